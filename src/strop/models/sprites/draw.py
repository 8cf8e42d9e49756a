"""Draws scenes as anti-aliased pictures, by the batch, on the device of the generator.

Shapes are signed distance functions (after I. Quilez, "2D distance functions",
https://iquilezles.org/articles/distfunctions2d/) in units of the object's radius: x to the
right, y down, every shape inside the box from -1 to 1.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Self

import torch
from torch import Tensor

from strop.models.sprites.grammar import BACKGROUNDS, COLOURS, PLACES, SHAPES
from strop.models.sprites.specs import (
    BACKGROUND,
    COLOUR1,
    COLOUR2,
    LAYOUT,
    SHAPE1,
    SHAPE2,
    SIZE1,
    SIZE2,
    TWO,
)

RADII: tuple[tuple[float, float], ...] = ((0.15, 0.18), (0.115, 0.135), (0.19, 0.205))
"""Lowest and highest radius for no size word, "small" and "large", in shorter picture sides."""

_NEAR, _FAR = 0.25, 0.75
_PLACE_JITTER, _CROSS_JITTER, _ALONG_JITTER, _FREE_JITTER = 0.02, 0.07, 0.02, 0.25
_LIGHT = 0.11


def _length(x: Tensor, y: Tensor) -> Tensor:
    return torch.sqrt(x * x + y * y + 1e-12)


def _circle(x: Tensor, y: Tensor) -> Tensor:
    return _length(x, y) - 0.94


def _box(x: Tensor, y: Tensor, half_x: float, half_y: float) -> Tensor:
    over_x, over_y = x.abs() - half_x, y.abs() - half_y
    outside = _length(over_x.clamp(min=0), over_y.clamp(min=0))
    return outside + torch.maximum(over_x, over_y).clamp(max=0)


def _square(x: Tensor, y: Tensor) -> Tensor:
    return _box(x, y, 0.76, 0.76) - 0.06


def _triangle(x: Tensor, y: Tensor) -> Tensor:
    # Half-planes of the triangle (0, -0.95), (-1, 0.8), (1, 0.8).
    slope = math.hypot(1.75, 1.0)
    return torch.maximum((1.75 * x.abs() - (y + 0.95)) / slope, y - 0.8)


def _star(x: Tensor, y: Tensor) -> Tensor:
    kx, ky, inner = 0.809016994375, 0.587785252292, 0.46
    x, y = x.abs(), -(y - 0.06)
    fold = (kx * x - ky * y).clamp(min=0) * 2
    x, y = x - fold * kx, y + fold * ky
    fold = (-kx * x - ky * y).clamp(min=0) * 2
    x, y = (x + fold * kx).abs(), y + fold * ky - 1.0
    edge_x, edge_y = inner * ky, inner * kx - 1.0
    along = ((x * edge_x + y * edge_y) / (edge_x**2 + edge_y**2)).clamp(0, 1)
    side = torch.sign(y * edge_x - x * edge_y)
    return _length(x - edge_x * along, y - edge_y * along) * side


def _ring(x: Tensor, y: Tensor) -> Tensor:
    return (_length(x, y) - 0.7).abs() - 0.26


def _cross(x: Tensor, y: Tensor) -> Tensor:
    return torch.minimum(_box(x, y, 0.95, 0.32), _box(x, y, 0.32, 0.95))


def _diamond(x: Tensor, y: Tensor) -> Tensor:
    return (x.abs() / 0.72 + y.abs() - 1.0) / math.hypot(1 / 0.72, 1.0)


def _heart(x: Tensor, y: Tensor) -> Tensor:
    unit = 0.635
    x, y = x.abs() * unit, 0.55 - y * unit
    lobe = _length(x - 0.25, y - 0.75) - 2**0.5 / 4
    middle = (x + y).clamp(min=0) * 0.5
    tip = torch.minimum(_length(x, y - 1.0), _length(x - middle, y - middle))
    return torch.where(x + y > 1.0, lobe, tip * torch.sign(x - y)) / unit


_DISTANCES: tuple[Callable[[Tensor, Tensor], Tensor], ...] = (
    _circle,
    _square,
    _triangle,
    _star,
    _ring,
    _cross,
    _diamond,
    _heart,
)


def shape_distance(code: int, x: Tensor, y: Tensor) -> Tensor:
    """Return the signed distance to one shape of radius 1, in radii, below zero inside.

    Args:
        code: The shape's code (its index in `grammar.SHAPES`).
        x: Points to the right of the centre, in radii.
        y: Points below the centre, in radii.
    """
    return _DISTANCES[code](x, y)


def _distances(codes: Tensor, x: Tensor, y: Tensor) -> Tensor:
    result = _DISTANCES[0](x, y)
    for code in range(1, len(SHAPES)):
        result = torch.where(codes == code, _DISTANCES[code](x, y), result)
    return result


@dataclass(frozen=True)
class Geometry:
    """Hold what a batch of scenes looks like in pixels; an absent second thing has radius 0.

    Attributes:
        center_x: Centres [batch, 2] from the left edge, in pixels.
        center_y: Centres [batch, 2] from the upper edge, in pixels.
        radius: Radii [batch, 2] in pixels.
        paint: Object colours [batch, 2, 3] from 0 to 1.
        backdrop: Background colours [batch, 3] from 0 to 1.
    """

    center_x: Tensor
    center_y: Tensor
    radius: Tensor
    paint: Tensor
    backdrop: Tensor

    def map(self, change: Callable[[Tensor], Tensor]) -> Self:
        """Return the scenes that ``change`` takes from each tensor."""
        return type(self)(**{name: change(value) for name, value in vars(self).items()})


@dataclass(frozen=True)
class _Constants:
    lowest: Tensor
    highest: Tensor
    palette: Tensor
    backdrops: Tensor
    place_x: Tensor
    place_y: Tensor
    ends: Tensor


@lru_cache(maxsize=4)
def _constants(device: torch.device) -> _Constants:
    # Cached, since every copy from the host would make a training step wait for the device.
    def put(rows: Sequence[object]) -> Tensor:
        return torch.tensor(rows, dtype=torch.float32, device=device)

    def spot(name: str, near: str, far: str) -> float:
        words = name.split()
        return _NEAR if near in words else _FAR if far in words else 0.5

    return _Constants(
        lowest=put([low for low, _ in RADII]),
        highest=put([high for _, high in RADII]),
        palette=put(list(COLOURS.values())) / 255,
        backdrops=put(list(BACKGROUNDS.values())) / 255,
        place_x=put([0.5, *(spot(name, "left", "right") for name in PLACES)]),
        place_y=put([0.5, *(spot(name, "top", "bottom") for name in PLACES)]),
        ends=put([_NEAR, _FAR, _NEAR, _FAR]),
    )


def place(specs: Tensor, width: int, height: int, generator: torch.Generator) -> Geometry:
    """Choose what the captions of `specs` [batch, 9] leave open, in pixels of the picture."""
    count, device = len(specs), specs.device
    constants = _constants(device)

    def uniform(columns: int) -> Tensor:
        return torch.rand(count, columns, device=device, generator=generator)

    along, across = _centers(specs, constants, uniform(4) * 2 - 1)
    size = specs[:, SIZE1 : SIZE2 + 1 : SIZE2 - SIZE1]
    lowest, highest = constants.lowest[size], constants.highest[size]
    radius = lowest + (highest - lowest) * uniform(2)
    shown = torch.stack([torch.ones_like(specs[:, TWO]), specs[:, TWO]], dim=1)
    free = torch.randint(len(BACKGROUNDS), (count,), device=device, generator=generator)
    stated = specs[:, BACKGROUND]
    return Geometry(
        center_x=along * width,
        center_y=across * height,
        radius=radius * min(width, height) * shown,
        paint=constants.palette[specs[:, COLOUR1 : COLOUR2 + 1 : COLOUR2 - COLOUR1]],
        backdrop=constants.backdrops[torch.where(stated > 0, stated - 1, free)],
    )


def _centers(specs: Tensor, constants: _Constants, jitter: Tensor) -> tuple[Tensor, Tensor]:
    """Return centres x, y [batch, 2] as shares of the picture; jitter [batch, 4] is in -1 to 1."""
    layout, two = specs[:, LAYOUT], specs[:, TWO, None] > 0
    one_x = constants.place_x[layout, None] + jitter[:, :2] * _PLACE_JITTER
    one_y = constants.place_y[layout, None] + jitter[:, 2:] * _PLACE_JITTER
    # A caption that names no place lets the object lie anywhere that keeps it inside.
    free = (layout == 0)[:, None]
    one_x = torch.where(free, 0.5 + jitter[:, :2] * _FREE_JITTER, one_x)
    one_y = torch.where(free, 0.5 + jitter[:, 2:] * _FREE_JITTER, one_y)
    ends, cross = constants.ends, 0.5 + jitter[:, 2:] * _CROSS_JITTER
    main = torch.where((layout % 2 == 1)[:, None], ends[1:3], ends[0:2])
    main = main + jitter[:, :2] * _ALONG_JITTER
    beside = (layout >= 2)[:, None]
    two_x, two_y = torch.where(beside, main, cross), torch.where(beside, cross, main)
    return torch.where(two, two_x, one_x), torch.where(two, two_y, one_y)


def render(specs: Tensor, geometry: Geometry, width: int, height: int) -> Tensor:
    """Paint the scenes; returns float32 RGB [batch, 3, height, width] from 0 to 1."""
    device = specs.device
    ys = torch.arange(height, device=device)[:, None] + 0.5
    xs = torch.arange(width, device=device)[None, :] + 0.5
    picture = geometry.backdrop[:, :, None, None].expand(-1, -1, height, width)
    for index, shape in enumerate((SHAPE1, SHAPE2)):
        radius = geometry.radius[:, index, None, None]
        unit = radius.clamp(min=1.0)
        x = (xs - geometry.center_x[:, index, None, None]) / unit
        y = (ys - geometry.center_y[:, index, None, None]) / unit
        cover = (0.5 - _distances(specs[:, shape, None, None], x, y) * unit).clamp(0, 1)
        cover = cover * (radius > 0)
        # Light from the top left, so that flat colours look like solid pieces.
        light = (1.0 - _LIGHT * (0.4 * x + 0.6 * y).clamp(-1, 1))[:, None]
        paint = geometry.paint[:, index, :, None, None] * light
        picture = picture + (paint.clamp(0, 1) - picture) * cover[:, None]
    return picture


def pictures(specs: Tensor, width: int, height: int, generator: torch.Generator) -> Tensor:
    """Draw specs [batch, 9]; returns float32 RGB [batch, 3, height, width] from 0 to 1."""
    return render(specs, place(specs, width, height, generator), width, height)
