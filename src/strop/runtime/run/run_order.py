"""The order says which steps of a program run at one shape, and in which part of a run."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from strop.ir.program import Program, Step
from strop.runtime.loop.hoisting import Hoist, Prologue, prologue_of
from strop.runtime.loop.timetable import Timed, TimetablePart, timed_of


@dataclass(frozen=True, slots=True)
class RunOrder:
    """A run walks the ``prologue``, then what is ``timed``, then the ``late`` steps, which are all
    others; the first two only where their results are not there. Steps are named by position.
    ``steps`` go by position, with None where another step does the work of one."""

    steps: tuple[Step | None, ...]
    prologue: Prologue
    timed: Timed
    late: tuple[int, ...]

    @property
    def parts(self) -> tuple[tuple[int, ...], ...]:
        return self.prologue.steps, self.timed.steps, self.late

    @property
    def times(self) -> dict[int, int]:
        """Say when each step runs, in the order of a run: a late one runs at its position."""
        count = len(self.steps)
        times = {position: position - 2 * count for position in self.prologue.steps}
        times |= {position: position - count for position in self.timed.steps}
        return times | {position: position for position in self.late}


def run_order(
    program: Program,
    env: Mapping[str, int],
    planned: Collection[str],
    hoist: Hoist | None,
    part: TimetablePart | None,
) -> RunOrder:
    """Sort the steps into the parts of a run. ``planned`` names library calls that write where they
    are told. A ``part`` leaves out all steps but its own."""
    steps = part.of(program.at(env)) if part else program.at(env)
    prologue = prologue_of(program, steps, hoist.steady if hoist else (), planned)
    timed = timed_of(program, steps, prologue, hoist, planned)
    early = {*prologue.steps, *timed.steps}
    return RunOrder(steps, prologue, timed, tuple(p for p in range(len(steps)) if p not in early))
