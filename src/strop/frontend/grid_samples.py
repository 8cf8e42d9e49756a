"""Sample images at places that a grid says: places are arithmetic on the grid, pixels are looked
up.

As in ATen a coordinate of -1 is the first edge and 1 the last one, of whole pixels or, with
``align_corners``, of their middles. Coordinates and weights are computed in fp32, or fp64 of fp64.
What lies outside counts as 0, or moves to the border, or is reflected. Grids of 2-d and 3-d images
are served, nearest and linear; cubic ones of 2-d alone, as in ATen.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Node as FxNode

from strop.frontend.lookups import PLACE, take
from strop.frontend.pointwise import apply
from strop.frontend.resize import cubic_weights
from strop.ir.dims import Expr, const
from strop.ir.graph import Node
from strop.ir.ops import compute_dtype

if TYPE_CHECKING:
    from strop.frontend.importer import Importer

aten = torch.ops.aten
Rule = Callable[..., Any]
_LINEAR, _NEAREST, _CUBIC = range(3)  # as ATen numbers the modes
_ZEROS, _BORDER, _REFLECTION = range(3)


@dataclass(frozen=True, slots=True)
class _Tap:
    """Describe a place along one dim: whether it ``is_inside`` (None: always), and its weight
    (None: 1)."""

    place: Node
    is_inside: Node | None
    weight: Node | None


class _Side:
    """Describe one dim of images, of ``size`` pixels, and where the grid looks along it."""

    def __init__(
        self, im: Importer, size: Expr, grid: Node, padding: int, *, align_corners: bool
    ) -> None:
        self.im, self.size, self.padding, self.align = im, size, padding, align_corners
        self.dtype = compute_dtype(grid.dtype)
        self.grid = im.builder.cast(grid, self.dtype)

    def __call__(self, op: str, *args: Any) -> Node:
        return apply(self.im, op, *args, dtype=self.dtype)

    def test(self, op: str, *args: Any) -> Node:
        nodes = [a if isinstance(a, Node) else self.im.operand(a, self.dtype) for a in args]
        return self.im.builder.pointwise(op, *nodes, dtype=torch.bool)

    def position(self) -> Node:
        """Return where the grid looks, in pixels from the middle of the first one."""
        moved = self("add", self.grid, 1.0)
        if self.align:
            return self("mul", self("mul", moved, 0.5), self.size - 1)
        return self("mul", self("sub", self("mul", moved, self.size), 1.0), 0.5)

    def nearest(self) -> list[_Tap]:
        return [self._tap(self("round", self._kept(self.position())), None)]

    def linear(self) -> list[_Tap]:
        at = self._kept(self.position())
        low = self("floor", at)
        share = self("sub", at, low)
        return [
            self._tap(low, self("sub", 1.0, share)),
            self._tap(self("add", low, 1.0), share),
        ]

    def cubic(self) -> list[_Tap]:
        """Return four pixels, each of which is moved into the image by itself."""
        at = self.position()
        low = self("floor", at)
        weights = cubic_weights(self, self("sub", at, low))
        places = (self("add", low, float(move)) for move in (-1, 0, 1, 2))
        return [
            self._tap(self._kept(place), weight)
            for place, weight in zip(places, weights, strict=True)
        ]

    def _kept(self, at: Node) -> Node:
        """Return where a pixel is read in place of one outside."""
        if self.padding == _ZEROS:
            return at
        return self._clipped(at if self.padding == _BORDER else self._reflected(at))

    def _clipped(self, at: Node) -> Node:
        """Move a position to the border; one that is no number goes to the first pixel."""
        at = self("where", self.test("gt", at, 0.0), at, 0.0)
        return self("minimum", at, self.size - 1)

    def _reflected(self, at: Node) -> Node:
        """Reflect at the middles of the outer pixels, or at their edges."""
        first, span = (0.0, self.size - 1) if self.align else (-0.5, self.size)
        if span == const(0):
            return self("mul", at, 0.0)
        moved = self("abs", self("sub", at, first) if first else at)
        turns, rest = self("floor", self("div", moved, span)), self("fmod", moved, span)
        half = self("mul", turns, 0.5)
        is_even = self.test("eq", self("floor", half), half)
        turned = self("where", is_even, rest, self("sub", span, rest))
        return self("add", turned, first) if first else turned

    def _tap(self, at: Node, weight: Node | None) -> _Tap:
        """Return the pixel at a whole number, as one that exists: that at the border outside."""
        inside = apply(
            self.im,
            "logical_and",
            self.test("ge", at, 0.0),
            self.test("le", at, self.size - 1),
            dtype=torch.bool,
        )
        place = self.im.builder.cast(self("where", inside, at, 0.0), PLACE)
        is_kept = self.padding != _ZEROS and weight is None
        return _Tap(place, None if is_kept else inside, weight)


def _sample(
    im: Importer,
    fx: FxNode,
    x: Any,
    grid: Any,
    mode: int,
    padding: int,
    align_corners: bool,
) -> Node | None:
    node, places, b = im.node(x), im.node(grid), im.builder
    rank = len(node.shape) - 2
    if not node.dtype.is_floating_point:
        return None
    batch, *sizes = places.shape[:-1]
    sides = []
    for number, size in enumerate(node.shape[2:]):
        last = rank - 1 - number  # the grid has x before y before z
        one = b.slice(places, rank + 1, last, const(1), 1)
        one = b.reshape(one, (batch, const(1), *sizes))
        sides.append(_Side(im, size, one, padding, align_corners=align_corners))
    taps = [_taps(side, mode) for side in sides]
    if const(0) in node.shape[2:]:
        return None  # there is no pixel: torch says so
    parts = [_part(im, node, some, im.shape(fx)) for some in itertools.product(*taps)]
    wide = compute_dtype(node.dtype)
    return b.cast(reduce(lambda p, q: apply(im, "add", p, q, dtype=wide), parts), node.dtype)


def _taps(side: _Side, mode: int) -> list[_Tap]:
    return {_LINEAR: side.linear, _NEAREST: side.nearest, _CUBIC: side.cubic}[mode]()


def _part(im: Importer, x: Node, taps: Sequence[_Tap], shape: Sequence[Expr]) -> Node:
    """Return the pixels at the taps of all dims, times their weights."""
    wide = compute_dtype(x.dtype)
    walks = [0, 1, *[None] * len(taps)]
    found = take(im.builder, x, [tap.place for tap in taps], walks, shape, "known")
    assert found is not None, "every dim has a pixel"
    found = im.builder.cast(found, wide)
    tests = [tap.is_inside for tap in taps if tap.is_inside is not None]
    if tests:
        inside = reduce(lambda p, q: apply(im, "logical_and", p, q, dtype=torch.bool), tests)
        found = apply(im, "where", inside, found, 0.0, dtype=wide)
    weights = [tap.weight for tap in taps if tap.weight is not None]
    if not weights:
        return found
    weight = reduce(lambda p, q: apply(im, "mul", p, q, dtype=wide), weights)
    return apply(im, "mul", found, weight, dtype=wide)


def _by_cudnn(im: Importer, fx: FxNode, x: Any, grid: Any) -> Node | None:
    """Sample as torch lets cuDNN do it: linear, 0 outside, corners aligned."""
    return _sample(im, fx, x, grid, _LINEAR, _ZEROS, True)


GRIDS: dict[Any, Rule] = {
    aten.grid_sampler_2d.default: _sample,
    aten.grid_sampler_3d.default: _sample,
    aten.cudnn_grid_sampler.default: _by_cudnn,
}
