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
from torch import Tensor
from torch.fx import Node as FxNode

from strop.frontend.lookups import PLACE, take
from strop.frontend.pointwise import apply
from strop.frontend.resize import cubic_weights
from strop.ir.affine import merge, strided
from strop.ir.dims import Expr, const, product
from strop.ir.graph import Node
from strop.ir.ops import compute_dtype

if TYPE_CHECKING:
    from strop.frontend.importer import Importer

aten = torch.ops.aten
Rule = Callable[..., Any]
_LINEAR, _NEAREST, _CUBIC = range(3)  # as ATen numbers the modes
_ZEROS, _BORDER, _REFLECTION = range(3)
_MOST, _OUTSIDE = 2**31, -100.0
_CPU_CHANNELS = 16  # a vector of fp32


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
        if self.padding != _ZEROS:
            at = self._clipped(at if self.padding == _BORDER else self._reflected(at))
        if "cpu" in self.im.devices:
            return at
        # a GPU takes what is no number, or too large for one, as a place outside
        is_place = self.test("lt", self("abs", at), float(_MOST))
        return self("where", is_place, at, _OUTSIDE)

    def _clipped(self, at: Node) -> Node:
        """Move a position to the border; one that is no number goes to the first pixel."""
        at = self("where", self.test("gt", at, 0.0), at, 0.0)
        return self("minimum", at, self.size - 1)

    def _reflected(self, at: Node) -> Node:
        """Return a position reflected at the middles of the outer pixels, or at their edges."""
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
    if not node.dtype.is_floating_point or const(0) in node.shape[2:]:
        return None  # where there is no pixel torch says so
    rank, is_last = len(node.shape) - 2, _has_channels_last(node)
    if "cpu" in im.devices and not suits_cpu(node.shape[1], is_last=is_last):
        return None
    images = b.permute(node, _channels_last(rank)) if is_last else node
    batch, *points = places.shape[:-1]
    spread = (batch, *points, const(1)) if is_last else (batch, const(1), *points)
    taps = []
    for number, size in enumerate(node.shape[2:]):
        last = rank - 1 - number  # the grid has x before y before z
        one = b.reshape(b.slice(places, rank + 1, last, const(1), 1), spread)
        side = _Side(im, size, one, padding, align_corners=align_corners)
        taps.append(_taps(side, mode))
    lookup = _Lookup(im, images, node.shape, points, is_last)
    wide = compute_dtype(node.dtype)
    parts = (lookup.part(some) for some in itertools.product(*taps))
    mixed = b.cast(reduce(lambda p, q: apply(im, "add", p, q, dtype=wide), parts), node.dtype)
    return b.permute(mixed, (0, rank + 1, *range(1, rank + 1))) if is_last else mixed


def suits_cpu(channels: Expr, *, is_last: bool) -> bool:
    """Tell whether kernels of ours sample faster on a CPU than ATen's call: where a vector of
    channels lies side by side. Measured on AVX-512 (docs/log/cpu.md): 1.24 to 1.32 times as fast
    there, 0.56 to 0.82 with pixels side by side, 0.27 with 3 channels."""
    return is_last and (not channels.is_const or channels.value >= _CPU_CHANNELS)


def _has_channels_last(x: Node) -> bool:
    """Tell whether the channels of a pixel lie side by side, as heads of attention do."""
    view = strided(x)
    return view is not None and [stride for _, stride in merge(view.dims[1])] == [const(1)]


def _channels_last(rank: int) -> tuple[int, ...]:
    return (0, *range(2, rank + 2), 1)


def _taps(side: _Side, mode: int) -> list[_Tap]:
    return {_LINEAR: side.linear, _NEAREST: side.nearest, _CUBIC: side.cubic}[mode]()


class _Lookup:
    """Looks pixels up in images (N, C, H, W), or (N, H, W, C) where channels are last."""

    def __init__(
        self, im: Importer, x: Node, shape: Sequence[Expr], points: Sequence[Expr], is_last: bool
    ) -> None:
        batch, channels, *self.sizes = shape
        self.im, self.is_last, self.wide = im, is_last, compute_dtype(x.dtype)
        self.shape = (batch, *points, channels) if is_last else (batch, channels, *points)
        dims = range(1, len(shape) - 1) if is_last else range(2, len(shape))
        view = strided(x)
        self.in_a_row = (
            view is not None and len(merge(atom for d in dims for atom in view.dims[d])) <= 1
        )
        if self.in_a_row:  # one number then says which pixel is read
            count = product(self.sizes)
            flat = (batch, count, channels) if is_last else (batch, channels, count)
            x = im.builder.reshape(x, flat)
        self.images = x

    def _pixel(self, places: Sequence[Node]) -> Node:
        """Return the number of a pixel in its image."""
        pixel, *rest = places
        for place, size in zip(rest, self.sizes[1:], strict=True):
            pixel = apply(self.im, "mul", pixel, size, dtype=PLACE)
            pixel = apply(self.im, "add", pixel, place, dtype=PLACE)
        return pixel

    def part(self, taps: Sequence[_Tap]) -> Node:
        """Return the pixels at the taps of all dims, times their weights."""
        im, wide = self.im, self.wide
        places = [tap.place for tap in taps]
        if self.in_a_row:
            places = [self._pixel(places)]
        walks: list[int | None] = [0, *[None] * len(places)]
        walks.insert(len(walks) if self.is_last else 1, len(self.shape) - 1 if self.is_last else 1)
        found = take(im.builder, self.images, places, walks, self.shape, "known")
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


def _shape_by_cudnn(x: Tensor, grid: Tensor) -> Tensor:
    return x.new_empty((*x.shape[:2], *grid.shape[1:3]))


def _shapes_by_cudnn(x: Tensor, grid: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), grid.new_empty(grid.shape)


# torch has no fake kernels of cuDNN's, which a trace on a GPU meets where corners are aligned.
torch.library.register_fake("aten::cudnn_grid_sampler", _shape_by_cudnn)
torch.library.register_fake("aten::cudnn_grid_sampler_backward", _shapes_by_cudnn)

GRIDS: dict[Any, Rule] = {
    aten.grid_sampler_2d.default: _sample,
    aten.grid_sampler_3d.default: _sample,
    aten.cudnn_grid_sampler.default: _by_cudnn,
}
