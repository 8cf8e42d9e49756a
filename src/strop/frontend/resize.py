"""Resize images: places are arithmetic on positions, pixels are looked up.

As in ATen a place is computed in the type of the pixels, for nearest ones in fp32. Where it lies
between pixels, each dim mixes two or four of them. ``resize_rules`` says where eager leaves the
factor that a call gives.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Node as FxNode

from strop.frontend.creation import positions
from strop.frontend.lookups import PLACE, take
from strop.frontend.pointwise import apply
from strop.frontend.resize_rules import CHANNELS, SHORTCUTS
from strop.frontend.resizing import RESIZING as MODES
from strop.ir.dims import Expr, const, to_expr
from strop.ir.graph import Node, Ref
from strop.ir.ops import compute_dtype

if TYPE_CHECKING:
    from strop.frontend.importer import Importer

aten = torch.ops.aten
Rule = Callable[..., Any]
Samples = list[tuple[Node, Node | None]]  # places along one dim, each with its weight
Condition = Node | bool
CUBIC = -0.75


class _Dim:
    """Describe one dim that is resized: ``count`` elements become ``shape[dim]``. ``copies``:
    whether it is copied where it keeps its size, ``doubles``: whether read twice where it doubles,
    although the call gives a ``factor``; either may depend on sizes."""

    def __init__(
        self,
        im: Importer,
        count: Expr,
        shape: Sequence[Expr],
        dim: int,
        factor: float | None,
        dtype: torch.dtype,
    ) -> None:
        self.im, self.count, self.made, self.dtype = im, count, shape[dim], dtype
        self.factor = factor
        self.copies: Condition = False
        self.doubles: Condition = False
        self.place = im.builder.cast(positions(im.builder, shape, dim), PLACE)
        self.position = im.builder.cast(self.place, dtype)

    def __call__(self, op: str, *args: Any) -> Node:
        return apply(self.im, op, *args, dtype=self.dtype)

    def nearest(self, shift: float) -> Samples:
        at = self(
            "mul", self("add", self.position, shift) if shift else self.position, self._ratio()
        )
        place = self._inside(self("floor", at))
        place = self._chosen(self.copies, self.place, place, PLACE)
        if self.doubles is not False:
            half = apply(self.im, "shift_right", self.place, 1, dtype=PLACE)
            place = self._chosen(self.doubles, half, place, PLACE)
        return [(place, None)]

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
        weights = cubic_weights(self, t)
        places = (apply(self.im, "add", low, move, dtype=PLACE) for move in (-1, 0, 1, 2))
        return [
            (apply(self.im, "clamp", place, 0, self.count - 1, dtype=PLACE), weight)
            for place, weight in zip(places, weights, strict=True)
        ]

    def _ratio(self) -> Any:
        """Return how far one position of the result moves among the elements."""
        return self("div", self.count, self.made) if self.factor is None else 1.0 / self.factor

    def _real(self, align_corners: bool) -> Node:
        if align_corners:
            step = self("div", self.count - 1, self("maximum", self.made - 1, 1.0))
            return self("mul", self.position, step)
        moved = self("mul", self("add", self.position, 0.5), self._ratio())
        return self._chosen(self.copies, self.position, self("sub", moved, 0.5), self.dtype)

    def _chosen(self, condition: Condition, yes: Node, no: Node, dtype: torch.dtype) -> Node:
        if isinstance(condition, bool):
            return yes if condition else no
        return apply(self.im, "where", condition, yes, no, dtype=dtype)

    def _share(self, real: Node, low: Node) -> Node:
        """Compute the share of the way to the next element."""
        return self("sub", real, self.im.builder.cast(low, self.dtype))

    def _inside(self, place: Node) -> Node:
        """Keep a place from lying behind the last element."""
        place = self.im.builder.cast(place, PLACE)
        return apply(self.im, "minimum", place, self.count - 1, dtype=PLACE)


def cubic_weights(compute: Callable[..., Node], t: Node) -> tuple[Node, ...]:
    """Return the weights of four pixels, of a place at the share ``t`` from the second to the
    third. ``compute`` applies an operator."""

    def far(x: Node) -> Node:
        """Compute ((A x - 5 A) x + 8 A) x - 4 A."""
        inner = compute("sub", compute("mul", x, CUBIC), 5 * CUBIC)
        inner = compute("add", compute("mul", inner, x), 8 * CUBIC)
        return compute("sub", compute("mul", inner, x), 4 * CUBIC)

    def near(x: Node) -> Node:
        """Compute ((A + 2) x - (A + 3)) x x + 1."""
        inner = compute("sub", compute("mul", x, CUBIC + 2), CUBIC + 3)
        return compute("add", compute("mul", compute("mul", inner, x), x), 1.0)

    rest = compute("sub", 1.0, t)
    return (
        far(compute("add", t, 1.0)),
        near(t),
        near(rest),
        far(compute("add", rest, 1.0)),
    )


def _resize(
    im: Importer,
    fx: FxNode,
    x: Any,
    size: Any,
    mode: str,
    align_corners: bool,
    scales: Sequence[float | None],
) -> Node | None:
    node, shape, is_nearest = im.node(x), im.shape(fx), mode.startswith("nearest")
    if not (is_nearest or node.dtype.is_floating_point):
        return _by_torch(im, node, shape, mode, align_corners, scales)
    dtype = torch.float32 if is_nearest else compute_dtype(node.dtype)
    dims = [
        _Dim(im, node.shape[place], shape, place, factor, dtype)
        for place, factor in enumerate(scales or [None] * (len(shape) - 2), 2)
    ]
    _take_shortcuts(im, x.meta["val"], dims, mode)
    samples = []
    for dim in dims:
        if is_nearest:
            samples.append(dim.nearest(0.5 if mode == "nearest-exact" else 0.0))
        else:
            between = dim.cubic if mode == "bicubic" else dim.linear
            samples.append(between(align_corners))
    mixed = _mixed(im, node, samples, shape, dtype)
    return None if mixed is None else im.builder.cast(mixed, node.dtype)


def _take_shortcuts(im: Importer, x: torch.Tensor, dims: Sequence[_Dim], mode: str) -> None:
    """Note for each dim where its sizes decide although the call gives a factor."""
    row = SHORTCUTS.get((x.device.type, mode, len(dims)))
    if row is None or any(dim.factor is None for dim in dims):
        return
    applies: Condition = True
    if row.most is not None:
        applies = _at_most(im, sum((dim.made for dim in dims), start=const(0)), row.most)
        if lies_channels_last(*map(im.symbols.shape, (x.shape, x.stride()))):
            more = _at_most(im, const(CHANNELS + 1), im.size(x.shape[1]))
            applies = _joined(im, "logical_or", applies, more)
    same = [_equal(im, dim.count, dim.made) for dim in dims]
    every = functools.reduce(functools.partial(_joined, im, "logical_and"), same)
    for dim, own in zip(dims, same, strict=True):
        dim.copies = _joined(im, "logical_and", applies, every if row.together else own)
        if row.doubles:
            twice = _equal(im, dim.count * 2, dim.made)
            dim.doubles = _joined(im, "logical_and", applies, twice)


def _equal(im: Importer, a: Expr, b: Expr) -> Condition:
    if a == b or (a.is_const and b.is_const):
        return a == b
    return im.builder.pointwise("eq", im.operand(a, PLACE), im.operand(b, PLACE), dtype=torch.bool)


def _at_most(im: Importer, a: Expr, b: Expr | int) -> Condition:
    b = to_expr(b)
    if a.is_const and b.is_const:
        return a.value <= b.value
    return im.builder.pointwise("le", im.operand(a, PLACE), im.operand(b, PLACE), dtype=torch.bool)


def _joined(im: Importer, op: str, a: Condition, b: Condition) -> Condition:
    """Join ``a`` and ``b``, or return one of them."""
    decides = op == "logical_or"  # the value that says it all
    if isinstance(a, bool) or isinstance(b, bool):
        known, other = (a, b) if isinstance(a, bool) else (b, a)
        return decides if known is decides else other
    return im.builder.pointwise(op, a, b, dtype=torch.bool)


def lies_channels_last(shape: Sequence[Expr], strides: Sequence[Expr]) -> bool:
    """Tell whether images or videos lie with the channels of a pixel side by side."""
    step = const(1)
    for dim in (1, *range(len(shape) - 1, 1, -1), 0):
        if strides[dim] != step and shape[dim] != const(1):
            return False
        step = step * shape[dim]
    return len(shape) in (4, 5)


def _by_torch(
    im: Importer,
    x: Node,
    shape: Sequence[Expr],
    mode: str,
    align_corners: bool,
    scales: Sequence[float | None],
) -> Node:
    """Leave integers between pixels to torch, which rounds them by rules of its own."""
    rank = len(shape) - 2
    sizes = (tuple(shape[2:]), *_how(mode, rank, align_corners, scales))
    return _library(im, x, shape, f"aten.{MODES[mode][0].format(rank)}.default", sizes)


def _gradient(
    im: Importer,
    fx: FxNode,
    grad: Any,
    size: Any,
    shape: Any,
    mode: str,
    align_corners: bool,
    scales: Sequence[float | None],
) -> Node:
    target = f"aten.{MODES[mode][0].format(len(size))}_backward.default"
    sizes = (im.literal(size), im.literal(shape), *_how(mode, len(size), align_corners, scales))
    return _library(im, im.node(grad), im.shape(fx), target, sizes)


def _how(
    mode: str, rank: int, align_corners: bool, scales: Sequence[float | None]
) -> tuple[Any, ...]:
    """Return what ATen's calls want to know behind the sizes."""
    align = () if mode.startswith("nearest") else (align_corners,)
    return (*align, *(scales or [None] * rank))


def _library(
    im: Importer, x: Node, shape: Sequence[Expr], target: str, how: tuple[Any, ...]
) -> Node:
    result = (tuple(shape), x.dtype)
    return im.builder.make(
        "aten",
        (x,),
        *result,
        target=target,
        args=(Ref(0), *how),
        kwargs=(),
        outputs=(result,),
        single=True,
        tag="",
    )


def _mixed(
    im: Importer,
    x: Node,
    samples: Sequence[Samples],
    shape: Sequence[Expr],
    dtype: torch.dtype,
    picked: tuple[Node, ...] = (),
) -> Node | None:
    """Look up the elements at ``picked`` places, then weight them along the dims that are left."""
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
    torch.ops.strop.resize_backward.default: _gradient,
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
