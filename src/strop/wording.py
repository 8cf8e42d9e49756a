"""Counts in sentences for people: "1 graph", "2 graphs"."""

from __future__ import annotations

_HISSING = ("s", "x", "z", "ch", "sh")


def counted(count: int, noun: str, form: str = "") -> str:
    """Write a number and a noun that agrees with it. ``form`` says how the number is written, as in
    f"{}"."""
    return f"{count:{form}} {noun if count == 1 else plural(noun)}"


def plural(noun: str) -> str:
    """Pluralise a regular noun, which adjectives may precede: "near misses", "entries"."""
    if noun.endswith(_HISSING):
        return f"{noun}es"
    if noun.endswith("y") and noun[-2:-1] not in "aeiou":
        return f"{noun[:-1]}ies"
    return f"{noun}s"
