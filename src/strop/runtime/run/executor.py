"""Runs a program at one shape: everything that depends on sizes is worked out once, here.

``Bound`` holds evaluated sizes, arena offsets, argument arrays and ready-made tensor views. A run
patches the few pointers that change (arguments, results, what library calls allocate) and walks
a list of closures.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from strop.errors import ShapeError
from strop.ir.dims import Expr
from strop.ir.ops import OF_ROWS
from strop.ir.program import CallStep, KernelStep, Program, Step, TensorRef
from strop.ir.source import KernelSource
from strop.runtime.build.loader import BoundKernel, KernelLoader
from strop.runtime.build.native import BoundKernel as NativeKernel
from strop.runtime.loop.hoisting import (
    Hoist,
    Hoisted,
    Moment,
    Stamp,
    prologue_of,
    read_by,
)
from strop.runtime.loop.timetable import Part, Timetable, timed_of
from strop.runtime.run import graph_keep_alive, own_calls
from strop.runtime.run.bounds_checks import BoundsChecks
from strop.runtime.run.cpu_runs import FIRST, Run, of_many, of_one
from strop.runtime.run.folded_taps import FoldedTaps
from strop.runtime.run.layouts import is_laid_out, laid_out, reshaped
from strop.runtime.run.library_calls import (
    ALLOCATING,
    CUDA_PLANNED_OUT,
    PLANNED_OUT,
    Getter,
    allocating_on,
    in_own_memory,
)
from strop.runtime.run.limits import needs_wide_indices
from strop.runtime.run.memory import (
    KEPT_BYTES,
    Interval,
    Workspace,
    freeing,
    most_alive,
    plan_arena,
    shared,
)
from strop.runtime.run.narrow_convolution import NarrowConvolution
from strop.runtime.run.wide_attention import WideAttention, working_bytes

Around = Callable[[int, Callable[[], None]], None]  # runs step n by calling what it is given


class KeepAlive(NamedTuple):
    """What the kernels of one run point to."""

    faults: BoundsChecks
    memory: tuple[object, ...]

    def check(self) -> None:
        self.faults.check()


class Bound:
    """A program at one shape on one stream. Not thread-safe: the dispatcher serialises runs."""

    def __init__(
        self,
        program: Program,
        env: Mapping[str, int],
        state: Sequence[Tensor | None],
        kernels: KernelLoader,
        workspace: Workspace,
        stream: int,
        hoist: Hoist | None = None,
        *,
        in_place: bool = True,
        part: Part | None = None,
    ) -> None:
        """Without ``in_place`` operands of a step are still there when it has run. A ``part`` binds
        some steps alone, for a timetable."""
        self.program, self.env, self.stream = program, env, stream
        self._part = part or Part()
        # None where another step does the work of one
        self.steps = self._part.of(program.at(env)) if part else program.at(env)
        self._state, self._kernels, self._workspace = state, kernels, workspace
        on_cuda = program.device == "cuda"
        self._planned_calls = CUDA_PLANNED_OUT if on_cuda else PLANNED_OUT
        self._allocating_calls = allocating_on(kernels.device) if on_cuda else ALLOCATING
        steady = hoist.steady if hoist else ()
        prologue = prologue_of(program, self.steps, steady, self._planned_calls)
        self.hoisted = Hoisted(prologue, hoist)
        timed = timed_of(program, self.steps, prologue, hoist, self._planned_calls)
        self.timetable = Timetable(program, timed, hoist, env, stream)
        self._is_looked_up = False  # by the latest run
        self._repeated = program.repeated
        early = {*prologue.steps, *timed.steps}
        self._late = [p for p in range(len(self.steps)) if p not in early]
        self._sizes: dict[Expr, int] = {}
        self._shapes = [self._eval_all(b.shape) for b in program.buffers]
        self._strides = [self._eval_all(b.strides) for b in program.buffers]
        self._own = own_calls.chosen(program, self.steps, self._eval_all, kernels.device)
        self._wide = working_bytes(program, self.steps, self._own, self._eval_all)
        self._plan_memory(in_place)
        self._sources = self._built()
        self._faults = BoundsChecks(program, workspace.device)
        self._memory: Tensor | None = None
        self._zeroed: dict[tuple[int, int], Tensor] = {}  # scratch of step and number
        self._arguments = [
            number
            for number, b in enumerate(program.buffers)
            if part is None and b.kind == "input" and not program.inputs[b.index].is_state
        ]
        self.around: Around | None = None  # a debugger's place between the steps

    @property
    def state(self) -> Sequence[Tensor | None]:  # weights by argument
        return self._state

    @property
    def num_launches(self) -> int:
        """Generated kernels and library calls of the latest run, behind what is hoisted."""
        return self._num_late + (0 if self._is_looked_up else len(self.timetable.steps))

    @cached_property
    def _num_late(self) -> int:
        return sum(self.steps[position] is not None for position in self._late)

    @cached_property
    def late_arguments(self) -> list[int]:
        """The arguments, by place, that are read behind what is hoisted."""
        read = {n for position in self._late for n in read_by(self.steps[position])}
        read |= {item.tensor.buffer for item in self.program.returned if item.tensor is not None}
        return [place for place, number in enumerate(self._arguments) if number in read]

    def _eval(self, size: Expr) -> int:
        if size not in self._sizes:
            self._sizes[size] = size.eval(self.env)
        return self._sizes[size]

    def _eval_all(self, sizes: Sequence[Expr]) -> tuple[int, ...]:
        return tuple(self._eval(size) for size in sizes)

    # memory

    def _plan_memory(self, shares: bool) -> None:
        """Offsets of arena buffers and scratch; when each library result is last read."""
        first, last = dict[int, int](), dict[int, int]()
        count = len(self.steps)
        times = {p: p - 2 * count for p in self.hoisted.steps}
        times |= {p: p - count for p in self.timetable.steps} | {p: p for p in self._late}
        for position, time in times.items():  # in the order of a run
            step = self.steps[position]
            for touched in step.touched if step else ():
                first.setdefault(touched, time)
                last[touched] = time
        for item in self.program.returned:
            if item.tensor is not None:
                last[item.tensor.buffer] = len(self.program.steps)
        alive = {
            number: Interval(first[number], last[number], self._size_bytes(number))
            for number, buffer in enumerate(self.program.buffers)
            if buffer.kind == "arena"
            and number in first
            and number not in self.hoisted.kept
            and number not in self._part.tensors
        }
        steps = [self.steps[position] for position in times] if shares else []
        pairs = (pair for step in steps if step is not None for pair in step.in_place)
        placed, host = shared(alive, pairs)
        owners = [("buffer", number, 0) for number in placed]
        intervals = list(placed.values())
        for position, step in enumerate(self.steps):
            for index, size in enumerate(self._scratch_bytes(position, step)):
                intervals.append(Interval(times[position], times[position], size))
                owners.append(("scratch", position, index))
        offsets, self.arena_bytes = plan_arena(intervals)
        self._offsets = dict(zip(owners, offsets, strict=True))
        self._offsets |= {
            ("buffer", new, 0): self._offsets["buffer", old, 0] for new, old in host.items()
        }
        self._dead: dict[int, list[int]] = defaultdict(list)  # by the step that reads it last
        allocated = []
        for number, buffer in enumerate(self.program.buffers):
            if buffer.kind == "call" and number in last:
                self._dead[last[number]].append(number)
                size = self._size_bytes(number)
                allocated.append(Interval(first[number], last[number], size))
        self.call_bytes = most_alive(allocated)  # of what library calls allocate
        kept = [Interval(0, 0, self._size_bytes(number)) for number in self.hoisted.kept]
        self._kept_offsets, self.kept_bytes = plan_arena(kept)

    def _size_bytes(self, number: int) -> int:
        return math.prod(self._shapes[number]) * self.program.buffers[number].dtype.itemsize

    def _scalars(self, step: KernelStep) -> list[int]:
        source = self.program.sources[step.kernel]
        scalars = list(self._eval_all(step.scalars))
        if source.split is not None:
            named = _named(scalars)
            scalars.append(self._kernels.splits(source.split, named))
        return scalars

    def _scratch_bytes(self, position: int, step: Step | None) -> list[int]:
        """Sizes of the scratch that need not be zero; zeroed scratch is kept apart."""
        if not isinstance(step, KernelStep):
            return [self._wide[position]] if position in self._wide else []
        source = self.program.sources[step.kernel]
        named = _named(self._scalars(step), has_splits=source.split is not None)
        return [0 if s.zeroed else s.numel.eval(named) * s.dtype.itemsize for s in source.scratch]

    # linking

    def _built(self) -> dict[int, KernelSource]:
        """The kernels that run at this shape, by step, and made: a form that no shape before has
        needed, and that the background has not come to, is built now."""
        found = {
            position: self._source(step)
            for position, step in enumerate(self.steps)
            if isinstance(step, KernelStep)
        }
        own = chain.from_iterable(each.sources for each in self._own.values())
        self._kernels.build(list(dict.fromkeys([*found.values(), *own])))
        return found

    def _source(self, step: KernelStep) -> KernelSource:
        source = self.program.sources[step.kernel]
        if self.program.device == "cuda" and needs_wide_indices(
            self._scalars(step), [math.prod(self._shapes[number]) for number in step.buffers]
        ):
            return source.widened()
        return source

    def _link(self, memory: Tensor) -> None:
        """Build argument arrays and views over this arena."""
        # where nothing lies in it, it is not to be kept alive either
        self._memory = memory if self.arena_bytes else memory.new_empty(0)
        self._slots: list[Tensor | None] = [None] * len(self.program.buffers)
        self._patches: dict[int, list[tuple[BoundKernel, int, int]]] = defaultdict(list)
        for number, buffer in enumerate(self.program.buffers):
            if ("buffer", number, 0) in self._offsets:
                self._slots[number] = self._view(number, memory, self._offsets["buffer", number, 0])
            elif buffer.kind == "input" and self.program.inputs[buffer.index].is_state:
                self._slots[number] = self._state[buffer.index]
        kept = self.hoisted.linked(self.kept_bytes)
        for number, offset in zip(self.hoisted.kept, self._kept_offsets, strict=True):
            self._slots[number] = self._view(number, kept, offset)
        for number, tensor in self._part.tensors.items():
            self._slots[number] = tensor
        self._steps = [self._link_step(position, step) for position, step in enumerate(self.steps)]
        kinds = [buffer.kind for buffer in self.program.buffers]
        self._results = [
            (n, self._shapes[n], self._strides[n], self.program.buffers[n].dtype)
            for n, kind in enumerate(kinds)
            if kind == "result"
        ]
        # arguments too: a backward's are what its forward has kept, half of the device's memory
        passing = (n for n, kind in enumerate(kinds) if kind in ("call", "result"))
        self._released = [*self._arguments, *passing]
        self._return = [self._link_returned(n) for n in range(len(self.program.returned))]

    def _view(self, number: int, memory: Tensor, offset: int) -> Tensor:
        flat = memory[offset : offset + self._size_bytes(number)]
        flat = flat.view(self.program.buffers[number].dtype)
        return flat.as_strided(self._shapes[number], self._strides[number])

    def _link_step(self, position: int, step: Step | None) -> Callable[[], None]:
        if step is None:
            return _nothing
        run = (
            self._link_call(position, step)
            if isinstance(step, CallStep)
            else self._link_kernel(position, step)
        )
        dead = self._dead.get(position)
        return freeing(run, self._slots, dead) if dead else run

    def _link_kernel(self, position: int, step: KernelStep) -> Callable[[], None]:
        if not any(math.prod(self._shapes[n]) for n in step.writes):
            return _nothing  # grids are not empty, and kernels divide by sizes
        source, scalars = self._sources[position], self._scalars(step)
        moves = [
            self._eval(offset) * self.program.buffers[number].dtype.itemsize
            for number, offset in zip(step.buffers, step.offsets, strict=True)
        ]
        pointers = [
            self._pointer(number) + move for number, move in zip(step.buffers, moves, strict=True)
        ]
        named = _named(scalars, has_splits=source.split is not None)
        for index, scratch in enumerate(source.scratch):
            if scratch.faults:
                pointers.append(self._faults.pointer(position))
                continue
            pointers.append(
                self._scratch_pointer(
                    position, index, scratch.zeroed, scratch.numel.eval(named), scratch.dtype
                )
            )
        bound = self._kernels.bind(
            source, pointers, scalars, self.stream, early=self._follows_a_kernel(position)
        )
        for slot, number in enumerate(step.buffers):
            if self._slots[number] is None:
                self._patches[number].append((bound, slot, moves[slot]))
        return bound

    def _follows_a_kernel(self, position: int) -> bool:
        """Whether the launch before is one of ours. A library's kernel lets nobody start before it
        has ended; the caller's may write weights, which a product fetches before it waits."""
        parts = (self.hoisted.steps, self.timetable.steps, self._late)
        mine = next(part for part in parts if position in part)
        before = next((p for p in reversed(mine[: mine.index(position)]) if self.steps[p]), -1)
        return before in self._own or (before >= 0 and isinstance(self.steps[before], KernelStep))

    def _pointer(self, number: int) -> int:
        tensor = self._slots[number]
        return 0 if tensor is None else tensor.data_ptr()

    def _scratch_pointer(
        self, position: int, index: int, zeroed: bool, numel: int, dtype: torch.dtype
    ) -> int:
        assert self._memory is not None
        if zeroed:
            if (position, index) not in self._zeroed:
                made = torch.zeros(numel, dtype=dtype, device=self._memory.device)
                self._zeroed[position, index] = made
            return self._zeroed[position, index].data_ptr()
        return self._memory.data_ptr() + self._offsets["scratch", position, index]

    def _getter(self, ref: TensorRef) -> Getter:
        """How a library call gets at a piece of a buffer: ready-made where memory stands still."""
        shape, strides = self._eval_all(ref.shape), self._eval_all(ref.strides)
        offset, number = self._eval(ref.offset), ref.buffer
        is_whole = shape == self._shapes[number] and not offset
        fixed = self._slots[number]
        if fixed is not None:
            if (
                is_whole
                and strides == self._strides[number]
                and self.program.buffers[number].kind == "input"
            ):
                view = fixed  # a weight may lie in memory in another order than it was traced
            else:
                view = fixed.as_strided(shape, strides, fixed.storage_offset() + offset)
            return lambda: view
        slots = self._slots
        if is_whole and strides == self._strides[number]:
            return lambda: slots[number]  # type: ignore[return-value]

        def get() -> Tensor:
            tensor = slots[number]
            assert tensor is not None
            return tensor.as_strided(shape, strides, tensor.storage_offset() + offset)

        return get

    def _link_call(self, position: int, step: CallStep) -> Callable[[], None]:
        attrs = {name: self._concrete(value) for name, value in step.attrs}
        getters = [self._getter(ref) for ref in step.inputs]
        if step.op == "aten":
            is_given = [ref.buffer in self._arguments for ref in step.inputs]
            getters = in_own_memory(attrs["target"], getters, is_given)
        if step.op in self._planned_calls:
            return self._link_planned(position, step, getters, attrs)
        call, outputs = self._allocating_calls[step.op](attrs), step.outputs
        if position in self._own:
            call = self._own_call(position, step, call)
        elif position in self._wide:
            assert self._memory is not None
            memory = self._memory[self._offsets["scratch", position, 0] :]
            call = WideAttention(attrs["scale"], self._kernels, self.stream, memory)
        single = attrs.get("single", True)
        slots = self._slots
        targets = [(n, self._strides[n], self._patches[n]) for n in outputs]

        def run() -> None:
            made = call([get() for get in getters])
            for (number, strides, patches), value in zip(
                targets, (made,) if single else made, strict=False
            ):
                if number >= 0:
                    slots[number] = laid = laid_out(value, strides)
                    pointer = laid.data_ptr()
                    for kernel, place, move in patches:
                        kernel.set_pointer(place, pointer + move)

        return run

    def _own_call(self, position: int, step: CallStep, library: own_calls.Call) -> own_calls.Call:
        return own_calls.instead(
            step,
            self._own[position],
            library,
            self._kernels,
            self.stream,
            early=self._follows_a_kernel(position),
        )

    def _link_planned(
        self, position: int, step: CallStep, getters: list[Getter], attrs: Mapping[str, Any]
    ) -> Callable[[], None]:
        call, (number,) = self._planned_calls[step.op](attrs), step.outputs
        if step.kernel is not None:
            source = self.program.sources[step.kernel]
            kernel = FoldedTaps if step.op == "folded_taps" else NarrowConvolution
            call = kernel(source, call, self._kernels, self.stream)
        elif position in self._own:
            call = self._own_call(position, step, call)
        shape = self._shapes[number]
        if step.op in OF_ROWS:
            shape = (math.prod(shape[:-1]), shape[-1])
        fixed, slots = self._slots[number], self._slots
        if fixed is not None:
            out = reshaped(fixed, shape)
            return lambda: call([get() for get in getters], out)
        return lambda: call([get() for get in getters], reshaped(slots[number], shape))

    def _concrete(self, value: Any) -> Any:
        if isinstance(value, Expr):
            return self._eval(value)
        return tuple(self._concrete(v) for v in value) if isinstance(value, tuple) else value

    def _link_returned(self, place: int) -> Callable[[], Any]:
        item = self.program.returned[place]
        if item.tensor is not None:
            get = self._getter(item.tensor)
            return (lambda: get().detach()) if self.program.is_shared(place) else get
        value = item.value if item.size is None else self._eval(item.size)
        return lambda: value

    # running

    def run(
        self, inputs: Sequence[Tensor], stamp: Stamp | None = None, moment: Moment | None = None
    ) -> list[Any]:
        """``inputs``: the arguments that are not state, in order; ``stamp``: of the steady ones;
        ``moment``: the place of the call in a denoise loop."""
        with self._workspace.lock:
            self._begin(inputs)
            if not self.hoisted.is_there(stamp):
                self._walk(self.hoisted.steps)
                self.hoisted.has_run()
            if (rows := self.timetable.rows(moment)) is None:
                self._walk(self.timetable.steps)
            else:
                self.look_up(rows)
            self._is_looked_up = rows is not None
            results = self._run_rest()
            if rows is None:
                self.make_timetable(moment, inputs)
            if self.is_large:
                self.let_go()
            return results

    def run_prologue(self, inputs: Sequence[Tensor]) -> None:
        """The first part of ``run`` alone."""
        with self._workspace.lock:
            self._begin(inputs)
            self._walk(self.hoisted.steps)

    def make_timetable(self, moment: Moment | None, inputs: Sequence[Tensor]) -> None:
        """For the steps behind this call, which had to compute its own. Nobody waits for it."""
        self.timetable.make(moment, partial(self.holding, inputs), self._bind_part)

    def look_up(self, rows: Sequence[Tensor]) -> None:
        """What depends on the timestep comes from a table."""
        self.timetable.note_use()
        for place, row in zip(self.of_timestep, rows, strict=True):
            place.copy_(row)

    def holding(self, inputs: Sequence[Tensor], number: int) -> Tensor:
        """What a buffer holds between two parts of a run with these arguments."""
        if number in self._arguments:
            return inputs[self._arguments.index(number)]
        return self.contents(number)

    @property
    def of_timestep(self) -> list[Tensor]:
        """Where what depends on the timestep lies."""
        return [self.contents(number) for number in self.timetable.timed.kept]

    def _bind_part(self, env: Mapping[str, int], part: Part) -> Callable[[], None]:
        workspace = Workspace(self._workspace.device)  # as another run is in the middle of its own
        bound = Bound(
            self.program, env, self._state, self._kernels, workspace, self.stream, part=part
        )

        def run() -> None:
            with workspace.lock:
                bound._begin(())
                bound._walk(bound._late)

        return run

    def run_timed(self, inputs: Sequence[Tensor]) -> None:
        """What depends on the timestep alone."""
        with self._workspace.lock:
            self._begin(inputs)
            self._walk(self.timetable.steps)

    def run_rest(self, inputs: Sequence[Tensor]) -> list[Any]:
        """What is left."""
        with self._workspace.lock:
            self._begin(inputs)
            return self._run_rest()

    @property
    def is_large(self) -> bool:
        """Whether it has memory of its own, for the time of a run."""
        return self.program.device == "cuda" and self.arena_bytes > KEPT_BYTES

    def let_go(self) -> None:
        """The next run links anew."""
        self._memory = None
        self._slots, self._steps, self._return = [], [], []
        self._patches = defaultdict(list)

    @property
    def has_moved(self) -> bool:
        """Whether this was linked to memory that is no longer that of its stream."""
        if self._memory is None or self.hoisted.has_moved:
            return True
        return self.arena_bytes > 0 and self._memory is not self._workspace.memory

    def _begin(self, inputs: Sequence[Tensor]) -> None:
        self.raise_faults()  # on a GPU those of earlier runs
        memory = (
            torch.empty(self.arena_bytes, dtype=torch.uint8, device=self._workspace.device)
            if self.is_large  # in a capture, from the graph's own memory
            else self._workspace.reserve(self.arena_bytes, self)
        )
        if self.is_large or self.has_moved:
            self._link(memory)
        if graph_keep_alive.are_wanted():
            lent = None if self.is_large else self._memory
            graph_keep_alive.note(KeepAlive(self._faults, (self, lent, self._zeroed)))
        for number, tensor in zip(self._arguments, inputs, strict=True):
            self._fill(number, tensor)

    def _run_rest(self) -> list[Any]:
        slots = self._slots
        device = self._workspace.device
        for number, shape, strides, dtype in self._results:
            self._put(number, torch.empty_strided(shape, strides, dtype=dtype, device=device))
        self._walk(self._late)
        returned = [get() for get in self._return]
        for place, first in self._repeated:
            returned[place] = returned[first]
        for number in self._released:
            slots[number] = None
        if self.program.device == "cpu":
            self.raise_faults()
        return returned

    def straight(self, structured: Callable[[list[Any]], Any]) -> Run | None:
        """``run`` without a walk, for a program that is nothing but kernels on a CPU; else None.

        Gives what ``structured`` makes of the results, or None where working memory has moved, or
        a debugger is here. To be asked for after a run.
        """
        refs = [item.tensor for item in self.program.returned if item.tensor is not None]
        numbers = [ref.buffer for ref in refs]
        is_plain = len(refs) == len(self.program.returned) and all(map(self._is_whole, refs))
        if self.hoisted.steps or self.timetable.steps:
            return None
        is_native = all(isinstance(step, NativeKernel) or step is _nothing for step in self._steps)
        if not (is_native and is_plain and sorted(numbers) == [n for n, *_ in self._results]):
            return None
        looks = {n: (shape, strides, dtype) for n, shape, strides, dtype in self._results}
        kernels = [step for step in self._steps if isinstance(step, NativeKernel)]
        patches = [
            (which, kernel, place, move)
            for which, number in enumerate([*self._arguments, *numbers])
            for kernel, place, move in self._patches[number]
            if isinstance(kernel, NativeKernel)
        ]
        uses_memory = self.arena_bytes or self._zeroed or self._faults
        is_from_one_to_one = [(which, move) for which, _, _, move in patches] == [(0, 0), (1, 0)]
        if len(kernels) == 1 and is_from_one_to_one and not uses_memory and structured is FIRST:
            places = [place for _, _, place, _ in patches]
            return of_one(self, kernels[0], looks[numbers[0]], *places)
        memory = self._memory if self.arena_bytes else None
        return of_many(
            self,
            kernels,
            [looks[n] for n in numbers],
            patches,
            len(self._arguments),
            structured,
            self._workspace,
            memory,
            self._faults,
        )

    def _is_whole(self, ref: TensorRef) -> bool:
        shape, strides = self._eval_all(ref.shape), self._eval_all(ref.strides)
        is_all = (shape, strides) == (self._shapes[ref.buffer], self._strides[ref.buffer])
        return is_all and not self._eval(ref.offset)

    def raise_faults(self) -> None:
        """Raise IndexError if a kernel has been asked to look outside of a tensor."""
        self._faults.check()

    def _walk(self, positions: Sequence[int]) -> None:
        steps = self._steps
        if self.around is None:
            for position in positions:
                steps[position]()
            return
        for position in positions:
            self.around(position, steps[position])

    def contents(self, number: int) -> Tensor:
        """What buffer ``number`` holds between two steps of a run, in its logical shape."""
        tensor = self._slots[number]
        assert tensor is not None, number
        return tensor

    def in_layout(self, tensors: Sequence[Tensor | None]) -> list[Tensor]:
        """Arguments by index -> those that ``run`` wants, copied where laid out otherwise."""
        result = []
        for number in self._arguments:
            tensor = tensors[self.program.buffers[number].index]
            if tensor is None:  # a size, or another number: nothing reads it
                tensor = torch.empty(0)
            result.append(laid_out(tensor, self._strides[number]))
        return result

    def _fill(self, number: int, tensor: Tensor) -> None:
        if tensor.stride() != self._strides[number] and not is_laid_out(
            tensor, self._strides[number]
        ):
            raise ShapeError(
                f"argument {number} has strides {tensor.stride()}, the plan {self._strides[number]}"
            )
        self._put(number, tensor)

    def _put(self, number: int, tensor: Tensor) -> None:
        self._slots[number] = tensor
        pointer = tensor.data_ptr()
        for kernel, place, move in self._patches[number]:
            kernel.set_pointer(place, pointer + move)


def _nothing() -> None:
    """A kernel that has no element to write, or whose work another one does."""


def _named(scalars: Sequence[int], *, has_splits: bool = False) -> dict[str, int]:
    names = {f"s{i}": value for i, value in enumerate(scalars)}
    return names | {"splits": scalars[-1]} if has_splits else names
