"""Take results without a gradient out of a backward graph, as autograd does.

A loss may read one of several results. Autograd then runs no node of the others: weights that only
these read get no gradient, and not one of zeros, which an optimizer with weight decay or momentum
would step by. Zeros for the others would not even give zeros, where a derivative is infinite.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Set
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from strop.errors import UnsupportedError
from strop.frontend.joint import TANGENT

aten = torch.ops.aten


def without(backward: GraphModule, absent: Set[str]) -> GraphModule:
    """Return a copy of a backward graph without the tangents of these names.
    It gives None for what depends on them alone. Placeholders that nothing reads are left out,
    unless they alone tell a size. Raises UnsupportedError where zeros are wanted of which only an
    absent tangent tells the size."""
    graph, copies = Graph(), dict[Node, Node]()
    graph.output(graph.graph_copy(backward.graph, copies))
    _remove(graph, absent)
    graph.eliminate_dead_code()
    unread = [node for node in graph.find_nodes(op="placeholder") if not node.users]
    kept = _symbols(node for node in graph.find_nodes(op="placeholder") if node.users)
    for node in unread:
        told = _symbols([node]) if node.name not in absent else set()
        if told <= kept:
            graph.erase_node(node)
        kept |= told
    if left := sorted({n.name for n in graph.find_nodes(op="placeholder")} & absent):
        raise UnsupportedError(
            f"a backward pass wants zeros as large as a result without a gradient ({left[0]}), and"
            " nothing else tells that size: have the loss read that result, times 0"
        )
    return GraphModule(backward, graph)


def _symbols(nodes: Iterable[Node]) -> set[str]:
    """Return the sizes that are known where these values are: those that they have as they are."""
    found = set[str]()
    for node in nodes:
        value = node.meta.get("val")
        sizes = value.shape if isinstance(value, Tensor) else (value,)
        found |= {
            str(size.node.expr)
            for size in sizes
            if isinstance(size, torch.SymInt) and size.node.expr.is_Symbol
        }
    return found


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
                _leave_out(graph, node, gone, absent)


def _leave_out(graph: Graph, node: Node, gone: Set[Node], absent: Set[Node]) -> None:
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
            zeros = _zeros(graph, node, each, absent)
        zeros.meta = {**each.meta}
        node.replace_input_with(each, zeros)


def _zeros(graph: Graph, before: Node, like: Node, absent: Set[Node]) -> Node:
    """Make zeros that look as a value, from sizes that others have: what computes it is not there.
    Where nobody has one of its sizes, they are made from the value."""
    value: Tensor = like.meta["val"]
    sizes = [_size(graph, before, size, absent) for size in value.shape]
    if None in sizes:
        return graph.call_function(aten.zeros_like.default, (like,))
    how: dict[str, Any] = {"dtype": value.dtype, "device": value.device, "pin_memory": False}
    return graph.call_function(aten.full.default, (sizes, 0), how)


def _size(
    graph: Graph, before: Node, size: int | torch.SymInt, absent: Set[Node]
) -> int | Node | None:
    """Return a size as it is known in front of a node without values that are ``absent``."""
    if not isinstance(size, torch.SymInt):
        return size
    wanted = str(size.node.expr)
    ahead: Iterator[Node] = itertools.takewhile(lambda node: node is not before, graph.nodes)
    for node in (node for node in ahead if node not in absent):
        value = node.meta.get("val")
        if isinstance(value, torch.SymInt) and str(value.node.expr) == wanted:
            return node
        for dim, other in enumerate(value.shape if isinstance(value, Tensor) else ()):
            if str(other) == wanted:
                found = graph.call_function(aten.sym_size.int, (node, dim))
                found.meta = {"val": size}
                return found
    return None


def _looks_as(one: Node, other: Node) -> bool:
    a, b = one.meta["val"], other.meta["val"]
    return bool(a.dtype == b.dtype and len(a.shape) == len(b.shape)) and all(
        str(m) == str(n) for m, n in zip(a.shape, b.shape, strict=True)
    )
