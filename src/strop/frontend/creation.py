"""Make tensors out of nothing: constants, and selects that compare positions.

None of these is ever stored for its own sake: they become literals and index arithmetic of the
kernels that read them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Node as FxNode

from strop.frontend import operators  # noqa: F401 - which registers strop.linspace
from strop.frontend.numbers import is_number
from strop.ir.dims import Expr, const
from strop.ir.graph import Builder, Node

if TYPE_CHECKING:
    from strop.frontend.importer import Importer

aten = torch.ops.aten
Rule = Callable[..., Any]
I64 = torch.int64


def filled(b: Builder, value: Any, shape: Sequence[Expr | int], dtype: torch.dtype) -> Node:
    """Make a constant of this shape."""
    return _spread(b, b.constant(value, dtype), shape)


def _spread(b: Builder, value: Node, shape: Sequence[Expr | int]) -> Node:
    """Spread one value everywhere."""
    return b.expand(b.view_as_rank(value, len(shape)), shape)


def positions(b: Builder, shape: Sequence[Expr], dim: int, start: Expr | int = 0) -> Node:
    """start + the position along ``dim``, of a shape that broadcasts to ``shape``."""
    iota = b.make("iota", (), (shape[dim],), I64, start=start, step=1)
    return b.reshape(iota, [s if d == dim % len(shape) else const(1) for d, s in enumerate(shape)])


def _arange(im: Importer, fx: FxNode, start: Any, end: Any, step: Any = 1, **_: Any) -> Node:
    dtype = fx.meta["val"].dtype
    return im.builder.make(
        "iota", (), im.shape(fx), dtype, start=im.literal(start), step=im.literal(step)
    )


def _arange_from_zero(im: Importer, fx: FxNode, end: Any, **_: Any) -> Node:
    return _arange(im, fx, 0, end)


def _filled(value: float | None, argument: int = 1) -> Rule:
    """Fill with ``value``, or with the number that is this positional argument."""

    def rule(im: Importer, fx: FxNode, *args: Any, **_: Any) -> Node:
        fill, dtype = args[argument] if value is None else value, fx.meta["val"].dtype
        if isinstance(fill, FxNode) and is_number(fill.meta.get("val")):
            return _spread(im.builder, im.operand(fill, dtype), im.shape(fx))
        return filled(im.builder, im.literal(fill), im.shape(fx), dtype)

    return rule


def _fill_tensor(im: Importer, fx: FxNode, x: Any, value: Any) -> Node:
    return _spread(im.builder, im.builder.cast(im.node(value), fx.meta["val"].dtype), im.shape(fx))


def _eye(im: Importer, fx: FxNode, *_: Any, **__: Any) -> Node:
    b, shape = im.builder, im.shape(fx)
    same = b.pointwise("eq", positions(b, shape, 0), positions(b, shape, 1), dtype=torch.bool)
    return b.cast(same, fx.meta["val"].dtype)


def _linspace(im: Importer, fx: FxNode, start: Any, end: Any, *_: Any, **__: Any) -> Node | None:
    """Compute from both ends to the middle, as torch does it, so that the last element is
    ``end``."""
    b, dtype = im.builder, fx.meta["val"].dtype
    if dtype not in (torch.float32, torch.float64):
        return None
    count = im.shape(fx)[0]
    ends = (float(x) if isinstance(x, int | float) else x for x in (start, end))  # else a size
    first, last = (im.operand(x, dtype) for x in ends)
    gaps = b.pointwise("maximum", b.constant(count - 1, dtype), b.constant(1, dtype), dtype=dtype)
    step = b.pointwise("div", _add(b, "sub", last, first), gaps, dtype=dtype)
    place = positions(b, (count,), 0)
    middle = b.constant((count + 1) // 2, I64)
    below = b.cast(place, dtype)
    above = b.cast(_add(b, "sub", b.constant(count - 1, I64), place), dtype)
    up = _add(b, "add", first, b.pointwise("mul", step, below, dtype=dtype))
    down = _add(b, "sub", last, b.pointwise("mul", step, above, dtype=dtype))
    lower_half = b.pointwise("lt", place, middle, dtype=torch.bool)
    return b.pointwise("where", lower_half, up, down, dtype=dtype)


def _add(b: Builder, op: str, x: Node, y: Node) -> Node:
    return b.pointwise(op, x, y, dtype=x.dtype, alpha=1)


def _triangle(relation: str) -> Rule:
    """Keep column ``relation`` row + diagonal: tril and triu."""

    def rule(im: Importer, fx: FxNode, x: Any, diagonal: int = 0) -> Node:
        b, node = im.builder, im.node(x)
        row, col = positions(b, node.shape, -2, diagonal), positions(b, node.shape, -1)
        kept = b.pointwise(relation, col, row, dtype=torch.bool)
        zero = b.constant(0, node.dtype)
        return b.pointwise("where", kept, node, zero, dtype=node.dtype)

    return rule


def _diag_embed(
    im: Importer, fx: FxNode, x: Any, offset: int = 0, dim1: int = -2, dim2: int = -1
) -> Node | None:
    b, node, shape = im.builder, im.node(x), im.shape(fx)
    if offset or (dim1 % len(shape), dim2 % len(shape)) != (len(shape) - 2, len(shape) - 1):
        return None
    row, col = positions(b, shape, -2), positions(b, shape, -1)
    same = b.pointwise("eq", row, col, dtype=torch.bool)
    spread = b.reshape(node, (*node.shape[:-1], 1, node.shape[-1]))
    return b.pointwise("where", same, spread, b.constant(0, node.dtype), dtype=node.dtype)


CREATION: dict[Any, Rule] = {
    aten.arange.start_step: _arange,
    aten.arange.start: _arange,
    aten.arange.default: _arange_from_zero,
    aten.linspace.default: _linspace,
    torch.ops.strop.linspace.default: _linspace,
    aten.full.default: _filled(None),
    aten.full_like.default: _filled(None),
    aten.new_full.default: _filled(None, 2),
    aten.scalar_tensor.default: _filled(None, 0),
    aten.fill.Scalar: _filled(None),
    aten.fill.Tensor: _fill_tensor,
    aten.zeros.default: _filled(0),
    aten.zeros_like.default: _filled(0),
    aten.new_zeros.default: _filled(0),
    aten.zero.default: _filled(0),
    aten.ones.default: _filled(1),
    aten.ones_like.default: _filled(1),
    aten.new_ones.default: _filled(1),
    # whatever somebody reads before writing there
    aten.empty.memory_format: _filled(0),
    aten.empty_like.default: _filled(0),
    aten.new_empty.default: _filled(0),
    aten.eye.default: _eye,
    aten.eye.m: _eye,
    aten.tril.default: _triangle("le"),
    aten.triu.default: _triangle("ge"),
    aten.diag_embed.default: _diag_embed,
}
