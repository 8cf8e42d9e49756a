"""Too little GPU memory: graphs are dropped, the call runs without, and says so once.

The first tests run the dispatcher and the graph pool as they are, over a torch whose streams and
graphs are made up: a graph is replayed by running its program again.
"""

from __future__ import annotations

import contextlib
import gc
import math
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, ClassVar
from weakref import WeakSet

import pytest
import torch
from torch import Tensor

import strop
from strop.dispatch import entry_runner
from strop.dispatch.dispatcher import Dispatcher
from strop.dispatch.entry import Entry
from strop.dispatch.entry_runner import EntryRunner
from strop.ir.program import Program
from strop.runtime.build import driver
from strop.runtime.run import cuda_graphs as graphs
from strop.runtime.run import executor, graph_capture, replay_gain
from strop.runtime.run.graph_copies import copy_all

from .nets import Net, X, optimized

Fault = Callable[[], None]


class Stream:
    cuda_stream = 0

    def __init__(self, *_: Any) -> None: ...
    def wait_event(self, event: Any) -> None: ...
    def wait_stream(self, stream: Any) -> None: ...


class Event:
    def record(self, stream: Any) -> None: ...


class Pool:
    """torch takes no graph into a pool that it knows and whose graphs are all gone."""

    def __init__(self) -> None:
        self.is_known = False
        self.graphs: WeakSet[Graph] = WeakSet()

    def take(self, graph: Graph) -> None:
        if self.is_known and not self.graphs:
            raise RuntimeError("use_count > 0 INTERNAL ASSERT FAILED")
        self.is_known = True
        self.graphs.add(graph)


class Graph:
    """Remembers the run inside its capture; a replay repeats it into the same results."""

    def __init__(self, cuda: Cuda) -> None:
        self.cuda = cuda
        self.run: Callable[[], list[Tensor]] = list
        self.results: list[Tensor | None] = []

    def capture_begin(self, pool: Pool, **_: Any) -> None:
        pool.take(self)
        usual = self.usual = executor.Bound.run_rest

        def remembered(bound: executor.Bound, inputs: Any, told: Any = None) -> list[Any]:
            self.cuda.num_captures += 1
            self.cuda.in_capture()
            self.run = lambda: usual(bound, inputs, told)
            found = usual(bound, inputs, told)
            homes = [told and told.home(place, None) for place in range(len(found))]
            self.results = [r if own is None else None for r, own in zip(found, homes, strict=True)]
            return found

        executor.Bound.run_rest = remembered  # type: ignore[method-assign]

    def capture_end(self) -> None:
        executor.Bound.run_rest = self.usual  # type: ignore[method-assign]
        self.cuda.at_its_end()

    def instantiate(self) -> None: ...

    def replay(self) -> None:
        for kept, new in zip(self.results, self.run(), strict=True):
            if kept is not None:  # else the new one is where it is wanted
                kept.copy_(new)


class Cuda:
    """As much of torch.cuda as a pool asks for."""

    Stream, Event = Stream, Event
    default_generators: ClassVar = {None: torch.default_generator}

    def __init__(self) -> None:
        self.num_holds = 0  # of workspaces of libraries
        self.in_capture: Fault = lambda: None
        self.at_its_end: Fault = lambda: None
        self.num_captures = 0

    def current_stream(self, *_: Any) -> Stream:
        return Stream()

    def stream(self, *_: Any) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def CUDAGraph(self, *, keep_graph: bool = False) -> Graph:
        return Graph(self)

    def empty_cache(self) -> None: ...

    def hold(self) -> None:
        self.num_holds += 1

    def graph_pool_handle(self) -> Pool:
        return Pool()

    def is_current_stream_capturing(self) -> bool:
        return False

    def synchronize(self, *_: Any) -> None: ...


class Torch:
    """torch with another ``cuda``, and copies that may fail."""

    def __init__(self) -> None:
        self.cuda = Cuda()
        self.in_copy: Fault = lambda: None

    _C = SimpleNamespace(
        _cuda_endAllocateToPool=lambda device, pool: None,
        _len_torch_dispatch_stack=torch._C._len_torch_dispatch_stack,
        _cuda_getCurrentRawStream=lambda index: 0,
    )

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def copy_all(self, places: Any, given: Any) -> None:
        self.in_copy()
        copy_all(places, given)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Torch:
    """CPU modules take the way of a GPU."""
    made = Torch()

    def run(self: EntryRunner, entry: Entry, tensors: list[Tensor], loop: int | None) -> Any:
        return self._run_on_gpu(entry, tensors, loop)

    for part in (graphs, graph_capture):
        monkeypatch.setattr(part, "torch", made)
    monkeypatch.setattr(graphs, "copy_all", made.copy_all)
    monkeypatch.setattr(entry_runner, "torch", made)
    monkeypatch.setattr(driver, "enter_thread", lambda index: None)
    monkeypatch.setattr(graphs, "_POOLS", {})
    monkeypatch.setattr(graph_capture, "library_workspaces", lambda device: made.cuda)
    monkeypatch.setattr(graph_capture, "own_stream", lambda owner, device: Stream())
    monkeypatch.setattr(graph_capture, "_count_kernels", lambda graph: 1)
    monkeypatch.setattr(graphs.GraphPool, "_current_stream", lambda self: Stream())
    monkeypatch.setattr(EntryRunner, "run", run)
    # the short way is a CPU's, and so is a run apart from the lock
    monkeypatch.setattr(Dispatcher, "_prepare", lambda *args: None)
    monkeypatch.setattr(EntryRunner, "may_run_apart", lambda *args: False)
    return made


def out_of_memory() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


def once(fault: Fault) -> Fault:
    """``fault`` at the first call, nothing at later ones."""
    left = [fault]
    return lambda: left.pop()() if left else None


def assert_right(module: Any, *rows: int) -> None:
    with torch.no_grad():
        for count in rows:
            x = X[:count]
            torch.testing.assert_close(module(x), type(module).forward(module, x))


def test_graphs_work_at_all(gpu: Torch) -> None:
    module = optimized(Net())
    assert_right(module, 3, 3, 3, 2, 2, 2)
    assert module.forward.counters.replays == 4
    assert gpu.cuda.num_captures == 2


def capture_breaks() -> None:
    raise RuntimeError("operation failed due to a previous error during capture\nmore")


def test_graphs_are_captured_after_the_last_one_is_gone(
    gpu: Torch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graphs, "DEVICES", ("cpu",))
    for number in range(1, 4):
        module = optimized(Net())
        assert_right(module, 2, 2, 2)
        assert gpu.cuda.num_captures == number
        assert not module.forward.counters.fallbacks
        strop.restore(module)
        del module
        assert not graphs.pool_of(X.device).held_bytes
        gc.collect()  # the made-up graph is in a cycle with what it runs


@pytest.mark.parametrize("where", ["in_capture", "at_its_end", "both", "in_copy"])
def test_without_memory_for_a_graph_a_shape_runs_without(
    gpu: Torch, where: str, caplog: Any
) -> None:
    module = optimized(Net())
    assert_right(module, 2, 2, 3)
    pool = graphs.pool_of(X.device)
    target = gpu if where == "in_copy" else gpu.cuda
    for name in ("in_capture", "at_its_end") if where == "both" else (where,):
        is_consequence = name == "at_its_end" and where == "both"
        setattr(target, name, once(capture_breaks) if is_consequence else out_of_memory)
    assert_right(module, 3)
    assert pool.held_bytes == 0, "the graphs of other shapes are gone as well"
    gpu.cuda.in_capture = gpu.cuda.at_its_end = gpu.in_copy = lambda: None
    assert_right(module, 3, 3, 2, 2)
    (reason,) = module.forward.counters.fallbacks
    assert reason.startswith("runs without a CUDA graph: out of memory, ")
    assert caplog.messages == [f"Net: {reason}"]
    tries = 3 + (where != "in_copy")  # once more when torch has given back what it keeps for later
    assert gpu.cuda.num_captures == tries, "no other try for that shape, another one for the other"
    assert module.forward.counters.eager_calls == 0


def test_a_call_that_cannot_be_captured_runs_without_a_graph(gpu: Torch) -> None:
    module = optimized(Net())
    gpu.cuda.in_capture = capture_breaks
    assert_right(module, 3, 3, 3)
    (reason,) = module.forward.counters.fallbacks
    assert reason.endswith(
        "the capture failed: operation failed due to a previous error during capture"
    )
    assert gpu.cuda.num_captures == 1


def make_room_scarce(monkeypatch: pytest.MonkeyPatch) -> None:
    """Working memory does not fit beside graphs from here on."""
    usual = executor.Workspace.reserve

    def reserve(self: executor.Workspace, size_bytes: int, tenant: Any) -> Tensor:
        if graphs.pool_of(X.device).held_bytes:
            out_of_memory()
        return usual(self, size_bytes, tenant)

    monkeypatch.setattr(executor.Workspace, "reserve", reserve)


def test_graphs_give_way_to_a_call(
    gpu: Torch, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    """The arena of a new shape does not fit beside the graphs of another."""
    module = optimized(Net())
    assert_right(module, 3, 3)
    make_room_scarce(monkeypatch)
    assert_right(module, 2)
    (reason,) = module.forward.counters.fallbacks
    assert "all CUDA graphs were dropped, and it ran again" in reason
    assert caplog.messages == [f"Net: {reason}"]


@pytest.fixture
def order(gpu: Torch, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Note which streams wait, and where programs run: first runs are on the stream of captures."""
    found, now = list[str](), ["caller"]

    class Told(Stream):
        def __init__(self, name: str) -> None:
            self.name, self.cuda_stream = name, int(name != "caller")

        def wait_stream(self, stream: Any) -> None:
            found.append(f"{self.name} waits for {stream.name}")

    @contextlib.contextmanager
    def entered(stream: Any) -> Iterator[None]:
        now.append(stream.name)
        try:
            yield
        finally:
            now.pop()

    usual = executor.Bound.run

    def run(self: executor.Bound, *args: Any, **more: Any) -> list[Any]:
        found.append(f"runs on {now[-1]}")
        return usual(self, *args, **more)

    caller = Told("caller")
    monkeypatch.setattr(graphs, "DEVICES", ("cpu",))
    monkeypatch.setattr(graph_capture, "own_stream", lambda owner, device: Told("captures"))
    monkeypatch.setattr(gpu.cuda, "stream", entered)
    monkeypatch.setattr(gpu.cuda, "current_stream", lambda *_: caller)
    monkeypatch.setattr(graphs.GraphPool, "_current_stream", lambda self: caller)
    monkeypatch.setattr(executor.Bound, "run", run)
    return found


FIRST_RUN = ["captures waits for caller", "runs on captures", "caller waits for captures"]


def test_first_runs_are_where_graphs_are_captured(gpu: Torch, order: list[str]) -> None:
    module = optimized(Net())
    assert_right(module, 3)
    assert order == FIRST_RUN
    assert gpu.cuda.num_holds == 1
    assert_right(module, 2)
    assert order == 2 * FIRST_RUN
    assert_right(module, 3, 3)
    assert order[6:] == FIRST_RUN  # the rehearsal of the one that is captured
    assert (gpu.cuda.num_captures, gpu.cuda.num_holds) == (1, 3)


def test_callers_on_several_streams_do_not_wait_for_each_other(
    gpu: Torch, order: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    module = optimized(Net())
    assert_right(module, 3)
    monkeypatch.setattr(gpu._C, "_cuda_getCurrentRawStream", lambda index: 7)
    assert_right(module, 2)
    assert order == [*FIRST_RUN, "runs on caller"]


def test_what_gets_no_graph_runs_once_where_it_always_will(
    gpu: Torch, order: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(executor, "reason_against", lambda plan: "it would take twice the memory")
    module = optimized(Net())
    assert_right(module, 3, 3)
    assert [what for what in order if "runs" in what] == 2 * ["runs on caller"]
    (reason,) = module.forward.counters.fallbacks
    assert reason == "runs without a CUDA graph: it would take twice the memory"


def test_a_first_run_without_memory_is_done_again(
    gpu: Torch, order: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind the graphs of other shapes, which give way; the caller waits for what has run."""
    module = optimized(Net())
    assert_right(module, 3, 3)
    order.clear()
    make_room_scarce(monkeypatch)
    assert_right(module, 2)
    assert order == [*FIRST_RUN, "runs on caller"]
    (reason,) = module.forward.counters.fallbacks
    assert "all CUDA graphs were dropped, and it ran again" in reason


@pytest.mark.parametrize("where", ["in_copy", "in_capture"])
def test_what_other_processes_take_part_in_never_runs_again(
    gpu: Torch, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Program, "has_exchanges", True)
    module = optimized(Net())
    assert_right(module, 3)
    setattr(gpu if where == "in_copy" else gpu.cuda, where, out_of_memory)
    with torch.no_grad(), pytest.raises(torch.OutOfMemoryError):
        module(X)
    assert not module.forward.counters.fallbacks
    assert module.forward.counters.replays == 0


def test_what_does_not_fit_without_graphs_is_torchs_own_error(
    gpu: Torch, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = optimized(Net())
    monkeypatch.setattr(executor.Workspace, "reserve", lambda *given: out_of_memory())
    with torch.no_grad(), pytest.raises(torch.OutOfMemoryError, match=r"Tried to allocate 2\.00"):
        module(X)
    monkeypatch.undo()
    assert_right(module, 3)


# on a GPU


@pytest.fixture
def limited() -> Iterator[Callable[[], None]]:
    """Call it to leave the process the memory that it has, and no more."""

    def limit() -> None:
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(torch.cuda.memory_reserved() / total)

    yield limit
    torch.cuda.set_per_process_memory_fraction(1.0)


class Scaled(Net):
    """A large result from few weights."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return torch.nn.functional.silu(self.lin(x)) + x


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_a_full_gpu_drops_graphs_and_goes_on(
    limited: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replay_gain, "MARGIN", math.inf)  # so that this large call wants a graph
    module = optimized(Scaled().cuda())
    small, large = (torch.randn(rows, 8, device="cuda") for rows in (1000, 4_000_000))
    with torch.no_grad():
        wanted = [module.forward.eager(x).cpu() for x in (small, large)]
        torch.cuda.empty_cache()
        for _ in range(3):
            module(small)
        assert module.forward.counters.replays == 2
        module(large)  # its memory stays in torch's cache: enough for this call, not for a graph
        limited()
        for x, expected in ((large, wanted[1]), (small, wanted[0]), (large, wanted[1])):
            torch.testing.assert_close(module(x).cpu(), expected, rtol=1e-4, atol=1e-5)
        assert any("out of memory" in reason for reason in module.forward.counters.fallbacks)
        assert module.forward.counters.eager_calls == 0
        torch.rand(3, device="cuda")  # a broken capture would have left the generator in it


class Waits(Net):
    """Calls torch for what no stream capture allows: the host waits for a value."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return self.lin(x) + torch.histc(x, 4).sum()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_a_call_that_waits_for_the_gpu_runs_without_a_graph() -> None:
    module, x = optimized(Waits().cuda()), X.cuda()
    with torch.no_grad():
        for _ in range(4):
            torch.testing.assert_close(module(x), module.forward.eager(x), rtol=1e-4, atol=1e-5)
        other = optimized(Net().cuda())
        for _ in range(3):
            torch.testing.assert_close(other(x), other.forward.eager(x), rtol=1e-4, atol=1e-5)
    assert other.forward.counters.replays == 2
    torch.rand(3, device="cuda")
