"""A program runs here at one shape: everything that depends on sizes is worked out once.

``Bound`` has a plan (``shape_plan.py``) and is linked to memory (``link.py``). A run patches the
few pointers that change (arguments, results, what library calls allocate) and walks a list of
closures.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from strop.ir.program import Program, Step
from strop.runtime.build.loader import KernelLoader
from strop.runtime.derived.packed_weights import PackedWeights
from strop.runtime.loop.hoisting import Hoist, Hoisted, Moment, Stamp, read_by
from strop.runtime.loop.timetable import Timetable, TimetablePart
from strop.runtime.run import cpu_runs, graph_keep_alive
from strop.runtime.run.bounds_checks import BoundsChecks
from strop.runtime.run.fewer_threads import shares_of
from strop.runtime.run.layouts import ArgumentLayouts, read_as
from strop.runtime.run.link import Linked, Resources, link
from strop.runtime.run.ready_results import Stage, Told, places_of, stages_of
from strop.runtime.run.replay_gain import reason_against
from strop.runtime.run.shape_plan import ShapePlans
from strop.runtime.run.sizes import Look
from strop.runtime.run.weight_stream import Streaming
from strop.runtime.run.workspace import KEPT_BYTES, Workspace

Around = Callable[[int, Callable[[], None]], None]  # runs step n by calling what it is given


class KeepAlive(NamedTuple):
    """The kernels of one run point to these."""

    faults: BoundsChecks
    memory: tuple[object, ...]

    def check(self) -> None:
        self.faults.check()


class Bound:
    """This is a program at one shape on one stream. It is not thread-safe: the dispatcher
    serialises runs."""

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
        part: TimetablePart | None = None,
        plans: ShapePlans | None = None,
        streaming: Streaming | None = None,
        packed: PackedWeights | None = None,
        has_free: bool = False,
    ) -> None:
        """Plan the program at these sizes, and build a kernel that no shape before has needed, and
        that the background has not come to. Unless ``in_place``, operands of a step are still there
        when it has run. A ``part`` binds some steps alone, for a timetable. ``plans``: those of
        this program so far. ``streaming`` has weights in place when a step wants them; ``packed``
        holds those that are packed, for all programs of one module. With ``has_free`` this serves
        all free sizes, which it reads off its arguments: a tensor that stands for a number has
        another shape."""
        self.program, self.env = program, env
        self._plans = ShapePlans() if plans is None else plans
        self.plan = self._plans.plan(
            program, env, kernels, hoist, part, shares=in_place, has_free=has_free
        )
        self._streaming = streaming
        if streaming is not None:
            self.plan = replace(self.plan, early=self.plan.early - streaming.fences)
        memory = self.plan.memory
        self.arena_bytes, self.kept_bytes = memory.arena_bytes, memory.kept_bytes
        self.call_bytes = memory.call_bytes
        self.hoisted = Hoisted(self.plan.order.prologue, hoist)
        self.timetable = Timetable(program, self.plan.order.timed, hoist, env, stream)
        kernels.build(self.plan.sources)
        faults, lent = BoundsChecks(program, workspace.device), part.tensors if part else {}
        self._packed = PackedWeights() if packed is None else packed
        stays = None if streaming is not None else self._packed
        self._resources = Resources(state, kernels, stream, lent, faults, {}, stays)
        self._workspace = workspace
        self._linked: Linked | None = None
        self._shares: dict[int, tuple[int, ...]] = {}
        self._is_looked_up = False  # by the latest run
        self._repeated = program.repeated
        self.around: Around | None = None  # a debugger's place between the steps

    @property
    def state(self) -> Sequence[Tensor | None]:  # weights by argument
        return self._resources.state

    @property
    def steps(self) -> Sequence[Step | None]:  # None where another step does the work of one
        return self.plan.order.steps

    @property
    def num_launches(self) -> int:
        """Count the generated kernels and library calls of the latest run, behind what is
        hoisted."""
        return self._num_late + (0 if self._is_looked_up else len(self.timetable.steps))

    @cached_property
    def _num_late(self) -> int:
        return sum(self.steps[position] is not None for position in self.plan.order.late)

    @cached_property
    def late_arguments(self) -> list[int]:
        """Return the arguments, by place, that are read behind what is hoisted."""
        read = {n for position in self.plan.order.late for n in read_by(self.steps[position])}
        read |= {item.tensor.buffer for item in self.program.returned if item.tensor is not None}
        return [place for place, number in enumerate(self.plan.arguments) if number in read]

    # memory

    @property
    def working_bytes(self) -> int:
        """Return the memory that a run takes beside arguments and weights: that of its values, of
        those that library calls allocate, and of what outlives it."""
        return self.arena_bytes + self.call_bytes + self.kept_bytes

    @property
    def is_large(self) -> bool:
        """Say whether it has memory of its own, for the time of a run."""
        return self.program.device == "cuda" and self.arena_bytes > KEPT_BYTES

    @property
    def against_keeping(self) -> str:
        """Return why no CUDA graph is to keep its working memory, or nothing."""
        if not self.is_large:
            return ""
        size = f"{self.arena_bytes / 2**30:.1f} GiB"
        return f"its working memory, {size}, is free for others between calls"

    @cached_property
    def against_graph(self) -> str:
        """Return why no CUDA graph is to run this, or nothing."""
        return self.against_keeping or reason_against(self.plan)

    @property
    def has_moved(self) -> bool:
        """Say whether this was linked to memory that is no longer that of its stream."""
        linked = self._linked
        if linked is None or self.hoisted.has_moved:
            return True
        return self.arena_bytes > 0 and not self._workspace.is_at(linked.memory, self.arena_bytes)

    def let_go(self) -> None:
        """Have the next run link anew."""
        self._linked = None

    def _link(self, memory: Tensor) -> Linked:
        kept = self.hoisted.linked(self.kept_bytes)
        self._linked = link(self.plan, self._resources, memory, kept)
        self._shares = {}
        return self._linked

    def shares(self, full: int) -> tuple[int, ...]:
        """Return with which numbers of threads below ``full`` a run on a CPU gives the same bits.
        It is to be asked for after a run; the first time, this takes about as long as some."""
        linked, known = self._linked, self._shares
        if linked is None:  # nothing is known before the next run
            return ()
        if full not in known:
            calls = [call for call in linked.calls if call is not None]
            known[full] = shares_of(calls, full) if len(calls) == len(linked.calls) else ()
        return known[full]

    # running

    def run(
        self,
        inputs: Sequence[Tensor],
        stamp: Stamp | None = None,
        moment: Moment | None = None,
        told: Told | None = None,
    ) -> list[Any]:
        """Run all parts. ``inputs`` are the arguments that are not state, in order; ``stamp`` is
        that of the steady ones; ``moment`` is the place of the call in a denoise loop. ``told``
        gets the results that are complete before the run ends, each when it is."""
        with self._workspace.lock:
            if self._is_captured():
                self._workspace.lend()
            try:
                return self._run(inputs, stamp, moment, told)
            except BaseException as error:
                self.note_failure(error)
                raise

    def _is_captured(self) -> bool:
        """Tell whether somebody else captures this run in a CUDA graph, or is about to: for our own
        graphs the parts of a run are called."""
        if graph_keep_alive.are_wanted():
            return True
        return self.program.device == "cuda" and torch.cuda.is_current_stream_capturing()

    def note_failure(self, error: BaseException) -> None:
        """Let go of what a run has made so far: the next one begins anew."""
        self.let_go()
        if _is_about_memory(error):
            size = f"{self.arena_bytes / 1e6:.1f} MB of working memory"
            sizes = ", ".join(f"{name}={value}" for name, value in self.env.items())
            error.add_note(f"It happened in a run that needs {size} at {sizes}.")

    def walk_late(self, linked: Linked) -> None:
        """Take all steps that a loop does not keep the results of."""
        self._walk(linked, self.plan.order.late)

    def is_linked(self, linked: Linked) -> bool:
        """Tell whether it has not let go of this link since."""
        return self._linked is linked

    def _run(
        self,
        inputs: Sequence[Tensor],
        stamp: Stamp | None,
        moment: Moment | None,
        told: Told | None,
    ) -> list[Any]:
        linked = self._begin(inputs)
        if not self.hoisted.is_there(stamp):
            self._walk(linked, self.hoisted.steps)
            self.hoisted.has_run()
        rows = self.timetable.rows(moment)
        if rows is None:
            rows = self.rows_amid_loop(moment, inputs)
        if rows is None:
            self._walk(linked, self.timetable.steps)
        else:
            self.look_up(rows)
        self._is_looked_up = rows is not None
        results = self._run_late(linked, told)
        if rows is None:
            self.make_timetable(moment, inputs)
        if self.is_large:
            self.let_go()
        return results

    def run_prologue(self, inputs: Sequence[Tensor]) -> None:
        """Run what is hoisted, which is the first part of ``run``, alone."""
        with self._workspace.lock:
            self._walk(self._begin(inputs), self.hoisted.steps)

    def run_timed(self, inputs: Sequence[Tensor]) -> None:
        """Run what depends on the timestep alone."""
        with self._workspace.lock:
            self._walk(self._begin(inputs), self.timetable.steps)

    def run_rest(self, inputs: Sequence[Tensor], told: Told | None = None) -> list[Any]:
        """Run what is left, and return the results."""
        with self._workspace.lock:
            return self._run_late(self._begin(inputs), told)

    def straight(self, structured: Callable[[list[Any]], Any]) -> cpu_runs.Run | None:
        """Return ``run`` without a walk, for a program that is nothing but kernels on a CPU; else
        None.

        It gives what ``structured`` makes of the results, or None where working memory has moved,
        or a debugger is here. It is to be asked for after a run.
        """
        if self._linked is None or self._streaming is not None:
            return None
        return cpu_runs.straight(
            self, self.plan, self._linked, self._resources, self._workspace, structured
        )

    def walking(self, structured: Callable[[list[Any]], Any]) -> cpu_runs.Run | None:
        """Return ``run`` for lone calls of a program in which libraries do a part, or None. It
        gives what ``straight`` does, or NOT_NOW."""
        linked, faults = self._linked, self._resources.faults
        if linked is None or self._streaming is not None:
            return None
        return cpu_runs.of_steps(self, self.plan, linked, faults, self._workspace, structured)

    def raise_faults(self) -> None:
        """Raise IndexError if a kernel has been asked to look outside of a tensor."""
        self._resources.faults.check()

    @property
    def checks_bounds(self) -> bool:
        """Tell whether a kernel could leave a mark for ``raise_faults``."""
        return bool(self._resources.faults)

    def forget_faults(self) -> None:
        """Take away all marks of kernels."""
        self._resources.faults.clear()

    def _begin(self, inputs: Sequence[Tensor]) -> Linked:
        faults = self._resources.faults
        faults.check()  # on a GPU those of earlier runs
        workspace, size_bytes, is_large = self._workspace, self.arena_bytes, self.is_large
        memory = (
            torch.empty(size_bytes, dtype=torch.uint8, device=workspace.device)
            if is_large  # in a capture, from the graph's own memory
            else workspace.reserve(size_bytes, self)
        )
        linked = self._linked
        if linked is None or is_large or self.has_moved:
            linked = self._link(memory)
        if graph_keep_alive.are_wanted():
            lent = None if is_large else linked.memory
            graph_keep_alive.note(KeepAlive(faults, (self, lent, self._resources.zeroed)))
        plan, buffers, layouts = self.plan, self.program.buffers, self._layouts
        read = inputs if layouts.are_met(inputs) else layouts.checked(inputs)
        for number, tensor in zip(plan.arguments, read, strict=True):
            linked.put(number, tensor)
        if plan.free:
            now = linked.told.tell(inputs)
            for number, name in plan.free.buffers:
                linked.put(number, torch.empty((now[name],), dtype=buffers[number].dtype))
        return linked

    def _walk(self, linked: Linked, positions: Sequence[int]) -> None:
        steps = linked.steps
        if self._streaming is not None:
            around = self.around or _launch
            self._streaming.walk(positions, lambda position: around(position, steps[position]))
            return
        if self.around is None:
            for position in positions:
                steps[position]()
            return
        for position in positions:
            self.around(position, steps[position])

    @cached_property
    def _layouts(self) -> ArgumentLayouts:
        arguments, strides = self.plan.arguments, self.plan.sizes.strides
        dtypes = [self.program.buffers[number].dtype for number in arguments]
        return ArgumentLayouts(dtypes, [strides[number] for number in arguments])

    @cached_property
    def _places_of_arguments(self) -> list[int]:
        return [self.program.buffers[number].index for number in self.plan.arguments]

    @cached_property
    def _places(self) -> dict[int, int]:
        return places_of(self.plan)

    @cached_property
    def _stages(self) -> tuple[Stage, ...]:
        return stages_of(self.plan)

    def _run_late(self, linked: Linked, told: Told | None = None) -> list[Any]:
        kept: set[int] = set()  # places of results of which ``told`` has all that there is
        if told is None:
            for number, look in self.plan.results:
                self._make(linked, number, look, None)
            self._walk(linked, self.plan.order.late)
        else:
            kept = self._run_stages(linked, told)
        returned = [None if at in kept else get() for at, get in enumerate(linked.returned)]
        for place, first in self._repeated:
            returned[place] = returned[first]
        for number in self.plan.released:
            linked.slots[number] = None
        if self.program.device == "cpu":
            self._resources.faults.check()
        return returned

    def _run_stages(self, linked: Linked, told: Told) -> set[int]:
        """Run the late steps; returns the places of the results that are kept by who is told of
        them."""
        looks, places, kept = dict(self.plan.results), self._places, set[int]()
        for stage in self._stages:
            for number in stage.made:
                look, place = looks[number], places.get(number)
                home = None if place is None else told.home(place, look)
                self._make(linked, number, look, home)
            self._walk(linked, stage.steps)
            for place in stage.ready:
                if told.ready(place, linked.returned[place]()):
                    kept.add(place)
                    ref = self.program.returned[place].tensor
                    assert ref is not None
                    linked.slots[ref.buffer] = None
        return kept

    def _make(self, linked: Linked, number: int, look: Look, home: Tensor | None) -> None:
        """Have a result written into its home, or into new memory."""
        shape, strides, dtype = look
        if home is None:
            device = self._workspace.device
            home = torch.empty_strided(shape, strides, dtype=dtype, device=device)
        linked.put(number, home)

    # between the parts of a run

    def make_timetable(self, moment: Moment | None, inputs: Sequence[Tensor]) -> None:
        """Make the table for the steps behind this call, which had to compute its own. Nobody waits
        for it."""
        self.timetable.make(moment, partial(self.holding, inputs), self._bind_part)

    def rows_amid_loop(
        self, moment: Moment | None, inputs: Sequence[Tensor]
    ) -> list[Tensor] | None:
        """Make the table before this call, which is not the first of a loop, and return its rows;
        None where there can be none. The prologue has run."""
        if moment is None or not moment.place:
            return None
        self.make_timetable(moment, inputs)
        return self.timetable.rows(moment)

    def look_up(self, rows: Sequence[Tensor]) -> None:
        """Take what depends on the timestep from a table."""
        self.timetable.note_use()
        for place, row in zip(self.of_timestep, rows, strict=True):
            place.copy_(row)

    @property
    def of_timestep(self) -> list[Tensor]:
        """Return the tensors in which what depends on the timestep lies."""
        return [self.contents(number) for number in self.timetable.timed.kept]

    def holding(self, inputs: Sequence[Tensor], number: int) -> Tensor:
        """Return what a buffer holds between two parts of a run with these arguments."""
        if number in self.plan.arguments:
            given = inputs[self.plan.arguments.index(number)]
            return read_as(given, self.program.buffers[number].dtype)
        return self.contents(number)

    def contents(self, number: int) -> Tensor:
        """Return what buffer ``number`` holds between two steps of a run, in its logical shape."""
        assert self._linked is not None
        tensor = self._linked.slots[number]
        assert tensor is not None, number
        return tensor

    def in_layout(self, tensors: Sequence[Tensor | None]) -> list[Tensor]:
        """Take arguments by index, and return those that ``run`` wants, copied where laid out
        otherwise."""
        return self._layouts.laid_out([tensors[place] for place in self._places_of_arguments])

    def _bind_part(self, env: Mapping[str, int], part: TimetablePart) -> Callable[[], None]:
        # another run is in the middle of its own memory
        workspace = Workspace(self._workspace.device, grows=False)
        state, kernels, stream = self.state, self._resources.kernels, self._resources.stream
        bound = Bound(
            self.program,
            env,
            state,
            kernels,
            workspace,
            stream,
            part=part,
            plans=self._plans,
            packed=self._packed,
        )

        def run() -> None:
            with workspace.lock:
                bound._walk(bound._begin(()), bound.plan.order.late)

        return run


def _launch(position: int, step: Callable[[], None]) -> None:
    step()


def _is_about_memory(error: BaseException) -> bool:
    """Say whether memory ran out; of a CPU's, torch says so in the text alone."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)
    )
