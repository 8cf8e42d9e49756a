"""Put a part into a tensor: what lies before it, the part, and what lies behind it, side by side.

``out[..., 0::2] = a; out[..., 1::2] = b`` is a stack of ``a`` and ``b``: a dim that is written in
steps is split by the step, and of a tensor whose parts were all written nothing else is read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Node as FxNode

from strop.frontend.creation import positions
from strop.frontend.lookups import PLACE, take
from strop.frontend.pointwise import apply
from strop.frontend.views import slice_start
from strop.ir.dims import Expr, const, to_expr
from strop.ir.graph import Builder, Node
from strop.ir.op import Kind

if TYPE_CHECKING:
    from strop.frontend.importer import Importer

aten = torch.ops.aten
Rule = Callable[..., Any]
ZERO = const(0)


def joined(b: Builder, pieces: Sequence[Node], dim: int) -> Node:
    """Join the pieces side by side; empty ones do not count."""
    kept = [p for p in pieces if p.shape[dim] != ZERO] or list(pieces[:1])
    if len(kept) == 1:
        return kept[0]
    shape = list(kept[0].shape)
    shape[dim] = sum((p.shape[dim] for p in kept), start=ZERO)
    return b.make("cat", kept, shape, kept[0].dtype, dim=dim)


def stretch(b: Builder, x: Node, dim: int, start: Expr | int, length: Expr) -> Node:
    """Take a slice; of a cat the pieces that it lies in, where sizes tell which these are, and of
    one number that is spread everywhere the number."""
    value = x
    while value.kind is Kind.VIEW:
        value = value.inputs[0]
    if value.op == "constant":
        shape = (*x.shape[:dim], length, *x.shape[dim + 1 :])
        return b.expand(b.view_as_rank(value, len(shape)), shape)
    pieces = _pieces_within(b, x, dim, to_expr(start), length) if x.op == "cat" else None
    return b.slice(x, dim, start, length) if pieces is None else joined(b, pieces, dim)


def _pieces_within(
    b: Builder, x: Node, dim: int, start: Expr, length: Expr
) -> Sequence[Node] | None:
    if x.attrs["dim"] != dim or length == ZERO:
        return None
    found: list[Node] = []
    first, end = ZERO, start + length
    for piece in x.inputs:
        last = first + piece.shape[dim]
        if _is_at_most(last, start) or _is_at_most(end, first):
            first = last
            continue
        begin, until = _outer(first, start), _outer(ZERO - last, ZERO - end)
        if begin is None or until is None:
            return None
        found.append(stretch(b, piece, dim, begin - first, ZERO - until - begin))
        first = last
    return found or None


def _is_at_most(a: Expr, b: Expr) -> bool:
    """Tell whether a <= b, whatever the sizes are."""
    return not (b - a).may_be_negative


def _outer(a: Expr, b: Expr) -> Expr | None:
    """Return the larger one, where sizes tell which one it is."""
    return b if _is_at_most(a, b) else a if _is_at_most(b, a) else None


def put(b: Builder, x: Node, part: Node, dim: int, start: Expr) -> Node:
    """Put ``part`` into x at ``start`` along ``dim``."""
    end = start + part.shape[dim]
    before = stretch(b, x, dim, 0, start)
    after = stretch(b, x, dim, end, x.shape[dim] - end)
    pieces = [*_pieces_of(before, dim), b.cast(part, x.dtype), *_pieces_of(after, dim)]
    return joined(b, pieces, dim)


def _pieces_of(x: Node, dim: int) -> Sequence[Node]:
    return x.inputs if x.op == "cat" and x.attrs["dim"] == dim else (x,)


def _put_in_steps(
    im: Importer, x: Node, part: Node, dim: int, start: Expr, step: int
) -> Node | None:
    """Put ``part`` at start, start + step, ... : one of ``step`` elements of each group of them."""
    b, count = im.builder, part.shape[dim]
    # the last group may end behind x, where another one begins so much further to the front
    over = start + count * step - x.shape[dim]
    place = over if _is_at_most(ZERO, over) else ZERO if _is_at_most(over, ZERO) else None
    if place is None or not place.is_const or not _is_at_most(place, start):
        return _put_by_places(im, x, part, dim, start, step)
    first = start - place
    groups = stretch(b, x, dim, first, count * step)
    split = (*x.shape[:dim], count, const(step), *x.shape[dim + 1 :])
    one = (*x.shape[:dim], count, const(1), *x.shape[dim + 1 :])
    written = put(b, b.reshape(groups, split), b.reshape(part, one), dim + 1, place)
    return put(b, x, b.reshape(written, groups.shape), dim, first)


def _put_by_places(
    im: Importer, x: Node, part: Node, dim: int, start: Expr, step: int
) -> Node | None:
    """Look up each element that is one of the part's there, as groups of ``step`` do not fit."""
    b, shape, count = im.builder, x.shape, part.shape[dim]
    at = b.cast(positions(b, shape, dim, ZERO - start), PLACE)
    place = apply(im, "div_floor_int", at, step, dtype=PLACE)
    begun = apply(im, "mul", place, step, dtype=PLACE)
    tests = (
        apply(im, "eq", at, begun, dtype=torch.bool),
        apply(im, "ge", place, 0, dtype=torch.bool),
        apply(im, "lt", place, b.constant(count, PLACE), dtype=torch.bool),
    )
    inside = tests[0]
    for test in tests[1:]:
        inside = apply(im, "logical_and", inside, test, dtype=torch.bool)
    known = apply(im, "clamp", place, 0, count - 1, dtype=PLACE)
    walks = [None if d == dim else d for d in range(len(shape))]
    found = take(b, part, (known,), walks, shape, "known")
    return None if found is None else apply(im, "where", inside, found, x, dtype=x.dtype)


def _slice_scatter(
    im: Importer,
    fx: FxNode,
    x: FxNode,
    part: Any,
    dim: int = 0,
    start: Any = None,
    end: Any = None,
    step: int = 1,
) -> Node | None:
    node = im.node(x)
    dim %= len(node.shape)
    value, begin = im.builder.cast(im.node(part), node.dtype), slice_start(im, x, dim, start)
    if value.shape[dim] == ZERO:
        return node
    if step == 1:
        return put(im.builder, node, value, dim, begin)
    return _put_in_steps(im, node, value, dim, begin, step)


def _select_scatter(im: Importer, fx: FxNode, x: Any, part: Any, dim: int, index: Any) -> Node:
    node, b = im.node(x), im.builder
    dim %= len(node.shape)
    place = im.size(index)
    if place.is_const and place.value < 0:
        place = place + node.shape[dim]
    im.needs_place(place, node.shape[dim])
    one = [const(1) if d == dim else s for d, s in enumerate(node.shape)]
    return put(b, node, b.reshape(im.node(part), one), dim, place)


PART_WRITES: dict[Any, Rule] = {
    aten.slice_scatter.default: _slice_scatter,
    aten.select_scatter.default: _select_scatter,
}
