"""Counts agree with their nouns, in every text that the package makes."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import strop
from strop.wording import counted, plural

ROOT = Path(strop.__file__).parent
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
COUNT = re.compile(r"\b(len\(|sum\(|num_|count\b)")
NOUN = re.compile(r" (?:[a-z]+ )?[a-z]*[a-rt-z]s\b")  # not "pass"
# These count what is never one, or are no counts of the noun that follows.
OTHERS = {
    "codegen/triton_column.py: {num_cols} cols",  # a size, which may be symbolic
    "models/sprites/learner.py: {len(source)} tensors",  # of a model; this part imports nothing
}


@pytest.mark.parametrize(
    ("count", "noun", "expected"),
    [
        (0, "graph", "0 graphs"),
        (1, "graph", "1 graph"),
        (2, "graph", "2 graphs"),
        (2, "launch", "2 launches"),
        (1, "launch", "1 launch"),
        (3, "near miss", "3 near misses"),
        (3, "entry", "3 entries"),
        (3, "try", "3 tries"),
        (3, "replay", "3 replays"),
    ],
)
def test_counted(count: int, noun: str, expected: str) -> None:
    assert counted(count, noun) == expected


def test_numbers_are_written_as_asked() -> None:
    assert counted(1234567, "byte", ",") == "1,234,567 bytes"
    assert counted(1, "edge", "4d") == "   1 edge"
    assert plural("batch") == "batches"


def _texts(file: Path, root: Path) -> Iterator[str]:
    """Counts that are followed by a noun in the plural, in the f-strings of a file."""
    for node in ast.walk(ast.parse(file.read_text())):
        if not isinstance(node, ast.JoinedStr):
            continue
        for value, rest in zip(node.values, node.values[1:], strict=False):
            if isinstance(value, ast.FormattedValue) and isinstance(rest, ast.Constant):
                code, noun = ast.unparse(value.value), NOUN.match(str(rest.value))
                if noun and COUNT.search(code) and not code.startswith("counted("):
                    yield f"{file.relative_to(root)}: {{{code}}}{noun[0]}"


def test_every_count_agrees() -> None:
    found = {
        text
        for root in (ROOT, BENCHMARKS)
        for file in root.rglob("*.py")
        for text in _texts(file, root)
    }
    assert found == OTHERS, "use strop.wording.counted"
