"""List the steps of a program: the values that each makes, where they lie, and what they cost."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import torch

from strop.backend import Compiled
from strop.debug.costs import (
    Machine,
    Sizes,
    bytes_moved,
    call_flops,
    group_flops,
    num_programs,
    working_us,
)
from strop.debug.listing import buffer_text, call_text, type_text
from strop.debug.report import StepRow, ValueRow
from strop.fusion.plan import Group, Scheme
from strop.ir.affine import base_of
from strop.ir.graph import Node
from strop.ir.ops import Kind
from strop.ir.program import CallStep, KernelStep, Program, Step


@dataclass(frozen=True, slots=True)
class Planned:
    """Describe step ``number`` of a program, what the plan meant it to be, and its values by
    buffer."""

    number: int
    step: Step
    plan: Group | Node
    made: dict[Node, int]

    @property
    def title(self) -> str:
        """Return a title such as "row kernel", "linear" or "aten.embedding.default"."""
        if isinstance(self.plan, Group):
            return f"{self.plan.schedule.value} kernel"
        return call_text(self.plan.op, self.plan.attrs)


def planned_steps(compiled: Compiled) -> tuple[Planned, ...]:
    """Pair the program's steps with the plan's; the plan has some more that need no step, and its
    order is that of the graph."""
    found: list[Planned] = []
    numbers = sorted(range(len(compiled.order)), key=compiled.order.__getitem__)
    steps = [compiled.program.steps[number] for number in numbers]
    items: dict[Node, list[Node]] = defaultdict(list)
    for node in compiled.graph.nodes:
        if node.op == "item":
            items[node.inputs[0]].append(node)
    places = {node: position for position, node in enumerate(compiled.graph.inputs)}
    for plan in compiled.plan.steps:
        if isinstance(plan, Node) and _has_no_step(plan, steps[len(found) :], places):
            continue
        step = steps[len(found)]
        found.append(Planned(numbers[len(found)], step, plan, _made(plan, step, items)))
    assert len(found) == len(steps), "the program is not that of the plan"
    return tuple(sorted(found, key=lambda planned: planned.number))


def _has_no_step(node: Node, rest: list[Step], places: dict[Node, int]) -> bool:
    """Tell whether a planned step needs none: an item is its call's, a join is what kernels have
    stored, and a write may have become a store of the kernel before it."""
    if node.op != "write":
        return node.op in ("item", "join")
    if not rest or not isinstance(rest[0], CallStep) or rest[0].op != "write":
        return True
    return rest[0].inputs[0].buffer != places[base_of(node.inputs[0])]


def _made(plan: Group | Node, step: Step, items: dict[Node, list[Node]]) -> dict[Node, int]:
    if isinstance(plan, Group):
        assert isinstance(step, KernelStep), step
        return dict(zip(plan.stores, step.writes, strict=True))
    assert isinstance(step, CallStep), step
    if not plan.attrs.get("single", True):
        made = {item: step.outputs[item.attrs["index"]] for item in items.get(plan, ())}
        return {item: number for item, number in made.items() if number >= 0}
    return dict.fromkeys([plan], step.outputs[0]) if step.outputs else {}


def step_rows(
    program: Program, compiled: Compiled | None, sizes: Sizes, able: Machine
) -> tuple[StepRow, ...]:
    """Return every step with its costs; values inside kernels and their FLOPs only where
    ``compiled``."""
    planned = planned_steps(compiled) if compiled else ()
    maker: dict[int, int] = {}
    rows = []
    for number, (step, runs) in enumerate(zip(program.steps, program.at(sizes), strict=True)):
        plan = planned[number].plan if planned else None
        made, read = _written(step), _read(step)
        num_bytes = bytes_moved(program, runs, sizes) if runs is not None else 0
        flops = _flops(step, plan, sizes) if runs is not None else 0
        bound_us, by = able.bound_us(num_bytes, flops, _computed_in(program, step))
        programs = num_programs(program, runs, sizes, able.device.sms) if runs is not None else 0
        working = working_us(program, runs, sizes, able.device) if runs is not None else 0.0
        rows.append(
            StepRow(
                number,
                _kind(step),
                _title(program, step),
                step.origin,
                _values(program, plan, made),
                tuple(sorted({maker[n] for n in read if n in maker} - {number})),
                num_bytes,
                flops,
                bound_us,
                by,
                programs,
                round(max(bound_us, able.moving_us(num_bytes, programs), working), 3),
            )
        )
        maker.update(dict.fromkeys(made, number))
    return tuple(rows)


def _written(step: Step) -> tuple[int, ...]:
    if isinstance(step, KernelStep):
        return step.writes
    if step.op == "write":
        return (step.inputs[0].buffer,)
    return tuple(n for n in step.outputs if n >= 0)


def _read(step: Step) -> tuple[int, ...]:
    if isinstance(step, KernelStep):
        return step.buffers
    return tuple(ref.buffer for ref in step.inputs)


def _kind(step: Step) -> str:
    if isinstance(step, KernelStep):
        return "kernel"
    return "opaque" if step.op == "aten" else "call"


def _title(program: Program, step: Step) -> str:
    if isinstance(step, KernelStep):
        return program.sources[step.kernel].name
    return call_text(step.op, dict(step.attrs))


def _flops(step: Step, plan: Group | Node | None, sizes: Sizes) -> int:
    if isinstance(step, CallStep):
        return call_flops(step, sizes)
    return group_flops(plan, sizes) if isinstance(plan, Group) else 0


def _computed_in(program: Program, step: Step) -> torch.dtype:
    """Return the type that a step computes in: kernels compute in single precision whatever they
    store."""
    if isinstance(step, KernelStep) or not step.inputs:
        return torch.float32
    return program.buffers[step.inputs[0].buffer].dtype


def _values(
    program: Program, plan: Group | Node | None, made: tuple[int, ...]
) -> tuple[ValueRow, ...]:
    if not isinstance(plan, Group):
        return tuple(
            ValueRow(buffer_text(program.buffers[n], n), Scheme.GLOBAL.value) for n in made
        )
    return tuple(
        ValueRow(f"{node.op} {type_text(node)}", _scheme(node, plan).value) for node in plan.nodes
    )


def _scheme(node: Node, group: Group) -> Scheme:
    if node in group.stores:
        return Scheme.GLOBAL
    return Scheme.REGIONAL if node.kind is Kind.REDUCTION else Scheme.LOCAL
