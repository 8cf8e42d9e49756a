"""Say when results of a run are complete, so that what reads them can begin before the run ends."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

from torch import Tensor

from strop.runtime.run.shape_plan import ShapePlan
from strop.runtime.run.sizes import Look


class Told(Protocol):
    """Gets results of a run by their places among those returned."""

    def home(self, place: int, look: Look) -> Tensor | None:
        """Return memory of this shape, strides and type that the result is to be written to, or
        None for new memory. It is asked right before the first step that writes there."""
        ...

    def ready(self, place: int, result: Tensor) -> bool:
        """Take a result that is complete. True where it is kept: the run then lets go of it, and
        returns None in its place."""
        ...


_OWN_MEMORY = ("result", "call")  # kinds of buffers that nothing else lies in


@dataclass(frozen=True, slots=True)
class Stage:
    """Hold steps that run one behind the other. ``made`` are the results, by buffer, that no step
    before them touches, and for which memory is to be made; ``ready`` those, by place, that are
    complete when they have run: no later step reads or writes them."""

    made: tuple[int, ...]
    steps: tuple[int, ...]
    ready: tuple[int, ...]


def places_of(plan: ShapePlan) -> dict[int, int]:
    """Return the places of results that a run has memory made for, by buffer."""
    made = {number for number, _ in plan.results}
    return {number: place for place, number in _alone(plan) if number in made}


def stages_of(plan: ShapePlan) -> tuple[Stage, ...]:
    """Cut the late steps of a plan behind each that completes results. A result that shares its
    memory with another one, or that no late step touches, is ``made`` in the first stage, if a run
    has to make memory for it, and ``ready`` in none."""
    late = plan.order.late
    first, last = _touched(plan)
    alone = [(place, number) for place, number in _alone(plan) if number in last]
    ready: dict[int, list[int]] = {}
    for place, number in alone:
        ready.setdefault(last[number], []).append(place)
    ends = [end for end, position in enumerate(late, 1) if position in ready]
    parts = [late[begin:end] for begin, end in pairwise([0, *ends, len(late)])]
    stage_of = {position: at for at, part in enumerate(parts) for position in part}
    made: list[list[int]] = [[] for _ in parts]
    waiting = {number for _, number in alone}
    for number, _ in plan.results:
        made[stage_of[first[number]] if number in waiting else 0].append(number)
    return tuple(
        Stage(tuple(numbers), part, tuple(ready.get(part[-1], ())) if part else ())
        for numbers, part in zip(made, parts, strict=True)
    )


def _touched(plan: ShapePlan) -> tuple[dict[int, int], dict[int, int]]:
    """Return for each buffer the first and the last late step that reads or writes it."""
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for position in plan.order.late:
        step = plan.order.steps[position]
        for number in step.touched if step else ():
            first.setdefault(number, position)
            last[number] = position
    return first, last


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
