"""Say where a kernel stores a value: in memory of its own, or in its part of a join's.

A join is a cat that no kernel computes. Its inputs are parts, of which each is stored where the
join has it, by the kernel that computes it.
"""

from __future__ import annotations

from strop.ir.dims import Expr, const
from strop.ir.graph import Builder, Node, Shape, dense_strides

ZERO = const(0)


def join(b: Builder, cat: Node, pieces: tuple[Node, ...]) -> Node:
    """Make a join of the pieces of a cat. Pieces without elements have no part."""
    dim, start, parts = cat.attrs["dim"], ZERO, list[Node]()
    for piece in pieces:
        attrs = {"dim": dim, "start": start, "whole": cat.shape[dim]}
        if ZERO not in piece.shape:
            part = b.make("part", (piece,), piece.shape, cat.dtype, order=cat.order, **attrs)
            parts.append(part)
        start = start + piece.shape[dim]
    return b.make("join", parts, cat.shape, cat.dtype, order=cat.order, dim=dim)


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
