"""Say where a value is stored: in memory of its own, or in its part of a join's.

A join is a cat that no kernel computes. Its inputs are parts, of which each is stored where the
join has it, by the kernel that computes it; and results of calls, seen through views, which these
write there.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from strop.ir.affine import base_of, strided
from strop.ir.dims import Expr, const, product
from strop.ir.graph import Builder, Graph, Node, Shape, dense_strides
from strop.ir.ops import OF_ROWS, OPS, Kind

ZERO = const(0)


def join(b: Builder, cat: Node, pieces: tuple[Node, ...], by_calls: Collection[Node] = ()) -> Node:
    """Make a join of the pieces of a cat. Pieces without elements have no part. Calls write those
    that are ``by_calls`` themselves."""
    dim, start, parts = cat.attrs["dim"], ZERO, list[Node]()
    for piece in pieces:
        attrs = {"dim": dim, "start": start, "whole": cat.shape[dim]}
        if piece in by_calls:
            parts.append(piece)
        elif ZERO not in piece.shape:
            part = b.make("part", (piece,), piece.shape, cat.dtype, order=cat.order, **attrs)
            parts.append(part)
        start = start + piece.shape[dim]
    return b.make("join", parts, cat.shape, cat.dtype, order=cat.order, dim=dim)


def places_of_calls(graph: Graph) -> dict[Node, Node]:
    """Map each call that writes into a join to the place of its result, as a view of the join."""
    joins = (node for node in graph.nodes if node.op == "join")
    return {call: place for node in joins for call, place in _places(node)}


def _places(whole: Node) -> Iterator[tuple[Node, Node]]:
    start, dim = ZERO, whole.attrs["dim"]
    for piece in whole.inputs:
        if piece.op != "part":
            yield base_of(piece), place_of(whole, piece, start)
        start = start + piece.shape[dim]


def place_of(whole: Node, piece: Node, start: Expr) -> Node:
    """Return the place of the call that a piece is a view of, within what begins at ``start`` of a
    join: what the call writes into, rows (M, N) where it writes rows that have one distance. Rows
    of several pictures have no such place; their dims stay as the call has them."""
    b, dim = Builder(), whole.attrs["dim"]
    place = b.slice(whole, dim, start, piece.shape[dim])
    while piece.kind is Kind.VIEW:
        assert OPS[piece.op].has_all_once, piece
        place = undone(b, piece, place)
        piece = piece.inputs[0]
    if piece.op not in OF_ROWS:
        return place
    view = strided(rows := as_rows(b, place))
    return place if view is None or view.strides is None else rows


def undone(b: Builder, view: Node, value: Node) -> Node:
    """Return what a value is a view of, as ``view`` is of its operand, which has all elements
    once."""
    if view.op == "reshape":
        return b.reshape(value, view.inputs[0].shape)
    dims = view.attrs["dims"]
    return b.permute(value, [dims.index(d) for d in range(len(dims))])


def as_rows(b: Builder, value: Node) -> Node:
    """View (..., N) as (rows, N)."""
    return b.reshape(value, (product(value.shape[:-1]), value.shape[-1]))


def has_strides(place: Node, multiple: int) -> bool:
    """Tell whether a place in a join has one stride a dim, the last one 1, and begins, as its rows
    do, at a multiple of so many elements."""
    view = strided(place)
    if view is None or view.strides is None:
        return False
    *some, last = view.strides
    unit = const(multiple)
    return last == const(1) and all(s.exact_div(unit) is not None for s in (view.offset, *some))


def stored_at(node: Node) -> tuple[Expr, Shape]:
    """Return the place of the first element in memory, and the strides, in elements."""
    if node.op != "part":
        return ZERO, node.strides
    dim, strides = node.attrs["dim"], dense_strides(shape_in_memory(node), node.order)
    return node.attrs["start"] * strides[dim], strides


def shape_in_memory(node: Node) -> Shape:
    """Return the shape of what lies in the memory of a value: that of a part has the whole join."""
    if node.op != "part":
        return node.shape
    dim = node.attrs["dim"]
    return (*node.shape[:dim], node.attrs["whole"], *node.shape[dim + 1 :])
