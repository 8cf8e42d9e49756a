"""Replay forward and backward of a training step from two CUDA graphs.

The host bounds a small network's step: each direction has a hundred launches and as many
allocations, while the GPU waits. So both graphs are captured at the second call with the same sizes
and the same weights. Weights are read where they lie; arguments and the results' gradients are
copied in, results and gradients of weights are copied out.

What the forward saves stays in its graph's memory. One call at a time can therefore be between its
forward and its backward. A call that comes meanwhile, as two calls in one loss do, runs step by
step. So does a call under hooks on saved tensors, which want each of them, and one that somebody
else captures.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any
from weakref import WeakSet, ref

import torch
from torch import Tensor
from torch._C import _functorch as functorch
from torch.nn import Parameter

from strop.dispatch.dynamo import AotLog
from strop.dispatch.gc_pause import collection_paused
from strop.options import Options
from strop.runtime.run import cuda_graphs, graph_keep_alive, group_shutdowns
from strop.runtime.run.executor import Bound
from strop.runtime.run.graph_capture import GraphCapture, NoGraphError
from strop.runtime.run.graph_copies import SharedResults, copies_of, copy_all, shared_by
from strop.runtime.run.graph_keep_alive import KeptMemory
from strop.runtime.run.library_settings import library_settings
from strop.runtime.run.replay_gain import reason_against_step
from strop.wording import counted

if TYPE_CHECKING:
    from strop.dispatch.training_steps import Backward, Step

log = logging.getLogger("strop")
MOST_LOOKS = 64  # of calls of one step, by sizes, stream and weights
IDLE_CALLS = 256  # of its stream, after which a pair makes room for another
_PLAIN = {Tensor, Parameter}
_OVER = (
    "Trying to backward through the graph a second time: what it needs is gone. Specify"
    " retain_graph=True if you need to backward through the graph a second time"
)


@dataclass(frozen=True, slots=True)
class CapturedHalf:
    """This is one captured direction, with the memory that it reads and writes."""

    graph: Any  # with a ``replay``
    inputs: tuple[Tensor, ...]
    results: tuple[Any, ...]
    leases: tuple[KeptMemory, ...]
    shared: tuple[SharedResults, ...] = ()  # of the results that the caller gets
    standing: Hashable = ()  # settings of libraries, and addresses of what else it reads

    def replay(self, given: Sequence[Tensor]) -> None:
        for lease in self.leases:
            lease.check()
        copy_all(self.inputs, given)
        self.graph.replay()


class StreamGraphs:
    """This captures what one stream replays: all its graphs share working memory."""

    def __init__(self, device: torch.device) -> None:
        self.lock = threading.RLock()
        self.num_calls = 0
        self._device, self._capturing = device, GraphCapture(device)
        self._pairs = WeakSet[StepPair]()

    def capture(
        self,
        run: Callable[[Sequence[Tensor]], Sequence[Any]],
        given: Sequence[Tensor],
        written: Sequence[Tensor] = (),
    ) -> CapturedHalf:
        """Capture what ``run`` does with these tensors, which it gets in memory that stays. What it
        writes to outside holds what it held. Raises NoGraphError or OutOfMemoryError."""
        capturing, caller = self._capturing, torch.cuda.current_stream(self._device)
        stream = capturing.stream
        stream.wait_stream(caller)
        try:
            with (
                collection_paused(),
                torch.no_grad(),
                torch.cuda.device(self._device),
                torch.cuda.stream(stream),
            ):
                capturing.libraries.hold()  # backward passes have handles of their own
                static = tuple(torch.empty_like(tensor).copy_(tensor) for tensor in given)
                before = [tensor.clone() for tensor in written]
                capturing.rehearse(lambda: run(static))
                for tensor, kept in zip(written, before, strict=True):
                    tensor.copy_(kept)
                with graph_keep_alive.taken() as leases:
                    graph, results, _ = capturing.recorded(lambda: tuple(run(static)))
        finally:
            caller.wait_stream(stream)
        return CapturedHalf(graph, static, results, tuple(leases))

    def admit(self, pair: StepPair, budget_bytes: int) -> bool:
        """Make room for a pair, if there is enough beside those that are in use."""
        self._pairs.discard(pair)
        for other in list(self._pairs):
            if other.is_idle(self.num_calls - IDLE_CALLS):
                other.drop()
                self._pairs.discard(other)
        if pair.size_bytes + sum(other.size_bytes for other in self._pairs) > budget_bytes:
            return False
        self._pairs.add(pair)
        group_shutdowns.note_capture(self)
        return True

    def let_go_of_graphs(self) -> None:
        with self.lock:
            for pair in self._pairs:
                pair.drop()
            self._pairs.clear()


_STREAMS: dict[tuple[torch.device, int], StreamGraphs] = {}
_LOCK = threading.Lock()


def graphs_of(device: torch.device, stream: int) -> StreamGraphs:
    """Return what captures for one stream of a GPU."""
    with _LOCK:
        if (device, stream) not in _STREAMS:
            _STREAMS[device, stream] = StreamGraphs(device)
        return _STREAMS[device, stream]


def _stream_of(device: torch.device) -> int:
    """Return the number of the current stream."""
    return torch._C._cuda_getCurrentRawStream(device.index) if device.type == "cuda" else 0


class StepPair:
    """These are the graphs of one step at one shape, with weights at one place."""

    def __init__(self, step: Step, env: Mapping[str, int], stream: int, log: AotLog) -> None:
        self._env, self.stream, self._log = dict(env), stream, log
        self._kept = step.saved
        self._device = step.forward.device
        self._num_state = len(step.wants) - len(step.specs)
        self._num_results = len(step.differentiable)
        self._home = graphs_of(step.forward.device, stream)
        self.size_bytes, self.reason = 0, ""
        self._forward: CapturedHalf | None = None
        self._backwards: dict[int, CapturedHalf] = {}  # by the identity of what is captured
        self._pending: ref[Lease] | None = None
        self._latest = 0

    @property
    def is_busy(self) -> bool:
        """Tell whether a call is between its forward and its backward."""
        lease = self._pending() if self._pending is not None else None
        return lease is not None and not lease.is_over

    def is_idle(self, since: int) -> bool:
        return self._latest < since and not self.is_busy

    def drop(self) -> None:
        """Let go of both graphs. What a call has saved stays until its backward."""
        self._forward, self.size_bytes = None, 0
        self._backwards.clear()

    def lease(
        self, step: Step, primals: Sequence[Tensor], budget_bytes: int
    ) -> tuple[Lease, list[Any]] | None:
        """Replay the forward; None where the call must run step by step."""
        home = self._home
        with home.lock:
            home.num_calls += 1
            if self.reason or self.is_busy:
                return None
            given = primals[self._num_state :]
            if self._forward is None and not self._captured_forward(step, primals, budget_bytes):
                return None
            half = self._forward
            assert half is not None
            half.replay(given)
            self._latest = home.num_calls
            self._log.step_replays += 1
            lease = Lease(self, half)
            self._pending = ref(lease)
            return lease, copies_of(half.results[: self._num_results], half.shared)

    def _captured_forward(self, step: Step, primals: Sequence[Tensor], budget_bytes: int) -> bool:
        """Capture it, if it and a backward have run once at these sizes."""
        backwards = (b.program for b in (step.backward, *step.parts.known))
        found = [bound for p in backwards if (bound := p.bound_at(self._env)) is not None]
        forward = step.forward.bound_at(self._env)
        if forward is None or not found:
            return False
        known = (forward, found[0])
        given = primals[self._num_state :]
        self.size_bytes = _size_of(known, given)
        reason = _unfit(step) or reason_against_step(known, self.size_bytes)
        if not reason and not self._home.admit(self, budget_bytes):
            size = f"{self.size_bytes / 2**20:.0f} MiB"
            reason = f"its {size} are more than graph_budget_bytes leaves"
        if reason:
            return self._go_without(reason)
        state = primals[: self._num_state]
        try:
            half = self._home.capture(
                lambda static: step.forward.run((*state, *static), self._env, is_call=False),
                given,
                [state[number] for number in step.written],
            )
        except (NoGraphError, torch.OutOfMemoryError) as error:
            return self._go_without(str(error))
        self._forward = replace(half, shared=shared_by(half.results[: self._num_results]))
        self._log.step_captures += 1
        return True

    def _go_without(self, reason: str) -> bool:
        """Run all further calls step by step."""
        self.drop()
        self.reason = reason.partition("\n")[0]
        known = self._log.against_step_graphs
        if self.reason not in known:
            log.info("a training step runs without CUDA graphs: %s", self.reason)
        known[self.reason] = known.get(self.reason, 0) + 1
        return False

    def gradients(
        self,
        half: CapturedHalf,
        backward: Backward,
        tangents: Sequence[Tensor | None],
        saved: Sequence[Tensor],
    ) -> list[Any] | None:
        """Replay a backward behind the forward ``half``; None where it must run step by step."""
        with self._home.lock:
            if half is not self._forward or _stream_of(self._device) != self.stream:
                return None
            read = self._read(half, saved)
            captured = self._backwards.get(id(backward))
            if captured is None:
                captured = self._captured_backward(backward, tangents, read)
            # who shards or offloads weights has them elsewhere by now
            if captured is None or captured.standing != _standing(read):
                return None
            with torch.no_grad():  # who wants gradients of gradients has them enabled
                captured.replay(_present(tangents))
                return copies_of(captured.results, captured.shared)

    def _read(self, half: CapturedHalf, saved: Sequence[Tensor]) -> list[Tensor]:
        """Return what a backward reads of that: arguments where the forward has copied them."""
        return [
            half.inputs[argument.number - self._num_state]
            if argument.kind == "argument" and argument.number >= self._num_state
            else tensor
            for argument, tensor in zip(self._kept, saved, strict=True)
        ]

    def _captured_backward(
        self, backward: Backward, tangents: Sequence[Tensor | None], read: Sequence[Tensor]
    ) -> CapturedHalf | None:
        def run(static: Sequence[Tensor]) -> list[Any]:
            present = iter(static)
            given = [None if tangent is None else next(present) for tangent in tangents]
            arguments = backward.arguments(given, read, self._env)
            return backward.program.run(arguments, self._env, is_call=False)

        try:
            captured = self._home.capture(run, _present(tangents))
        except (NoGraphError, torch.OutOfMemoryError) as error:
            self._go_without(str(error))
            return None
        captured = replace(captured, shared=shared_by(captured.results), standing=_standing(read))
        self._backwards[id(backward)] = captured
        return captured


class Lease:
    """One call has this from its forward to its backward: nobody else's call writes over what it
    has saved."""

    __slots__ = ("__weakref__", "_half", "_pair", "is_over")

    def __init__(self, pair: StepPair, half: CapturedHalf) -> None:
        self._pair, self._half = pair, half
        self.is_over = False

    def saved(self, arguments: Sequence[Tensor]) -> list[Tensor]:
        """Return all that the forward has saved; ``arguments`` are those among it. Raises
        RuntimeError behind the end, as torch does."""
        if self.is_over:
            raise RuntimeError(_OVER)
        given = iter(arguments)
        return [
            next(given) if kept.kind == "argument" else self._half.results[kept.number]
            for kept in self._pair._kept
        ]

    def gradients(
        self, backward: Backward, tangents: Sequence[Tensor | None], saved: Sequence[Tensor]
    ) -> list[Any] | None:
        """Replay this backward; None where it must run step by step."""
        return self._pair.gradients(self._half, backward, tangents, saved)

    def end(self) -> None:
        self.is_over = True


class StepGraphs:
    """Finds the pair of graphs for a call of one step."""

    def __init__(self, options: Options, log: AotLog) -> None:
        self._log, self._budget_bytes = log, options.graph_budget_bytes
        self._are_wanted = options.cuda_graphs and not options.check
        self._pairs: OrderedDict[Hashable, StepPair | None] = OrderedDict()
        self._lock = threading.Lock()

    def lease(
        self, step: Step, env: Mapping[str, int], primals: Sequence[Tensor]
    ) -> tuple[Lease, list[Any]] | None:
        """Replay the forward of a call, and return what its backward needs, and its results; None
        where it has to run step by step."""
        device = step.forward.device
        if not self._are_wanted or device.type not in cuda_graphs.DEVICES:
            return None
        if _is_watched() or not {*map(type, primals)} <= _PLAIN:
            return None
        if any(t.device != device for t in primals):
            return None
        stream = _stream_of(device)
        state = primals[: len(step.wants) - len(step.specs)]
        places = (*map(Tensor.data_ptr, state), *map(Tensor.stride, state))
        key = (*env.values(), stream, library_settings(), places)
        with self._lock:
            is_new = key not in self._pairs
            pair = self._pairs.pop(key, None)
            if pair is None and not is_new:
                pair = StepPair(step, env, stream, self._log)
            self._pairs[key] = pair  # the latest used
            while len(self._pairs) > MOST_LOOKS:
                self._pairs.popitem(last=False)
        return None if pair is None else pair.lease(step, primals, self._budget_bytes)


def _present(tangents: Sequence[Tensor | None]) -> list[Tensor]:
    return [tangent for tangent in tangents if tangent is not None]


def _standing(read: Sequence[Tensor]) -> Hashable:
    return library_settings(), *map(Tensor.data_ptr, read)


def _is_watched() -> bool:
    """Tell whether somebody captures this call, transforms it, or wants each saved tensor."""
    hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks
    return (
        torch.cuda.is_current_stream_capturing()
        or graph_keep_alive.are_wanted()
        or functorch.peek_interpreter_stack() is not None
        or hooks(True) is not None
    )


def _size_of(bounds: Sequence[Bound], given: Sequence[Tensor]) -> int:
    """Return the memory that a pair keeps between calls."""
    results = sum(b.plan.sizes.bytes_of(number) for b in bounds for number, _ in b.plan.results)
    working = sum(bound.working_bytes for bound in bounds)
    return results + working + sum(tensor.nbytes for tensor in given)


def _unfit(step: Step) -> str:
    """Say why results of a forward must lie where an argument lies, or that it draws numbers on the
    host; nothing where neither is so."""
    program = step.forward.program
    if program.host_draws or step.backward.program.program.host_draws:
        return "it draws random numbers on the host"
    refs = [item.tensor for item in program.returned[: len(step.differentiable)]]
    shared = [r for r in refs if r is not None and program.buffers[r.buffer].kind == "input"]
    if shared:
        return f"{counted(len(shared), 'result')} of it lies in memory of an argument"
    return ""
