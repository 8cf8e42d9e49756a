"""Memory that grows where it is, on a real driver."""

from __future__ import annotations

import ctypes
import gc

import pytest
import torch

import strop
from strop.runtime.build import driver
from strop.runtime.run import cuda_graphs, growing_memory
from strop.runtime.run.growing_memory import StayingMemory
from strop.runtime.run.workspace import Workspace, workspace_of
from tests.runtime.test_workspace import Chain, Guest

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
MIB = 1 << 20


@pytest.fixture
def gpu() -> torch.device:
    """Give a GPU on which Strop holds nothing that anybody can give back."""
    device = torch.device("cuda", torch.cuda.current_device())
    gc.collect()
    cuda_graphs.pool_of(device).drop()
    workspace_of(device, torch.cuda.current_stream().cuda_stream).give_back()
    return device


def test_it_grows_under_kernels_that_run(gpu: torch.device) -> None:
    workspace, tenant = Workspace(gpu), Guest()
    small = workspace.reserve(3 * MIB, tenant)
    assert isinstance(workspace._bytes, StayingMemory), "this driver has no such ranges"
    assert small.device == gpu
    torch.cuda._sleep(200_000_000)  # 0.1 s
    small.fill_(7)
    large = workspace.reserve(300 * MIB, tenant)
    assert large.data_ptr() == small.data_ptr()
    assert large.numel() >= 300 * MIB
    large[small.numel() :].fill_(8)
    assert bool(small.eq(7).all())
    assert bool(large[-MIB:].eq(8).all())
    assert tenant.num_moves == 0


@pytest.mark.alone
def test_it_goes_back_to_the_device(gpu: torch.device) -> None:
    torch.cuda.empty_cache()
    before, held = torch.cuda.mem_get_info(gpu)[0], growing_memory.held_bytes(gpu)
    workspace = Workspace(gpu)
    memory = workspace.reserve(512 * MIB, Guest())
    memory.zero_()
    assert before - torch.cuda.mem_get_info(gpu)[0] >= 512 * MIB
    assert growing_memory.held_bytes(gpu) - held == memory.numel()
    del memory
    workspace.give_back()
    assert before - torch.cuda.mem_get_info(gpu)[0] <= 4 * MIB
    assert growing_memory.held_bytes(gpu) == held


def test_a_graph_replays_in_memory_that_has_grown(gpu: torch.device) -> None:
    pool = cuda_graphs.pool_of(gpu)
    before = pool.num_captures
    module = strop.optimize(Chain(1024).to(gpu).eval().requires_grad_(False))
    with torch.no_grad():
        for rows in (64, 64, 64, 20_000, 20_000, 64, 64, 20_000):
            x = torch.randn(rows, 4, device=gpu)
            expected = module.forward.eager(x)
            torch.testing.assert_close(module(x), expected, rtol=1e-3, atol=1e-4)
    assert pool.num_captures - before == 2
    assert module.forward.counters.replays == 6
    assert not module.forward.counters.fallbacks


def test_what_torch_keeps_makes_room(gpu: torch.device) -> None:
    """The process may hold no more than it does now; torch gives up what it has for later."""
    torch.cuda.empty_cache()  # what other tests have left would make room, too
    workspace = Workspace(gpu)
    torch.empty(512 * MIB, dtype=torch.uint8, device=gpu)
    total = torch.cuda.get_device_properties(gpu).total_memory
    held = torch.cuda.memory_reserved(gpu) + growing_memory.held_bytes(gpu)
    torch.cuda.set_per_process_memory_fraction((held + MIB) / total, gpu)
    try:
        assert workspace.reserve(256 * MIB, Guest()).numel() == 256 * MIB
        with pytest.raises(torch.OutOfMemoryError):
            workspace.reserve(1024 * MIB, Guest())
        assert workspace.memory.numel() == 256 * MIB
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, gpu)
    with pytest.raises(torch.OutOfMemoryError):
        workspace.reserve(2 * total, Guest())


@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() < (9, 0),
    reason="needs a tensor memory accelerator",
)
def test_a_tensor_map_that_was_moved_is_as_if_made_there(gpu: torch.device) -> None:
    pointer = torch.empty(1 << 20, dtype=torch.float16, device=gpu).data_ptr()
    geometry = driver._Geometry(6, 3, (64, 96), (256,), (64, 32), (1, 1), 0)
    moved = driver._described(geometry, pointer)
    driver._described.cache_clear()
    memory, address = driver._map_memory()
    rank, sizes = 2, (ctypes.c_uint64 * 2)(64, 96)
    steps, reach = (ctypes.c_uint32 * 2)(1, 1), (ctypes.c_uint32 * 2)(64, 32)
    given = (pointer, sizes, (ctypes.c_uint64 * 2)(256), reach, steps, 0, 3, 2, 0)
    driver.call("encoding", "cuTensorMapEncodeTiled", address, 6, rank, *given)
    assert bytes(memory) == moved
