"""Captured graphs write to workspaces of cuBLAS that nobody else gets."""

from __future__ import annotations

import contextlib
import gc
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import strop
from strop.runtime.run.library_workspaces import LibraryWorkspaces, library_workspaces
from strop.runtime.run.own_streams import own_stream

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
CPU = torch.device("cpu")


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, bool]]:
    """Note what was asked of libraries, and whether that was within a pool of memory. A pool is one
    of the device that is current."""
    found: list[tuple[str, bool]] = []
    pools: list[Any] = []
    devices: list[torch.device] = []

    @contextlib.contextmanager
    def current(device: torch.device) -> Iterator[None]:
        devices.append(device)
        yield
        devices.pop()

    def pool() -> object:
        assert devices == [CPU]
        return object()

    @contextlib.contextmanager
    def use(pool: Any, device: torch.device) -> Iterator[None]:
        pools.append(pool)
        yield
        assert pools.pop() is pool

    def noted(name: str, call: Any) -> Any:
        def product(*operands: Any, **more: Any) -> Any:
            found.append((name, bool(pools)))
            return call(*operands, **more)

        return product

    monkeypatch.setattr(torch.cuda, "device", current)
    monkeypatch.setattr(torch.cuda, "MemPool", pool)
    monkeypatch.setattr(torch.cuda, "use_mem_pool", use)
    monkeypatch.setattr(torch.cuda, "current_blas_handle", noted("handle", lambda: 0))
    monkeypatch.setattr(torch, "addmm", noted("addmm", torch.addmm))
    return found


def test_both_libraries_are_called_in_the_pool(made: list[tuple[str, bool]]) -> None:
    """In any mode of the caller's, whatever the mode in which it was made."""
    with torch.inference_mode():
        workspaces = LibraryWorkspaces(CPU)
        workspaces.hold()
    workspaces.hold()
    with torch.no_grad():
        workspaces.hold_for_training()
    assert made == [("handle", True), ("addmm", True)] * 4


def test_no_product_is_made_where_torch_may_refuse_it(made: list[tuple[str, bool]]) -> None:
    torch.use_deterministic_algorithms(True)
    try:
        LibraryWorkspaces(CPU).hold()
    finally:
        torch.use_deterministic_algorithms(False)
    assert made == [("handle", True)]


class Products(nn.Module):
    """Long sums for few results: cuBLAS cuts them, and adds the parts up in its workspace."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8192, 96, bias=False), nn.Linear(96, 8192)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x)))


@pytest.mark.gpu
@needs_gpu
def test_what_torch_frees_is_not_written_to() -> None:
    """Others have used all of torch's streams before, and have workspaces there."""
    device = torch.device("cuda", torch.cuda.current_device())
    square = torch.randn(64, 64, device=device)
    for _ in range(40):
        with torch.cuda.stream(torch.cuda.Stream()):
            square @ square
    owner = Products()
    stream = own_stream(owner, device)
    a = torch.randn(96, 65536, device=device)
    b = torch.randn(65536, 96, device=device)
    result = torch.empty(96, 96, device=device)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        library_workspaces(device).hold()
        torch.mm(a, b, out=result)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            torch.mm(a, b, out=result)
        wanted = result.clone()
        torch._C._cuda_clearCublasWorkspaces()
        patterns = [torch.full((32 << 20,), 7, dtype=torch.uint8, device=device) for _ in range(4)]
        result.zero_()
        graph.replay()
        torch.cuda.synchronize()
        assert all(bool((pattern == 7).all()) for pattern in patterns)
        torch.testing.assert_close(result, wanted)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_inductor_captures_beside_us(dtype: torch.dtype) -> None:
    """Inductor's graphs free all workspaces; ours go on, and so do first runs of other shapes."""
    with torch.no_grad():
        module, expected = (Products().cuda().to(dtype).eval() for _ in range(2))
        expected.load_state_dict(module.state_dict())
        strop.optimize(module, options=strop.Options(strict=True))
        theirs = torch.compile(nn.Linear(64, 64).cuda(), mode="reduce-overhead")
        given = [torch.randn(n, 8192, device="cuda", dtype=dtype) for n in (2, 5, 40)]
        kept = []
        for turn in range(4):
            for x in given[: turn + 1]:
                kept.append((x, module(x)))
            theirs(torch.randn(8, 64, device="cuda"))
            kept.append((given[0], module(given[0])))
        for x, found in kept:
            torch.testing.assert_close(found, expected(x), rtol=2e-3, atol=2e-3)
        counters = module.forward.counters
        assert counters.replays >= 4
        assert not counters.fallbacks


@pytest.mark.gpu
@needs_gpu
def test_first_runs_are_in_order_with_the_caller() -> None:
    """A first run is on another stream than the caller's: it waits for his inputs, and he for its
    results, whose memory is not given away before he has read them."""
    with torch.no_grad():
        module = Products().cuda().half().eval()
        weights = {name: value.double() for name, value in module.state_dict().items()}
        strop.optimize(module, options=strop.Options(strict=True))
        slow = torch.randn(4096, 4096, device="cuda", dtype=torch.float16)
        found = []
        for rows in range(3, 19):
            x = torch.zeros(rows, 8192, device="cuda", dtype=torch.float16)
            for _ in range(20):
                slow = torch.tanh(slow @ slow)
            x.add_(rows / 16)  # behind what takes the GPU longer than the host's launches
            result = module(x)
            for _ in range(20):
                slow = torch.tanh(slow @ slow)
            found.append((rows, result * 2))
            del result  # and behind that it is read
        assert not module.forward.counters.replays
        for rows, twice in found:
            x = torch.full((1, 8192), rows / 16, device="cuda", dtype=torch.float64)
            hidden = torch.tanh(x @ weights["first.weight"].T)
            exact = 2 * (hidden @ weights["second.weight"].T + weights["second.bias"])
            torch.testing.assert_close(twice.double(), exact.expand(rows, -1), rtol=5e-3, atol=5e-3)


_ONE_WORKSPACE = """
import torch, strop
from tests.runtime.test_library_workspaces import Products
with torch.no_grad():
    module = Products().cuda().eval()
    strop.optimize(module, options=strop.Options(strict=True))
    x = torch.randn(4, 8192, device="cuda")
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for _ in range(4):
        module(x)
    torch.cuda.synchronize()
    assert module.forward.counters.replays
    print((torch.cuda.memory_allocated() - before) / 2**20)
"""


@pytest.mark.gpu
@needs_gpu
def test_a_first_run_and_its_graph_have_one_workspace() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _ONE_WORKSPACE], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert float(done.stdout.split()[-1]) < 40  # 32 on a Hopper, and some for the graph


@pytest.mark.gpu
@needs_gpu
def test_a_stream_has_one_owner_at_a_time() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    first, second = Products(), Products()
    streams = [own_stream(owner, device) for owner in (first, second)]
    handles = {stream.cuda_stream for stream in streams}
    assert len(handles | {torch.cuda.Stream().cuda_stream for _ in range(40)}) == 34
    del first
    gc.collect()
    third = Products()
    assert own_stream(third, device).cuda_stream in handles
    with torch.cuda.stream(streams[1]):
        assert torch.cuda.current_stream().cuda_stream == streams[1].cuda_stream
