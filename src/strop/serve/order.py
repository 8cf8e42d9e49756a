"""Turn what an interface has read into requests for pictures, or say what is wrong with it."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from strop.drawing.request import PictureRequest, PictureSize
from strop.drawing.samplers import UnknownSamplerError, chosen
from strop.serve.checks import number, pixels, side, whole, wrong
from strop.serve.controls import ControlWish, seen_in
from strop.serve.limits import MOST_SEED, ServeLimits
from strop.serve.masks import Canvas, Overlay, resized
from strop.serve.prompts import Spell, spelled
from strop.serve.second_pass import SecondWish, begun

if TYPE_CHECKING:
    from PIL.Image import Image

Adapters = tuple[tuple[str, float], ...]


@dataclass(frozen=True)
class ModelCard:
    """Say what the model that is served takes. Both sides of a picture are multiples of
    ``factor``. ``samplers`` has the schedules of those that draw with it beside its own.
    ``reads_weights`` and ``draws_twice`` are of ``strop.drawing``."""

    name: str
    size: PictureSize
    factor: int
    guidance: float
    loras: Sequence[str]
    has_eager: bool
    spell: Spell
    steps: int = 20
    samplers: Mapping[str, Sequence[str]] = field(default_factory=dict)
    reads_weights: bool = False
    draws_twice: bool = False
    controlnets: Sequence[str] = ()


@dataclass(frozen=True)
class Wish:
    """Hold what a client has asked for; None stands for the model's own. A start has any size, and
    ``resize`` brings it to that of the pictures. Where there is a ``canvas``, which has that size,
    it is drawn on instead. ``is_weighted`` reads the prompts as A1111 does, and ``second`` draws
    the pictures once more. ``controls`` name ControlNets of the card."""

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
    is_weighted: bool = False
    second: SecondWish | None = None
    controls: Sequence[ControlWish] = ()


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
    steps = whole("steps", card.steps if wish.steps is None else wish.steps, 1, limits.most_steps)
    guidance = card.guidance if wish.guidance is None else wish.guidance
    number("guidance", guidance, 0, limits.most_guidance)
    whole("count", wish.count, 1, limits.most_count)
    first = PictureRequest("", size, steps, guidance, _seed(wish))
    first, notes = _with_texts(first, wish, card, limits)
    sampler, schedule = _sampler("", wish.sampler, wish.schedule, card)
    first = replace(first, sampler=sampler, schedule=schedule)
    if wish.start is not None or wish.canvas is not None:
        first = _with_start(first, wish)
    if wish.second is not None:
        first, notes = _with_second(first, notes, wish, wish.second, card, limits)
    first = _with_controls(first, wish)
    if wish.is_eager and not card.has_eager:
        raise wrong("eager", "this server has no eager model; start it with --eager")
    return Order(
        [seeded(first, (first.seed + n) % (MOST_SEED + 1)) for n in range(wish.count)],
        _adapters(wish, card, limits),
        whole("preview_every", wish.preview_every, 0, limits.most_steps),
        wish.is_eager,
        wish.is_alone,
        notes,
        None if wish.canvas is None else wish.canvas.overlay,
    )


def size_of(wish: Wish, card: ModelCard, limits: ServeLimits) -> PictureSize:
    """Return the size that a wish stands for. Raises Refused with status 400."""
    width = card.size.width if wish.width is None else wish.width
    height = card.size.height if wish.height is None else wish.height
    for name, value in (("width", width), ("height", height)):
        side(name, value, card.factor, limits)
    size = PictureSize(width, height)
    pixels("width", size, limits)
    return size


def _with_texts(
    request: PictureRequest, wish: Wish, card: ModelCard, limits: ServeLimits, before: str = ""
) -> tuple[PictureRequest, tuple[str, ...]]:
    """Return a request with the prompts of a wish, and notes on them. ``before`` stands before the
    names of the fields."""
    weights = card.reads_weights if wish.is_weighted else None
    prompt, note = spelled(f"{before}prompt", wish.prompt, card.spell, limits, weights)
    negative, other = "", ""
    if wish.negative:
        negative, other = spelled(f"{before}negative", wish.negative, card.spell, limits, weights)
    made = replace(request, prompt=prompt, negative=negative, is_weighted=bool(weights))
    return made, tuple(text for text in (note, other) if text)


def _seed(wish: Wish) -> int:
    if wish.seed is None:
        return random.SystemRandom().randrange(2**31)
    return whole("seed", wish.seed, 0, MOST_SEED)


def _sampler(before: str, sampler: str, schedule: str, card: ModelCard) -> tuple[str, str]:
    """Return a sampler and its schedule, both as the card has them; no name is the model's own.
    ``before`` stands before the names of the fields."""
    try:
        return chosen(sampler, schedule, card.samplers)
    except UnknownSamplerError as error:
        raise wrong(f"{before}{error.field}", str(error)) from error


def _with_second(
    first: PictureRequest,
    notes: tuple[str, ...],
    wish: Wish,
    second: SecondWish,
    card: ModelCard,
    limits: ServeLimits,
) -> tuple[PictureRequest, tuple[str, ...]]:
    """Return a request that is drawn once more, and the notes on its prompts."""
    if not card.draws_twice:
        raise wrong("second", "a second pass is built for models with a UNet; leave it out")
    if second.prompt and dict(second.loras) != dict(wish.loras):
        raise wrong("second_prompt", "it has other LoRAs than the prompt; give both the same ones")
    texts = replace(
        wish, prompt=second.prompt or wish.prompt, negative=second.negative or wish.negative
    )
    again, others = _with_texts(first, texts, card, limits, "second_")
    if second.sampler or second.schedule:
        names = (second.sampler or first.sampler, second.schedule or first.schedule)
        sampler, schedule = _sampler("second_", *names, card)
        again = replace(again, sampler=sampler, schedule=schedule)
    made = replace(first, second=begun(first, again, second, card.factor, limits))
    return made, tuple(dict.fromkeys((*notes, *others)))


def seeded(request: PictureRequest, seed: int) -> PictureRequest:
    """Return a request with another seed, in both passes."""
    second = request.second
    if second is not None:
        second = replace(second, request=replace(second.request, seed=seed))
    return replace(request, seed=seed, second=second)


def _with_start(request: PictureRequest, wish: Wish) -> PictureRequest:
    if not (math.isfinite(wish.strength) and 0 < wish.strength <= 1):
        raise wrong("strength", f"{wish.strength:g} is not above 0 and at most 1")
    if wish.canvas is not None:
        start, mask = wish.canvas.start, wish.canvas.mask
    else:
        assert wish.start is not None
        start, mask = resized(wish.start, request.size, wish.resize), None
    begun = replace(request, start=start, mask=mask, strength=wish.strength)
    if not begun.num_steps:
        raise wrong(
            "strength",
            f"{wish.strength:g} of {request.steps} steps is less than one; take more of either",
        )
    return begun


def _with_controls(request: PictureRequest, wish: Wish) -> PictureRequest:
    """Return a request whose passes have what ControlNets see in them."""
    if wish.controls and wish.is_eager:
        raise wrong("eager", "ControlNets are there with Strop only; leave one of them out")
    overlay, second = None if wish.canvas is None else wish.canvas.overlay, request.second
    if second is not None:
        seen = seen_in(1, wish.controls, second.request.size, None)
        second = replace(second, request=replace(second.request, controls=seen))
    seen = seen_in(0, wish.controls, request.size, overlay)
    return replace(request, controls=seen, second=second)


def _adapters(wish: Wish, card: ModelCard, limits: ServeLimits) -> Adapters:
    if len(wish.loras) > limits.most_loras:
        raise wrong("loras", f"there are more than {limits.most_loras}")
    for name, scale in wish.loras.items():
        if name not in card.loras:
            known = ", ".join(card.loras) or "none; start it with --lora DIR"
            raise wrong("loras", f"this server has no LoRA of that name; it has {known}")
        number("loras", scale, -limits.most_scale, limits.most_scale)
    return tuple((name, float(scale)) for name, scale in wish.loras.items() if scale)
