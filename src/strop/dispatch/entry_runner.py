"""The entries of one module run here, step by step or from a CUDA graph."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakMethod

import torch
from torch import Tensor

from strop.dispatch.arguments import as_specified, returned
from strop.dispatch.counters import Counters
from strop.dispatch.entry import Entry
from strop.dispatch.fallbacks import Fallbacks
from strop.dispatch.finite import not_finite
from strop.dispatch.flights import Flight
from strop.dispatch.gc_pause import collection_paused
from strop.dispatch.hosted_weights import HostedWeights
from strop.dispatch.module_state import ModuleState
from strop.dispatch.native_look import look_if_ready
from strop.dispatch.placed_weights import place
from strop.dispatch.variants import library_for
from strop.dispatch.weights_budget import WeightsBudget
from strop.options import Options
from strop.runtime.build import driver
from strop.runtime.loop.denoise_loop import DenoiseLoop, moment_of
from strop.runtime.loop.hoisting import Hoist, Kept, Moment, Stamp, stamp_of
from strop.runtime.run import cuda_graphs, graph_keep_alive
from strop.runtime.run.executor import Bound
from strop.runtime.run.graph_capture import NoGraphError
from strop.runtime.run.large_pages import LargePages
from strop.runtime.run.run_order import RunOrder
from strop.runtime.run.workspace import Workspace, workspace_of

if TYPE_CHECKING:
    from strop.backend import Compiled

log = logging.getLogger("strop")


class EntryRunner:
    """This runs the entries of one module. ``forget_others`` is told of an entry for which weights
    have been put at other places."""

    def __init__(
        self,
        name: str,
        options: Options,
        state: ModuleState,
        loop: DenoiseLoop,
        counters: Counters,
        fallbacks: Fallbacks,
        forget_others: Callable[[Entry], None],
        hosted: HostedWeights,
    ) -> None:
        self._name, self._options, self._state = name, options, state
        self.loop, self._counters, self._fallbacks = loop, counters, fallbacks
        # This keeps no dispatcher alive: a module that is restored must be free at once.
        self._forget_others = WeakMethod(forget_others)
        self._hosted = hosted
        self._pages = LargePages()

    def run(self, entry: Entry, tensors: list[Tensor], checked_loop: int | None) -> Any:
        """Run an entry with these tensors. ``checked_loop`` is the denoise loop that this is a call
        of, if the module has been looked at in it; what the call gives may then be kept for later
        ones."""
        if entry.device.type != "cuda":
            return self._run_bound(entry, tensors, 0, checked_loop)
        if torch.cuda.current_device() == entry.device.index:
            return self._run_on_gpu(entry, tensors, checked_loop)
        with torch.cuda.device(entry.device):  # kernels are launched in the current context
            return self._run_on_gpu(entry, tensors, checked_loop)

    def may_run_apart(self, entry: Entry, checked_loop: int | None) -> bool:
        """Say whether a call may run without the dispatcher's lock, beside others. A first run may
        not: the libraries make ready with it, and it is checked. Nor may what writes to arguments
        or weights or draws numbers, or keeps what comes of it for a loop."""
        return (
            entry.device.type == "cpu"
            and entry.device.type not in cuda_graphs.DEVICES
            and entry.is_pure
            and entry.uses > 0
            and 0 in entry.bounds
            and checked_loop is None
            and not self._has_budget  # whose slots are for one run at a time
        )

    def set_out(self, flight: Flight, entry: Entry, tensors: list[Tensor]) -> None:
        """Bind a call to a lane, in which it will run alone, whoever is served meanwhile."""
        bound = self._bound_for(entry, flight.begin(entry.bounds[0].shares))
        counters, weights, variant = self._counters, self._state.tensors, entry.variant

        def run() -> Any:
            results = bound.run(as_specified(tensors, variant.specs))
            counters.launches = bound.num_launches
            specs = variant.out_spec, entry.aliases, variant.same
            return returned(*specs, results, tensors, weights)

        flight.run = run

    def wants_graph(self, entry: Entry) -> bool:
        """Say whether a CUDA graph is to run this: that is so from the second use of a shape on,
        unless the caller captures one, or is about to. None does under a budget for weights: a
        graph would read the host's memory whenever it is replayed."""
        return entry.uses > 1 and self._may_be_captured(entry)

    def _may_be_captured(self, entry: Entry) -> bool:
        if self._has_budget or not entry.has_graph or not self._options.cuda_graphs:
            return False
        return not (torch.cuda.is_current_stream_capturing() or graph_keep_alive.are_wanted())

    def _is_about_to_capture(self, entry: Entry) -> bool:
        """Say whether the next run will be the first from a graph, which makes a timetable of its
        own."""
        is_able = entry.has_graph and self._options.cuda_graphs
        return is_able and entry.uses == 1 and entry.device.type in cuda_graphs.DEVICES

    def has_graph(self, entry: Entry) -> bool:
        """Say whether there is a graph of this entry, which has been captured."""
        return cuda_graphs.pool_of(entry.device).has(self._key(entry))

    def _key(self, entry: Entry) -> tuple[int, int]:
        """Return what the graph of an entry is kept under."""
        return id(self), entry.number

    def may_run_ahead(self, entry: Entry) -> bool:
        """Say whether the module may be looked at while the GPU is at work. A UNet takes a host
        half a millisecond, at each step of a loop, since a user's code may run between two. Where
        something is another, the run is taken back, and the call is done again."""
        return self.may_replay(entry) and self.may_be_taken_back(entry)

    def may_replay(self, entry: Entry) -> bool:
        """Say whether a graph can run that leaves nothing but results and marks.

        What the graph reads must still be there: a Parameter's memory can be given back while it is
        being kept. And a graph must have nothing but results to show for itself; what it keeps is
        its own, and goes with it.
        """
        return (
            entry.is_pure
            and entry.device.type in cuda_graphs.DEVICES
            and not entry.variant.layout_reads
            and entry.variant.wants is None
            and self.wants_graph(entry)
            and self.has_graph(entry)
            and not self._state.has_moved()
        )

    def may_be_taken_back(self, entry: Entry) -> bool:
        """Say whether a replay could be undone: no mark of it could be one of an earlier call."""
        return cuda_graphs.pool_of(entry.device).may_be_taken_back(self._key(entry))

    def take_back(self, entry: Entry) -> None:
        """Undo the latest replay, whose results nobody gets: the module has changed, so an index
        that is outside of an old table may lie within the new one."""
        if entry.device.type in cuda_graphs.DEVICES:
            cuda_graphs.pool_of(entry.device).take_back(self._key(entry))

    def forget(self, devices: Iterable[torch.device], but: Iterable[Entry] = ()) -> None:
        """Drop the graphs of all entries on these devices ``but`` those of some."""
        kept = {self._key(entry) for entry in but}
        for device in devices:
            if device.type in cuda_graphs.DEVICES:
                cuda_graphs.pool_of(device).forget(id(self), kept)

    def _run_on_gpu(self, entry: Entry, tensors: list[Tensor], checked_loop: int | None) -> Any:
        """Run from a graph if there is one, else step by step. Where memory runs out, all graphs
        are dropped, and it runs again, unless other processes would have to do so too."""
        may_run_again = not entry.has_exchanges
        if self.wants_graph(entry):
            try:
                return self._replay(entry, tensors, checked_loop)
            except NoGraphError as error:
                if isinstance(error.__cause__, torch.OutOfMemoryError) and not may_run_again:
                    raise error.__cause__ from None
                entry.has_graph = False
                self._fallbacks.note(f"runs without a CUDA graph: {error}")
        driver.enter_thread(entry.device.index)
        stream = torch.cuda.current_stream(entry.device).cuda_stream
        try:
            if self._goes_before_graph(entry):
                look_if_ready(self._options.cache_dir)  # it is compiled before it is wanted
                with suppress(NoGraphError):
                    return self._run_before_graph(entry, tensors, checked_loop)
            return self._run_bound(entry, tensors, stream, checked_loop)
        except torch.OutOfMemoryError:
            entry.bounds.clear()  # it holds what library calls have allocated
            if not (cuda_graphs.pool_of(entry.device).drop() and may_run_again):
                raise
        self._fallbacks.note("ran out of memory: all CUDA graphs were dropped, and it ran again")
        return self._run_bound(entry, tensors, stream, checked_loop)

    def _goes_before_graph(self, entry: Entry) -> bool:
        """Say whether this run is to be where the next one will be captured."""
        return (
            self._is_about_to_capture(entry)
            and not self._options.check
            and self._may_be_captured(entry)
            and cuda_graphs.pool_of(entry.device).has_one_caller()
        )

    def _run_before_graph(
        self, entry: Entry, tensors: list[Tensor], checked_loop: int | None
    ) -> Any:
        """Run step by step where the graph will be captured. Raises NoGraphError where none will
        be."""

        def make(workspace: Workspace, stream: int) -> Bound:
            bound = self._bound(entry, workspace, stream)
            if not bound.against_graph:
                entry.bounds[stream] = bound
            return bound

        def run(stream: int, caller: torch.cuda.Stream) -> Any:
            return self._run_bound(entry, tensors, stream, checked_loop, caller)

        return cuda_graphs.pool_of(entry.device).run_before(make, run)

    def _run_bound(
        self,
        entry: Entry,
        tensors: list[Tensor],
        stream: int,
        checked_loop: int | None,
        caller: torch.cuda.Stream | None = None,
    ) -> Any:
        """Run step by step on a stream. Results are for ``caller``, where he is on another one."""
        inputs = as_specified(tensors, entry.variant.specs)
        is_first, compiled = entry.uses == 1, entry.variant.compiled
        if is_first:
            entry.addresses = tuple(tensor.data_ptr() for tensor in tensors)
        if is_first and compiled is not None:  # compilers are free: libraries are called first
            entry.variant.later.start()
        bound = self._bound_for(entry, stream)
        if is_first and self._options.check and compiled is not None:
            results = self._run_checked(bound, compiled, inputs)
        else:
            results = bound.run(inputs, *self._where(entry, tensors, checked_loop))
        if caller is not None:
            for result in results:
                if isinstance(result, Tensor) and result.is_cuda:
                    result.record_stream(caller)
        if is_first:  # to put those for other sizes in an order takes this interpreter a second
            entry.variant.later.start()
        self._counters.launches = bound.num_launches
        is_judged = is_first and self._options.check_finite
        if is_judged and (text := not_finite(self._name, results, tensors)):
            self._counters.nonfinite.append(text)
            log.warning("%s", text)
        return self._returned(entry, results, tensors)

    def _replay(self, entry: Entry, inputs: list[Tensor], checked_loop: int | None) -> Any:
        is_there = self.has_graph(entry)
        with nullcontext() if is_there else collection_paused():
            results, launches = cuda_graphs.pool_of(entry.device).run(
                self._key(entry),
                inputs,
                entry.variant.specs,
                lambda workspace, stream: self._bound(entry, workspace, stream),
                self._options.graph_budget_bytes,
                *self._where(entry, inputs, checked_loop),
                () if is_there else entry.repeated(inputs),
            )
        self._counters.replays += 1
        self._counters.launches = launches
        return self._returned(entry, results, inputs)

    def replayed(self, entry: Entry, inputs: list[Tensor]) -> tuple[list[Any], int]:
        """Replay the graph of an entry that has one and keeps nothing for a loop. Return its
        results, and how many kernels ran."""
        return cuda_graphs.pool_of(entry.device).run(
            self._key(entry),
            inputs,
            entry.variant.specs,
            lambda workspace, stream: self._bound(entry, workspace, stream),
            self._options.graph_budget_bytes,
        )

    def _returned(self, entry: Entry, results: list[Any], tensors: Sequence[Tensor]) -> Any:
        variant, weights = entry.variant, self._state.tensors
        return returned(variant.out_spec, entry.aliases, variant.same, results, tensors, weights)

    def _run_checked(self, bound: Bound, compiled: Compiled, inputs: Sequence[Tensor]) -> list[Any]:
        from strop.debug.check import run_checked

        results, findings = run_checked(bound, compiled, inputs, self._name)
        self._counters.checked_steps += len(compiled.program.steps)
        self._counters.findings += map(str, findings)
        return results

    # binding

    def _bound_for(self, entry: Entry, stream: int) -> Bound:
        """Return the program that is bound to the working memory of a stream; on a CPU, of a
        lane."""
        bound = entry.bounds.get(stream)
        if bound is None:
            workspace = workspace_of(entry.device, stream)
            bound = entry.bounds[stream] = self._bound(entry, workspace, stream)
        return bound

    def _bound(self, entry: Entry, workspace: Workspace, stream: int) -> Bound:
        program = entry.variant.program
        if entry.placed is None:
            before = self._state.pointers
            entry.placed = self._placed(entry)
            if self._options.large_pages:
                self._pages.ask(entry.placed)
                self._counters.large_pages = str(self._pages)
            entry.coded = self._state.coded.fill(program, self._state.tensors, entry.placed)
            self._state.remember(program, entry.placed)
            if self._state.pointers != before:
                self._have_forgotten(entry)  # they were bound to the old places
        hoist = self._hoist(entry, workspace) if entry.steady else None
        state: Sequence[Tensor | None] = entry.placed
        streaming = None
        if self._has_budget and self.budget is not None:
            state, streaming = self.budget.bind(program, self._order(entry), entry.placed)
        bound = Bound(
            program,
            entry.env,
            state,
            library_for(entry.device, self._options),
            workspace,
            stream,
            hoist,
            in_place=not self._options.check,
            plans=entry.variant.plans,
            streaming=streaming,
            packed=self._state.packed,
            has_free=bool(entry.free),
        )
        if self.budget is not None:
            self.budget.working_bytes = max(self.budget.working_bytes, bound.working_bytes)
        return bound

    @property
    def budget(self) -> WeightsBudget | None:
        """Return what streams weights from the host, where some lie there."""
        return self._hosted.budget

    @property
    def _has_budget(self) -> bool:
        return self.budget is not None and self.budget.serves()

    def _placed(self, entry: Entry) -> list[Tensor | None]:
        """Put weights where the entry's program wants them."""
        program = entry.variant.program
        if self.budget is None or not self.budget.serves():
            return place(program, self._state.tensors, self._state.tied)
        forget = partial(self._have_forgotten, entry)
        self._hosted.let_go()
        return self.budget.put(program, self._order(entry), forget)

    def _have_forgotten(self, entry: Entry) -> None:
        if (forget_others := self._forget_others()) is not None:
            forget_others(entry)

    def _order(self, entry: Entry) -> RunOrder:
        """Return the order in which the entry's program runs."""
        library, shares = library_for(entry.device, self._options), not self._options.check
        plans = entry.variant.plans
        program, env, has_free = entry.variant.program, entry.env, bool(entry.free)
        found = plans.plan(program, env, library, None, None, shares=shares, has_free=has_free)
        return found.order

    def _hoist(self, entry: Entry, workspace: Workspace) -> Hoist:
        """Return what to hoist. Its memory is kept as all other is: for a stream, or for the
        graphs, whose runs are in order. Pieces of a step, which take turns, have each their
        own."""
        key = id(self), id(workspace), entry.piece
        kept = self.loop.kept.setdefault(key, Kept(entry.device))
        inputs = enumerate(entry.variant.program.inputs)
        arguments = [index for index, spec in inputs if not spec.is_state]
        steady = tuple(arguments[number] for number in entry.steady)
        timestep = None if entry.timestep is None else arguments[entry.timestep]
        return Hoist(steady, kept, self._state.tensors, self._counters.hoisted, timestep)

    def _where(
        self, entry: Entry, tensors: Sequence[Tensor], checked_loop: int | None
    ) -> tuple[Stamp | None, Moment | None]:
        """Return what the arguments are that stay the same through a loop, and at which timestep it
        is, if this is a loop. What the caller captures must not depend on it."""
        if not entry.steady or checked_loop is None:
            return None, None
        if entry.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return None, None
        stamp = stamp_of(checked_loop, [tensors[number] for number in entry.steady])
        if entry.timestep is None or self._is_about_to_capture(entry):
            return stamp, None
        return stamp, moment_of(self.loop.timesteps, tensors[entry.timestep], stamp)
