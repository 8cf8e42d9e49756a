"""Searches in sorted numbers, which fuse with what is made of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import strop
from strop.options import Options


class Searches(nn.Module):
    """Looks numbers up in a buffer of sorted ones, and rows up where they are."""

    def __init__(self, numbers: Tensor, search: Callable[..., Tensor], rows: int) -> None:
        super().__init__()
        self.register_buffer("numbers", numbers)
        self.search = search
        self.table = nn.Embedding(rows, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        place = self.search(self.numbers, x * 2)
        return place, self.table(place) + 1


def bucketize(**how: Any) -> Callable[..., Tensor]:
    return lambda numbers, x: torch.bucketize(x, numbers, **how)


def searchsorted(**how: Any) -> Callable[..., Tensor]:
    return lambda numbers, x: torch.searchsorted(numbers, x, **how)


SEARCHES = {
    "bucketize": bucketize(),
    "right": bucketize(right=True),
    "int32": bucketize(out_int32=True),
    "searchsorted": searchsorted(),
    "side": searchsorted(side="right"),
}
SPECIAL = torch.tensor([torch.nan, torch.inf, -torch.inf, 0.0, -0.0])


def checked(module: nn.Module, given: list[Tensor], folder: object) -> list[str]:
    """Compare with eager, and return the operators of the kernels where torch runs none."""
    with torch.no_grad():
        wanted = [module(x) for x in given]
        strop.optimize(module, options=Options(cache_dir=str(folder), strict=True, check=True))
        for x, right in zip(given, wanted, strict=True):
            torch.testing.assert_close(module(x), right, rtol=0, atol=0)
    dispatcher: Any = module.forward
    assert not dispatcher.counters.findings
    (variant,) = dispatcher.variants.all
    assert not variant.program.call_steps
    return [op for step in variant.program.kernel_steps for op in step.ops]


@pytest.mark.parametrize("count", [1, 8, 63])
@pytest.mark.parametrize("name", SEARCHES)
def test_against_eager(name: str, count: int, tmp_path: Any) -> None:
    """Numbers that are equal to one looked for are among them, and ends."""
    numbers = torch.randint(-9, 9, (count,)).float().sort().values
    module = Searches(numbers, SEARCHES[name], count + 1).eval()
    given = [torch.randint(-10, 10, (5, 3)) / 2.0, torch.randn(40, 2)]
    given[0][0] = SPECIAL[:3]
    checked(module, given, tmp_path)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int64, torch.int32])
def test_types(dtype: torch.dtype, tmp_path: Any) -> None:
    numbers = torch.randint(-20, 20, (15,)).sort().values.to(dtype)
    module = Searches(numbers, bucketize(), 16).eval()
    checked(module, [torch.randint(-12, 12, (4, 6)).to(dtype)], tmp_path)


def test_numbers_that_are_not_sorted_end_up_where_they_do_in_eager(tmp_path: Any) -> None:
    numbers = torch.cat([torch.randn(20), torch.full((2,), torch.nan)])
    module = Searches(numbers, searchsorted(), 23).eval()
    checked(module, [torch.randn(30, 4), SPECIAL[None]], tmp_path)


def test_a_row_of_numbers_for_each_row(tmp_path: Any) -> None:
    numbers = torch.randn(3, 9).sort(1).values
    module = Searches(numbers, searchsorted(right=True), 10).eval()
    checked(module, [torch.randn(3, 5), torch.randn(3, 70)], tmp_path)


def test_many_numbers_stay_with_torch(tmp_path: Any) -> None:
    module = Searches(torch.randn(5000).sort().values, bucketize(), 5001).eval()
    x = torch.randn(7, 3)
    with torch.no_grad():
        wanted = module(x)
        strop.optimize(module, options=Options(cache_dir=str(tmp_path)))
        torch.testing.assert_close(module(x), wanted)
    dispatcher: Any = module.forward
    assert [step.op for step in dispatcher.variants.all[0].program.call_steps] == ["aten"]
