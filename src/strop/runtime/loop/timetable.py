"""Compute what depends on the timestep for all timesteps of a denoise loop at once.

SD1.5's time embedding and its projections into all blocks read 50 MB of weights in every step, of
which nothing is new but one number. The steps of a program that read only that number, weights and
what the prologue leaves (``hoisting.py``) run once a loop, at a batch of as many copies of the
call's as the program's guards allow, each with a timestep of its own. A call copies its rows.

That such a batch holds the results of each is proven when the program is made
(``codegen.by_rows``); which rows are a call's is told by where its timestep lies in the memory of
the scheduler's, never by its value, which would have to be waited for. The first step of a loop
computes its own and makes a table behind it, when a GPU is at work and has not to wait for the
host. A later step that finds none makes it first: so all pictures have the same bits, among them
the first one, whose graph is captured at its second step.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from strop.ir.dims import Expr, symbol
from strop.ir.program import CallStep, Program, Step
from strop.runtime.loop.hoisting import (
    Held,
    Hoist,
    Moment,
    Prologue,
    held_now,
    kept_of,
    movable,
    read_by,
    read_by_all,
    weights_of,
    writes_inputs,
    written,
)

MOST_BYTES = 64 << 20  # of a timetable; SD1.5's for 50 steps at batch 2 has 3.6 MB,
WEIGHTS_SHARE = 8  # or that part of the weights that no step reads then: SD3 medium's has 88 MB
Run = Callable[[], None]
Read = Callable[[int], Tensor]  # what a buffer holds


@dataclass(frozen=True, slots=True)
class Timed:
    """Positions of the steps that a timetable is made by; the buffers that they leave to others,
    and those that they read but weights, ``timestep`` among them. ``rows``: the symbol of their
    first dim. ``weights``, as numbers among the program's inputs: theirs, and the prologue's where
    they read what it leaves. ``absorbed``: positions of calls whose work these steps do here, and
    not at more rows."""

    steps: tuple[int, ...] = ()
    kept: tuple[int, ...] = ()
    given: tuple[int, ...] = ()
    timestep: int = -1
    rows: str = ""
    weights: tuple[int, ...] = ()
    absorbed: tuple[int, ...] = ()

    @property
    def part(self) -> tuple[int, ...]:
        """Return what runs where the table is made."""
        return self.steps + self.absorbed

    @property
    def is_alone(self) -> bool:
        """Tell whether the timestep is all that they read."""
        return self.given == (self.timestep,)


@dataclass(frozen=True, slots=True)
class TimetablePart:
    """Some steps of a program, run by themselves, between buffers that lie in tensors."""

    steps: tuple[int, ...] = ()
    tensors: Mapping[int, Tensor] = field(default_factory=dict)

    def of(self, steps: Sequence[Step | None]) -> tuple[Step | None, ...]:
        """Return these steps, with None for the others."""
        return tuple(step if p in self.steps else None for p, step in enumerate(steps))


Bind = Callable[[Mapping[str, int], TimetablePart], Run]


def timed_of(
    program: Program,
    steps: Sequence[Step | None],
    prologue: Prologue,
    hoist: Hoist | None,
    planned: Collection[str],
) -> Timed:
    """Find the part of ``steps``, which run at one shape, that a timetable holds: those made by
    rows whose other sizes are known. Tokens of a prompt that meet the timestep are none: a table
    of them is as large as what they are made from."""
    if hoist is None or hoist.timestep is None or writes_inputs(program, steps):
        return Timed()
    number = next(
        n for n, b in enumerate(program.buffers) if b.kind == "input" and b.index == hoist.timestep
    )
    rows = _symbol_of(program, number)
    if not rows:
        return Timed()
    known = read_by_all(program, hoist.steady) | {number}
    before = {n for p in prologue.steps for n in written(steps[p])}
    later = [None if p in prologue.steps else step for p, step in enumerate(steps)]
    of_rows = {n for n in program.by_rows if _is_of_rows(program.buffers[n].shape, rows)}
    able = [step if of_rows.issuperset(written(step)) else None for step in later]
    found = movable(program, able, known | before, planned)
    made = {n for p in found for n in written(steps[p])}
    read = {n for p in found for n in read_by(steps[p])} - made
    inputs = {n: program.buffers[n].index for n in read if program.buffers[n].kind == "input"}
    weights = {i for i in inputs.values() if program.inputs[i].is_state}
    given = tuple(sorted(n for n in read if inputs.get(n) not in weights))
    kept = kept_of(later, found)
    if not kept or number not in given:
        return Timed()
    others = () if given == (number,) else prologue.weights
    absorbed = (p for p, s in enumerate(program.steps) if steps[p] is None and _gives(s, made))
    return Timed(
        tuple(found),
        kept,
        given,
        number,
        rows,
        tuple({*weights_of(program, weights), *others}),
        tuple(absorbed),
    )


def _gives(step: Step, made: set[int]) -> bool:
    """Tell whether a call is one of those that give such buffers."""
    return isinstance(step, CallStep) and not made.isdisjoint(step.outputs)


def _is_of_rows(shape: Sequence[Expr], rows: str) -> bool:
    return tuple(shape[:1]) == (symbol(rows),) and all(size.is_const for size in shape[1:])


def _symbol_of(program: Program, number: int) -> str:
    """The first size of a vector, if that is one of the program's symbols."""
    shape = program.buffers[number].shape
    names = [name for name, _ in program.hints if shape[:1] == (symbol(name),)]
    return names[0] if names and len(shape) == 1 else ""


class Timetable:
    """Hold the timetable of one bound program. ``record``: makes what has run once a CUDA graph,
    where runs are replays."""

    def __init__(
        self,
        program: Program,
        timed: Timed,
        hoist: Hoist | None,
        env: Mapping[str, int],
        stream: int,
    ) -> None:
        self.timed, self.steps = timed, timed.steps
        self.record: Callable[[Run], Run] | None = None
        self.held: Held | None = None  # what the table came from; None: it may not be used
        self._next: Held | None = None  # what one would come from that this step makes
        self._program, self._env, self._stream, self._hoist = program, env, stream, hoist
        self._weights = [hoist.weights[n] for n in timed.weights] if hoist else []
        self._count = 0  # of the timesteps that ``_work`` is for
        self._work: TimetableWork | None = None  # or they can have no table
        self._num_uses, self._loop = 0, 0  # of the latest table, and where it was made

    def rows(self, moment: Moment | None) -> list[Tensor] | None:
        """Return what ``timed.kept`` hold at that moment; None where no table that holds now has
        it."""
        if not self.steps:
            return []
        self._next = None
        if moment is None or self._hoist is None:
            return None
        stamp = moment.stamp if self.timed.is_alone else moment.stamp.beside(moment.steady)
        if self._work is None or self.held is None or not self.held.is_for(None, stamp):
            self._next = held_now(None, stamp, self._weights)  # as things are before the step runs
            return None
        batch = self._env[self.timed.rows]
        first = moment.place * batch
        return [table[first : first + batch] for table in self._work.tables]

    def note_use(self) -> None:
        self._num_uses += 1
        if self.steps and self._hoist is not None:
            self._hoist.tally.num_looked_up += 1

    @property
    def held_bytes(self) -> int:
        """Memory of tables and of what makes them, their working memory apart."""
        return self._work.nbytes if self._work else 0

    def make(self, moment: Moment | None, read: Read, bind: Bind) -> None:
        """A table for the steps behind this one, where it can be and brings something: of few
        timesteps, or large batches, nothing; nor before the last one has served half of a loop,
        as where two prompts take turns. ``read``: what ``timed.given`` hold; ``bind``: a part of
        the program at other sizes, in memory of its own, on its stream."""
        now, self._next = self._next, None
        if moment is None or self._hoist is None or now is None:
            return
        count, device = len(moment.timesteps), moment.timesteps.device
        is_unable = count == self._count and self._work is None
        if is_unable or (self._loop == moment.stamp.loop and 2 * self._num_uses < count):
            return
        self.held = None
        with _on(self._stream, device):
            if count != self._count:
                self._work, self._count = self._work_for(count, device, bind), count
            if (work := self._work) is None:
                return
            work.clock[:count].copy_(moment.timesteps)
            work.clock[count:].copy_(moment.timesteps[-1:].expand(len(work.clock) - count))
            if work.replay is not None:
                work.replay()
            else:
                self._fill(work, read)
                if self.record is not None:
                    work.replay = self.record(partial(self._fill, work, read))
        self.held, self._loop = now, moment.stamp.loop
        self._num_uses = 0 if moment.place else 1  # a first step has computed its own
        self._hoist.place.timetables.add(self)
        self._hoist.tally.num_timetables += 1

    def _work_for(self, count: int, device: torch.device, bind: Bind) -> TimetableWork | None:
        """Share the work into as many copies of the call's batch as the guards allow, all alike."""
        rows = self.timed.rows
        for shares in range(1, count):
            copies = -(-count // shares)
            env = {**self._env, rows: self._env[rows] * copies}
            if all(guard.holds(env) for guard in self._program.guards):
                size = sum(self._bytes(n, env) for n in self.timed.kept) * shares
                if copies < 2 or size > self._most_bytes or not self._is_alike(env):
                    return None
                return self._bound(env, copies, shares, device, bind)
        return None

    @property
    def _most_bytes(self) -> int:
        return max(MOST_BYTES, sum(weight.nbytes for weight in self._weights) // WEIGHTS_SHARE)

    def _is_alike(self, env: Mapping[str, int]) -> bool:
        """Tell whether the part makes the same of the same there: other forms may do another's
        work as well."""
        here, there = self._program.at(self._env), self._program.at(env)
        (_, read), (made, read_there) = (self._made(steps) for steps in (here, there))
        return made.issuperset(self.timed.kept) and read_there <= read

    def _made(self, steps: Sequence[Step | None]) -> tuple[set[int], set[int]]:
        """Return the buffers that the part makes, and those that it takes from others."""
        own = [steps[p] for p in self.timed.part]
        made = {n for step in own for n in written(step)}
        return made, {n for step in own for n in read_by(step)} - made

    def _bytes(self, number: int, env: Mapping[str, int]) -> int:
        buffer = self._program.buffers[number]
        return math.prod(size.eval(env) for size in buffer.shape) * buffer.dtype.itemsize

    def _bound(
        self, env: Mapping[str, int], copies: int, shares: int, device: torch.device, bind: Bind
    ) -> TimetableWork:
        def empty(number: int) -> Tensor:
            buffer = self._program.buffers[number]
            shape, strides = ([e.eval(env) for e in of] for of in (buffer.shape, buffer.strides))
            return torch.empty_strided(shape, strides, dtype=buffer.dtype, device=device)

        given = {number: empty(number) for number in self.timed.given}
        left = [empty(number) for number in self.timed.kept]
        tensors = given | dict(zip(self.timed.kept, left, strict=True))
        clock = given[self.timed.timestep].new_empty(shares * copies)
        tables = [each.new_empty(shares * len(each), *each.shape[1:]) for each in left]
        run = bind(env, TimetablePart(self.timed.part, tensors))
        return TimetableWork(copies, clock, given, left, tables, run)

    def _fill(self, work: TimetableWork, read: Read) -> None:
        for number, tensor in work.given.items():
            if number != self.timed.timestep:
                _spread(tensor, read(number), work.copies)
        vector = work.given[self.timed.timestep].view(work.copies, -1)
        for share, some in enumerate(work.clock.view(-1, work.copies, 1)):
            vector.copy_(some.expand_as(vector))
            work.run()
            for table, left in zip(work.tables, work.left, strict=True):
                table[share * len(left) : (share + 1) * len(left)].copy_(left)


@dataclass
class TimetableWork:
    """Describe what makes a timetable: ``run`` does so for ``copies`` of the call's batch, of the
    next timesteps of ``clock``, from what is ``given`` to what is ``left``. ``replay``: all of
    it."""

    copies: int
    clock: Tensor
    given: Mapping[int, Tensor]
    left: Sequence[Tensor]
    tables: Sequence[Tensor]
    run: Run
    replay: Run | None = None

    @property
    def nbytes(self) -> int:
        every = (self.clock, *self.given.values(), *self.left, *self.tables)
        return sum(tensor.nbytes for tensor in every)


def _spread(tensor: Tensor, source: Tensor, copies: int) -> None:
    """A copy of ``source`` for each, or one, if it has no rows: it is the same for every batch."""
    if tensor.shape == source.shape:
        tensor.copy_(source)
    else:
        tensor.unflatten(0, (copies, -1)).copy_(source.expand(copies, *source.shape))


@contextlib.contextmanager
def _on(stream: int, device: torch.device) -> Iterator[None]:
    """Send work to this stream, between what the caller's has had and what it gets."""
    if device.type != "cuda" or torch.cuda.current_stream(device).cuda_stream == stream:
        yield
        return
    caller, other = torch.cuda.current_stream(device), torch.cuda.ExternalStream(stream, device)
    other.wait_stream(caller)
    try:
        with torch.cuda.stream(other):
            yield
    finally:
        caller.wait_stream(other)
