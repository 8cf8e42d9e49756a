"""Images of another size: places are arithmetic on positions, pixels are looked up.

As in ATen a place is computed in the type of the pixels, for nearest ones in fp32. Where it lies
between pixels, each dim mixes two or four of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Node as FxNode

from strop.frontend.creation import positions
from strop.frontend.lookups import PLACE, take
from strop.frontend.operators import RESIZING as MODES
from strop.frontend.pointwise import apply
from strop.ir.dims import Expr
from strop.ir.graph import Node, Ref
from strop.ir.ops import compute_dtype

if TYPE_CHECKING:
    from strop.frontend.importer import Importer

aten = torch.ops.aten
Rule = Callable[..., Any]
Samples = list[tuple[Node, Node | None]]  # places along one dim, each with its weight
CUBIC = -0.75


class _Dim:
    """One dim that is resized: ``count`` elements become ``shape[dim]``."""

    def __init__(self, im: Importer, count: Expr, shape: Sequence[Expr], dim: int,
                 factor: float | None, dtype: torch.dtype) -> None:  # fmt: skip
        self.im, self.count, self.made, self.dtype = im, count, shape[dim], dtype
        self.factor = factor
        place = im.builder.cast(positions(im.builder, shape, dim), PLACE)
        self.position = im.builder.cast(place, dtype)

    def __call__(self, op: str, *args: Any) -> Node:
        return apply(self.im, op, *args, dtype=self.dtype)

    def nearest(self, shift: float) -> Samples:
        at = self("mul", self("add", self.position, shift) if shift else self.position,
                  self._step())  # fmt: skip
        return [(self._inside(self("floor", at)), None)]

    def linear(self, align_corners: bool) -> Samples:
        real = self._real(align_corners)
        real = real if align_corners else self("maximum", real, 0.0)
        low = self._inside(real)
        high = self._inside(apply(self.im, "add", low, 1, dtype=PLACE))
        share = self._share(real, low)
        return [(low, self("sub", 1.0, share)), (high, share)]

    def cubic(self, align_corners: bool) -> Samples:
        real = self._real(align_corners)
        low = self.im.builder.cast(self("floor", real), PLACE)
        low = apply(self.im, "minimum", low, self.count - 1, dtype=PLACE)
        t = self._share(real, low)
        rest = self("sub", 1.0, t)
        weights = (self._far(self("add", t, 1.0)), self._near(t), self._near(rest),
                   self._far(self("add", rest, 1.0)))  # fmt: skip
        places = (apply(self.im, "add", low, move, dtype=PLACE) for move in (-1, 0, 1, 2))
        return [(apply(self.im, "clamp", place, 0, self.count - 1, dtype=PLACE), weight)
                for place, weight in zip(places, weights, strict=True)]  # fmt: skip

    def _far(self, x: Node) -> Node:
        """((A x - 5 A) x + 8 A) x - 4 A"""
        inner = self("sub", self("mul", x, CUBIC), 5 * CUBIC)
        inner = self("add", self("mul", inner, x), 8 * CUBIC)
        return self("sub", self("mul", inner, x), 4 * CUBIC)

    def _near(self, x: Node) -> Node:
        """((A + 2) x - (A + 3)) x x + 1"""
        inner = self("sub", self("mul", x, CUBIC + 2), CUBIC + 3)
        return self("add", self("mul", self("mul", inner, x), x), 1.0)

    def _step(self) -> Node:
        """How far one position of the result moves among the elements."""
        step = self("div", self.count, self.made)
        if self.factor is None or self.count == self.made:
            return step
        same = self.im.builder.pointwise("eq", *(self.im.operand(n, PLACE) for n in
                                         (self.count, self.made)), dtype=torch.bool)  # fmt: skip
        return self("where", same, 1.0, 1.0 / self.factor)

    def _real(self, align_corners: bool) -> Node:
        if align_corners:
            step = self("div", self.count - 1, self("maximum", self.made - 1, 1.0))
            return self("mul", self.position, step)
        ratio = self("div", self.count, self.made) if self.factor is None else 1.0 / self.factor
        return self("sub", self("mul", self("add", self.position, 0.5), ratio), 0.5)

    def _share(self, real: Node, low: Node) -> Node:
        """Of the way to the next element."""
        return self("sub", real, self.im.builder.cast(low, self.dtype))

    def _inside(self, place: Node) -> Node:
        """Not behind the last element."""
        place = self.im.builder.cast(place, PLACE)
        return apply(self.im, "minimum", place, self.count - 1, dtype=PLACE)


def _resize(im: Importer, fx: FxNode, x: Any, size: Any, mode: str, align_corners: bool,
            scales: Sequence[float | None]) -> Node | None:  # fmt: skip
    node, shape, is_nearest = im.node(x), im.shape(fx), mode.startswith("nearest")
    if not (is_nearest or node.dtype.is_floating_point):
        return _by_torch(im, node, shape, mode, align_corners, scales)
    dtype = torch.float32 if is_nearest else compute_dtype(node.dtype)
    samples = []
    for place, factor in enumerate(scales or [None] * (len(shape) - 2)):
        dim = _Dim(im, node.shape[place + 2], shape, place + 2, factor or None, dtype)
        if is_nearest:
            samples.append(dim.nearest(0.5 if mode == "nearest-exact" else 0.0))
        else:
            between = dim.cubic if mode == "bicubic" else dim.linear
            samples.append(between(align_corners))
    mixed = _mixed(im, node, samples, shape, dtype)
    return None if mixed is None else im.builder.cast(mixed, node.dtype)


def _by_torch(im: Importer, x: Node, shape: Sequence[Expr], mode: str, align_corners: bool,
              scales: Sequence[float | None]) -> Node:  # fmt: skip
    """Integers between pixels are rounded by rules of torch's own."""
    rank, result = len(shape) - 2, (tuple(shape), x.dtype)
    target = f"aten.{MODES[mode][0].format(rank)}.default"
    args = (Ref(0), tuple(shape[2:]), align_corners, *(scales or [None] * rank))
    return im.builder.make("aten", (x,), *result, target=target, args=args, kwargs=(),
                           outputs=(result,), single=True, tag="")  # fmt: skip


def _mixed(im: Importer, x: Node, samples: Sequence[Samples], shape: Sequence[Expr],
           dtype: torch.dtype, picked: tuple[Node, ...] = ()) -> Node | None:  # fmt: skip
    """The elements at ``picked`` places, then weighted along the dims that are left."""
    if not samples:
        walks = [0, 1, *[None] * len(picked)]
        return take(im.builder, x, picked, walks, shape, "known")
    total: Node | None = None
    for place, weight in samples[0]:
        part = _mixed(im, x, samples[1:], shape, dtype, (*picked, place))
        if part is None or weight is None:
            return part
        part = apply(im, "mul", part, weight, dtype=dtype)
        total = part if total is None else apply(im, "add", total, part, dtype=dtype)
    return total


def _aten(mode: str) -> Rule:
    def rule(im: Importer, fx: FxNode, x: Any, size: Any, *rest: Any, **scales: Any) -> Node | None:
        align, given = (False, rest) if mode.startswith("nearest") else (rest[0], rest[1:])
        factors = [*given, *scales.values()]
        if any(factors) and not all(factors):
            return None
        return _resize(im, fx, x, size, mode, align, factors if all(factors) else [])

    return rule


RESIZING: dict[Any, Rule] = {
    torch.ops.strop.resize.default: _resize,
    aten.upsample_nearest1d.default: _aten("nearest"),
    aten.upsample_nearest2d.default: _aten("nearest"),
    aten.upsample_nearest3d.default: _aten("nearest"),
    aten._upsample_nearest_exact1d.default: _aten("nearest-exact"),
    aten._upsample_nearest_exact2d.default: _aten("nearest-exact"),
    aten._upsample_nearest_exact3d.default: _aten("nearest-exact"),
    aten.upsample_linear1d.default: _aten("linear"),
    aten.upsample_bilinear2d.default: _aten("bilinear"),
    aten.upsample_trilinear3d.default: _aten("trilinear"),
    aten.upsample_bicubic2d.default: _aten("bicubic"),
}
