"""Draw a picture once more, larger: what a client asks for, and the sizes that come of it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from strop.drawing.request import PictureRequest, PictureSize, SecondPass
from strop.drawing.twice import UPSCALERS
from strop.serve.checks import number, pixels, side, whole, wrong
from strop.serve.limits import ServeLimits

MOST_SCALE = 8.0
_FINEST = 1000  # steps, as many as there are timesteps in training
_MOST_STRENGTH = 0.999  # with which A1111 divides


@dataclass(frozen=True)
class SecondWish:
    """Hold what a client asks of a second pass. ``width`` and ``height`` stand in place of
    ``scale``: where one of them is 0 it follows from the other, and where both are given what is
    too much is cut off. Without ``steps`` there are as many as in the first pass, and without a
    prompt, a sampler or a schedule it has those of the first pass."""

    scale: float = 2.0
    width: int = 0
    height: int = 0
    upscaler: str = "Latent"
    steps: int = 0
    strength: float = 0.75
    prompt: str = ""
    negative: str = ""
    sampler: str = ""
    schedule: str = ""
    loras: Mapping[str, float] = field(default_factory=dict)


def begun(
    first: PictureRequest, again: PictureRequest, wish: SecondWish, factor: int, limits: ServeLimits
) -> SecondPass:
    """Return the second pass behind ``first``. ``again`` has its prompts and its sampler; both
    sides of a picture are multiples of ``factor``.

    As A1111 counts, it has exactly so many steps as were asked for: the last ones of so many more
    as ``strength`` says. Raises Refused.
    """
    names = {name.lower(): name for name in UPSCALERS}
    if wish.upscaler.lower() not in names:
        raise wrong("second_upscaler", f"there is none of that name; there are {_listed()}")
    size, cover = sizes_of(first.size, wish, factor, limits)
    steps = whole("second_steps", wish.steps or first.steps, 1, limits.most_steps)
    if not (math.isfinite(wish.strength) and 0 < wish.strength <= 1):
        raise wrong("strength", f"{wish.strength:g} is not above 0 and at most 1")
    total = int(steps / min(wish.strength, _MOST_STRENGTH)) if wish.strength > 1e-6 else _FINEST + 1
    if total > _FINEST:
        text = f"{wish.strength:g} with {steps} steps is finer than the model's {_FINEST} timesteps"
        raise wrong("strength", f"{text}; take more strength, or fewer steps")
    share = min(1.0, (steps + 0.5) / total)  # of which pipelines take the whole steps
    made = replace(again, size=size, steps=total, strength=share, second=None)
    return SecondPass(made, cover, names[wish.upscaler.lower()])


def _listed() -> str:
    return ", ".join(UPSCALERS)


def sizes_of(
    first: PictureSize, wish: SecondWish, factor: int, limits: ServeLimits
) -> tuple[PictureSize, PictureSize]:
    """Return the size of a second pass, and the one that the first pass is brought to before it is
    cut to that. What is computed is rounded down to multiples of ``factor``. Raises Refused."""
    width, height = wish.width, wish.height
    for name, value in (("second_width", width), ("second_height", height)):
        if value:
            side(name, value, factor, limits)
    if width and height:
        size = PictureSize(width, height)
        is_wide = first.width * height < width * first.height  # the picture is to be wider
        cover = _by_width(first, width) if is_wide else _by_height(first, height)
        pixels("second_width", cover, limits)
        return size, cover
    if width or height:
        name, asked = ("second_width" if width else "second_height"), width or height
        free = _by_width(first, asked) if width else _by_height(first, asked)
    else:
        number("second_scale", wish.scale, 1, MOST_SCALE)
        name = "second_scale"
        free = PictureSize(int(first.width * wish.scale), int(first.height * wish.scale))
    size = PictureSize(free.width // factor * factor, free.height // factor * factor)
    for one in (size.width, size.height):
        if not factor <= one <= limits.most_side:
            raise wrong(
                name, f"{size} has a side that is not within {factor} and {limits.most_side}"
            )
    pixels(name, size, limits)
    return size, size


def _by_width(first: PictureSize, width: int) -> PictureSize:
    return PictureSize(width, width * first.height // first.width)


def _by_height(first: PictureSize, height: int) -> PictureSize:
    return PictureSize(height * first.width // first.height, height)
