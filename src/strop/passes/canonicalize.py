"""Take out what does nothing: x/1, x*1, slices of a cat that undo it, rows flattened for a GEMM,
and the rounding between a sum of halves and its cast to fp32.

Merging equal nodes and folding views needs no rule: ``Builder`` does both on every rewrite.
"""

from __future__ import annotations

import torch

from strop.ir.dims import const
from strop.ir.graph import Builder, Graph, Node, rewrite
from strop.ir.ops import Kind
from strop.options import Options


def canonicalize(graph: Graph, options: Options) -> Graph:
    kept = _views_of_results(graph) | _views_of_shared(graph)

    def rule(b: Builder, node: Node, inputs: tuple[Node, ...]) -> Node | None:
        return None if node in kept else simplify(b, node, inputs)

    return rewrite(graph, rule)


def _views_of_results(graph: Graph) -> set[Node]:
    """Return the views among the results, which lie in the memory of what they are views of: the
    user may write into either."""
    found: set[Node] = set()
    for node in graph.outputs:
        while node.kind is Kind.VIEW:
            found.add(node)
            node = node.inputs[0]
    return found


def _views_of_shared(graph: Graph) -> set[Node]:
    """Return the views of linears that others read as well, as a backward does: one on the tensor
    itself would be a second GEMM."""
    users = graph.users()
    shared = {
        n for n in graph.nodes if n.op == "linear" and (n in graph.outputs or len(users[n]) > 1)
    }
    return {n for n in graph.nodes if n.op == "reshape" and n.inputs[0] in shared}


def simplify(b: Builder, node: Node, inputs: tuple[Node, ...]) -> Node | None:
    if node.op in ("mul", "div"):
        return _drop_one(node, inputs)
    if node.op == "slice":
        return _slice_of_cat(b, node, inputs[0])
    if node.op == "reshape":
        return _linear_of_rows(b, node, inputs[0])
    if node.op == "cast":
        return _wide_sum(b, node, inputs[0])
    return None


def _wide_sum(b: Builder, node: Node, x: Node) -> Node | None:
    """Keep a sum that has been added up in fp32: gradients of biases under autocast keep these
    digits."""
    while x.op == "reshape":
        x = x.inputs[0]
    is_half = x.op == "sum" and x.dtype in (torch.float16, torch.bfloat16)
    if not is_half or node.dtype != torch.float32:
        return None
    return b.reshape(b.reduce("sum", x.inputs[0], x.attrs["dims"], node.dtype), node.shape)


def _linear_of_rows(b: Builder, node: Node, y: Node) -> Node | None:
    """Turn a GEMM on flattened rows, as Dynamo's graphs have it, into one on the tensor itself."""
    if y.op != "linear" or y.inputs[0].op != "reshape":
        return None
    x = y.inputs[0].inputs[0]
    if not x.shape or node.shape != (*x.shape[:-1], y.shape[-1]):
        return None
    if x.shape[-1] != y.inputs[0].shape[-1]:
        return None
    return b.make("linear", (x, *y.inputs[1:]), node.shape, y.dtype)


def _drop_one(node: Node, inputs: tuple[Node, ...]) -> Node | None:
    """Replace x*1 and x/1 by x, shape and dtype permitting. x+0 stays: it turns -0.0 into 0.0."""
    x, other = inputs
    same = x.shape == node.shape and x.dtype == node.dtype
    return x if same and other.op == "constant" and other.attrs["value"] == 1 else None


def _slice_of_cat(b: Builder, node: Node, x: Node) -> Node | None:
    """Replace a slice that takes whole pieces of a cat along its dim by those pieces."""
    if x.op != "cat" or x.attrs["dim"] != node.attrs["dim"] or node.attrs["step"] != 1:
        return None
    dim, position = node.attrs["dim"], const(0)
    for piece in x.inputs:
        if position == node.attrs["start"] and piece.shape == node.shape:
            return piece
        position = position + piece.shape[dim]
    return None
