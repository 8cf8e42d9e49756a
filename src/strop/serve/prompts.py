"""Bring the prompts of a wish into the words of the model, weighted or as they are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from strop.drawing.emphasis import read, respelled
from strop.drawing.request import PictureRequest
from strop.serve.checks import wrong
from strop.serve.limits import ServeLimits
from strop.wording import counted

# Returns a prompt as the model wants it, and a note on it or nothing. Raises ValueError.
Spell = Callable[[str, str], tuple[str, str]]
_NO_WEIGHTS = (
    "this model reads no weights of words, which are built for CLIP; leave the brackets out"
)


def spelled(
    name: str, text: str, spell: Spell, limits: ServeLimits, weights: bool | None
) -> tuple[str, str]:
    """Return a prompt as the model wants it, and a note on it or nothing. ``weights`` tells whether
    the model reads them; None: brackets are text. Raises Refused."""
    if name.endswith("prompt") and not text.strip():
        raise wrong(name, "it is empty; describe the picture to draw")
    if len(text) > limits.most_prompt:
        raise wrong(name, f"it has more than {limits.most_prompt} characters")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise wrong(name, "it holds half a character, which no text has") from error
    try:
        if weights:
            return respelled(text, lambda words: spell(words, name))
        if weights is not None:
            given = read(text)
            if not given.is_plain:
                raise wrong(name, _NO_WEIGHTS)
            text = given.text
        return spell(text, name)
    except ValueError as error:
        raise wrong(name, str(error)) from error


def in_chunks(
    request: PictureRequest, chunks: Callable[[PictureRequest], int], limits: ServeLimits
) -> PictureRequest:
    """Return a request that knows how many chunks of tokens its prompts have, in both passes, so
    that those of one number are drawn together. Raises Refused where there are too many."""
    if not request.is_weighted:
        return request
    count = chunks(request)
    if count > limits.most_chunks:
        chunks_there = counted(count, "chunk")
        text = f"it has {chunks_there} of tokens, more than {limits.most_chunks}; take fewer words"
        raise wrong("prompt", text)
    second = request.second
    if second is not None:
        second = replace(second, request=in_chunks(second.request, chunks, limits))
    return replace(request, chunks=count, second=second)
