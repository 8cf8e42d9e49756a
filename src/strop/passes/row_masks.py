"""Keep a mask that is the same for all queries as one row, which attention reads once.

Models whose code is traced combine what hides padding with conditions on indices that always hold
(``query >= 0``): a row of marks for each batch becomes a mark for each query and key. What always
holds is left out here, and what is computed of broadcast values is computed before they are.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from strop.ir.graph import Builder, Graph, Node, broadcast, rewrite
from strop.ir.index_values import Affine, IndexValues, NotAbove
from strop.ir.ops import OPS, Kind
from strop.options import Options
from strop.passes.causal_masks import MASK


def row_masks(graph: Graph, options: Options) -> Graph:
    masks = [n.inputs[MASK] for n in graph.nodes if n.op == "attention" and len(n.inputs) > MASK]
    if not masks:
        return graph
    known = IndexValues(graph.nodes)
    inside = _computed(masks) - set(graph.outputs)

    def rule(b: Builder, node: Node, inputs: tuple[Node, ...]) -> Node | None:
        return _narrow(b, node, inputs, known) if node in inside else None

    return rewrite(graph, rule)


def _computed(masks: Iterable[Node]) -> set[Node]:
    """Return the elementwise nodes by which masks are computed, up to others."""
    found, left = set[Node](), list(masks)
    while left:
        node = left.pop()
        if node.kind is Kind.POINTWISE and OPS[node.op].is_elementwise and node not in found:
            found.add(node)
            left.extend(node.inputs)
    return found


def _narrow(b: Builder, node: Node, inputs: tuple[Node, ...], known: IndexValues) -> Node | None:
    """Return a node of smaller operands, broadcast to its shape; None where there are none."""
    if node.op == "bitwise_and" and node.dtype is torch.bool:
        kept = [x for x, own in zip(inputs, node.inputs, strict=True) if not _holds(own, known)]
        if len(kept) < len(inputs):
            return _spread(b, (*kept, inputs[0])[0], node)
    operands = [x.inputs[0] if x.op == "expand" else x for x in inputs]
    shape = broadcast(node.op, *(x.shape for x in operands))
    if shape == node.shape:
        return None
    return _spread(b, b.make(node.op, operands, shape, node.dtype, **node.attrs), node)


def _holds(condition: Node, known: IndexValues) -> bool:
    """Tell whether a condition on indices holds for all of them, which are 0 and more."""
    found = known.of(condition)
    if isinstance(found, NotAbove):
        parts = (found.number.start, *found.number.steps)
        return all(part.is_const and part.value <= 0 for part in parts)
    return isinstance(found, Affine) and found.value() == 1


def _spread(b: Builder, x: Node, node: Node) -> Node:
    return b.expand(b.view_as_rank(x, len(node.shape)), node.shape)
