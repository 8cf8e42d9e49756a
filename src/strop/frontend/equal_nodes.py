"""Merge nodes of a traced graph that compute the same.

torch's partitioner does so too, but for the sake of writes, which a graph of ours has none of, it
loads all of Inductor: a second of the first training step.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from strop.frontend.draws import draws
from strop.frontend.functional import memory_of

_EMPTY = torch.ops.aten.empty  # what is written into one of them is not in the other


def can_merge(graph: Graph) -> bool:
    """Tell whether no node of a graph writes into a tensor."""
    schemas = (getattr(node.target, "_schema", None) for node in graph.nodes)
    return not any(schema is not None and schema.is_mutable for schema in schemas)


def merged(graph: Graph) -> Graph:
    """Return a copy of ``graph`` with the first of all equal nodes in the places of the others.
    Results keep memory of their own, and random numbers are drawn as often as before."""
    graph.eliminate_dead_code()
    results = next(iter(reversed(graph.nodes))).all_input_nodes
    returned = {memory for node in results for memory in _memory(node)}
    copy, kept, first = Graph(), dict[Node, Node](), dict[Hashable, Node]()
    for node in graph.nodes:
        if node.op == "call_function" and _may_merge(node) and returned.isdisjoint(_memory(node)):
            key = node.target, _key(node.args, kept), _key(node.kwargs, kept)
            if key not in first:
                first[key] = copy.node_copy(node, kept.__getitem__)
            kept[node] = first[key]
        else:
            kept[node] = copy.node_copy(node, kept.__getitem__)
    return copy


def _may_merge(node: Node) -> bool:
    return not draws(node) and getattr(node.target, "overloadpacket", None) is not _EMPTY


def _memory(node: Node) -> tuple[int, ...]:
    value = node.meta.get("val")
    return (memory_of(value),) if isinstance(value, Tensor) else ()


def _key(argument: Any, kept: dict[Node, Node]) -> Hashable:
    """Return what is equal for equal arguments: 1 is not 1.0, nor True."""
    if isinstance(argument, Node):
        return kept[argument]
    if isinstance(argument, list | tuple):
        return type(argument), *(_key(item, kept) for item in argument)
    if isinstance(argument, dict):
        return tuple((name, _key(item, kept)) for name, item in argument.items())
    if isinstance(argument, torch.SymInt | torch.SymFloat | torch.SymBool):
        return type(argument), argument.node
    return type(argument), repr(argument) if isinstance(argument, float) else argument
