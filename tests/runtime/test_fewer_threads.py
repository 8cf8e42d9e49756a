"""Which library calls give the same bits with fewer threads is found out, or they have one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import strop
from strop.runtime.run import fewer_threads
from strop.runtime.run.executor import Bound
from strop.runtime.run.fewer_threads import SMALL_FLOPS, LibraryCall, halved, shares_of
from tests.e2e import tiny

ROWS = ((64, 256), (256, 1), torch.float32)
WEIGHT = ((512, 256), (256, 1), torch.float32)


@pytest.fixture(autouse=True)
def nothing_known() -> Iterator[None]:
    before = torch.get_num_threads()
    fewer_threads._is_same.cache_clear()
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(before)
    fewer_threads._is_same.cache_clear()


def linear(call: Callable[[Sequence[Tensor]], Tensor]) -> LibraryCall:
    return LibraryCall("linear", (), (ROWS, WEIGHT), None, call)


def test_numbers_are_halves() -> None:
    assert [*halved(16)] == [8, 4, 2, 1]
    assert [*halved(6)] == [3, 1]
    assert [*halved(1)] == []


def test_only_numbers_with_the_same_bits() -> None:
    """A call whose sums depend on the number of threads, from two threads down."""
    seen = list[int]()

    def call(given: Sequence[Tensor]) -> Tensor:
        seen.append(torch.get_num_threads())
        x, weight = given
        result = x @ weight.t()
        return torch.nextafter(result, result + 1) if torch.get_num_threads() < 2 else result

    same = linear(lambda given: given[0] + 1)
    assert shares_of([same], 4) == (2, 1)
    assert shares_of([same, linear(call)], 4) == (2, 1), "one answer for calls that look alike"
    fewer_threads._is_same.cache_clear()
    assert shares_of([linear(call)], 4) == (2,)
    assert seen == [4, 2, 4, 1]
    assert shares_of([linear(call)], 4) == (2,)
    assert len(seen) == 4, "it is found out once"


def test_a_single_bit_is_a_difference() -> None:
    def call(given: Sequence[Tensor]) -> Tensor:
        result = given[0].clone()
        if torch.get_num_threads() == 1:
            result[0, 0] = -0.0
        else:
            result[0, 0] = 0.0
        return result

    assert shares_of([linear(call)], 2) == ()


def test_what_has_much_to_do_keeps_all(monkeypatch: pytest.MonkeyPatch) -> None:
    call = linear(lambda given: given[0])
    monkeypatch.setattr(fewer_threads, "MOST_SHARED_FLOPS", 2 * call.flops - 1)
    assert shares_of([call], 4) == (2, 1)
    assert shares_of([call, call], 4) == ()


def test_random_numbers_of_the_user_are_left_alone() -> None:
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    shares_of([linear(lambda given: given[0] @ given[1].t())], 4)
    assert torch.equal(torch.rand(4), expected)


class Layers(nn.Module):
    """Two products, of which the first is small, between kernels; and perhaps a sort."""

    def __init__(self, is_sorted: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.small, self.large = nn.Linear(128, 256), nn.Linear(256, 512)
        self.is_sorted = is_sorted

    def forward(self, x: Tensor) -> Tensor:
        x = self.large(self.small(x).relu()).relu()
        return x.sort(-1)[0] + 1 if self.is_sorted else x + 1


def bound_of(module: Any, x: Tensor) -> Bound:
    with torch.no_grad():
        for _ in range(2):
            module(x)
    (entry,) = module.forward.shapes.entries
    bound: Bound = entry.bounds[0]
    return bound


def test_small_calls_have_one_thread_and_large_ones_are_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen, usual = list[tuple[int, int]](), torch.mm

    def mm(x: Tensor, weight: Tensor, **more: Any) -> Tensor:
        seen.append((weight.shape[0], torch.get_num_threads()))
        return usual(x, weight, **more)

    monkeypatch.setattr(torch, "mm", mm)  # biases are added by kernels
    options = tiny.options(strict=True, kernels_off=("cpu_linear",))  # which asks nobody
    module = strop.optimize(Layers(False).eval(), options=options)
    x = torch.randn(64, 128)
    assert 2 * x.numel() * 256 <= SMALL_FLOPS < 2 * 64 * 256 * 512
    bound = bound_of(module, x)
    assert {*seen} == {(128, 1), (256, 4)}
    seen.clear()
    assert bound.shares(4) == (2, 1)
    assert {*seen} == {(256, 4), (256, 2), (256, 1)}
    assert bound.shares(1) == ()


def test_an_operator_of_torch_of_which_nothing_is_known_keeps_all() -> None:
    module = strop.optimize(Layers(True).eval(), options=tiny.options())
    assert bound_of(module, torch.randn(64, 128)).shares(4) == ()
