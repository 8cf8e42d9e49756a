"""Bags of rows on a CPU: values, sizes that change from call to call, and what eager refuses."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import strop
from strop.dispatch.dispatcher import Dispatcher
from strop.errors import OutOfRangeError
from strop.options import Options
from strop.testing import assert_as_accurate_as_eager
from tests.frontend.tracing import Function

ROWS = 50


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("cache"))


def bags(
    lengths: list[int], *, ends: bool = False, ids: torch.dtype = torch.int64
) -> tuple[Tensor, Tensor]:
    """Return ids, and offsets of bags so long."""
    generator = torch.Generator().manual_seed(sum(lengths))
    numbers = torch.randint(0, ROWS, (sum(lengths),), generator=generator, dtype=ids)
    offsets = torch.tensor([0, *itertools.accumulate(lengths)], dtype=ids)
    return numbers, offsets if ends else offsets[:-1]


def optimized(function: Callable[..., Any], folder: str, **options: Any) -> Dispatcher:
    module = Function(function).eval()
    strop.optimize(module, options=Options(cache_dir=folder, strict=True, **options))
    found = module.forward
    assert isinstance(found, Dispatcher)
    return found


def calls(dispatcher: Dispatcher) -> list[str]:
    return [step.op for v in dispatcher.variants.all for step in v.program.call_steps]


LENGTHS = ([2, 0, 5, 1], [1, 1, 9, 0], [0, 0, 3, 0], [30, 2, 1], [7], [1, 1], [3] * 70)
FORMS: dict[str, dict[str, Any]] = {
    "sum": {"mode": "sum"},
    "mean": {"mode": "mean"},
    "max": {"mode": "max"},
    "padding": {"mode": "sum", "padding_idx": 3},
    "max padding": {"mode": "max", "padding_idx": 3},
    "ends": {"mode": "sum", "include_last_offset": True},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("width", [32, 5, 1])
@pytest.mark.parametrize("form", FORMS)
def test_against_eager(form: str, width: int, dtype: torch.dtype, folder: str) -> None:
    more = FORMS[form]

    def function(table: Tensor, ids: Tensor, offsets: Tensor) -> Tensor:
        return F.embedding_bag(ids, table, offsets, **more) * 2 + 1

    dispatcher = optimized(function, folder, check=True)
    table = torch.randn(ROWS, width, dtype=dtype)
    with torch.no_grad():
        for lengths in LENGTHS:
            given = bags(lengths, ends="include_last_offset" in more)
            exact, eager = function(table.double(), *given), function(table, *given)
            assert_as_accurate_as_eager(dispatcher.module(table, *given), eager, exact)
    assert not dispatcher.counters.findings
    is_ours = not (form == "ends" and dtype is torch.float64)  # of which eager reads other ids
    assert (calls(dispatcher) == []) is is_ours


@pytest.mark.parametrize("ids", [torch.int32, torch.int64], ids=str)
def test_a_factor_for_each_id(ids: torch.dtype, folder: str) -> None:
    def function(table: Tensor, ids: Tensor, offsets: Tensor, factors: Tensor) -> Tensor:
        return F.embedding_bag(ids, table, offsets, mode="sum", per_sample_weights=factors)

    dispatcher, table = optimized(function, folder), torch.randn(ROWS, 24)
    with torch.no_grad():
        for lengths in LENGTHS:
            given = bags(lengths, ids=ids)
            factors = torch.randn(len(given[0]))
            exact = function(table.double(), *given, factors.double())
            eager = function(table, *given, factors)
            assert_as_accurate_as_eager(dispatcher.module(table, *given, factors), eager, exact)
    assert calls(dispatcher) == []


class Tables(nn.Module):
    """Rows of hashed ids, bags and a norm of numbers, joined."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.single = nn.ModuleList(nn.Embedding(ROWS, width) for _ in range(3))
        self.bags = nn.ModuleList(
            nn.EmbeddingBag(ROWS, width, mode=mode)  # type: ignore[arg-type]
            for mode in ("sum", "mean", "max", "sum")
        )
        self.dense = nn.Linear(5, width)

    def forward(self, x: Tensor, ids: Tensor, *given: Tensor) -> Tensor:
        hashed = (ids * 2654435761 ^ (ids >> 3)) % ROWS
        parts = [self.dense(x).relu()]
        parts += [table(hashed[:, n]) for n, table in enumerate(self.single)]
        parts += [
            table((given[2 * n] * 7 + 1) % ROWS, given[2 * n + 1])
            for n, table in enumerate(self.bags)
        ]
        return torch.stack(parts, 1)


def call_of(batch: int, seed: int) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    found = [torch.randn(batch, 5), torch.randint(0, 10**9, (batch, 3))]
    for _ in range(4):
        lengths = torch.randint(0, 7, (batch,), generator=generator)
        lengths[0] += 1  # sizes of 0 are another graph
        found += bags(lengths.tolist())
    return tuple(found)


def test_all_tables_are_one_kernel_and_all_sizes_one_graph(folder: str) -> None:
    module, exact = Tables().eval(), Tables().double().eval()
    exact.load_state_dict(module.state_dict())
    wanted = [
        (given, module(*given), exact(given[0].double(), *given[1:]))
        for given in (call_of(b, n) for n, b in enumerate((9, 4, 9, 70, 2)))
    ]
    with torch.no_grad():
        strop.optimize(module, options=Options(cache_dir=folder, strict=True))
        for given, eager, right in wanted:
            assert_as_accurate_as_eager(module(*given), eager, right)
    (variant,) = module.forward.variants.all
    kernels = [step.ops for step in variant.program.kernel_steps]
    assert calls(module.forward) == ["linear"]
    assert sum("cat" in ops for ops in kernels) == 1, kernels
    assert not [ops for ops in kernels if "bag" in ops or "take" in ops], "none is by itself"


READ_OUTSIDE = ("negative offset", "decreasing")  # eager reads whatever lies there, or raises
BAD: dict[str, tuple[list[int], list[int]]] = {  # ids, offsets
    "id": ([1, 2, ROWS, 4], [0, 2]),
    "negative id": ([1, 2, -1, 4], [0, 2]),
    "far away": ([1, 2, 2**62, 4], [0, 2]),
    "does not begin": ([1, 2, 3, 4], [1, 2]),
    "beyond the ids": ([1, 2, 3, 4], [0, 5]),
    "negative offset": ([1, 2, 3, 4], [0, -2]),
    "decreasing": ([1, 2, 3, 4], [0, 3, 1]),
}


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("width", [16, 1])
def test_what_eager_refuses_raises(name: str, width: int, folder: str) -> None:
    def function(table: Tensor, ids: Tensor, offsets: Tensor) -> Tensor:
        return F.embedding_bag(ids, table, offsets, mode="sum")

    table, (ids, offsets) = torch.randn(ROWS, width), map(torch.tensor, BAD[name])
    dispatcher = optimized(function, folder)
    right = torch.tensor([1, 2, 3, 4]), torch.tensor([0, 2])
    with torch.no_grad():
        if name not in READ_OUTSIDE:
            with pytest.raises((RuntimeError, IndexError)):
                function(table, ids, offsets)
        torch.testing.assert_close(dispatcher.module(table, *right), function(table, *right))
        with pytest.raises(OutOfRangeError):
            dispatcher.module(table, ids, offsets)
        torch.testing.assert_close(dispatcher.module(table, *right), function(table, *right))


def test_nan_of_extremes_is_what_eager_has(folder: str) -> None:
    def function(table: Tensor, ids: Tensor, offsets: Tensor) -> Tensor:
        return F.embedding_bag(ids, table, offsets, mode="max")

    table = torch.randn(ROWS, 8)
    table[3], table[4] = torch.nan, -torch.inf
    given = torch.tensor([1, 3, 3, 1, 4, 3, 4]), torch.tensor([0, 2, 4, 5, 5, 6])
    with torch.no_grad():
        wanted = function(table, *given)
        found = optimized(function, folder).module(table, *given)
    torch.testing.assert_close(found, wanted, equal_nan=True, rtol=0, atol=0)


def test_a_bag_that_is_read_in_two_ways_is_stored(folder: str) -> None:
    def function(table: Tensor, ids: Tensor, offsets: Tensor) -> Tensor:
        rows = F.embedding_bag(ids, table, offsets, mode="sum")
        return rows.softmax(-1) + rows.t().contiguous().t() + rows[:, None].expand(-1, 3, -1).sum(1)

    dispatcher, table = optimized(function, folder), torch.randn(ROWS, 8)
    with torch.no_grad():
        for lengths in LENGTHS[:4]:
            given = bags(lengths)
            torch.testing.assert_close(dispatcher.module(table, *given), function(table, *given))


def test_a_sum_of_many_pieces_reads_them_where_they_are_joined(folder: str) -> None:
    """In the loop of the sum each piece would be computed for each of the others."""

    def function(table: Tensor, ids: Tensor) -> Tensor:
        rows = torch.stack([table[ids[:, n]] * (n + 1) for n in range(9)], 1)
        return rows.sum(1) + (rows * rows).sum(1)

    dispatcher, table = optimized(function, folder), torch.randn(ROWS, 8)
    with torch.no_grad():
        for batch in (3, 40):
            ids = torch.randint(0, ROWS, (batch, 9))
            exact, eager = function(table.double(), ids), function(table, ids)
            assert_as_accurate_as_eager(dispatcher.module(table, ids), eager, exact)
    (variant,) = dispatcher.variants.all
    kernels = [step.ops for step in variant.program.kernel_steps]
    assert [ops for ops in kernels if "cat" in ops and "sum" not in ops], kernels
    assert not [ops for ops in kernels if "cat" in ops and "sum" in ops], kernels


class OfOneBag(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.EmbeddingBag(50, 8, mode="mean")

    def forward(self, ids: Tensor) -> Tensor:
        found: Tensor = self.table(ids * 7 % 50, torch.zeros(1, dtype=torch.int64))
        return found


def test_means_of_one_bag(folder: str) -> None:
    """A trace knows that the bag is alone, so that no other one begins where it ends."""
    module = OfOneBag().eval()
    fast = strop.optimize(copy.deepcopy(module), options=Options(cache_dir=folder, strict=True))
    with torch.no_grad():
        for count in (1, 5):
            ids = torch.randint(0, 50, (count,))
            torch.testing.assert_close(fast(ids), module(ids))
