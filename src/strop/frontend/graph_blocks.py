"""Cut blocks that repeat out of a graph that Dynamo has traced, as modules of their own.

Dynamo opens all modules, and its nodes name those whose forward they come from. Where the nodes of
two calls are the same but for what they are given, both become modules of one class and one code:
our trace then looks at both and copies the second (``repeated_blocks.py``). A block is a run of
nodes without a gap, and weights are arguments of it, so that the whole computes what it did, in the
same order, whatever the names say.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import EllipsisType
from typing import Any

import torch
from torch import nn
from torch.fx import Graph, GraphModule, Node

from strop.frontend.module_parts import graph_module_like

_LEAST_NODES = 8  # in a block: to look at a smaller one takes as long as to trace it
_BLOCK = "b{}"  # the name of a block, by its number
_BY_VALUE = (
    *(bool, int, str, bytes, EllipsisType),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)
_BY_TEXT = (float, complex)  # -0.0 is 0.0, and nan is not itself
_CALLS = ("call_function", "call_method")


class _NoFormError(Exception):
    """An argument of a node cannot be compared."""


@dataclass(frozen=True, slots=True)
class _Block:
    """Hold a run of nodes: what it is given, and which of its nodes others read. Two of one
    ``form`` compute the same of what they are given."""

    form: Hashable
    nodes: tuple[Node, ...]
    given: tuple[Node, ...]
    read: tuple[Node, ...]


class GraphBlocks:
    """Hold the blocks of a graph that repeat."""

    def __init__(self, graph: Graph) -> None:
        self._blocks = {block.nodes[0]: block for block in _repeated(graph)}
        self._inside = {node for block in self._blocks.values() for node in block.nodes}
        self._made: dict[Hashable, GraphModule] = {}
        self._count = 0

    def put(self, node: Node, root: nn.Module, graph: Graph, copies: dict[Node, Node]) -> bool:
        """Put a call of the block that ``node`` begins, if it begins one, into the graph of
        ``root``. ``copies`` are the nodes there of those that are known. Return whether the node is
        in a block."""
        block = self._blocks.get(node)
        if block is None:
            return node in self._inside
        name = _BLOCK.format(self._count)
        self._count += 1
        root.add_module(name, self._module(block))
        call = graph.call_module(name, tuple(copies[given] for given in block.given))
        if len(block.read) == 1:
            copies[block.read[0]] = call
            return True
        for place, read in enumerate(block.read):
            copies[read] = graph.call_function(operator.getitem, (call, place))
        return True

    def _module(self, block: _Block) -> GraphModule:
        made = self._made.get(block.form)
        if made is not None:
            return graph_module_like(made)
        graph, copies = Graph(), dict[Node, Node]()
        for number, given in enumerate(block.given):
            copies[given] = graph.placeholder(f"a{number}")
        for node in block.nodes:
            copies[node] = graph.node_copy(node, copies.__getitem__)
        read = tuple(copies[node] for node in block.read)
        graph.output(read[0] if len(read) == 1 else read)
        made = GraphModule(nn.Module(), graph, class_name="TracedBlock").eval()
        self._made[block.form] = made
        return made


def _repeated(graph: Graph) -> list[_Block]:
    """Return the blocks that repeat, and of those within each other the outermost."""
    nodes = [node for node in graph.nodes if node.op in _CALLS]
    paths = [tuple(node.meta.get("nn_module_stack") or ()) for node in nodes]
    spans = dict.fromkeys(_spans(paths, 0, len(nodes), 0))  # each comes before those within it
    found = {}
    for start, stop in spans:
        try:
            found[start, stop] = _block(nodes[start:stop])
        except _NoFormError:
            continue
    counts = Counter(block.form for block in found.values())
    blocks, end = [], 0
    for (start, stop), block in found.items():
        if start >= end and counts[block.form] > 1:
            blocks.append(block)
            end = stop
    taken = Counter(block.form for block in blocks)
    return [block for block in blocks if taken[block.form] > 1]


def _spans(
    paths: Sequence[tuple[str, ...]], start: int, stop: int, depth: int
) -> Iterator[tuple[int, int]]:
    """Yield where the nodes of calls of modules begin and end."""
    while start < stop:
        call, end = paths[start][depth : depth + 1], start + 1
        while end < stop and paths[end][depth : depth + 1] == call:
            end += 1
        if call and end - start >= _LEAST_NODES:
            yield start, end
            yield from _spans(paths, start, end, depth + 1)
        start = end


def _block(nodes: Sequence[Node]) -> _Block:
    inside = {node: number for number, node in enumerate(nodes)}
    given: dict[Node, int] = {}
    calls = tuple(
        (node.op, node.target, _form(node.args, inside, given), _form(node.kwargs, inside, given))
        for node in nodes
    )
    read = tuple(node for node in nodes if any(user not in inside for user in node.users))
    form = calls, tuple(inside[node] for node in read)
    return _Block(form, tuple(nodes), tuple(given), read)


def _form(value: Any, inside: Mapping[Node, int], given: dict[Node, int]) -> Hashable:
    """Return what is equal for arguments that are the same, but for what comes from outside."""
    if isinstance(value, Node):
        if value in inside:
            return "own", inside[value]
        return "given", given.setdefault(value, len(given))
    if value is None or isinstance(value, _BY_VALUE):
        return type(value), value
    if isinstance(value, _BY_TEXT):
        return type(value), repr(value)
    if isinstance(value, slice):
        ends = (value.start, value.stop, value.step)
        return slice, tuple(_form(end, inside, given) for end in ends)
    if isinstance(value, list | tuple):
        return type(value), tuple(_form(item, inside, given) for item in value)
    if isinstance(value, dict):
        items = ((name, _form(item, inside, given)) for name, item in value.items())
        return dict, tuple(items)
    raise _NoFormError
