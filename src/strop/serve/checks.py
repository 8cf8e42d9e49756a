"""Say which value of a wish is out of its range."""

from __future__ import annotations

import math

from strop.drawing.request import PictureSize
from strop.serve.limits import ServeLimits
from strop.serve.refused import Refused


def wrong(name: str, message: str) -> Refused:
    return Refused(400, "invalid_value", f"{name}: {message}", field=name)


def whole(name: str, value: int, least: int, most: int) -> int:
    """Return a whole number. Raises Refused unless it is in its range."""
    if not least <= value <= most:
        raise wrong(name, f"{_short(value)} is not within {least} and {most}")
    return value


def number(name: str, value: float, least: float, most: float) -> None:
    """Raise Refused unless a number is finite and in its range."""
    if not (math.isfinite(value) and least <= value <= most):
        raise wrong(name, f"{value:g} is not within {least:g} and {most:g}")


def _short(value: int) -> str:
    return str(value) if abs(value) < 10**12 else "the number"


def side(name: str, value: int, factor: int, limits: ServeLimits) -> int:
    """Return a side of a picture. Raises Refused unless the model draws it."""
    whole(name, value, factor, limits.most_side)
    if value % factor:
        below = value // factor * factor
        near = f"{below} or {below + factor}"
        raise wrong(name, f"{value} is no multiple of {factor}; take {near}")
    return value


def pixels(name: str, size: PictureSize, limits: ServeLimits) -> None:
    """Raise Refused for a picture that is larger than the server draws."""
    if size.num_pixels > limits.most_pixels:
        raise wrong(
            name,
            f"{size} has more than the {limits.most_pixels} pixels that this server draws; take a"
            " smaller size, or start it with a larger --max-pixels",
        )
