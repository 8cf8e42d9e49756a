"""Which values of the graph each step of a program makes, and where they lie."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from strop.backend import Compiled
from strop.fusion.plan import Group
from strop.ir.affine import base_of
from strop.ir.graph import Node
from strop.ir.program import CallStep, KernelStep, Step


@dataclass(frozen=True, slots=True)
class Planned:
    """Step ``number`` of a program, what the plan meant it to be, and its values by buffer."""

    number: int
    step: Step
    plan: Group | Node
    made: dict[Node, int]

    @property
    def title(self) -> str:
        """ "row kernel", "linear", "aten.embedding.default"."""
        if isinstance(self.plan, Group):
            return f"{self.plan.schedule.value} kernel"
        return str(self.plan.attrs["target"]) if self.plan.op == "aten" else self.plan.op


def planned_steps(compiled: Compiled) -> tuple[Planned, ...]:
    """The program's steps beside the plan's; the plan has some more that need no step."""
    found: list[Planned] = []
    steps = list(compiled.program.steps)
    items: dict[Node, list[Node]] = defaultdict(list)
    for node in compiled.graph.nodes:
        if node.op == "item":
            items[node.inputs[0]].append(node)
    places = {node: position for position, node in enumerate(compiled.graph.inputs)}
    for plan in compiled.plan.steps:
        if isinstance(plan, Node) and _has_no_step(plan, steps[len(found) :], places):
            continue
        step = steps[len(found)]
        found.append(Planned(len(found), step, plan, _made(plan, step, items)))
    assert len(found) == len(steps), "the program is not that of the plan"
    return tuple(found)


def _has_no_step(node: Node, rest: list[Step], places: dict[Node, int]) -> bool:
    """An item is its call's; a write may have become a store of the kernel before it."""
    if node.op != "write":
        return node.op == "item"
    if not rest or not isinstance(rest[0], CallStep) or rest[0].op != "write":
        return True
    return rest[0].inputs[0].buffer != places[base_of(node.inputs[0])]


def _made(plan: Group | Node, step: Step, items: dict[Node, list[Node]]) -> dict[Node, int]:
    if isinstance(plan, Group):
        assert isinstance(step, KernelStep), step
        return dict(zip(plan.stores, step.writes, strict=True))
    assert isinstance(step, CallStep), step
    if plan.op == "aten" and not plan.attrs["single"]:
        return {item: step.outputs[item.attrs["index"]] for item in items.get(plan, ())}
    return dict.fromkeys([plan], step.outputs[0]) if step.outputs else {}
