"""A docstring begins with a sentence that has a verb."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import strop

ROOT = Path(strop.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))

# A sentence that begins with one of these is, in a docstring, no sentence but a piece of one: "Of
# the tensors of both.", "What a step reads.", "Whether it fits." Say "Return what a step reads."
_REFUSED = """
about above across after against along among around as at before behind below beneath beside
besides between beyond but by despite down during except for from how if in inside into like near
of off on once onto out outside over per since so such than that those through throughout till to
toward under until up upon via what when where whether which while who whom whose why with within
without
"""
REFUSED = frozenset(_REFUSED.split())

# Verbs that the first sentence may have, also with -s or -es. A noun that is spelt like a verb
# passes, so the list finds pieces such as "One row per batch.", and not every bad sentence.
_VERBS = """
accept adapt add advance align allocate allow answer append apply are ask assemble assert assign
attribute become begin belong bind bisect branch build call can cannot capture cast change check
choose clamp collect combine come compare compile compute contain continue convert convolve copies
copy cost count cover cross cut deal declare decode define delete depend describe disable divide
do does draw drop emit encode end enlarge enqueue evaluate execute exist expand explain express
fails fall feed fetch fill find fine-tune finish fit fix flatten fold follow forget free fuse
generate get give go goes grow guard hand handle has hash have having hoist hold implement import
index infer integrate invert is join judge keep kept know knows lack launch lay lead learn leave
let lie list load look lower make map mark match may mean measure meet merge mirror move multiply
must name need normalise note number open order own pad pair parse pass patch pause perform plan
plot pluralise point pool prepare print process profile promise promote prove pull put raise ran
rank read rebuild record recover reduce refuse refused release remain remember rename repeat
replace report reshape resize restore restrict retarget return rewrite round run save say scale
score search see send serve set settle shift show shuffle silence skip solve sort spare split
spread stand start stay step stop store strip sum swap take tell tie time trace train translate
try turn type undo unite unscale unscales update use view visit wait walk want warn was watch were
will work wrap write yield
"""
VERBS = frozenset(_VERBS.split())


def _docstrings(file: Path) -> Iterator[tuple[str, str]]:
    """Yield (name, docstring) of each module, class and function of a file that has one."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                yield getattr(node, "name", "the module"), text


def _first_sentence(text: str) -> str:
    paragraph = " ".join(text.split("\n\n")[0].split())
    found = re.match(r".*?[.:!?](?=\s|$)", paragraph)
    return found[0] if found else paragraph


def _fault(text: str) -> str:
    """Say what is wrong with a docstring, or nothing."""
    sentence = _first_sentence(text)
    words = re.findall(r"[\w'-]+", re.sub(r"``.*?``", "", sentence).lower())
    if text.split()[0].lower().strip(".,:;") in REFUSED:
        return f"begins with {text.split()[0]!r}: {sentence}"
    if not any(form in VERBS for word in words for form in (word, word[:-1], word[:-2])):
        return f"has no verb: {sentence}"
    return ""


def _faults(file: Path) -> list[str]:
    return [f"{name} {fault}" for name, text in _docstrings(file) if (fault := _fault(text))]


@pytest.mark.parametrize(
    ("text", "is_good"),
    [
        ("Return the sizes of a step.", True),
        ("A reader sees the old file or the new one.", True),
        ("Sizes are polynomials.", True),
        ("``out`` is what the kernel writes.", True),
        ("Of the tensors of both.", False),
        ("What a step reads is kept.", False),
        ("Whether it fits.", False),
        ("One row per batch.", False),
        ("To the end.", False),
    ],
)
def test_what_is_refused(text: str, is_good: bool) -> None:
    assert (_fault(text) == "") is is_good


@pytest.mark.parametrize("file", FILES, ids=lambda f: str(f.relative_to(ROOT)))
def test_docstrings_are_sentences(file: Path) -> None:
    faults = _faults(file)
    assert not faults, "\n".join(faults)
