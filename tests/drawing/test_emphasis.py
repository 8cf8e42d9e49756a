"""Weights in prompts: what A1111's documentation says that they mean, and what is refused."""

from __future__ import annotations

import random

import pytest

from strop.drawing.emphasis import Piece, PromptSyntaxError, WeightedText, read, respelled, written


def _pairs(prompt: str) -> list[tuple[str, float]]:
    return [(piece.text, round(piece.weight, 6)) for piece in read(prompt).pieces]


READ = {
    "a cat": [("a cat", 1)],
    "a (cat)": [("a ", 1), ("cat", 1.1)],
    "a ((cat))": [("a ", 1), ("cat", 1.21)],
    "a [cat]": [("a ", 1), ("cat", 0.909091)],
    "a [[cat]]": [("a ", 1), ("cat", 0.826446)],
    "a (cat:1.5) here": [("a ", 1), ("cat", 1.5), (" here", 1)],
    "(cat:.25)(cat : 2. )(cat:-1)": [("cat", 0.25), ("cat ", 2), ("cat", -1)],
    "((a cat:1.3) dog)": [("a cat", 1.43), (" dog", 1.1)],
    "([a])": [("a", 1)],
    r"a \(cat\) \[b\] \\ \x": [("a (cat) [b] \\ x", 1)],
    r"(a\):2)": [("a)", 2)],
    "(a cat": [("a cat", 1.1)],
    "a [cat": [("a ", 1), ("cat", 0.909091)],
    "a cat)] :) x": [("a cat)] :) x", 1)],
    "(a) (b)": [("a", 1.1), (" ", 1), ("b", 1.1)],
    "(a)(b)": [("ab", 1.1)],
    "a: b (12:30)": [("a: b ", 1), ("12", 10 * 3)],
    "[a: b]": [("a: b", 0.909091)],
    "(a [b) c]": [("a ", 1.1), ("b", 1), (" c", 0.909091)],
    "1:2) a|b <3": [("1:2) a|b <3", 1)],
    "SAND and BREAKING": [("SAND and BREAKING", 1)],
    "()": [],
}


@pytest.mark.parametrize("prompt", READ)
def test_brackets_are_read_as_documented(prompt: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("strop.drawing.emphasis.MOST_WEIGHT", 30)
    assert _pairs(prompt) == READ[prompt]


REFUSED = {
    "a [cat:dog:0.5]": "from:to:when",
    "a [cat:10]": "from:to:when",
    "[(a:1.2):b: .5 ]": "from:to:when",
    "a [cat|dog]": "alternates",
    "a [(cat|dog:1.2)]": "alternates",
    "a cat AND a dog :1.2": "AND, which joins",
    "a <lora:ink:0.5> cat": "LoRA of /sdapi",
    "a <hypernet:x:1>": "<name:...> is not built",
    "(a:10.5)": "a weight of 10.5 is not within -10 and 10",
    "(" * 50 + "a": "fewer brackets",
    "(" * 101 + "a": "more than 100 brackets",
    f"(a:{'9' * 400})": "a weight of inf",
}


@pytest.mark.parametrize("prompt", REFUSED)
def test_what_is_not_built_is_named(prompt: str) -> None:
    with pytest.raises(PromptSyntaxError, match=REFUSED[prompt]):
        read(prompt)
    if "|" in prompt:
        read(prompt.replace("[", r"\["))


def test_break_divides_sections() -> None:
    found = read("(a BREAK b:1.5) c BREAK")
    assert found == WeightedText(
        ((Piece("a", 1.5),), (Piece("b", 1.5), Piece(" c")), ()),
    )
    assert not found.is_plain
    assert read(r"a \(cat\)").is_plain
    assert not read("a [cat]").is_plain


def test_written_prompts_read_as_before() -> None:
    """And whatever is written is read without a fault."""
    dice, signs = (
        random.Random(0),
        ["(", ")", "[", "]", ":1.3)", "\\", "a", "b ", ":", "BREAK", "é"],
    )
    for _ in range(3000):
        prompt = "".join(dice.choices(signs, k=dice.randint(0, 14)))
        if (first := _read_if_built(prompt)) is None:
            continue
        again = read(written(first))
        for one, other in zip(first.sections, again.sections, strict=True):
            those, others = (
                [(p.text, p.weight) for p in s if p.text.strip()] for s in (one, other)
            )
            assert [w for _, w in those] == pytest.approx([w for _, w in others], rel=1e-8), prompt
            assert [t.strip() for t, _ in those] == [t.strip() for t, _ in others], prompt


def _read_if_built(prompt: str) -> WeightedText | None:
    try:
        return read(prompt)
    except PromptSyntaxError:
        return None


def test_each_piece_is_spelled_by_itself() -> None:
    def spell(text: str) -> tuple[str, str]:
        return text.lower().strip(), f"note on {text}" if "RED" in text else ""

    assert respelled("A (RED:1.5) circle", spell) == (
        "a (red:1.5) circle",
        "note on A  RED  circle",
    )
    assert respelled("a (red:1.50)cat", spell) == ("a (red:1.5) cat", "")
    assert respelled(r"(red\))", spell) == (r"(red\))", "")
