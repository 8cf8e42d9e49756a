"""Working memory that runs, graphs and modules share, in turns."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import strop
from strop.bench import timer
from strop.options import Options
from strop.runtime.run import cuda_graphs as graphs
from strop.runtime.run import executor, graph_keep_alive
from strop.runtime.run.executor import Bound
from strop.runtime.run.memory import aligned
from strop.runtime.run.workspace import Workspace, rest_on, workspace_of
from tests.badinput.nets import optimized
from tests.badinput.test_memory import Stream, Torch, gpu  # noqa: F401  (a fixture)
from tests.e2e import tiny
from tests.standing_memory import Guest, StandingMemory

CPU = torch.device("cpu")


class Chain(nn.Module):
    """What lies between its layers is working memory."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, width), nn.Linear(width, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)) * 2)


def assert_right(module: nn.Module, rows: int) -> None:
    torch.manual_seed(rows)
    x = torch.randn(rows, 4)
    with torch.no_grad():
        torch.testing.assert_close(module(x), type(module).forward(module, x))


@pytest.fixture
def shared(gpu: Torch) -> Iterator[Workspace]:  # noqa: F811
    workspace = workspace_of(CPU, 0)
    workspace.give_back()
    yield workspace
    workspace._is_lent = False
    workspace.give_back()


def test_memory_grows_and_its_tenants_hear_of_it() -> None:
    workspace, first, second = Workspace(CPU), Guest(), Guest()
    memory = workspace.reserve(100, first)
    assert workspace.reserve(50, second) is memory
    assert first.num_moves == second.num_moves == 0
    assert workspace.reserve(200, second).numel() == 200
    assert first.num_moves == second.num_moves == 1
    workspace.give_back()
    assert (first.num_moves, second.num_moves) == (1, 2), "the first one had left"
    assert workspace.memory.numel() == 0


def test_nobody_is_kept_alive() -> None:
    workspace = Workspace(CPU)
    workspace.reserve(10, Guest())
    gc.collect()
    workspace.give_back()
    assert not workspace._tenants


def test_graphs_have_the_memory_of_runs(shared: Workspace) -> None:
    module = optimized(Chain())
    for _ in range(3):
        assert_right(module, 5)
    assert module.forward.counters.replays == 2
    pool = graphs.pool_of(CPU)
    assert pool._workspace is shared
    (captured,) = pool._graphs.values()
    (entry,) = module.forward.shapes.entries
    (plain,) = entry.bounds.values()
    assert captured.bound._linked.memory is plain._linked.memory is shared.memory
    assert shared.memory.numel() > 0


def test_another_module_that_needs_more_moves_all(shared: Workspace, request: Any) -> None:
    torch_ = request.getfixturevalue("gpu")
    small, large = optimized(Chain()), optimized(Chain(64))
    for _ in range(3):
        assert_right(small, 5)
    (captured,) = graphs.pool_of(CPU)._graphs.values()
    assert_right(large, 5)
    assert captured.bound._linked is None, "the old memory would stay as long as its graph"
    assert captured.bound.has_moved
    assert torch_.cuda.num_captures == 1
    for _ in range(2):
        assert_right(small, 5)
        assert_right(large, 5)
    assert torch_.cuda.num_captures == 3
    assert not small.forward.counters.fallbacks


def test_calls_from_a_second_stream(shared: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs there and here wait for nobody, so graphs get memory of their own."""
    module = optimized(Chain())
    for _ in range(3):
        assert_right(module, 5)
    other = Stream()
    other.cuda_stream = 7
    monkeypatch.setattr(graphs.GraphPool, "_current_stream", lambda self: other)
    assert_right(module, 5)
    pool = graphs.pool_of(CPU)
    own = pool._workspace
    assert own is not shared
    assert shared.memory.numel() == 0
    monkeypatch.setattr(graphs.GraphPool, "_current_stream", lambda self: Stream())
    for _ in range(3):
        assert_right(module, 5)
    assert pool._workspace is own
    assert module.forward.counters.replays == 6
    assert not module.forward.counters.fallbacks


def test_large_memory_is_given_back(shared: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    is_large = property(lambda bound: bound.arena_bytes > 5000)
    monkeypatch.setattr(executor.Bound, "is_large", is_large)
    small, large = optimized(Chain()), optimized(Chain(300))
    for _ in range(3):
        assert_right(small, 5)
        before = shared.memory
        assert_right(large, 5)
        assert shared.memory is before, "graphs of others would have to be captured again"
        (entry,) = large.forward.shapes.entries
        assert [bound._linked for bound in entry.bounds.values()] == [None]
    (reason,) = large.forward.counters.fallbacks
    assert reason.endswith("GiB, is free for others between calls")
    assert large.forward.counters.replays == 0
    assert small.forward.counters.replays == 2


# on a GPU


def bytes_of(options: Options) -> tuple[int, Bound]:
    """What three calls leave allocated, beside the weights."""
    graphs.pool_of(torch.device("cuda", 0)).drop()
    module = strop.optimize(Chain(4096).cuda().eval().requires_grad_(False), options=options)
    x = torch.randn(4096, 4, device="cuda")
    gc.collect()
    before = timer.allocated(x.device)
    with torch.no_grad():
        for _ in range(3):
            result = module(x)
        torch.testing.assert_close(result, module.forward.eager(x), rtol=1e-3, atol=1e-4)
    del result
    gc.collect()
    held = timer.allocated(x.device) - before
    (bound,) = module.forward.latest.bounds.values()
    return held, bound


class Attentions(nn.Module):
    """Results of a library, each read by a product and by a kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.linears = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for linear in self.linears:
            attended = nn.functional.scaled_dot_product_attention(x, x, x)
            x = linear(attended) + attended.sin()
        return x


def test_what_a_library_allocates_is_free_behind_its_last_reader() -> None:
    module, x = Attentions().eval().double(), torch.randn(2, 3, 5, 8).double()
    with torch.no_grad():
        expected = module(x)
        fast = optimized(module)
        fast(x)
        (entry,) = fast.forward.shapes.entries
        (bound,) = entry.bounds.values()
        calls = [n for n, b in enumerate(bound.program.buffers) if b.kind == "call"]
        most = 0

        def around(position: int, step: Any) -> None:
            nonlocal most
            step()
            most = max(most, sum(bound._linked.slots[n] is not None for n in calls))

        bound.around = around
        torch.testing.assert_close(fast(x), expected)
    assert len(calls) == 4
    assert most == 1
    assert bound.call_bytes == aligned(x.nbytes)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_a_graph_costs_its_arguments_and_results_alone() -> None:
    bytes_of(Options())  # cuBLAS takes 32 MiB for a stream with its first product, and keeps them
    plain, bound = bytes_of(Options(cuda_graphs=False))
    with_graph, _ = bytes_of(Options())
    assert bound.arena_bytes >= 4096 * 4096 * 4
    assert plain >= bound.arena_bytes
    assert with_graph - plain < bound.arena_bytes / 10


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_large_memory_is_free_between_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor, "KEPT_BYTES", 1 << 20)
    bytes_of(Options())  # cuBLAS takes 32 MiB for a stream with its first product, and keeps them
    held, bound = bytes_of(Options())
    assert bound.arena_bytes >= 4096 * 4096 * 4
    assert held < bound.arena_bytes / 10


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_streams_in_turns() -> None:
    """Every stream's calls are right, whoever has captured the graph and whatever ran before."""
    module = strop.optimize(Chain(512).cuda().eval().requires_grad_(False))
    other = torch.cuda.Stream()
    with torch.no_grad():
        for turn in range(12):
            stream = other if turn % 3 == 2 else torch.cuda.current_stream()
            x = torch.randn(64 + turn // 6, 4, device="cuda")
            wanted = module.forward.eager(x)
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                found = module(x)
            torch.cuda.current_stream().wait_stream(stream)
            torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-4)


@pytest.mark.usefixtures("shared")
def test_what_a_graph_would_only_copy_runs_without(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its results are new memory each time."""
    monkeypatch.setattr(executor, "reason_against", lambda plan: "copies cost more")
    module = optimized(Chain())
    for _ in range(4):
        assert_right(module, 5)
    assert module.forward.counters.replays == 0
    (reason,) = module.forward.counters.fallbacks
    assert reason.endswith("runs without a CUDA graph: copies cost more")
    assert not graphs.pool_of(CPU)._graphs


@pytest.fixture(params=["stays", "moves"])
def memory(
    shared: Workspace, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> str:
    if request.param == "stays":
        monkeypatch.setattr(shared, "_bytes", StandingMemory(CPU))
    return request.param


def test_graphs_find_memory_again_that_has_rested(
    shared: Workspace, memory: str, request: Any
) -> None:
    small, large, torch_ = optimized(Chain()), optimized(Chain(64)), request.getfixturevalue("gpu")
    for _ in range(3):
        assert_right(large, 5)
        assert_right(small, 5)
    before = torch_.cuda.num_captures
    for _ in range(3):
        rest_on(CPU)
        assert not shared.memory.numel()
        assert_right(small, 5)
        few = shared.memory.numel()
        assert_right(large, 5)
        assert 0 < few < shared.memory.numel(), "each has as much as it needs"
    assert torch_.cuda.num_captures - before == (0 if memory == "stays" else 6)
    assert not small.forward.counters.fallbacks


def test_runs_without_graphs_find_memory_again(shared: Workspace, memory: str) -> None:
    options = tiny.options(strict=True, cuda_graphs=False)
    modules = [strop.optimize(Chain(width).eval(), options=options) for width in (16, 64)]
    for _ in range(3):
        for module in modules:
            assert_right(module, 5)
            rest_on(CPU)
            assert not shared.memory.numel()


def test_memory_that_a_graph_of_others_uses_does_not_rest(shared: Workspace, memory: str) -> None:
    module = optimized(Chain())
    with graph_keep_alive.taken():
        assert_right(module, 5)
    size = shared.memory.numel()
    assert size
    rest_on(CPU)
    assert shared.memory.numel() == size


def test_memory_of_other_devices_does_not_rest(shared: Workspace) -> None:
    size = shared.reserve(100, Guest()).numel()
    rest_on(torch.device("meta"))
    assert shared.memory.numel() == size
