"""Choose the shape in which each picture is shown: one of some with about the same area."""

from __future__ import annotations

import math
from collections.abc import Sequence

from strop.errors import OptionError
from strop.train.folders import Picture

Shape = tuple[int, int]
"""Width and height in pixels."""

_WIDEST = 2.0  # times as wide as high, or as high as wide


def shapes_of(side: int, grid: int) -> tuple[Shape, ...]:
    """Return the shapes on the model's grid whose area is at most that of a square of ``side``, as
    large as they come, the square among them."""
    wide = []
    for width in range(side, int(side * math.sqrt(_WIDEST)) + 1, grid):
        height = side * side // width // grid * grid
        if height and width / height <= _WIDEST:
            wide.append((width, height))
    return tuple(dict.fromkeys([*wide, *((height, width) for width, height in wide)]))


def choose(pictures: Sequence[Picture], shapes: Sequence[Shape]) -> tuple[Shape, ...]:
    """Return the shape of each picture: that of the nearest aspect, of which least is cut off."""

    def nearest(picture: Picture) -> Shape:
        own = math.log(picture.width / picture.height)
        return min(shapes, key=lambda shape: abs(own - math.log(shape[0] / shape[1])))

    return tuple(map(nearest, pictures))


def check_sizes(pictures: Sequence[Picture], shapes: Sequence[Shape]) -> None:
    """Raise OptionError for pictures that would have to be enlarged."""
    for picture, (width, height) in zip(pictures, shapes, strict=True):
        if picture.width < width or picture.height < height:
            raise OptionError(
                f"{picture.path} has {picture.width}x{picture.height} pixels and would be shown as "
                f"{width}x{height}; lower --resolution, or add --allow_upscaling"
            )


def batches_of(order: Sequence[int], shapes: Sequence[Shape], size: int) -> list[list[int]]:
    """Cut an epoch's pictures into batches of one shape each, in their order; the last batch of a
    shape may be smaller."""
    rows: dict[Shape, list[int]] = {}
    for number in order:
        rows.setdefault(shapes[number], []).append(number)
    return [
        row[start : start + size] for row in rows.values() for start in range(0, len(row), size)
    ]
