"""Hoist what does not change from step to step: what depends on nothing but weights and the prompt
runs once a loop, and what depends on the timestep as well runs for all timesteps at once
(``timetable.py``).

The steps of a program that read only such arguments, its prologue, come first and leave their
results in memory that outlives the run. Later runs start behind them, as long as the sources of
these (``runtime.derived.sources``) say that the prologue would give the same again: same loop, same
tensors, nobody wrote to them. That is never guessed from addresses. Writes that torch does not
count (through ``.data``, NumPy or DLPack, by a kernel of the user's) are why nothing outlives a
denoise loop; tensors without a version, as inference mode makes them, have no stamp.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from operator import is_
from typing import TYPE_CHECKING
from weakref import WeakSet

import torch
from torch import Tensor

from strop.ir.dims import product
from strop.ir.ops import CODES
from strop.ir.program import CallStep, KernelStep, Program, Step
from strop.runtime.derived.sources import KnownMemory, KnownWrites, Sources, versions_of
from strop.runtime.run.growing_memory import memory_on

if TYPE_CHECKING:
    from strop.runtime.loop.timetable import Timetable


@dataclass(frozen=True, slots=True)
class Prologue:
    """Positions of the steps that depend on weights and steady arguments alone, the buffers that
    they leave to the others, and the ``weights``, as numbers among the program's inputs."""

    steps: tuple[int, ...] = ()
    kept: tuple[int, ...] = ()
    weights: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Stamp:
    """Say which loop a call is of, and with which tensors of the caller's own."""

    loop: int
    tensors: tuple[Tensor, ...]

    def beside(self, other: Stamp) -> Stamp:
        """Return the stamp of the tensors of both."""
        return Stamp(self.loop, self.tensors + other.tensors)

    def equals(self, other: Stamp) -> bool:
        return self.loop == other.loop and all(map(is_, self.tensors, other.tensors))


@dataclass(frozen=True, slots=True)
class Moment:
    """Say which of a loop's timesteps (n,) a call is at. ``stamp``: of these timesteps, ``steady``:
    of steady arguments."""

    place: int
    timesteps: Tensor
    stamp: Stamp
    steady: Stamp


@dataclass(frozen=True, slots=True)
class Held:
    """Say whose results lie in memory, and what they came from. Where only one's can, ``holder`` is
    None."""

    holder: Hoisted | None
    stamp: Stamp
    sources: Sources

    def is_for(self, holder: Hoisted | None, stamp: Stamp) -> bool:
        """Tell whether these are the results that this one's are to be now."""
        is_same = self.holder is holder and self.stamp.equals(stamp)
        return is_same and not self.sources.differs()


class Kept:
    """Memory for what prologues leave, of one module on one stream: that of the latest."""

    def __init__(self, device: torch.device) -> None:
        self._bytes = memory_on(device)
        self.held: Held | None = None  # None: nothing that may be used again
        self.timetables: WeakSet[Timetable] = WeakSet()  # each has its own memory

    @property
    def memory(self) -> Tensor:
        return self._bytes.tensor

    def reserve(self, size_bytes: int) -> Tensor:
        """Return memory of this size at least."""
        if self.memory.numel() < size_bytes:
            if not self._bytes.stays:
                self.held = None
            self._bytes.grow(size_bytes)
        return self.memory

    def forget(self) -> None:
        self.held = None
        for timetable in self.timetables:
            timetable.held = None


@dataclass
class Tally:
    """Count how many prologues have run, and how many runs of the rest did without; how many
    timetables were made, and how many runs found their timestep there."""

    num_runs: int = 0
    num_reuses: int = 0
    num_timetables: int = 0
    num_looked_up: int = 0


@dataclass(frozen=True, slots=True)
class Hoist:
    """Leave to hoist: which arguments are ``steady``, as numbers among a program's inputs, where
    results may stay, and the module's own weights, which count the writes to them. ``timestep``:
    the argument that goes through the timesteps of a loop, if there is one."""

    steady: tuple[int, ...]
    place: Kept
    weights: Sequence[Tensor]
    tally: Tally
    timestep: int | None = None


class Hoisted:
    """The prologue of one bound program, and whether its results are there."""

    def __init__(self, prologue: Prologue, hoist: Hoist | None) -> None:
        self.steps, self.kept = prologue.steps, prologue.kept
        self._weights = [hoist.weights[n] for n in prologue.weights] if hoist else []
        self._place = hoist.place if hoist else Kept(torch.device("cpu"))
        self._tally = hoist.tally if hoist else Tally()
        self._memory = self._place.memory
        self._next: Held | None = None  # what the prologue is about to leave

    def linked(self, size_bytes: int) -> Tensor:
        """Return memory for the results. Where it grows elsewhere, others are bound to the old
        one."""
        self._memory = self._place.reserve(size_bytes)
        return self._memory

    @property
    def memory(self) -> Tensor:
        """Return what the place has, which others of its programs share."""
        return self._place.memory

    @property
    def has_moved(self) -> bool:
        """Say whether results of this one would lie in memory that is no longer the place's."""
        now = self._place.memory
        if self._memory is now or not self.kept:
            return False
        return self._memory.data_ptr() != now.data_ptr()

    def is_there(self, stamp: Stamp | None) -> bool:
        """Tell whether the results are what the prologue would give now. If not, all that lies in
        its place is forgotten: it is about to run."""
        if not self.steps:
            return True
        held = self._place.held
        if held is not None and stamp is not None and held.is_for(self, stamp):
            self._tally.num_reuses += 1
            return True
        self._place.held = None
        self._next = held_now(self, stamp, self._weights)  # as things are before it runs
        return False

    def has_run(self) -> None:
        """The prologue has, to its end."""
        self._place.held, self._next = self._next, None
        self._tally.num_runs += 1


def stamp_of(loop: int, tensors: Sequence[Tensor]) -> Stamp | None:
    """None for tensors whose writes nobody counts."""
    return None if versions_of(tensors) is None else Stamp(loop, tuple(tensors))


def held_now(holder: Hoisted | None, stamp: Stamp | None, weights: Sequence[Tensor]) -> Held | None:
    """Note what results come from that are computed now; None where nobody could tell later."""
    if stamp is None:
        return None
    writes = KnownWrites([*stamp.tensors, *weights])
    memory = KnownMemory(stamp.tensors, keeps=True)
    return Held(holder, stamp, Sources(writes, memory)) if writes.are_counted else None


def prologue_of(
    program: Program,
    steps: Sequence[Step | None],
    steady: Collection[int],
    planned: Collection[str],
) -> Prologue:
    """Find the prologue of ``steps``, which run at one shape. ``steady``: arguments, as numbers
    among the inputs.

    A step belongs to it if it reads nothing else and its results lie in planned memory, as those of
    kernels and of ``planned`` library calls do. Kernels that check indices stay behind, since every
    call has to raise again. A program that writes to its arguments or weights has no prologue.
    What is made of quantised weights alone, or is a weight in another type, is not left to others:
    it would be the weights in full.
    """
    if not steady or writes_inputs(program, steps):
        return Prologue()
    found, kept = _small(program, steps, steady, planned)
    read = {
        program.buffers[n].index
        for p in found
        for n in read_by(steps[p])
        if program.buffers[n].kind == "input"
    }
    if not kept or read.isdisjoint(steady):
        return Prologue()
    return Prologue(tuple(found), kept, weights_of(program, read - set(steady)))


def _small(
    program: Program,
    steps: Sequence[Step | None],
    steady: Collection[int],
    planned: Collection[str],
) -> tuple[list[int], tuple[int, ...]]:
    """Return the positions of steps that may move, and what they leave, no weight in full."""
    able, in_full = list(steps), dequantised(program, steps)
    while True:
        found = movable(program, able, read_by_all(program, steady), planned)
        kept = kept_of(steps, found)
        if in_full.isdisjoint(kept):
            return found, kept
        left = in_full.intersection(kept)
        able = [None if left.intersection(written(step)) else step for step in able]


def dequantised(program: Program, steps: Sequence[Step | None]) -> set[int]:
    """Return the buffers that come of weights alone, quantised ones among them, or are weights in
    another type."""
    weights = read_by_all(program, ())
    alone, codes = {*weights}, {n for n in weights if program.buffers[n].dtype in CODES}
    found = set[int]()
    for step in steps:
        read = set(read_by(step))
        if read and alone >= read:
            alone.update(written(step))
            is_cast = weights >= read and _are_casts(program, read, written(step))
            if is_cast or not (codes | found).isdisjoint(read):
                found.update(written(step))
    return found


def _are_casts(program: Program, read: Collection[int], made: Collection[int]) -> bool:
    """Tell whether a step makes one weight in another type."""
    if len(read) != 1 or len(made) != 1:
        return False
    (weight, own) = (program.buffers[n] for n in (*read, *made))
    is_float = weight.dtype.is_floating_point and own.dtype.is_floating_point
    return is_float and weight.dtype != own.dtype and product(weight.shape) == product(own.shape)


def writes_inputs(program: Program, steps: Sequence[Step | None]) -> bool:
    return any(program.buffers[n].kind == "input" for step in steps for n in written(step))


def read_by_all(program: Program, steady: Collection[int]) -> set[int]:
    """The buffers of weights and of arguments that are ``steady``."""
    return {
        n
        for n, b in enumerate(program.buffers)
        if b.kind == "input" and (program.inputs[b.index].is_state or b.index in steady)
    }


def movable(
    program: Program, steps: Sequence[Step | None], known: set[int], planned: Collection[str]
) -> list[int]:
    """Positions of steps that read nothing but buffers that are ``known``, to which what they write
    is added. Of a buffer that several steps write, each a part, all move or none does."""
    writers = Counter(n for step in steps for n in written(step))
    apart = set[int]()
    while True:
        left, made, found = Counter(writers), set(known), list[int]()
        for position, step in enumerate(steps):
            if step is None or not _may_move(program, step, planned):
                continue
            into = written(step)
            if not made >= set(read_by(step)) or apart.intersection(into):
                continue
            if all(program.buffers[n].kind == "arena" for n in into):
                found.append(position)
                left.subtract(into)
                made.update(n for n in into if not left[n])
        halves = {n for p in found for n in written(steps[p]) if left[n]}
        if not halves:
            known.update(made)
            return found
        apart |= halves


def kept_of(steps: Sequence[Step | None], found: Sequence[int]) -> tuple[int, ...]:
    """The buffers that steps leave to the others."""
    wanted = {n for p, step in enumerate(steps) if p not in found for n in read_by(step)}
    return tuple(dict.fromkeys(n for p in found for n in written(steps[p]) if n in wanted))


def _may_move(program: Program, step: Step, planned: Collection[str]) -> bool:
    if isinstance(step, CallStep):
        return step.op in planned
    return not any(scratch.faults for scratch in program.sources[step.kernel].scratch)


def written(step: Step | None) -> Sequence[int]:
    """The buffers that a step writes."""
    if isinstance(step, KernelStep):
        return step.writes
    if step is None:
        return ()
    return [step.inputs[0].buffer] if step.op == "write" else [n for n in step.outputs if n >= 0]


def read_by(step: Step | None) -> Sequence[int]:
    """The buffers that it reads."""
    if isinstance(step, KernelStep):
        return [n for n in step.buffers if n not in step.writes]
    return () if step is None else [ref.buffer for ref in step.inputs]


def weights_of(program: Program, weights: Collection[int]) -> tuple[int, ...]:
    """A merged weight as its parts: whoever writes to it writes to one of them."""
    groups = (program.inputs[number].merged or (number,) for number in sorted(weights))
    return tuple(dict.fromkeys(number for group in groups for number in group))
