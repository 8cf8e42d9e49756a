"""Products of many small matrices on a CPU, against fp64 and eager."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import strop
from strop.ir.device import CPU
from strop.kernels.gemm import small_cpu
from strop.kernels.kernel import FASTEST, NEVER, Problem
from strop.options import Options
from strop.testing import assert_as_accurate_as_eager

pytestmark = pytest.mark.skipif(
    not torch.backends.cpu.get_cpu_capability().startswith("AVX"), reason="has vectors of AVX"
)


class Products(nn.Module):
    """Numbers in rows become matrices of known sizes, which ``product`` multiplies."""

    def __init__(self, a: tuple[int, int], b: tuple[int, int], product: Callable[..., Any]) -> None:
        super().__init__()
        self.a, self.b, self.product = a, b, product

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        found: Tensor = self.product(a.view(-1, *self.a) + 1, b.view(-1, *self.b) * 2)
        return found


def turned(a: Tensor, b: Tensor) -> Tensor:
    return torch.bmm(a, b.transpose(1, 2))


def both_turned(a: Tensor, b: Tensor) -> Tensor:
    return torch.bmm(a.transpose(1, 2), b.transpose(1, 2))


CASES: dict[str, tuple[tuple[int, int], tuple[int, int], Callable[..., Any]]] = {
    "as they are": ((33, 32), (32, 33), torch.bmm),
    "turned": ((33, 32), (33, 32), turned),
    "both turned": ((9, 7), (64, 9), both_turned),
    "one row": ((1, 50), (50, 17), torch.bmm),
    "one column": ((13, 16), (16, 1), torch.bmm),
    "one number": ((1, 1), (1, 1), torch.bmm),
    "large": ((64, 128), (64, 128), turned),
    "vectors": ((5, 20), (20, 48), torch.bmm),
}


@pytest.mark.parametrize("name", CASES)
def test_against_eager(name: str, tmp_path: Any) -> None:
    a, b, product = CASES[name]
    module = Products(a, b, product).eval()
    strop.optimize(module, options=Options(cache_dir=str(tmp_path), strict=True))
    with torch.no_grad():
        for batch in (5, 4, 70, 1):
            x, y = torch.randn(batch, a[0] * a[1]), torch.randn(batch, b[0] * b[1])
            eager = Products(a, b, product)
            exact = eager(x.double(), y.double())
            assert_as_accurate_as_eager(module(x, y), eager(x, y), exact)
    dispatcher: Any = module.forward
    chosen = {
        choice.kernel
        for entry in dispatcher.shapes.entries
        for choice in entry.bounds[0].plan.choices.values()
        if choice.launches is not None
    }
    assert chosen == {small_cpu.NAME}


def test_when_it_runs() -> None:
    device = replace(CPU, isa="avx2")
    problem = Problem("matmul", (), ((8, 33, 32), (8, 32, 33)), torch.float32)
    assert small_cpu.supports(problem.call, device) == ""
    assert "AVX2" in small_cpu.supports(problem.call, replace(CPU, isa=""))
    assert "fp32" in small_cpu.supports(replace(problem, dtype=torch.float64).call, device)
    large = replace(problem, shapes=((8, 65, 32), (8, 32, 33)))
    assert "64" in small_cpu.supports(large.call, device)
    one = replace(problem, shapes=((1, 33, 32), (1, 32, 33)))
    assert small_cpu.cost_us(one, device) == FASTEST
    none = replace(problem, shapes=((0, 33, 32), (0, 32, 33)))
    assert small_cpu.cost_us(none, device) == NEVER
    assert small_cpu.launch(none, device) is None
