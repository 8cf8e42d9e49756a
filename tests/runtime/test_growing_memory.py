"""Working memory grows where it is, so that nobody who is bound to it binds again."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from strop.errors import CodegenError
from strop.runtime.build import driver
from strop.runtime.loop.hoisting import Hoist, Hoisted, Kept, Prologue, Tally
from strop.runtime.run import cuda_graphs as graphs
from strop.runtime.run import growing_memory
from strop.runtime.run.growing_memory import MovingMemory, StayingMemory, memory_on, space_of
from strop.runtime.run.workspace import Workspace, workspace_of
from tests.badinput.nets import optimized
from tests.badinput.test_memory import Torch, gpu, once  # noqa: F401  (a fixture)
from tests.runtime.host_pages import CPU, PAGE, HostMemory, host_memory
from tests.runtime.test_workspace import Chain, Guest, assert_right


@pytest.fixture
def memory() -> Iterator[HostMemory]:
    with host_memory(64 * PAGE) as found:
        yield found
        assert found.pages.modes == [0], "the thread's captures would let through what they refuse"


def test_it_grows_behind_its_end(memory: HostMemory) -> None:
    workspace, first, second = Workspace(CPU), Guest(), Guest()
    small = workspace.reserve(100, first)
    assert small.numel() == PAGE
    small.fill_(7)
    large = workspace.reserve(3 * PAGE + 1, second)
    large[PAGE:].fill_(8)
    assert large.numel() == 4 * PAGE
    assert large.data_ptr() == small.data_ptr()
    assert large[:PAGE].eq(7).all()
    assert workspace.is_at(small, PAGE)
    assert workspace.reserve(2 * PAGE, first) is large
    assert first.num_moves == second.num_moves == 0
    assert memory.pages.used_bytes == growing_memory.held_bytes(CPU) == 4 * PAGE


def test_it_goes_back_when_the_last_tensor_in_it_is_gone(memory: HostMemory) -> None:
    workspace, tenant = Workspace(CPU), Guest()
    piece = workspace.reserve(PAGE, tenant)[10:20].view(torch.int16)
    workspace.give_back()
    assert tenant.num_moves == 1
    assert workspace.memory.numel() == 0
    assert memory.pages.used_bytes == growing_memory.held_bytes(CPU) == PAGE
    other = workspace.reserve(PAGE, tenant)
    assert not workspace.is_at(piece, PAGE)
    other.fill_(1)
    piece.fill_(2)  # is still memory, and another
    assert other.eq(1).all()
    del piece, other
    workspace.give_back()
    assert memory.pages.used_bytes == growing_memory.held_bytes(CPU) == 0
    assert not memory.pages.reserved
    assert memory.num_waits == 1, "kernels may still be at work there"


def test_who_watches_is_told_before_it_changes(memory: HostMemory) -> None:
    workspace, told = Workspace(CPU), list[int]()
    growing_memory.watch(CPU, lambda: told.append(growing_memory.held_bytes(CPU)))
    for size_bytes in (PAGE, 2 * PAGE, PAGE):
        workspace.reserve(size_bytes, Guest())
    workspace.give_back()
    assert told == [0, PAGE, 2 * PAGE], "before it grew, grew again and was given back"
    assert not growing_memory.held_bytes(CPU)


def test_nothing_goes_back_amid_a_capture(memory: HostMemory) -> None:
    workspace = Workspace(CPU)
    workspace.reserve(PAGE, Guest())
    memory.capturing = True
    workspace.give_back()
    gc.collect()
    other = Workspace(CPU)
    other.reserve(PAGE, Guest())
    assert memory.pages.used_bytes == 2 * PAGE
    memory.capturing = False
    other.reserve(2 * PAGE, Guest())
    assert memory.pages.used_bytes == 2 * PAGE
    assert len(memory.pages.reserved) == 1


def test_torch_gives_back_what_it_keeps(memory: HostMemory, monkeypatch: Any) -> None:
    workspace = Workspace(CPU)
    workspace.reserve(PAGE, Guest())
    memory.pages.made[99] = 63 * PAGE  # torch's
    monkeypatch.setattr(memory, "empty_cache", lambda: memory.pages.made.pop(99))
    assert workspace.reserve(5 * PAGE, Guest()).numel() == 5 * PAGE


@pytest.mark.parametrize("limit", ["of the device", "of the range", "of the process"])
def test_too_little_memory_changes_nothing(memory: HostMemory, limit: str) -> None:
    workspace, tenant = Workspace(CPU), Guest()
    before = workspace.reserve(PAGE, tenant)
    if limit == "of the device":
        memory.pages.made[99] = 62 * PAGE
    if limit == "of the process":
        memory.most = 2 * PAGE
    size = (65 if limit == "of the range" else 3) * PAGE
    with pytest.raises(torch.OutOfMemoryError):
        workspace.reserve(size, Guest())
    assert workspace.memory is before
    assert tenant.num_moves == 0
    assert memory.num_emptied == (limit != "of the range")
    assert workspace.reserve(2 * PAGE, Guest()).numel() == 2 * PAGE


def test_amid_a_capture_torch_gives_nothing_back(memory: HostMemory) -> None:
    memory.capturing, memory.most = True, 0
    with pytest.raises(torch.OutOfMemoryError):
        Workspace(CPU).reserve(PAGE, Guest())
    assert memory.num_emptied == 0


@pytest.mark.parametrize("name", ["cuMemCreate", "cuMemMap", "cuMemRelease", "cuMemSetAccess"])
def test_a_call_that_fails_leaves_nothing_mapped(memory: HostMemory, name: str) -> None:
    workspace = Workspace(CPU)
    memory.pages.breaks.append(name)
    with pytest.raises(CodegenError, match=r"error 1 .* while mapping 16384 bytes"):
        workspace.reserve(PAGE, Guest())
    if name == "cuMemRelease":  # a driver that cannot take a handle back keeps it
        return
    assert memory.pages.used_bytes == growing_memory.held_bytes(CPU) == 0
    assert workspace.reserve(PAGE, Guest()).numel() == PAGE


def test_a_driver_without_such_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is asked once; memory then moves, as on a CPU."""
    asked: list[int] = []
    monkeypatch.setattr(growing_memory, "_SPACES", {})
    monkeypatch.setattr(driver, "attribute", lambda index, number: asked.append(number) or 0)
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    device = torch.device("cuda", 3)
    assert space_of(device) is space_of(device) is None
    assert asked == [102]
    assert isinstance(memory_on(CPU), MovingMemory)


# who is bound to it


def test_graphs_of_a_smaller_size_stay(memory: HostMemory, gpu: Torch) -> None:  # noqa: F811
    module = optimized(Chain(900))
    for rows in (3, 3, 3, 50, 50, 50, 3, 3, 50):
        assert_right(module, rows)
    assert gpu.cuda.num_captures == graphs.pool_of(CPU).num_captures == 2
    assert module.forward.counters.replays == 7
    assert workspace_of(CPU, 0).memory.numel() == growing_memory.held_bytes(CPU)
    assert memory.pages.calls.count("cuMemMap") == 2
    assert not module.forward.counters.fallbacks


def test_graphs_stay_when_another_module_needs_more(memory: HostMemory, gpu: Torch) -> None:  # noqa: F811
    small, large = optimized(Chain()), optimized(Chain(5000))
    for module in (small, small, large, large, small, large):
        assert_right(module, 5)
    assert gpu.cuda.num_captures == 2
    graphs.pool_of(CPU).drop()
    gc.collect()
    workspace_of(CPU, 0).give_back()
    assert memory.pages.used_bytes == 0


def test_without_memory_graphs_are_dropped_and_the_call_is_right(
    memory: HostMemory,
    gpu: Torch,  # noqa: F811
) -> None:
    small, large = optimized(Chain()), optimized(Chain(5000))
    for _ in range(2):
        assert_right(small, 5)
    usual = memory.pages.total_bytes
    memory.pages.total_bytes = PAGE
    with pytest.raises(torch.OutOfMemoryError):
        assert_right(large, 5)
    assert not graphs.pool_of(CPU).held_bytes, "they give way first"
    memory.pages.total_bytes = usual
    assert_right(large, 5)
    assert_right(small, 5)


def hoisted(place: Kept, kept: tuple[int, ...]) -> Hoisted:
    return Hoisted(Prologue((0,), kept), Hoist((), place, (), Tally()))


@pytest.mark.parametrize("stays", [True, False])
def test_what_is_hoisted_stays_where_it_is(stays: bool) -> None:
    """A program that leaves nothing there does not care."""
    with host_memory() if stays else pytest.MonkeyPatch.context():
        place = Kept(CPU)
        small, none, large = hoisted(place, (1,)), hoisted(place, ()), hoisted(place, (1,))
        small.linked(10)
        none.linked(0)
        place.held = held = cast(Any, SimpleNamespace())
        large.linked(3 * PAGE)
        assert small.has_moved is not stays
        assert place.held is (held if stays else None)
        assert not none.has_moved
        assert not large.has_moved
        assert isinstance(place._bytes, StayingMemory) is stays
