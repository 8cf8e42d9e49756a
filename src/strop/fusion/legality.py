"""May this node join that group? Each refusal has a reason; nothing here looks at cost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from strop.ir.affine import base_of, reduced_runs
from strop.ir.dims import Expr, const
from strop.ir.graph import Node
from strop.ir.loops import Schedule
from strop.ir.ops import Kind

ONE = const(1)


@dataclass(eq=False)
class Draft:
    """A group while it grows. ``domain`` is the element count of one full sweep."""

    schedule: Schedule
    domain: Expr
    nodes: list[Node] = field(default_factory=list)
    kept: Expr | None = None  # elements left after the reductions
    reduced: set[Node] = field(default_factory=set)  # members that depend on a reduction here


def is_fusible(node: Node) -> bool:
    """Pointwise nodes and reductions that code generators print; constants go with their users."""
    if node.op in ("constant", "iota"):
        return False
    return node.kind in (Kind.POINTWISE, Kind.REDUCTION)


def reduction_schedule(node: Node, hints: Mapping[str, int]) -> Schedule | None:
    """ROW when the reduced elements lie innermost in memory, COLUMN when kept ones lie inside.

    None when kept and reduced atoms alternate more often: such an operand is copied first.
    """
    runs = reduced_runs(node.inputs[0], node.attrs["dims"], hints)
    if runs in ([True], [False, True], [False], []):
        return Schedule.ROW
    column = ([True, False], [False, True, False], [True, False, True], [False, True, False, True])
    return Schedule.COLUMN if runs in column else None


def refusal(node: Node, draft: Draft, hints: Mapping[str, int]) -> str | None:
    """Why ``node`` cannot join ``draft``, or None when it can."""
    if node.kind is Kind.REDUCTION:
        return _refuse_reduction(node, draft, hints)
    if draft.schedule is Schedule.POINTWISE:
        return None if node.numel == draft.domain else "another number of elements"
    assert draft.kept is not None
    after = any(base_of(i) in draft.reduced for i in node.inputs)
    if draft.schedule is Schedule.ROW:
        if node.numel == draft.domain or (after and node.numel == draft.kept):
            return None
        return "another number of elements"
    if after:
        if node.numel == draft.kept:
            return None
        return "GLOBAL: needs the statistics of all programs"
    return "beside a column reduction, not before it"


def _refuse_reduction(node: Node, draft: Draft, hints: Mapping[str, int]) -> str | None:
    operand = base_of(node.inputs[0])
    schedule = reduction_schedule(node, hints)
    if schedule is None:
        return "kept and reduced dims alternate in memory"
    if operand.numel != draft.domain or node.inputs[0].numel != draft.domain:
        return "reduces another number of elements"
    if draft.schedule is Schedule.POINTWISE:
        if schedule is Schedule.COLUMN and not _all_before(operand, draft):
            return "column reduction beside other results"
        return None
    if schedule is not draft.schedule or node.numel != draft.kept:
        return "reduces over other dims"
    if draft.schedule is Schedule.COLUMN and operand in draft.reduced:
        return "GLOBAL: reduces over a value that needs another reduction"
    return None


def _all_before(operand: Node, draft: Draft) -> bool:
    """Whether every member is the operand or feeds it."""
    seen, stack = {operand}, [operand]
    first = min(member.serial for member in draft.nodes)
    while stack:
        for i in stack.pop().inputs:
            base = base_of(i)
            if base not in seen and base.serial >= first:
                seen.add(base)
                stack.append(base)
    return all(member in seen for member in draft.nodes)


def join(node: Node, draft: Draft, hints: Mapping[str, int]) -> None:
    """Add a node for which ``refusal`` is None."""
    draft.nodes.append(node)
    if node.kind is Kind.REDUCTION:
        if draft.schedule is Schedule.POINTWISE:
            schedule = reduction_schedule(node, hints)
            assert schedule is not None
            draft.schedule, draft.kept = schedule, node.numel
        draft.reduced.add(node)
    elif any(base_of(i) in draft.reduced for i in node.inputs):
        draft.reduced.add(node)
