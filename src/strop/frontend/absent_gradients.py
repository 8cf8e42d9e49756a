"""Take results without a gradient out of a backward graph, as autograd does.

A loss may read one of several results. Autograd then runs no node of the others: weights that only
these read get no gradient, and not one of zeros, which an optimizer with weight decay or momentum
would step by. Zeros for the others would not even give zeros, where a derivative is infinite.
"""

from __future__ import annotations

from collections.abc import Set

import torch
from torch.fx import Graph, GraphModule, Node

from strop.frontend.joint import TANGENT

aten = torch.ops.aten


def without(backward: GraphModule, absent: Set[str]) -> GraphModule:
    """Return a copy of a backward graph without the tangents of these names.
    It gives None for what depends on them alone, and has no placeholders that nothing reads."""
    graph, copies = Graph(), dict[Node, Node]()
    graph.output(graph.graph_copy(backward.graph, copies))
    _remove(graph, absent)
    graph.eliminate_dead_code()
    for node in graph.find_nodes(op="placeholder"):
        if not node.users:
            graph.erase_node(node)
    return GraphModule(backward, graph)


def _remove(graph: Graph, names: Set[str]) -> None:
    depends, absent = set[Node](), set[Node]()  # on gradients of results; on absent ones alone
    for node in list(graph.nodes):
        if node.op == "placeholder":
            depends |= {node} if node.name.startswith(TANGENT) else set()
            absent |= {node} if node.name in names else set()
        elif node.op == "output":
            found = node.args[0]
            node.args = (type(found)(None if n in absent else n for n in found),)
        elif reads := depends.intersection(node.all_input_nodes):
            depends.add(node)
            if reads <= absent:
                absent.add(node)
            elif gone := reads & absent:
                _leave_out(graph, node, gone)


def _leave_out(graph: Graph, node: Node, gone: Set[Node]) -> None:
    """Let a node do without some of what it reads: a sum of two is the other one, and all else gets
    zeros there."""
    terms = node.args[:2]
    if node.target is aten.add.Tensor and len(terms) == 2 and "alpha" not in node.kwargs:
        (kept,) = (term for term in terms if term not in gone)
        if isinstance(kept, Node) and _looks_as(kept, node):
            node.replace_all_uses_with(kept)
            return
    for each in gone:
        with graph.inserting_before(node):
            zeros = graph.call_function(aten.zeros_like.default, (each,))
        zeros.meta = {**each.meta}
        node.replace_input_with(each, zeros)


def _looks_as(one: Node, other: Node) -> bool:
    a, b = one.meta["val"], other.meta["val"]
    return bool(a.dtype == b.dtype and len(a.shape) == len(b.shape)) and all(
        str(m) == str(n) for m, n in zip(a.shape, b.shape, strict=True)
    )
