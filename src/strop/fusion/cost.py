"""Compute a value again, or store it? Judged on bytes at the traced sizes, and on instructions."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass

from strop.fusion.legality import has_own_loops
from strop.ir.affine import base_of, strided
from strop.ir.dims import Expr, const
from strop.ir.graph import Node
from strop.ir.ops import OPS, Kind

MAX_RECOMPUTED_NODES = 12
MAX_GROWTH = 4  # how much larger than the value a domain may be that recomputes it ...
MOST_OF_PLACES = 3  # values from which places, weights and marks beside a lookup are computed
HEAVY_SHARE = 4  # a value is heavy if one in so many of its elements is a call of exp or the like
SMALL = 65536  # ... unless the value has so few elements that its operands stay in cache
# Instructions for an element, by machine code of an sm_90; of a cat, for each further piece. What
# takes fewer than EFFORT hides behind the loads of its kernel.
HEAVY, LOOKUP, PIECE, EFFORT = 24, 8, 8, 16
ZERO, ONE = const(0), const(1)


@dataclass(frozen=True, slots=True)
class Reading:
    """Describe who reads a value: how many ``kernels``, the elements of the ``largest`` one's loop,
    and how often all of them would compute an element of the value ``again``. ``of_places``: it
    says where something larger is looked up, or stands beside what was."""

    kernels: int
    largest: int
    again: int
    of_places: bool = False


def is_cheaper_again(
    node: Node, reading: Reading, stored: Set[Node], hints: Mapping[str, int], launch: int
) -> bool:
    """Tell whether every consumer should compute ``node`` itself instead of loading it.

    A single consumer saves the write and the read and never loads more than the value's own
    operands. Several consumers each load the operands, so only one of them may be large. Nobody
    does so where it takes more than ``launch`` instructions, those of a launch: the gates of
    Z-Image's blocks are 3840 values of tanh, which are multiplied with 4,000 rows.
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
    elements = max(node.numel.eval(hints), 1)
    effort = sum(map(_instructions, members))
    if effort >= EFFORT and reading.again > max(MAX_GROWTH * elements, launch // effort):
        return False
    is_plain = not any(OPS[m.op].is_heavy or m.op == "take" for m in members)
    if reading.of_places and is_plain and len({base_of(x) for x in loads}) <= MOST_OF_PLACES:
        return True
    growth = reading.largest / elements
    if reading.kernels == 1 and growth <= 1:
        return True  # computed once, elsewhere
    if len(members) > MAX_RECOMPUTED_NODES:
        return False
    heavy = sum(m.numel.eval(hints) for m in members if OPS[m.op].is_heavy)  # the pieces of a cat
    is_heavy = heavy * HEAVY_SHARE >= elements
    if growth > MAX_GROWTH and (is_heavy or large) and elements > SMALL:
        return False
    return reading.kernels == 1 or (large <= 1 and not is_heavy)


def times_computed(node: Node, reader: Node, hints: Mapping[str, int]) -> int:
    """Return for how many elements a reader that does not load ``node`` computes it. Rows of a
    kernel's tile compute once what is the same in all their columns."""
    return max(
        (_computed(x, reader, hints) for x in reader.inputs if base_of(x) is node), default=0
    )


def _computed(operand: Node, reader: Node, hints: Mapping[str, int]) -> int:
    is_spread = reader.kind is Kind.POINTWISE and reader.op not in ("take", "cat")
    shape = reader.shape if is_spread else operand.shape
    view = strided(operand)
    if view is None or len(view.dims) > len(shape):
        return math.prod(size.eval(hints) for size in shape)
    missing: Iterable[tuple[tuple[Expr, Expr], ...]] = [()] * (len(shape) - len(view.dims))
    sizes = list(zip((*missing, *view.dims), shape, strict=True))
    while sizes and all(size == ONE or stride == ZERO for size, stride in sizes[-1][0]):
        sizes.pop()
    return math.prod(size.eval(hints) for _, size in sizes)


def _instructions(node: Node) -> int:
    if node.op == "cat":
        return PIECE * (len(node.inputs) - 1)
    return HEAVY if OPS[node.op].is_heavy else LOOKUP if node.op == "take" else 1


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
