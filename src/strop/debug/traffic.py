"""Count the bytes that a fusion plan moves beside the least that its library calls leave over.

Products, attention and other calls read their operands and write their results, whatever lies
between them. The least that kernels move in between is each result of a call and each argument
once, and each operand of a call and each result once. What they move beyond that goes through
memory from one kernel to another, or is read by several.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from strop.fusion.plan import FusionPlan, Group
from strop.ir.affine import base_of
from strop.ir.graph import Graph, Node
from strop.ir.ops import Kind

Sizes = Mapping[str, int]
Cut = tuple[Node, ...]  # the views that leave out elements, from the base on
Reads = dict[Node, dict[Cut, int]]  # how many elements, by value and cut


@dataclass(frozen=True, slots=True)
class Traffic:
    """Hold bytes: of calls, of generated kernels, and the least that kernels have to move."""

    calls: int
    kernels: int
    least_of_kernels: int

    @property
    def ratio(self) -> float:
        """Return what is moved by what has to be."""
        return (self.calls + self.kernels) / (self.calls + self.least_of_kernels)

    @property
    def over_calls(self) -> float:
        """Return what is moved by what calls move alone, as if these did all else in passing."""
        return (self.calls + self.kernels) / self.calls


def traffic(graph: Graph, plan: FusionPlan, sizes: Sizes) -> Traffic:
    """Count what a plan moves at these sizes."""
    stored = {node for group in plan.groups for node in group.stores}
    calls = [s for s in plan.steps if isinstance(s, Node) and s.op not in ("item", "write", "join")]
    read_by_calls = [_call_reads(call, sizes) for call in calls]
    read_by_groups = [_group_reads(group, stored, sizes) for group in plan.groups]
    of_calls = sum(map(_bytes_read, read_by_calls)) + sum(_bytes(c, sizes) for c in calls)
    of_kernels = sum(map(_bytes_read, read_by_groups)) + sum(_bytes(n, sizes) for n in stored)
    wanted = {base_of(output) for output in graph.outputs}.union(*read_by_calls)
    wanted |= {part for node in wanted if node.op == "join" for part in node.inputs}
    given = _merged(read_by_groups, stored)
    least = _bytes_read(given) + sum(_bytes(node, sizes) for node in wanted & stored)
    return Traffic(of_calls, of_kernels, least)


def _call_reads(call: Node, sizes: Sizes) -> Reads:
    reads: Reads = defaultdict(dict)
    for operand in call.inputs:
        cut, count = _cut(operand, sizes)
        reads[base_of(operand)][cut] = count
    return reads


def _group_reads(group: Group, stored: set[Node], sizes: Sizes) -> Reads:
    """Return what a kernel loads: computed values that are stored elsewhere, and arguments."""
    reads: Reads = defaultdict(dict)
    stack: list[tuple[Node, Cut, int]] = [(n, (), n.numel.eval(sizes)) for n in group.stores]
    seen = {(node, cut) for node, cut, _ in stack}
    while stack:
        node, asked, most = stack.pop()
        for place, operand in enumerate(node.inputs):
            base, (cut, count) = base_of(operand), _cut(operand, sizes)
            if node.row.is_elementwise and operand.numel == node.numel:
                cut, count = cut + asked, min(count, most)
            elif node.op == "take" and place == 0:
                count = min(count, node.numel.eval(sizes))
            elif node.op == "bag" and place == 0:
                rows = node.inputs[1].numel.eval(sizes)
                count = min(count, rows * node.shape[1].eval(sizes))
            if _is_loaded(base, stored):
                reads[base][cut] = count if base not in group.stores else 0
            elif base.op not in ("constant", "iota") and (base, cut) not in seen:
                seen.add((base, cut))
                stack.append((base, cut, count))
    return reads


def _is_loaded(node: Node, stored: set[Node]) -> bool:
    return node in stored or node.kind not in (Kind.POINTWISE, Kind.REDUCTION)


def _cut(operand: Node, sizes: Sizes) -> tuple[Cut, int]:
    """Return which views leave out elements of a value, and how many they leave."""
    path = [operand]
    while path[-1].kind is Kind.VIEW:
        path.append(path[-1].inputs[0])
    count, cut = path[-1].numel.eval(sizes), list[Node]()
    for view in reversed(path[:-1]):
        if (left := view.numel.eval(sizes)) < count:
            count = left
            cut.append(view)
    return tuple(cut), count


def _merged(reads: Iterable[Reads], stored: set[Node]) -> Reads:
    merged: Reads = defaultdict(dict)
    for each in reads:
        for node, cuts in each.items():
            if node not in stored and node.op != "join":
                merged[node].update(cuts)
    return merged


def _bytes_read(reads: Reads) -> int:
    return sum(_elements(node, cuts) * node.dtype.itemsize for node, cuts in reads.items())


def _elements(node: Node, cuts: Mapping[Cut, int]) -> int:
    """Add up parts of a value, without those that are parts of others."""
    return sum(
        count
        for cut, count in cuts.items()
        if not any(cut[:length] in cuts for length in range(len(cut)))
    )


def _bytes(node: Node, sizes: Sizes) -> int:
    return node.numel.eval(sizes) * node.dtype.itemsize
