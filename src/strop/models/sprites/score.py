"""Judges a picture against its prompt: what the generator knows, measured back from the pixels.

The background is read off the border. What differs from it falls into connected pieces, and each
piece is named by analysis by synthesis: every shape is drawn over it at a few centres and radii,
and the best overlap wins.
"""

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional

from strop.models.sprites.draw import shape_distance
from strop.models.sprites.grammar import BACKGROUNDS, COLOURS, SHAPES, Scene, Thing, parse

_CONTRAST = 0.16
_SMALLEST_PIECE = 8
_COLOUR_REACH = 0.22
_LEAST_OVERLAP = 0.72
_SMALL_BELOW, _LARGE_ABOVE = 0.15, 0.17
_THIRD = 0.375


@dataclass(frozen=True)
class Piece:
    """Describe one object seen in a picture.

    Attributes:
        colour: Name of the nearest object colour, or None if none is near.
        shape: Name of the best fitting shape, or None if none fits.
        x: Centre as a share of the width.
        y: Centre as a share of the height.
        radius: Radius as a share of the shorter side.
        overlap: Soft intersection over union with the best fitting shape.
    """

    colour: str | None
    shape: str | None
    x: float
    y: float
    radius: float
    overlap: float


@dataclass(frozen=True)
class Score:
    """Say which attributes of a prompt a picture got right; what a prompt leaves out is right."""

    count: bool
    colours: bool
    shapes: bool
    sizes: bool
    layout: bool
    background: bool

    @property
    def all_right(self) -> bool:
        """Tell whether every attribute is right."""
        parts = (self.count, self.colours, self.shapes, self.sizes, self.layout, self.background)
        return all(parts)


def score(image: Tensor, prompt: str) -> Score:
    """Judge a picture.

    Args:
        image: RGB [3, height, width] from 0 to 1.
        prompt: A caption of the sprites grammar.

    Raises:
        ValueError: `prompt` is outside the grammar, or `image` is no RGB picture.
    """
    scene = parse(prompt)
    if image.ndim != 3 or image.shape[0] != 3:
        raise ValueError(f"expected a picture [3, height, width], got {list(image.shape)}")
    image = image.detach().float().cpu()
    backdrop = _backdrop(image)
    pieces = find_pieces(image, backdrop)
    background = nearest(backdrop, BACKGROUNDS) if _is_flat(image, backdrop) else None
    stated = scene.background is None or scene.background == background
    if len(pieces) != len(scene.things):
        return Score(False, False, False, False, False, stated and background is not None)
    height, width = image.shape[1:]
    found = max((pieces, pieces[::-1]), key=lambda order: _matches(scene.things, order))
    pairs = list(zip(scene.things, found, strict=True))
    return Score(
        count=True,
        colours=all(thing.colour == piece.colour for thing, piece in pairs),
        shapes=all(thing.shape == piece.shape for thing, piece in pairs),
        sizes=all(_size_fits(thing, piece) for thing, piece in pairs),
        layout=_layout_fits(scene, found, width, height),
        background=stated and background is not None,
    )


def _matches(things: tuple[Thing, ...], pieces: list[Piece]) -> int:
    pairs = zip(things, pieces, strict=True)
    return sum((t.colour == p.colour) + (t.shape == p.shape) for t, p in pairs)


def _size_fits(thing: Thing, piece: Piece) -> bool:
    if thing.size == "small":
        return piece.radius < _SMALL_BELOW
    return thing.size is None or piece.radius > _LARGE_ABOVE


def _layout_fits(scene: Scene, pieces: list[Piece], width: int, height: int) -> bool:
    if scene.relation is not None:
        first, second = pieces
        right, down = (second.x - first.x) * width, (second.y - first.y) * height
        if scene.relation in ("above", "below"):
            return abs(down) > abs(right) and (down > 0) == (scene.relation == "above")
        return abs(right) > abs(down) and (right > 0) == (scene.relation == "to the left of")
    if scene.place is None:
        return True
    wanted = scene.place.split()
    across = "left" if pieces[0].x < _THIRD else "right" if pieces[0].x > 1 - _THIRD else None
    upright = "top" if pieces[0].y < _THIRD else "bottom" if pieces[0].y > 1 - _THIRD else None
    seen = [word for word in (upright, across) if word is not None] or ["center"]
    return seen == wanted


def nearest(colour: Tensor, palette: dict[str, tuple[int, int, int]]) -> str | None:
    """Return the name of the colour nearest to `colour` [3], or None if all are far off."""
    values = torch.tensor(list(palette.values())) / 255
    far = (values - colour).norm(dim=1)
    best = int(far.argmin())
    return list(palette)[best] if float(far[best]) < _COLOUR_REACH else None


def _border(image: Tensor) -> Tensor:
    sides = (image[:, :2], image[:, -2:], image[:, 2:-2, :2], image[:, 2:-2, -2:])
    return torch.cat([side.flatten(1) for side in sides], dim=1)


def _backdrop(image: Tensor) -> Tensor:
    return _border(image).median(dim=1).values


def _is_flat(image: Tensor, backdrop: Tensor) -> bool:
    off = (_border(image) - backdrop[:, None]).norm(dim=0) > _CONTRAST
    return float(off.float().mean()) < 0.1


def find_pieces(image: Tensor, backdrop: Tensor) -> list[Piece]:
    """Find the objects of a picture [3, height, width] on a background colour [3]."""
    away = (image - backdrop[:, None, None]).norm(dim=0)
    labels = _label(away > _CONTRAST)
    pieces = []
    for label in sorted(set(labels.flatten().tolist())):
        mask = labels == label
        if label and int(mask.sum()) >= _SMALLEST_PIECE:
            pieces.append(_describe(image, backdrop, mask, (labels > 0) & ~mask))
    return pieces


def _label(mask: Tensor) -> Tensor:
    """Number the 8-connected pieces of `mask` [height, width]; 0 is outside."""
    height, width = mask.shape
    labels = torch.arange(1, height * width + 1, dtype=torch.float32).view(1, 1, height, width)
    labels = labels * mask
    while True:
        spread = functional.max_pool2d(labels, 3, stride=1, padding=1) * mask
        if torch.equal(spread, labels):
            return labels[0, 0].long()
        labels = spread


def _describe(image: Tensor, backdrop: Tensor, mask: Tensor, others: Tensor) -> Piece:
    away = (image - backdrop[:, None, None]).norm(dim=0)
    # The median over the strongest half keeps the soft edge out of the colour.
    strong = mask & (away >= away[mask].median())
    colour = image[:, strong].median(dim=1).values
    toward = colour - backdrop
    cover = ((image - backdrop[:, None, None]) * toward[:, None, None]).sum(0)
    cover = (cover / toward.square().sum()).clamp(0, 1) * ~others
    near = functional.max_pool2d(mask[None, None].float(), 5, stride=1, padding=2)[0, 0]
    shape, x, y, radius, overlap = _fit(cover * near)
    height, width = cover.shape
    return Piece(
        colour=nearest(colour, COLOURS),
        shape=shape if overlap >= _LEAST_OVERLAP else None,
        x=x / width,
        y=y / height,
        radius=radius / min(width, height),
        overlap=overlap,
    )


@lru_cache(maxsize=1)
def _outlines() -> Tensor:
    """Return area and box (left, right, top, bottom) of each shape of radius 1, [shapes, 5]."""
    axis = (torch.arange(400) + 0.5) / 200 - 1
    y, x = torch.meshgrid(axis, axis, indexing="ij")
    rows = []
    for code in range(len(SHAPES)):
        mask = shape_distance(code, x, y) < 0
        across, down = axis[mask.any(0)], axis[mask.any(1)]
        area = mask.float().mean() * 4
        rows.append(torch.stack([area, across[0], across[-1], down[0], down[-1]]))
    return torch.stack(rows)


def _fit(cover: Tensor) -> tuple[str, float, float, float, float]:
    """Return the best shape for `cover` [height, width], its centre, radius and overlap."""
    solid = cover > 0.5
    columns, rows = solid.any(0).nonzero().flatten(), solid.any(1).nonzero().flatten()
    if not len(columns):
        return SHAPES[0], 0.0, 0.0, 0.0, 0.0
    left, right = float(columns[0]), float(columns[-1]) + 1
    top, bottom = float(rows[0]), float(rows[-1]) + 1
    outline = _outlines()
    radius = (cover.sum() / outline[:, 0]).sqrt()
    steps = torch.cartesian_prod(
        torch.arange(len(SHAPES)).float(),
        torch.tensor([0.92, 1.0, 1.08]),
        torch.tensor([-0.8, 0.0, 0.8]),
        torch.tensor([-0.8, 0.0, 0.8]),
    )
    code = steps[:, 0].long()
    size = radius[code] * steps[:, 1]
    x = (left + right) / 2 - size * outline[code, 1:3].mean(1) + steps[:, 2]
    y = (top + bottom) / 2 - size * outline[code, 3:5].mean(1) + steps[:, 3]
    over = _overlaps(cover, code, x, y, size)
    best = int(over.argmax())
    return (
        SHAPES[int(code[best])],
        float(x[best]),
        float(y[best]),
        float(size[best]),
        float(over[best]),
    )


def _overlaps(cover: Tensor, code: Tensor, x: Tensor, y: Tensor, size: Tensor) -> Tensor:
    """Return the soft intersection over union of `cover` with each candidate [candidates]."""
    seen = cover > 0
    columns, rows = seen.any(0).nonzero().flatten(), seen.any(1).nonzero().flatten()
    left, right = max(0, int(columns[0]) - 3), int(columns[-1]) + 4
    top, bottom = max(0, int(rows[0]) - 3), int(rows[-1]) + 4
    part = cover[top:bottom, left:right]
    ys = torch.arange(top, top + part.shape[0])[None, :, None] + 0.5
    xs = torch.arange(left, left + part.shape[1])[None, None, :] + 0.5
    overlaps = torch.zeros(len(code))
    for shape in range(len(SHAPES)):
        mine = code == shape
        unit = size[mine, None, None]
        px, py = (xs - x[mine, None, None]) / unit, (ys - y[mine, None, None]) / unit
        drawn = (0.5 - shape_distance(shape, px, py) * unit).clamp(0, 1)
        both = torch.minimum(drawn, part).sum((1, 2))
        overlaps[mine] = both / torch.maximum(drawn, part).sum((1, 2))
    return overlaps
