"""Find kernels that could be one: a kernel whose only reader among kernels runs as many steps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from strop.fusion.plan import FusionPlan, Group
from strop.fusion.planner import loaded
from strop.ir.affine import base_of
from strop.ir.dims import Expr
from strop.ir.graph import Node
from strop.ir.ops import Kind


@dataclass(frozen=True, slots=True)
class Neighbours:
    """Hold two kernels of one size, of which the second reads no other kernel than the first, and
    the planner's reasons to keep them apart: where it gives none, it has overlooked them."""

    first: Group
    second: Group
    reasons: tuple[str, ...]

    def __str__(self) -> str:
        names = [f"{g.origin} ({', '.join(n.op for n in g.stores)})" for g in self.of]
        return f"{names[0]} -> {names[1]}: {'; '.join(self.reasons) or 'overlooked'}"

    @property
    def of(self) -> tuple[Group, Group]:
        return self.first, self.second


def neighbours(plan: FusionPlan) -> Iterator[Neighbours]:
    """Yield all pairs of a plan, by the second kernel."""
    stored = {node for group in plan.groups for node in group.stores}
    makers: dict[Node, set[Group | Node]] = {}
    before: dict[Group | Node, set[Group | Node]] = {}
    for step in plan.steps:
        loads = loaded(step, stored) if isinstance(step, Group) else map(base_of, step.inputs)
        read = [makers.get(value, set()) for value in loads]
        direct = set[Group | Node]().union(*read)
        before[step] = direct.union(*(before[maker] for maker in direct))
        if isinstance(step, Node):
            makers[step] = direct if step.op == "join" else {step}
            continue
        makers |= {node: {step} for node in step.stores}
        kernels = [maker for maker in direct if isinstance(maker, Group)]
        if len(kernels) == 1 and _may_meet(kernels[0], step, direct, before):
            yield Neighbours(kernels[0], step, _reasons(plan, kernels[0], step))


def _may_meet(
    first: Group,
    second: Group,
    direct: set[Group | Node],
    before: dict[Group | Node, set[Group | Node]],
) -> bool:
    """Tell whether they run as many steps, and no call stands between them."""
    between = [maker for maker in direct if maker is not first and first in before[maker]]
    return not between and _num_steps(first) == _num_steps(second)


def _num_steps(group: Group) -> Expr:
    reduced = (node.inputs[0] for node in group.nodes if node.kind is Kind.REDUCTION)
    return next(reduced, group.stores[-1]).numel


def _reasons(plan: FusionPlan, first: Group, second: Group) -> tuple[str, ...]:
    found = (
        refusal.reason
        for refusal in plan.refusals
        if refusal.consumer in second.nodes and refusal.producer in first.nodes
    )
    return tuple(dict.fromkeys(found))
