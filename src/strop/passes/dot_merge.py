"""Merge linears that read the same input into one GEMM whose result is sliced.

Weights stay data: a merged weight is an input of its own, bound by the runtime to one storage
whose row slices are the Parameters themselves. So only Parameters merge, never values.

A storage is made while its parts are still there, and it is whole to an allocator. So its size is
bounded: the modulations of all blocks of Flux.1 read one vector, and their weights are 6.5 GB.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any

from strop.ir.dims import Expr, const
from strop.ir.graph import Builder, Graph, Node, finish
from strop.options import Options
from strop.passes.joined_calls import joined_activations

# An H100 reads as much in 0.1 ms, beside which a launch more is nothing. Both halves of a gated
# linear of a network of 14B parameters are less.
MOST_BYTES = 320 << 20


def dot_merge(graph: Graph, options: Options) -> Graph:
    groups = _groups(graph, joined_activations(graph, options))
    if not groups:
        return graph
    b = Builder()
    new: dict[Node, Node] = {}
    extra: list[Node] = []
    for node in graph.nodes:
        if node in new:
            continue
        b.origin = node.origin
        if node in groups:
            new.update(_merge(b, groups[node], new, extra, len(graph.inputs)))
        else:
            new[node] = b.copy_of(node, tuple(new[i] for i in node.inputs))
    inputs = [new[i] for i in graph.inputs] + extra
    return finish(b, inputs, [new[o] for o in graph.outputs], graph.hints, graph.num_saved)


def _groups(graph: Graph, apart: Set[Node]) -> dict[Node, list[Node]]:
    """Map the first linear of each mergeable set to the set, in execution order. Factors of low
    rank merge with each other: weights stay together in one order, with adapters and without.
    Those that stay ``apart`` have something else at the end."""
    by_input: dict[tuple[Node, int, bool, str], list[Node]] = defaultdict(list)
    taken, given = set[Node](), graph.given()
    for node in graph.nodes:
        if node.op != "linear" or not all(_is_state(w) for w in node.inputs[1:]):
            continue
        if node in apart or node in given:  # which has memory of its own, as in eager
            continue
        if taken.isdisjoint(node.inputs[1:]):  # a storage can be part of one merge only
            is_small = bool(node.inputs[1].attrs.get("small"))
            alike = is_small, str(node.attrs)  # in 8 bits or not
            by_input[node.inputs[0], len(node.inputs), *alike].append(node)
            taken.update(node.inputs[1:])
    sizes = dict(graph.hints)
    runs = [run for nodes in by_input.values() for run in _runs(nodes, sizes)]
    return {nodes[0]: nodes for nodes in runs if len(nodes) > 1}


def _runs(nodes: Sequence[Node], sizes: Mapping[str, int]) -> Iterator[list[Node]]:
    """Cut linears of one input into runs whose weights are no more than ``MOST_BYTES``, but for a
    weight that is larger alone."""
    run, run_bytes = list[Node](), 0
    for node in nodes:
        weight = node.inputs[1]
        size_bytes = math.prod(s.eval(sizes) for s in weight.shape) * weight.dtype.itemsize
        if run and run_bytes + size_bytes > MOST_BYTES:
            yield run
            run, run_bytes = [], 0
        run.append(node)
        run_bytes += size_bytes
    yield run


def _is_state(node: Node) -> bool:
    """Tell whether it is a weight that may be moved."""
    is_weight = node.op == "input" and bool(node.attrs["state"])
    return is_weight and not node.attrs["merged"] and not node.attrs.get("tied")


def _merge(
    b: Builder, nodes: list[Node], new: dict[Node, Node], extra: list[Node], num_inputs: int
) -> dict[Node, Node]:
    """Make one linear over merged weights, then a slice for each of ``nodes``."""
    merged = [new[nodes[0].inputs[0]]]
    for position in range(1, len(nodes[0].inputs)):
        parts = [node.inputs[position] for node in nodes]
        rows = sum((part.shape[0] for part in parts), start=const(0))
        index = num_inputs + len(extra)
        merged_from = tuple(part.attrs["index"] for part in parts)
        more: dict[str, Any] = {"small": True} if parts[0].attrs.get("small") else {}
        weight = b.make(
            "input",
            (),
            (rows, *parts[0].shape[1:]),
            parts[0].dtype,
            index=index,
            state=True,
            merged=merged_from,
            **more,
        )
        extra.append(weight)
        merged.append(weight)
    width: Expr = merged[1].shape[0]
    attrs = nodes[0].attrs
    y = b.make("linear", merged, (*nodes[0].shape[:-1], width), nodes[0].dtype, **attrs)
    slices, start = {}, const(0)
    for node in nodes:
        slices[node] = b.slice(y, len(node.shape) - 1, start, node.shape[-1])
        start = start + node.shape[-1]
    return slices
