"""Groups that compute the same from operands that lie alike are one kernel, lowered once.

A model has many of them: its blocks repeat. What is compared is all that ``lower`` looks at; which
values are read and written is filled in for each group.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from typing import Any

from strop.fusion.plan import Group
from strop.ir.graph import Node
from strop.ir.ops import Kind
from strop.lowering.lower import Lowered, lower

Lower = Callable[[Group, Set[Node]], Lowered]


def lower_once(hints: Mapping[str, int], *, generic: bool = False) -> Lower:
    """``lower`` for the groups of one graph."""
    made: dict[Any, tuple[Lowered, list[Node]]] = {}

    def lower_group(group: Group, stored: Set[Node]) -> Lowered:
        key, nodes = _structure(group, stored)
        if key not in made:
            made[key] = lower(group, stored, hints, generic=generic), nodes
            return made[key][0]
        first, first_nodes = made[key]
        here = dict(zip(first_nodes, nodes, strict=True))
        return Lowered(first.kernel, tuple(here[n] for n in first.buffers), first.offsets)

    return lower_group


def _structure(group: Group, stored: Set[Node]) -> tuple[Any, list[Node]]:
    """All that ``lower`` looks at, with numbers in the place of nodes, and the nodes by number."""
    inside, number = set(group.nodes), dict[Node, int]()
    rows: list[Any] = []
    edges: list[Node] = []
    stack = [*reversed(group.nodes), *reversed(group.stores)]
    while stack:
        node = stack.pop()
        if node in number:
            continue
        number[node] = len(number)
        layout = (node.shape, node.dtype, node.order)
        if _is_read(node, stored, inside):
            rows.append(layout)
            continue
        # as text: 1, 1.0 and True are equal, and so are 0.0, -0.0
        attrs = repr(sorted(node.attrs.items())) if node.attrs else ""
        rows.append((*layout, node.op, len(node.inputs), attrs, node in inside, node in stored))
        edges += node.inputs
        stack += reversed(node.inputs)
    numbers = tuple(tuple(map(number.__getitem__, n)) for n in (group.nodes, group.stores, edges))
    return (group.schedule, numbers, tuple(rows)), list(number)


def _is_read(node: Node, stored: Set[Node], inside: Set[Node]) -> bool:
    """Whether the kernel loads it, whatever it was computed from."""
    if node.op in ("constant", "iota") or node.kind is Kind.VIEW:
        return False
    is_computable = node.kind in (Kind.POINTWISE, Kind.REDUCTION)
    return not is_computable or (node in stored and node not in inside)
