"""Say when results of a run are complete, so that what reads them can begin before the run ends."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from strop.runtime.run.shape_plan import ShapePlan
from strop.runtime.run.sizes import Look


class Told(Protocol):
    """Gets results of a run by their places among those returned."""

    def home(self, place: int, look: Look) -> Tensor | None:
        """Return memory of this shape, strides and type that the result is to be written to, or
        None for new memory."""
        ...

    def ready(self, place: int, result: Tensor) -> None:
        """Take a result that is complete."""
        ...


_OWN_MEMORY = ("result", "call")  # kinds of buffers that nothing else lies in


@dataclass(frozen=True, slots=True)
class Stage:
    """Hold steps that run one behind the other, and the results, by place, that are complete when
    they have run: no later step reads or writes them."""

    steps: tuple[int, ...]
    ready: tuple[int, ...]


def places_of(plan: ShapePlan) -> dict[int, int]:
    """Return the places of results that a run has memory made for, by buffer."""
    made = {number for number, _ in plan.results}
    return {number: place for place, number in _alone(plan) if number in made}


def stages_of(plan: ShapePlan) -> tuple[Stage, ...]:
    """Cut the late steps of a plan behind each that completes results. A result that shares its
    memory with another one, or that no late step touches, is in no stage."""
    late = plan.order.late
    last = _last_touched(plan)
    ready: dict[int, list[int]] = {}
    for place, number in _alone(plan):
        if number in last:
            ready.setdefault(last[number], []).append(place)
    stages, begin = [], 0
    for end, position in enumerate(late, 1):
        if position in ready:
            stages.append(Stage(late[begin:end], tuple(ready[position])))
            begin = end
    return (*stages, Stage(late[begin:], ()))


def _last_touched(plan: ShapePlan) -> dict[int, int]:
    """Return for each buffer the last late step that reads or writes it."""
    last: dict[int, int] = {}
    for position in plan.order.late:
        step = plan.order.steps[position]
        for number in step.touched if step else ():
            last[number] = position
    return last


def _alone(plan: ShapePlan) -> list[tuple[int, int]]:
    """Return places and buffers of results that have a buffer for themselves."""
    program = plan.program
    found = [
        (place, item.tensor.buffer)
        for place, item in enumerate(program.returned)
        if item.tensor is not None
    ]
    counts = Counter(number for _, number in found)
    return [
        (place, number)
        for place, number in found
        if counts[number] == 1 and program.buffers[number].kind in _OWN_MEMORY
    ]
