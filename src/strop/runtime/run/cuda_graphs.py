"""Each shape has a CUDA graph, which is captured at its second use, and all lie in one memory pool.

Replays are serialised by a lock and an event, so graphs of different shapes share their memory, and
as long as all calls come from one stream they share it with the runs without a graph, too. Captures
that do not fit the byte budget push out the least recently used ones. A graph's inputs are copied
in and its results copied out: nobody outside ever holds memory of the pool. Large inputs that lie
where they lay in the call before, such as a cache of keys and values, are read where they are; the
first call that has them elsewhere captures anew, and has them copied from then on. Large results
are handed out where they are (``handed_results.py``); the first call that comes while somebody
keeps those of the call before captures anew, and copies from then on.
"""

from __future__ import annotations

import contextlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from strop.ir.tensor_spec import TensorSpec
from strop.runtime.loop.hoisting import Moment, Stamp, written
from strop.runtime.run import group_shutdowns
from strop.runtime.run.executor import Bound
from strop.runtime.run.graph_capture import GraphCapture, NoGraphError
from strop.runtime.run.graph_copies import SharedResults, copies_of, copy_all, shared_by
from strop.runtime.run.handed_results import HandedResults, ResultPool, handed_of
from strop.runtime.run.replay_gain import reason_against
from strop.runtime.run.workspace import Workspace, workspace_of
from strop.wording import counted

T = TypeVar("T")
_NO_STREAM = -1  # nobody's
# Of an input that is read where it lies, and of all of them: to copy these takes 40 us and more.
LEAST_BYTES, LEAST_SUM_BYTES = 1 << 18, 64 << 20
DEVICES = ("cuda",)  # types of devices whose programs are replayed; tests add another


MakeBound = Callable[[Workspace, int], Bound]


@dataclass(frozen=True, slots=True)
class CapturedGraph:
    """This is one graph with the memory that it reads and writes."""

    graph: torch.cuda.CUDAGraph
    prologue: torch.cuda.CUDAGraph | None  # replayed where what it leaves is not there
    timed: torch.cuda.CUDAGraph | None  # replayed where no table has what it leaves
    inputs: tuple[Tensor | None, ...]  # None for what is read where it lies
    results: tuple[Any, ...]  # None for what is handed out where it is
    bound: Bound  # owns counters and weights that the graph points to, and its memory
    size_bytes: int
    num_kernels: int  # without the prologue's and those of ``timed``
    num_timed: int = 0  # kernels of ``timed``
    shared: tuple[SharedResults, ...] = ()  # memory of several results
    in_place: Mapping[int, int] = field(default_factory=dict)  # addresses, by place
    handed: HandedResults | None = None

    def replay(
        self, inputs: Sequence[Tensor], stamp: Stamp | None, moment: Moment | None = None
    ) -> tuple[list[Any], int]:
        """Replay it, and return the results and how many kernels have run behind the prologue."""
        bound, count = self.bound, self.num_kernels
        bound.raise_faults()
        is_there, rows = bound.hoisted.is_there(stamp), bound.timetable.rows(moment)
        if is_there and rows is not None:
            late = bound.late_arguments
            static, own = self._copied(inputs, late)
            if own or rows:
                copy_all([*static, *bound.of_timestep], [*own, *rows])
            bound.timetable.note_use()
        else:
            copy_all(*self._copied(inputs, range(len(inputs))))
            if self.prologue is not None and not is_there:
                self.prologue.replay()
                bound.hoisted.has_run()
            if rows is None:
                rows = bound.rows_amid_loop(moment, self._read(inputs))
            if rows is not None:
                bound.look_up(rows)
            else:
                assert self.timed is not None
                self.timed.replay()
                count += self.num_timed
        self.graph.replay()
        results = copies_of(self.results, self.shared)
        if self.handed is not None:
            results = self.handed.hand_over(results)
        if rows is None:  # for the steps behind this one: the GPU is at work, and the host need not
            bound.make_timetable(moment, self._read(inputs))
        return results, count

    def reads(self, inputs: Sequence[Tensor], specs: Sequence[TensorSpec]) -> bool:
        """Tell whether it would read these inputs."""
        return all(
            inputs[n].data_ptr() == address and _lies_as(inputs[n], specs[n])
            for n, address in self.in_place.items()
        )

    def _copied(
        self, inputs: Sequence[Tensor], places: Iterable[int]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Return where inputs at these places are copied to, and the inputs."""
        pairs = [(own, inputs[n]) for n in places if (own := self.inputs[n]) is not None]
        return [own for own, _ in pairs], [given for _, given in pairs]

    def _read(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Return what it reads in a call with these inputs."""
        pairs = zip(self.inputs, inputs, strict=True)
        return [given if own is None else own for own, given in pairs]


def _lies_as(tensor: Tensor, spec: TensorSpec) -> bool:
    """Tell whether a program may read a tensor as it is."""
    is_plain = tensor.dtype is spec.dtype and not (tensor.is_neg() or tensor.is_conj())
    return is_plain and tensor.device == spec.device and spec.lies_so(tensor)


def _in_place(
    bound: Bound, inputs: Sequence[Tensor], specs: Sequence[TensorSpec], repeated: Collection[int]
) -> dict[int, int]:
    """Return the addresses of inputs that are worth being read where they lie, of those that were
    there in the call before. What the program writes to would be written by a rehearsal, and what
    it returns would be kept."""
    program = bound.program
    kept = {number for step in program.steps for number in written(step)}
    kept |= {n for step in program.kernel_steps for form in step.variants for n in form.writes}
    kept |= {item.tensor.buffer for item in program.returned if item.tensor is not None}
    numbers = bound.plan.arguments
    found = {
        n: inputs[n].data_ptr()
        for n in repeated
        if numbers[n] not in kept and inputs[n].nbytes >= LEAST_BYTES
        if _lies_as(inputs[n], specs[n])
    }
    return found if sum(inputs[n].nbytes for n in found) >= LEAST_SUM_BYTES else {}


class GraphPool:
    """This holds the graphs of one device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.num_captures = 0
        self._graphs: OrderedDict[Hashable, CapturedGraph] = OrderedDict()
        self._wander = set[Hashable]()  # graphs whose inputs come from elsewhere each time
        self._kept = set[Hashable]()  # graphs whose results somebody keeps over the next call
        self._capturing = GraphCapture(device)
        self._workspace: Workspace | None = None  # of the first call's stream
        self._home = 0  # this stream
        self._done = torch.cuda.Event()
        self._latest: torch.cuda.Stream | None = None  # that replayed
        self._streams: dict[int, torch.cuda.Stream] = {}
        self._lock = threading.RLock()  # binding may move weights, which drops graphs

    def run(
        self,
        key: Hashable,
        inputs: Sequence[Tensor],
        specs: Sequence[TensorSpec],
        make: MakeBound,
        budget_bytes: int,
        stamp: Stamp | None = None,
        moment: Moment | None = None,
        repeated: Collection[int] = (),
    ) -> tuple[list[Any], int]:
        """Replay the graph of ``key``, capturing it first if need be, and say how many kernels ran.

        ``inputs`` may be strided and of other dtypes than ``specs``: copying them in converts.
        ``stamp`` is that of the steady ones, ``moment`` the call's in its denoise loop. Raises
        NoGraphError where the call must run without. Too little memory ends all graphs. Inputs at
        ``repeated`` places lie where they lay in the call before.
        """
        with self._lock:
            stream = self._caller_in_order()
            try:
                # nobody moves the memory from here on, or runs in it while a graph is captured
                with self._workspace_for(stream).lock:
                    captured = self._captured(key, inputs, specs, make, budget_bytes, repeated)
                    found = captured.replay(inputs, stamp, moment)
            except torch.OutOfMemoryError as error:
                dropped = counted(self.drop(), "graph")
                raise NoGraphError(f"out of memory, with {dropped} dropped") from error
            self._done.record(stream)
            return found

    def run_before(self, make: MakeBound, run: Callable[[int, torch.cuda.Stream], T]) -> T:
        """Run what will be captured at its next use, step by step, on the stream of captures and in
        the memory of graphs: behind what the caller has launched, before what he launches next.

        Libraries have a workspace for each stream, so the first run of a shape and its graph share
        one. ``run`` gets the number of that stream and the caller's, for which it must record what
        it returns (``Tensor.record_stream``). Nobody replays meanwhile. Raises NoGraphError where
        no graph will come.
        """
        with self._lock:
            caller = self._caller_in_order()
            workspace, stream = self._workspace_for(caller), self._capturing.stream
            bound = make(workspace, stream.cuda_stream)
            if bound.against_graph:
                raise NoGraphError(bound.against_graph)
            with workspace.lock:
                stream.wait_stream(caller)
                try:
                    with torch.cuda.stream(stream):
                        self._hold(bound)
                        return run(stream.cuda_stream, caller)
                finally:
                    caller.wait_stream(stream)
                    self._done.record(caller)

    def _hold(self, bound: Bound) -> None:
        """Have libraries' workspaces in memory that stays, if the program calls libraries."""
        if bound.program.call_steps:
            self._capturing.libraries.hold()

    @contextlib.contextmanager
    def lending_stream(self) -> Iterator[None]:
        """Run calls of libraries that mean nothing on the stream of captures, whose workspace is
        there anyway. Nobody replays or captures meanwhile."""
        with self._lock, torch.cuda.stream(self._capturing.stream):
            self._capturing.libraries.hold()
            yield

    def has_one_caller(self) -> bool:
        """Tell whether nobody has called from another stream than this caller's. Those who call
        from several do not wait for each other, unless they replay."""
        with self._lock:
            handle = torch._C._cuda_getCurrentRawStream(self.device.index)
            return self._workspace is None or self._home == handle

    def has(self, key: Hashable) -> bool:
        return key in self._graphs

    def drop(self) -> int:
        """Give back the memory of all graphs, and say how many there were."""
        with self._lock:
            count = len(self._graphs)
            if count:
                torch.cuda.synchronize(self.device)  # one of them may be running
            self._graphs.clear()
            if self._workspace is not None:
                with self._workspace.lock:
                    self._workspace.give_back()
            self._capturing.renew_pool()
            return count

    def let_go_of_graphs(self) -> int:
        return self.drop()

    def _workspace_for(self, stream: torch.cuda.Stream) -> Workspace:
        """Return the workspace of the caller's stream while there is one caller's stream. From the
        second on the graphs have one of their own: runs without a graph wait for nobody on another
        stream."""
        if self._workspace is None:
            self._home = stream.cuda_stream
            self._workspace = workspace_of(self.device, self._home)
        elif self._home not in (stream.cuda_stream, _NO_STREAM):
            self.drop()
            self._home, self._workspace = _NO_STREAM, Workspace(self.device)
        return self._workspace

    def _captured(
        self,
        key: Hashable,
        inputs: Sequence[Tensor],
        specs: Sequence[TensorSpec],
        make: MakeBound,
        budget_bytes: int,
        repeated: Collection[int] = (),
    ) -> CapturedGraph:
        captured = self._graphs.pop(key, None)
        if captured is not None and not captured.reads(inputs, specs):
            self._wander.add(key)
            captured = None
        if captured is not None and captured.bound.has_moved:
            captured = None
        if captured is not None and captured.handed and not captured.handed.are_back():
            self._kept.add(key)
            captured = None  # with its memory, before more is taken
        if captured is None:
            repeated = () if key in self._wander else repeated
            hands_over = key not in self._kept
            captured = self._capture(inputs, specs, make, repeated, hands_over=hands_over)
            self._graphs[key] = captured
            self._trim(budget_bytes)
            return captured
        self._graphs[key] = captured  # the latest used
        return captured

    def _caller_in_order(self) -> torch.cuda.Stream:
        """Return the caller's stream, which waits for the latest replay."""
        stream = self._current_stream()
        if stream is not self._latest:  # work of one stream is in order anyway
            stream.wait_event(self._done)
            self._latest = stream
        return stream

    def _current_stream(self) -> torch.cuda.Stream:
        """Return the caller's stream: the same object for the same stream, at a tenth of the
        cost."""
        handle = torch._C._cuda_getCurrentRawStream(self.device.index)
        if handle not in self._streams:
            self._streams[handle] = torch.cuda.current_stream(self.device)
        return self._streams[handle]

    def may_be_taken_back(self, key: Hashable) -> bool:
        """Tell whether marks behind the next replay would be its own: it leaves none, or all
        replays have ended, so that those of earlier ones are here."""
        with self._lock:
            captured = self._graphs.get(key)
            return captured is None or not captured.bound.checks_bounds or self._done.query()

    def take_back(self, key: Hashable) -> None:
        """Take away the marks of a replay that ``may_be_taken_back``, once it has ended."""
        with self._lock:
            captured = self._graphs.get(key)
            if captured is not None and captured.bound.checks_bounds:
                self._done.synchronize()
                captured.bound.forget_faults()

    def forget(self, owner: Hashable, but: Collection[Hashable] = ()) -> None:
        """Drop the graphs whose key starts with ``owner``, ``but`` some: their weights have
        moved."""
        with self._lock:
            own = [k for k in self._graphs if isinstance(k, tuple) and k[0] == owner]
            for key in own:
                if key not in but:
                    del self._graphs[key]

    @property
    def held_bytes(self) -> int:
        """Return the memory that goes when all graphs do. What several shapes of a module hoist
        lies in one place."""
        graphs = self._graphs.values()
        kept = {id(g.bound.hoisted.memory): g.bound.hoisted.memory.nbytes for g in graphs}
        own = sum(g.size_bytes + g.bound.timetable.held_bytes for g in graphs)
        return own + sum(kept.values())

    def _capture(
        self,
        inputs: Sequence[Tensor],
        specs: Sequence[TensorSpec],
        make: MakeBound,
        repeated: Collection[int],
        *,
        hands_over: bool,
    ) -> CapturedGraph:
        capturing, caller = self._capturing, torch.cuda.current_stream(self.device)
        stream = capturing.stream
        stream.wait_stream(caller)
        with torch.cuda.stream(stream):
            bound = self._bound(make, caller, hands_over=hands_over)
            with torch.cuda.stream(caller):
                handed = self._handed(bound) if hands_over else None
            in_place = _in_place(bound, inputs, specs, repeated)
            own = tuple(
                None if n in in_place else spec.empty(x.shape).copy_(x)
                for n, (x, spec) in enumerate(zip(inputs, specs, strict=True))
            )
            static = [x if mine is None else mine for x, mine in zip(inputs, own, strict=True)]
            capturing.rehearse(lambda: bound.run(static, told=handed))
            prologue = timed = None
            num_timed = 0
            if bound.hoisted.steps:
                prologue, _, _ = capturing.recorded(lambda: bound.run_prologue(static))
            if bound.timetable.steps:
                bound.timetable.record = capturing.replayable
                timed, _, num_timed = capturing.recorded(lambda: bound.run_timed(static))
            graph, results, num_kernels = capturing.recorded(
                lambda: tuple(bound.run_rest(static, handed))
            )
            if handed is not None:
                results = handed.let_go(results)
        caller.wait_stream(stream)
        self.num_captures += 1
        group_shutdowns.note_capture(self)
        tensors = [t for t in (*own, *results) if isinstance(t, Tensor)]
        size = sum(t.untyped_storage().nbytes() for t in tensors) + bound.call_bytes
        size += 0 if handed is None else handed.size_bytes
        return CapturedGraph(
            graph,
            prologue,
            timed,
            own,
            results,
            bound,
            size,
            num_kernels,
            num_timed,
            shared_by(results),
            in_place,
            handed,
        )

    def _bound(self, make: MakeBound, caller: torch.cuda.Stream, *, hands_over: bool) -> Bound:
        """Bind a program on the stream of captures, which is current. Raises NoGraphError where no
        graph is to run it."""
        assert self._workspace is not None
        bound = make(self._workspace, self._capturing.stream.cuda_stream)
        reason = bound.against_graph
        if not (reason or hands_over):
            reason = reason_against(bound.plan, hands_over=False)
        if reason:
            caller.wait_stream(self._capturing.stream)
            raise NoGraphError(reason)
        self._hold(bound)
        return bound

    def _handed(self, bound: Bound) -> HandedResults | None:
        """Make memory for results on the caller's stream, which is current."""
        looks = handed_of(bound.plan)
        return HandedResults(ResultPool(self.device), looks) if looks else None

    def _trim(self, budget_bytes: int) -> None:
        while len(self._graphs) > 1 and self.held_bytes > budget_bytes:
            self._graphs.popitem(last=False)


_POOLS: dict[torch.device, GraphPool] = {}
_POOLS_LOCK = threading.Lock()


def pool_of(device: torch.device) -> GraphPool:
    with _POOLS_LOCK:
        if device not in _POOLS:
            _POOLS[device] = GraphPool(device)
        return _POOLS[device]
