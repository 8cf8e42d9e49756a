"""Turn what an interface has read into requests for pictures, or say what is wrong with it."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from strop.drawing.request import PictureRequest, PictureSize
from strop.drawing.samplers import AUTOMATIC
from strop.serve.limits import MOST_SEED, ServeLimits
from strop.serve.masks import Canvas, Overlay, resized
from strop.serve.refused import Refused

if TYPE_CHECKING:
    from PIL.Image import Image

Adapters = tuple[tuple[str, float], ...]
# Returns a prompt as the model wants it, and a note on it or nothing. Raises ValueError.
Spell = Callable[[str, str], tuple[str, str]]


@dataclass(frozen=True)
class ModelCard:
    """Say what the model that is served takes. Both sides of a picture are multiples of
    ``factor``. ``samplers`` has the schedules of those that draw with it beside its own."""

    name: str
    size: PictureSize
    factor: int
    guidance: float
    loras: Sequence[str]
    has_eager: bool
    spell: Spell
    steps: int = 20
    samplers: Mapping[str, Sequence[str]] = field(default_factory=dict)


@dataclass(frozen=True)
class Wish:
    """Hold what a client has asked for; None stands for the model's own. A start has any size, and
    ``resize`` brings it to that of the pictures. Where there is a ``canvas``, which has that size,
    it is drawn on instead."""

    prompt: str
    negative: str = ""
    width: int | None = None
    height: int | None = None
    steps: int | None = None
    guidance: float | None = None
    seed: int | None = None
    count: int = 1
    loras: Mapping[str, float] = field(default_factory=dict)
    start: Image | None = None
    strength: float = 0.75
    preview_every: int = 0
    is_eager: bool = False
    is_alone: bool = False
    sampler: str = ""
    schedule: str = ""
    resize: str = "default"
    canvas: Canvas | None = None


@dataclass(frozen=True)
class Order:
    """Hold pictures to draw, one request each, with the adapters that are active meanwhile.

    ``is_eager`` draws with the model that Strop has not compiled. ``is_alone`` keeps pictures of
    others out of the batch, so that the result has the bits of ``strop generate``. ``overlay``
    comes over each picture that was drawn.
    """

    requests: Sequence[PictureRequest]
    adapters: Adapters = ()
    preview_every: int = 0
    is_eager: bool = False
    is_alone: bool = False
    notes: Sequence[str] = ()
    overlay: Overlay | None = None


def order(wish: Wish, card: ModelCard, limits: ServeLimits) -> Order:
    """Check a wish and fill in what it leaves open. Raises Refused with status 400."""
    size = size_of(wish, card, limits)
    steps = _whole("steps", card.steps if wish.steps is None else wish.steps, 1, limits.most_steps)
    guidance = card.guidance if wish.guidance is None else wish.guidance
    _number("guidance", guidance, 0, limits.most_guidance)
    _whole("count", wish.count, 1, limits.most_count)
    prompt, note = _spelled("prompt", wish.prompt, card, limits)
    negative, other = (
        _spelled("negative", wish.negative, card, limits) if wish.negative else ("", "")
    )
    first = PictureRequest(prompt, size, steps, guidance, _seed(wish), negative)
    sampler, schedule = _sampler(wish, card)
    first = replace(first, sampler=sampler, schedule=schedule)
    if wish.start is not None or wish.canvas is not None:
        first = _with_start(first, wish)
    if wish.is_eager and not card.has_eager:
        raise _wrong("eager", "this server has no eager model; start it with --eager")
    return Order(
        [replace(first, seed=(first.seed + n) % (MOST_SEED + 1)) for n in range(wish.count)],
        _adapters(wish, card, limits),
        _whole("preview_every", wish.preview_every, 0, limits.most_steps),
        wish.is_eager,
        wish.is_alone,
        tuple(text for text in (note, other) if text),
        None if wish.canvas is None else wish.canvas.overlay,
    )


def _wrong(name: str, message: str) -> Refused:
    return Refused(400, "invalid_value", f"{name}: {message}", field=name)


def _whole(name: str, value: int, least: int, most: int) -> int:
    if not least <= value <= most:
        raise _wrong(name, f"{_short(value)} is not within {least} and {most}")
    return value


def _number(name: str, value: float, least: float, most: float) -> None:
    if not (math.isfinite(value) and least <= value <= most):
        raise _wrong(name, f"{value:g} is not within {least:g} and {most:g}")


def _short(value: int) -> str:
    return str(value) if abs(value) < 10**12 else "the number"


def size_of(wish: Wish, card: ModelCard, limits: ServeLimits) -> PictureSize:
    """Return the size that a wish stands for. Raises Refused with status 400."""
    width = card.size.width if wish.width is None else wish.width
    height = card.size.height if wish.height is None else wish.height
    for name, side in (("width", width), ("height", height)):
        _whole(name, side, card.factor, limits.most_side)
        if side % card.factor:
            below = side // card.factor * card.factor
            near = f"{below} or {below + card.factor}"
            raise _wrong(name, f"{side} is no multiple of {card.factor}; take {near}")
    if width * height > limits.most_pixels:
        raise _wrong(
            "width",
            f"{width}x{height} has more than the {limits.most_pixels} pixels that this server"
            " draws; take a smaller size, or start it with a larger --max-pixels",
        )
    return PictureSize(width, height)


def _spelled(name: str, text: str, card: ModelCard, limits: ServeLimits) -> tuple[str, str]:
    if name == "prompt" and not text.strip():
        raise _wrong(name, "it is empty; describe the picture to draw")
    if len(text) > limits.most_prompt:
        raise _wrong(name, f"it has more than {limits.most_prompt} characters")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise _wrong(name, "it holds half a character, which no text has") from error
    try:
        return card.spell(text, name)
    except ValueError as error:
        raise _wrong(name, str(error)) from error


def _seed(wish: Wish) -> int:
    if wish.seed is None:
        return random.SystemRandom().randrange(2**31)
    return _whole("seed", wish.seed, 0, MOST_SEED)


def _sampler(wish: Wish, card: ModelCard) -> tuple[str, str]:
    """Return a sampler and its schedule, both as the card has them; no name is the model's own."""
    known = {name.lower(): name for name in card.samplers}
    if wish.schedule and not wish.sampler:
        raise _wrong("schedule", "it belongs to a sampler; name one, or leave both out")
    if wish.sampler and wish.sampler.lower() not in known:
        have = ", ".join(card.samplers) or "none but its own"
        raise _wrong("sampler", f"this model is not drawn with it here; there are {have}")
    sampler = known.get(wish.sampler.lower(), "")
    schedule = wish.schedule.lower() or AUTOMATIC
    schedules = (AUTOMATIC, *card.samplers.get(sampler, ()))
    if schedule not in schedules:
        raise _wrong("schedule", f"{sampler} has none of that name; it has {', '.join(schedules)}")
    return sampler, schedule


def _with_start(request: PictureRequest, wish: Wish) -> PictureRequest:
    if not (math.isfinite(wish.strength) and 0 < wish.strength <= 1):
        raise _wrong("strength", f"{wish.strength:g} is not above 0 and at most 1")
    if wish.canvas is not None:
        start, mask = wish.canvas.start, wish.canvas.mask
    else:
        assert wish.start is not None
        start, mask = resized(wish.start, request.size, wish.resize), None
    begun = replace(request, start=start, mask=mask, strength=wish.strength)
    if not begun.num_steps:
        raise _wrong(
            "strength",
            f"{wish.strength:g} of {request.steps} steps is less than one; take more of either",
        )
    return begun


def _adapters(wish: Wish, card: ModelCard, limits: ServeLimits) -> Adapters:
    if len(wish.loras) > limits.most_loras:
        raise _wrong("loras", f"there are more than {limits.most_loras}")
    for name, scale in wish.loras.items():
        if name not in card.loras:
            known = ", ".join(card.loras) or "none; start it with --lora DIR"
            raise _wrong("loras", f"this server has no LoRA of that name; it has {known}")
        _number("loras", scale, -limits.most_scale, limits.most_scale)
    return tuple((name, float(scale)) for name, scale in wish.loras.items() if scale)
