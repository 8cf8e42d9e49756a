"""Large results of a graph are handed out where they are, and nobody's are written over."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import strop
from strop.options import Options
from strop.runtime.run import cuda_graphs as graphs
from strop.runtime.run import handed_results
from strop.runtime.run.handed_results import LEAST_SUM_BYTES, HandedResults, handed_of
from strop.runtime.run.replay_gain import reason_against
from strop.runtime.run.sizes import Look
from tests.badinput.nets import optimized
from tests.badinput.test_memory import Torch, gpu  # noqa: F401  (a fixture)
from tests.runtime.test_replay_gain import ROW_BYTES, planned

CPU = torch.device("cpu")


class Memory:
    """Gives out its own memory, or other where somebody has some of that, as torch's allocator
    does for a ``ResultPool``."""

    def __init__(self, device: torch.device) -> None:
        self._own: dict[int, Tensor] = {}

    def empty(self, looks: Mapping[int, Look]) -> dict[int, Tensor]:
        return {place: self._one(place, look) for place, look in looks.items()}

    def _one(self, place: int, look: Look) -> Tensor:
        shape, strides, dtype = look
        if place not in self._own:
            self._own[place] = torch.empty_strided(shape, strides, dtype=dtype)
        own = self._own[place]
        is_free = torch._C._storage_Use_Count(own.untyped_storage()._cdata) <= 2  # here, and asking
        return own.as_strided(shape, strides) if is_free else torch.empty_like(own)


class Step(nn.Module):
    """Has two results of its own, one of which is a view, and one that lies in the other."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        found = self.layer(x)
        return found.softmax(0), (found * 2).t(), found.sum(1)


@pytest.fixture
def _for_small_ones(gpu: Torch, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    monkeypatch.setattr(handed_results, "LEAST_SUM_BYTES", 40 * 8 * 4)
    monkeypatch.setattr(handed_results, "LEAST_BYTES", 40 * 4)
    monkeypatch.setattr(graphs, "ResultPool", Memory)


def made() -> Any:
    torch.manual_seed(0)
    return optimized(Step())


def checked(module: Any, x: Tensor) -> tuple[Tensor, ...]:
    with torch.no_grad():
        wanted, found = type(module).forward(module, x), module(x)
    torch.testing.assert_close(found, wanted)
    assert [r.stride() for r in found] == [r.stride() for r in wanted]
    return found  # type: ignore[no-any-return]


def addresses(results: tuple[Tensor, ...]) -> list[int]:
    return [result.data_ptr() for result in results]


@pytest.mark.usefixtures("_for_small_ones")
def test_who_lets_go_gets_the_same_memory_again(gpu: Torch) -> None:  # noqa: F811
    module, seen = made(), []
    for _ in range(5):
        seen.append(addresses(checked(module, torch.randn(40, 8))))
    assert seen[1:] == [seen[1]] * 4
    assert gpu.cuda.num_captures == 1
    (captured,) = graphs.pool_of(CPU)._graphs.values()
    assert captured.results == (None, None, None)
    assert captured.size_bytes > 2 * 40 * 8 * 4


@pytest.mark.parametrize("which", [0, 1, 2])
@pytest.mark.parametrize("how", ["a result", "a view", "a storage"])
@pytest.mark.usefixtures("_for_small_ones")
def test_what_somebody_keeps_stays_as_it_is(gpu: Torch, which: int, how: str) -> None:  # noqa: F811
    module, kept = made(), []
    for n in range(6):
        found = checked(module, torch.randn(40, 8))[which]
        if n in (2, 3, 5):
            keep: Any = {
                "a result": found,
                "a view": found[3:],
                "a storage": found.untyped_storage(),
            }
            kept.append((keep[how], found.clone()))
        del found
    for own, copy in kept:
        if how == "a storage":
            now = torch.empty(0).set_(own, 0, copy.shape, copy.stride())
        else:
            now, copy = own, copy[3:] if how == "a view" else copy
        assert torch.equal(now, copy)
    assert gpu.cuda.num_captures == 2, "once more, and copied from then on"
    (captured,) = graphs.pool_of(CPU)._graphs.values()
    assert captured.handed is None


@pytest.mark.usefixtures("_for_small_ones")
def test_a_result_may_be_the_next_argument(gpu: Torch) -> None:  # noqa: F811
    module, x = made(), torch.randn(40, 8)
    for _ in range(5):
        x = checked(module, x)[0]
    assert gpu.cuda.num_captures == 2


def test_small_results_are_copied(gpu: Torch) -> None:  # noqa: F811
    module = made()
    for _ in range(3):
        checked(module, torch.randn(40, 8))
    (captured,) = graphs.pool_of(CPU)._graphs.values()
    assert captured.handed is None


def test_memory_that_is_not_back_is_not_taken() -> None:
    looks: dict[int, Look] = dict.fromkeys((0, 3), ((4, 2), (2, 1), torch.float32))
    memory: Any = Memory(CPU)
    handed = HandedResults(memory, looks)
    assert handed.size_bytes == 64
    assert handed.let_go((handed.home(0, looks[0]), 7, None, handed.home(3, looks[3]))) == (
        *(None, 7, None),
        None,
    )
    assert handed.are_back()
    first, *_ = handed.hand_over([None, 7, None, None])
    assert not handed.are_back()
    assert not handed.are_back()
    del first, _
    assert handed.are_back()


def test_a_program_that_hands_over_may_have_a_graph() -> None:
    """0.5 GiB of arguments are still moved twice; results alone are not."""
    plan = planned(1 << 18)
    assert handed_of(plan)
    assert f"{(1 << 18) * ROW_BYTES >> 20} MiB of arguments" in reason_against(plan)
    assert f"{(2 << 18) * ROW_BYTES >> 20} MiB" in reason_against(plan, hands_over=False)
    assert handed_of(planned(LEAST_SUM_BYTES // ROW_BYTES))
    assert not handed_of(planned(LEAST_SUM_BYTES // ROW_BYTES - 1))


@pytest.mark.usefixtures("_for_small_ones")
def test_small_ones_beside_large_ones_are_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handed_results, "LEAST_BYTES", 40 * 8 * 4)
    module = made()
    for _ in range(4):
        checked(module, torch.randn(40, 8))
    (captured,) = graphs.pool_of(CPU)._graphs.values()
    assert [result is None for result in captured.results] == [True, True, False]


class Large(nn.Module):
    """Gives four results of 8 MiB, and one of few bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(256, 256)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        found = self.layer(x)
        return found.relu(), found * 2, found.softmax(1), found.t() + 1, found.mean()


def pair(cache: Path) -> tuple[Any, Any]:
    torch.manual_seed(0)
    eager, fast = (Large().cuda().half().eval().requires_grad_(False) for _ in range(2))
    fast.load_state_dict(eager.state_dict())
    strop.optimize(fast, options=Options(cache_dir=str(cache)))
    return fast, eager


def agree(fast: Any, eager: Any) -> tuple[Tensor, ...]:
    x = torch.randn(16384, 256, device="cuda").half()
    found, wanted = fast(x), eager(x)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-2, atol=2e-3)
    return found  # type: ignore[no-any-return]


def captures() -> int:
    return graphs.pool_of(torch.device("cuda", torch.cuda.current_device())).num_captures


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_results_on_a_gpu_are_there_once(tmp_path: Path) -> None:
    fast, eager = pair(tmp_path)
    before, seen = captures(), []
    for n in range(6):
        seen.append(addresses(agree(fast, eager))[:4])
        if n == 3:
            torch.cuda.empty_cache()
    assert seen[2:] == [seen[1]] * 4
    assert captures() == before + 1
    assert not fast.forward.counters.fallbacks
    x = torch.randn(16384, 256, device="cuda").half()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    least = torch.cuda.memory_allocated()
    found = fast(x)
    assert torch.cuda.max_memory_allocated() - least < sum(r.nbytes for r in found) + (1 << 20)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_results_that_are_kept_on_a_gpu_stay(tmp_path: Path) -> None:
    fast, eager = pair(tmp_path)
    before, kept = captures(), []
    for n in range(7):
        found = agree(fast, eager)
        if n in (2, 3, 5):
            kept.append((found[n % 4][:100], found[n % 4][:100].clone()))
        del found
    for view, copy in kept:
        assert torch.equal(view, copy)
    assert captures() == before + 2
    strop.restore(fast)
    del fast
    gc.collect()
    for view, copy in kept:
        assert torch.equal(view, copy)
    kept.clear()
    torch.cuda.empty_cache()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_what_another_stream_reads_is_not_written_over(tmp_path: Path) -> None:
    fast, eager = pair(tmp_path)
    for _ in range(3):
        agree(fast, eager)
    other = torch.cuda.Stream()
    for _ in range(3):
        found = agree(fast, eager)[1]
        wanted = found.clone()
        torch.cuda.synchronize()
        with torch.cuda.stream(other):
            torch.cuda._sleep(50_000_000)
            read = found.clone()
        found.record_stream(other)
        del found
        agree(fast, eager)
        torch.cuda.synchronize()
        assert torch.equal(read, wanted)
