"""Adapters beside the weights in one product with them, as on an H100, and on a CPU here."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import strop
from strop import options, passes
from strop.dispatch.cornered_factors import bytes_beside, standing, write_again
from strop.dispatch.derived_inputs import LOW_RANK
from strop.testing import assert_as_accurate_as_eager
from tests.dispatch.test_low_rank import TARGETS, activate, add, by_row, given, layers, pictures

HALVES = (torch.float16, torch.bfloat16)
PASSES = ("low_rank_pair", "low_rank_add", "linear_add")


@pytest.fixture(autouse=True)
def _passes_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passes, "ONLY_ON", passes.ONLY_ON | dict.fromkeys(PASSES, "cpu"))
    monkeypatch.setattr(options, "WGMMA_PASSES", ())


def assert_accurate(eager: Any, fast: Any, dtype: torch.dtype) -> None:
    exact, x = copy.deepcopy(eager).double(), given(3).to(dtype)
    assert_as_accurate_as_eager(fast(x), eager(x), exact(x.double()))


def pairs_of(fast: Any) -> list[Any]:
    return [
        step
        for variant in fast.forward.variants.all
        for step in variant.program.call_steps
        if step.op.startswith("paired")
    ]


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("chosen", [TARGETS, ("q", "v"), ("k", "v"), ("k",)], ids=str)
def test_all_that_users_change_is_seen(
    chosen: tuple[str, ...], dtype: torch.dtype, tmp_path: Path
) -> None:
    """By one program, whose products read the factors where they stand."""
    eager, fast = pictures(tmp_path, dtype=dtype)
    for module in (eager, fast):
        add(module, target_modules=[*chosen])
        add(module, "b", rank=5, seed=2, target_modules=[*chosen])
    for names, scale in ((["a"], 1.0), (["a", "b"], -0.37), (["b"], 2.0), (["b"], 0.25)):
        for module in (eager, fast):
            activate(module, *names)
            for layer in layers(module):
                layer.scaling["b"] = scale
        assert_accurate(eager, fast, dtype)
    for module in (eager, fast):
        layers(module)[-1].lora_B["b"].weight.mul_(-3)
    assert_accurate(eager, fast, dtype)
    assert fast.forward.variants.num_captures == 1
    assert len(pairs_of(fast)) == 1 + ("out" in chosen)


def test_a_rank_that_grows(tmp_path: Path) -> None:
    """Other factors, which stand in other places."""
    eager, fast = pictures(tmp_path, dtype=torch.bfloat16)
    for name, rank in (("a", 2), ("b", 17), ("c", 3)):
        for module in (eager, fast):
            add(module, name, rank)
            activate(module, name)
        assert_accurate(eager, fast, torch.bfloat16)
    assert fast.forward.variants.num_captures == 2


def test_rows_take_adapters_of_their_own(tmp_path: Path) -> None:
    dtype, names = torch.bfloat16, ["a", None, "b"]
    eager, fast = pictures(tmp_path, dtype=dtype)
    for module in (eager, fast):
        add(module, "a", 2)
        add(module, "b", 5, seed=2)
    exact, x = copy.deepcopy(eager).double(), given(3).to(dtype)
    with strop.lora_rows(fast, names):
        found = fast(x)
    wanted, ideal = (
        by_row(module, x.to(kind), names, [1.0] * 3)
        for module, kind in ((eager, dtype), (exact, torch.float64))
    )
    assert_as_accurate_as_eager(found, wanted, ideal)
    assert len(pairs_of(fast)) == 2


def test_where_factors_stand_is_counted(tmp_path: Path) -> None:
    _, fast = pictures(tmp_path, dtype=torch.bfloat16)
    add(fast)
    fast(given().bfloat16())
    (row,) = strop.explain(fast).components
    factors = next(one for one in row.derived if one.kind == LOW_RANK)
    weights = fast.forward.state.effective.low_rank
    linears, conv, beside = 4 * 16 * (16 + 16), 16 * (4 * 9 + 16), (3 * 16) ** 2
    assert weights.size_bytes == 2 * (linears + conv + beside)
    assert factors.size_bytes == weights.size_bytes + weights.watch_bytes
    # the convolution's two, and A's and pairs of the others
    assert "6 more products" in factors.detail


def test_a_factor_stands_in_several_places() -> None:
    ones, twos = (nn.Parameter(torch.full((2, 3), value), False) for value in (1.0, 2.0))
    whole = standing((5, 6), [ones, twos], [(0, 0), (3, 3)])
    other = standing((5, 6), [twos, ones], [(0, 0), (3, 3)])
    assert standing((5, 6), [ones, twos], [(0, 0), (3, 3)]) is whole
    assert whole.sum() == other.sum() == 6 * (1 + 2)
    for factor in (ones, twos):
        factor.mul_(10)
    write_again([ones, twos])
    wanted = torch.zeros(5, 6)
    wanted[:2, :3], wanted[3:, 3:] = 10, 20
    assert torch.equal(whole, wanted)
    assert torch.equal(other[:2, :3], twos)
    assert torch.equal(other[3:, 3:], ones)
    assert bytes_beside([ones, twos]) == 2 * whole.nbytes
    assert bytes_beside([nn.Parameter(torch.ones(2, 3), False)]) == 0
