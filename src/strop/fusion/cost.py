"""Compute a value again, or store it? Judged on bytes at the traced sizes."""

from __future__ import annotations

from collections.abc import Mapping, Set

from strop.fusion.legality import has_own_loops
from strop.ir.affine import base_of
from strop.ir.graph import Node
from strop.ir.ops import OPS, Kind

MAX_RECOMPUTED_NODES = 12
MAX_GROWTH = 4  # how much larger than the value a domain may be that recomputes it ...
MOST_OF_PLACES = 3  # values from which places, weights and marks beside a lookup are computed
HEAVY_SHARE = 4  # a value is heavy if one in so many of its elements is a call of exp or the like
SMALL = 65536  # ... unless the value has so few elements that its operands stay in cache


def is_cheaper_again(
    node: Node,
    num_consumers: int,
    largest_consumer: int,
    stored: Set[Node],
    hints: Mapping[str, int],
    *,
    is_of_places: bool = False,
) -> bool:
    """Tell whether every consumer should compute ``node`` itself instead of loading it.

    A single consumer saves the write and the read and never loads more than the value's own
    operands. Several consumers each load the operands, so only one of them may be large.
    """
    members, loads = _expression(node, stored)
    if any(member.op == "bag" for member in members):
        return True  # the planner has seen that it is done once
    half = node.numel.eval(hints) / 2
    large = len({base_of(x) for x in loads if x.numel.eval(hints) >= half})
    if not loads and not any(OPS[m.op].is_heavy for m in members):
        return True  # arithmetic on positions
    if node.op == "take" and large <= 1:
        return True  # rows are read as well where they lie as from a copy
    if any(m.kind is Kind.REDUCTION for m in members):
        return False
    is_plain = not any(OPS[m.op].is_heavy or m.op == "take" for m in members)
    if is_of_places and is_plain and len({base_of(x) for x in loads}) <= MOST_OF_PLACES:
        return True
    elements = max(node.numel.eval(hints), 1)
    growth = largest_consumer / elements
    if num_consumers == 1 and growth <= 1:
        return True  # computed once, elsewhere
    if len(members) > MAX_RECOMPUTED_NODES:
        return False
    heavy = sum(m.numel.eval(hints) for m in members if OPS[m.op].is_heavy)  # the pieces of a cat
    is_heavy = heavy * HEAVY_SHARE >= elements
    if growth > MAX_GROWTH and (is_heavy or large) and elements > SMALL:
        return False
    return num_consumers == 1 or (large <= 1 and not is_heavy)


def has_loops(node: Node, stored: Set[Node]) -> bool:
    """Tell whether computing ``node`` takes loops that no reduction shares."""
    return any(map(has_own_loops, _expression(node, stored)[0]))


def _expression(node: Node, stored: Set[Node]) -> tuple[set[Node], set[Node]]:
    """Return the nodes that computing ``node`` runs, and the values that it loads."""
    members: set[Node] = set()
    loads: set[Node] = set()
    stack = [node]
    while stack:
        current = stack.pop()
        members.add(current)
        for operand in current.inputs:
            base = base_of(operand)
            computed = base.kind in (Kind.POINTWISE, Kind.REDUCTION) and base not in stored
            if computed and base not in members:
                stack.append(base)
            elif not computed:
                loads.add(operand)
    return members, loads
