"""Large arguments that lie where they lay before are read there by a graph, and never stale."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import strop
from strop.dispatch.entry import Entry
from strop.runtime.run import cuda_graphs as graphs
from strop.runtime.run.cuda_graphs import CapturedGraph
from tests.badinput.nets import optimized
from tests.badinput.test_memory import Torch, gpu  # noqa: F401  (a fixture)

CPU = torch.device("cpu")


class Step(nn.Module):
    """A step with a cache, which comes and goes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
        both = torch.cat([cache, self.layer(x)])
        return both.softmax(0), both * 2


class Writes(Step):
    def forward(self, x: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
        cache.mul_(1.5)
        return super().forward(x, cache)


class Returns(Step):
    def forward(self, x: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
        return super().forward(x, cache)[0], cache


@pytest.fixture
def _for_small_ones(gpu: Torch, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    monkeypatch.setattr(graphs, "LEAST_BYTES", 33 * 8 * 4)
    monkeypatch.setattr(graphs, "LEAST_SUM_BYTES", 33 * 8 * 4)


def made(kind: Any = Step) -> Any:
    torch.manual_seed(0)
    return optimized(kind())


def assert_right(module: Any, x: Tensor, cache: Tensor) -> None:
    own = cache.clone()
    with torch.no_grad():
        wanted = type(module).forward(module, x, own)
        torch.testing.assert_close(module(x, cache), wanted)
    assert torch.equal(own, cache)


def captured() -> CapturedGraph:
    (found,) = graphs.pool_of(CPU)._graphs.values()
    return found


@pytest.mark.usefixtures("_for_small_ones")
def test_a_cache_is_read_where_it_lies(gpu: Torch) -> None:  # noqa: F811
    module, cache = made(), torch.randn(40, 8)
    for n in range(5):
        assert_right(module, torch.randn(1, 8), cache)
        cache.add_(n)  # what the graph reads from now on
    small, large = captured().inputs
    assert small is not None
    assert large is None
    assert captured().in_place == {1: cache.data_ptr()}
    assert gpu.cuda.num_captures == 1
    assert module.forward.counters.replays == 4


@pytest.mark.usefixtures("_for_small_ones")
def test_another_cache_is_captured_once_and_copied_from_then_on(gpu: Torch) -> None:  # noqa: F811
    module, first, second = made(), torch.randn(40, 8), torch.randn(40, 8)
    for cache in (first, first, first, second, second, first, second.clone()):
        assert_right(module, torch.randn(1, 8), cache)
    assert None not in captured().inputs
    assert not captured().in_place
    assert gpu.cuda.num_captures == 2


@pytest.mark.usefixtures("_for_small_ones")
def test_the_same_memory_in_another_type_is_another_argument() -> None:
    """Or read by other strides, or negated: all of it at one address."""
    module, cache = made(), torch.randn(40, 8)
    for _ in range(3):
        assert_right(module, torch.randn(1, 8), cache)
    assert captured().in_place
    view = torch.as_strided(cache, (40, 8), (1, 40))
    assert_right(module, torch.randn(1, 8), view)
    assert_right(module, torch.randn(1, 8), cache)
    negative = torch._neg_view(cache)
    assert negative.data_ptr() == cache.data_ptr()
    assert_right(module, torch.randn(1, 8), negative)


@pytest.mark.parametrize("kind", [Writes, Returns])
@pytest.mark.usefixtures("_for_small_ones")
def test_what_is_written_or_returned_is_copied(kind: Any) -> None:
    """A rehearsal would write it twice, and a result would keep it."""
    module, cache = made(kind), torch.randn(40, 8)
    for _ in range(4):
        assert_right(module, torch.randn(1, 8), cache)
    for found in graphs.pool_of(CPU)._graphs.values():
        assert not found.in_place


def test_small_arguments_are_copied(gpu: Torch) -> None:  # noqa: F811
    module, cache = made(), torch.randn(40, 8)
    for _ in range(3):
        assert_right(module, torch.randn(1, 8), cache)
    assert not captured().in_place


def test_an_entry_knows_which_lie_where_they_lay() -> None:
    a, b = torch.zeros(4), torch.zeros(4)
    entry = Entry(0, None, CPU)  # type: ignore[arg-type]
    assert entry.repeated([a, b]) == []
    entry.addresses = (a.data_ptr(), b.data_ptr())
    assert entry.repeated([a, b]) == [0, 1]
    assert entry.repeated([b, b]) == [1]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_values_on_a_gpu() -> None:
    torch.manual_seed(0)
    module = Step().cuda().half().eval().requires_grad_(False)
    eager = Step().cuda().half().eval().requires_grad_(False)
    eager.load_state_dict(module.state_dict())
    fast = strop.optimize(module)
    caches = [torch.randn(1 << 23, 8, device="cuda").half() for _ in range(2)]  # 128 MiB each
    for n in (0, 0, 0, 0, 1, 0, 1):
        x = torch.randn(1, 8, device="cuda").half()
        found, expected = fast(x, caches[n])[1], eager(x, caches[n])[1]
        assert torch.equal(found[:-1], expected[:-1])
        torch.testing.assert_close(found[-1], expected[-1], rtol=1e-3, atol=1e-3)  # fp16 sums of 8
        caches[n].mul_(0.9)
    strop.restore(module)
