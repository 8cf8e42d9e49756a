"""A plan says where the values of a program lie at one shape, and how long each is needed: it is
numbers alone."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from strop.ir.program import Program
from strop.runtime.run.memory import Interval, most_alive, plan_arena, shared
from strop.runtime.run.run_order import RunOrder
from strop.runtime.run.sizes import Sizes

Life = tuple[int, int]  # when a value is first and last touched


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Offsets are in bytes: those of ``buffers``, by number, and of ``scratch``, by step and place
    among its scratch, in the arena, which has ``arena_bytes``; those of what is ``kept``, by number
    of the buffer, in memory that outlives the run. Of what library calls allocate, ``dead`` says
    which buffers nobody reads behind a step, and ``call_bytes`` how much is alive at once."""

    buffers: Mapping[int, int]
    scratch: Mapping[tuple[int, int], int]
    kept: Mapping[int, int]
    dead: Mapping[int, Sequence[int]]
    arena_bytes: int
    kept_bytes: int
    call_bytes: int


def plan_memory(
    program: Program,
    sizes: Sizes,
    order: RunOrder,
    scratch: Mapping[int, Sequence[int]],
    lent: Collection[int],
    handed_on: Collection[int] = (),
    taken_in: Collection[int] = (),
    *,
    shares: bool,
) -> MemoryPlan:
    """Plan the memory of a run. ``scratch`` holds bytes, by step. Buffers that are ``lent`` lie
    elsewhere, and those ``handed_on`` where late library calls put them; those ``taken_in`` lie in
    the arena although library calls would allocate them. Where it ``shares``, results may take the
    memory of operands that end there."""
    times = order.times
    lives, kept = _lives(program, order, times), order.prologue.kept
    elsewhere = {*kept, *lent, *handed_on}
    alive = {
        number: Interval(*life, sizes.bytes_of(number))
        for number, life in sorted(lives.items())
        if program.buffers[number].kind == "arena" or number in taken_in
        if number not in elsewhere
    }
    pairs = [p for at in times if (step := order.steps[at]) for p in step.in_place]
    placed, host = shared(alive, pairs if shares else ())
    working = _working(times, scratch)
    offsets, arena_bytes = plan_arena([*placed.values(), *working.values()])
    buffers = dict(zip(placed, offsets, strict=False))
    buffers |= {new: buffers[old] for new, old in host.items()}
    kept_offsets, kept_bytes = plan_arena([Interval(0, 0, sizes.bytes_of(n)) for n in kept])
    called = {
        number: life
        for number, life in lives.items()
        if program.buffers[number].kind == "call" or number in handed_on
        if number not in taken_in
    }
    return MemoryPlan(
        buffers,
        dict(zip(working, offsets[len(placed) :], strict=True)),
        dict(zip(kept, kept_offsets, strict=True)),
        _dead(called),
        arena_bytes,
        kept_bytes,
        most_alive([Interval(*life, sizes.bytes_of(n)) for n, life in called.items()]),
    )


def _lives(program: Program, order: RunOrder, times: Mapping[int, int]) -> dict[int, Life]:
    """Say when each buffer that a step touches is needed; what is returned is needed until behind
    the run."""
    lives: dict[int, Life] = {}
    for position, time in times.items():
        step = order.steps[position]
        for number in step.touched if step else ():
            lives[number] = (lives[number][0] if number in lives else time, time)
    for item in program.returned:
        if item.tensor is not None and item.tensor.buffer in lives:
            lives[item.tensor.buffer] = (lives[item.tensor.buffer][0], len(program.steps))
    return lives


def _working(
    times: Mapping[int, int], scratch: Mapping[int, Sequence[int]]
) -> dict[tuple[int, int], Interval]:
    """Return the memory that each step works in, by step and place."""
    return {
        (position, place): Interval(times[position], times[position], size)
        for position in sorted(scratch)
        for place, size in enumerate(scratch[position])
    }


def _dead(called: Mapping[int, Life]) -> dict[int, list[int]]:
    """Sort buffers by the step that reads them last. Library calls that allocate run late, so that
    a time is a position."""
    dead = defaultdict[int, list[int]](list)
    for number, (_, last) in sorted(called.items()):
        dead[last].append(number)
    return dict(dead)
