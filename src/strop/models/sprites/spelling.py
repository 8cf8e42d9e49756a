"""Spell prompts as the sprites models learnt them."""

from __future__ import annotations

import difflib
import re

from strop.models.sprites.grammar import parse, words


def spelled(prompt: str) -> tuple[str, str]:
    """Return a prompt in the spelling that the models were trained on, and what is to be said
    about it, or nothing: captions outside the grammar are drawn, with less success.

    Raises:
        ValueError: there are words that the models do not know; the message has all that they do.
    """
    known = words()
    given = re.findall(r"[^\s.,;:!?]+", prompt.lower().replace("grey", "gray"))
    unknown = [word for word in dict.fromkeys(given) if word not in known]
    if unknown:
        named = ", ".join(_with_suggestion(word, known) for word in unknown)
        raise ValueError(f"the sprites model does not know {named}. Its words: {' '.join(known)}")
    text = " ".join(given)
    try:
        parse(text)
    except ValueError as error:
        return text, f"{error}. Drawing it anyway."
    return text, ""


def _with_suggestion(word: str, known: tuple[str, ...]) -> str:
    close = difflib.get_close_matches(word, known, n=1)
    return repr(word) + (f" (did you mean {close[0]!r}?)" if close else "")
