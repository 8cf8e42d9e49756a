r"""Read the weights of words as A1111's web UI writes them.

``(words)`` weigh 1.1 times as much, ``[words]`` 1.1 times less, ``(words:1.3)`` 1.3 times as much,
and brackets within brackets multiply. ``\(``, ``\)``, ``\[``, ``\]`` and ``\\`` are the characters
themselves, and another backslash is left out. A bracket that is never closed reaches to the end,
and one that was never opened is text. BREAK ends a chunk of tokens. It was written from A1111's
documentation of this syntax, and from what its parser returns.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field

from strop.errors import StropError

STEP = 1.1  # of a bracket without a number
MOST_WEIGHT = 10.0
_NUMBER = re.compile(r":\s*([+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+))\s*\)")
_ENDS_AT = re.compile(r":\s*[0-9]*\.?[0-9]+\s*\Z")
_LONGEST_END = 40  # characters of ":0.5" with blanks
_AND = re.compile(r"\bAND\b")
_BREAK = re.compile(r"\bBREAK\b")
_EXTRA = re.compile(r"<\w+:[^<>]+>")
_ESCAPED = "\\()[]"
_PLAIN = re.compile(r"[^\\()\[\]:|]+")
_MOST_OPEN = 100  # brackets; 1.1 to that power is far beyond any weight


class PromptSyntaxError(StropError, ValueError):
    """A prompt asks for something in A1111's syntax that is not built."""


@dataclass(frozen=True)
class Piece:
    """Hold text and how much its tokens weigh; 1 is as much as without brackets."""

    text: str
    weight: float = 1.0


@dataclass(frozen=True)
class WeightedText:
    """Hold the pieces of a prompt. BREAK stands between ``sections``."""

    sections: tuple[tuple[Piece, ...], ...]

    @property
    def pieces(self) -> tuple[Piece, ...]:
        return tuple(piece for section in self.sections for piece in section)

    @property
    def is_plain(self) -> bool:
        """Tell whether it is text alone, which every model reads."""
        return len(self.sections) == 1 and all(piece.weight == 1 for piece in self.pieces)

    @property
    def text(self) -> str:
        """Return the text without brackets."""
        return " ".join("".join(piece.text for piece in section) for section in self.sections)


def read(prompt: str) -> WeightedText:
    """Return the pieces of a prompt.

    Raises:
        PromptSyntaxError: it has ``[from:to:when]``, ``[a|b]``, ``AND`` or ``<name:...>``, which
            are not built, or a weight beyond ``MOST_WEIGHT``.
    """
    if _AND.search(prompt):
        raise PromptSyntaxError("AND, which joins prompts, is not built; write 'and'")
    if _EXTRA.search(prompt):
        raise PromptSyntaxError(
            "<name:...> is not built; a LoRA of /sdapi/v1 is written <lora:NAME:0.8>, elsewhere it"
            " is an argument"
        )
    reader = _Reader(prompt)
    while reader.at < len(prompt):
        reader.take()
    sections: list[list[Piece]] = [[]]
    for text, weight in reader.closed():
        if text is None:
            sections.append([])
        else:
            sections[-1] += _checked(text, weight)
    return WeightedText(tuple(tuple(_joined(section)) for section in sections))


_Read = tuple[str | None, float]  # a text and its weight; None is BREAK


def _divided(text: str) -> list[str]:
    """Return the parts of a text between BREAK, without the blanks around it."""
    parts = _BREAK.split(text)
    last = len(parts) - 1
    begun = (part.lstrip() if number else part for number, part in enumerate(parts))
    return [part.rstrip() if number < last else part for number, part in enumerate(begun)]


@dataclass
class _Reader:
    """Read a prompt from left to right. ``opened`` has, for each bracket that is open, the piece
    that it begins with and the place of its first character."""

    prompt: str
    at: int = 0
    pieces: list[_Read] = field(default_factory=list)
    opened: dict[str, list[tuple[int, int]]] = field(default_factory=lambda: {"(": [], "[": []})
    last_bar: int = -1

    def take(self) -> None:
        """Read what stands at the place."""
        sign, rounds, squares = self.prompt[self.at], self.opened["("], self.opened["["]
        number = _NUMBER.match(self.prompt, self.at) if sign == ":" and rounds else None
        if sign == "\\":
            behind = self.prompt[self.at + 1 : self.at + 2]
            is_escape = behind in tuple(_ESCAPED)
            self._add(behind if is_escape else "", 2 if is_escape else 1)
        elif sign in self.opened:
            if len(rounds) + len(squares) == _MOST_OPEN:
                raise PromptSyntaxError(f"more than {_MOST_OPEN} brackets are open at once")
            self.at += 1
            self.opened[sign].append((len(self.pieces), self.at))
        elif number is not None:
            self._weigh(rounds.pop()[0], float(number[1]))
            self.at = number.end()
        elif sign == ")" and rounds:
            self._weigh(rounds.pop()[0], STEP)
            self.at += 1
        elif sign == "]" and squares:
            start, place = squares.pop()
            self._check_square(place)
            self._weigh(start, 1 / STEP)
            self.at += 1
        else:
            self.last_bar = self.at if sign == "|" else self.last_bar
            run = _PLAIN.match(self.prompt, self.at)
            text = sign if run is None else run[0]
            self._add(text, len(text))

    def closed(self) -> list[_Read]:
        """Return the pieces. Brackets that are still open reach to the end."""
        for kind, factor in (("(", STEP), ("[", 1 / STEP)):
            for start, _ in self.opened[kind]:
                self._weigh(start, factor)
        return self.pieces

    def _add(self, text: str, length: int) -> None:
        head, *others = _divided(text)
        self.pieces.append((head, 1.0))
        for other in others:
            self.pieces += [(None, 1.0), (other, 1.0)]
        self.at += length

    def _weigh(self, start: int, factor: float) -> None:
        self.pieces[start:] = [(text, weight * factor) for text, weight in self.pieces[start:]]

    def _check_square(self, place: int) -> None:
        if self.last_bar >= place:
            raise PromptSyntaxError("[a|b], which alternates between steps, is not built")
        if _ENDS_AT.search(self.prompt[max(place, self.at - _LONGEST_END) : self.at]):
            raise PromptSyntaxError(
                "[from:to:when], which changes a prompt at a step, is not built; a weight is"
                " written in round brackets, (word:0.8)"
            )


def _checked(text: str, weight: float) -> list[Piece]:
    if not text:
        return []
    if not abs(weight) <= MOST_WEIGHT:
        raise PromptSyntaxError(
            f"a weight of {weight:.4g} is not within {-MOST_WEIGHT:g} and {MOST_WEIGHT:g}; take"
            " fewer brackets or smaller numbers"
        )
    return [Piece(text, weight)]


def _joined(pieces: list[Piece]) -> list[Piece]:
    """Put neighbours of one weight together."""
    found: list[tuple[list[str], float]] = []
    for piece in pieces:
        if found and found[-1][1] == piece.weight:
            found[-1][0].append(piece.text)
        else:
            found.append(([piece.text], piece.weight))
    return [Piece("".join(texts), weight) for texts, weight in found]


def written(text: WeightedText) -> str:
    """Return a prompt that reads as these pieces do, with a blank between them. Weights have ten
    digits behind the point."""
    sections = (" ".join(map(_written, section)) for section in text.sections)
    return " BREAK ".join(sections)


def _written(piece: Piece) -> str:
    escaped = "".join(f"\\{sign}" if sign in _ESCAPED else sign for sign in piece.text)
    if piece.weight == 1:
        return escaped
    number = f"{piece.weight:.10f}".rstrip("0").rstrip(".")
    return f"({escaped}:{number})"


def respelled(prompt: str, spell: Callable[[str], tuple[str, str]]) -> tuple[str, str]:
    """Return a prompt with the words of each piece as ``spell`` has them, and the note that it has
    on the whole. Raises what ``read`` and ``spell`` raise."""
    given = read(prompt)
    _, note = spell(" ".join(piece.text for piece in given.pieces))
    sections = tuple(
        tuple(Piece(spell(piece.text)[0], piece.weight) for piece in section)
        for section in given.sections
    )
    made = WeightedText(sections)
    return (prompt if made == given else written(made)), note
