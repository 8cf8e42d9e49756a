"""Divisions of fp32 in generated kernels are as exact as fp64's rounded quotients."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import strop
from strop.codegen.triton_division import by_number, by_tensor
from strop.options import Options
from tests.fuzz.interpreted import interpreted

INF = float("inf")
DIVISORS = (3.0, -7.0, 0.1, 1e-3, 6.02e7, 1e30, 1e-30, 1.0, -4.0, 0.125, 0.0, INF)
SPECIAL = (0.0, -0.0, 1.0, -1.0, INF, -INF, float("nan"), 1e-30, -1e30, 3e38)


class Quotients(nn.Module):
    """Divides by numbers that are known, and by a tensor."""

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        numbers = (torch.full((), d, dtype=x.dtype, device=x.device) for d in DIVISORS)
        return x / y, *(x / number for number in numbers)


def given(device: str = "cpu") -> tuple[Tensor, Tensor]:
    """Return every pair of special numbers, and random ones of many sizes."""
    special = torch.tensor(SPECIAL)
    pairs = torch.cartesian_prod(special, special).T
    torch.manual_seed(0)
    mantissas, exponents = torch.randn(2, 4000), torch.randint(-20, 20, (2, 4000))
    x, y = torch.cat([pairs, mantissas * 2.0**exponents], dim=1)
    return x.to(device), y.to(device)


def wanted(x: Tensor, y: Tensor) -> list[Tensor]:
    """Divide in fp64, whose quotients round to fp32's."""
    divisors = (y, *(torch.tensor(d, device=x.device) for d in DIVISORS))
    return [(x.double() / d.double()).float() for d in divisors]


def check(found: tuple[Tensor, ...], x: Tensor, y: Tensor, ulps: float) -> None:
    for ours, exact, divisor in zip(found, wanted(x, y), ("y", *DIVISORS), strict=True):
        # within fp32's normal numbers, where Newton's step has all its bits
        normal = (exact == 0) | (exact.abs() > 1e-30) | exact.isnan()
        ours, exact = ours[normal], exact[normal]
        same = (ours == exact) & (ours.signbit() == exact.signbit()) | ours.isnan() & exact.isnan()
        off = (ours - exact).abs() <= ulps * 1.2e-7 * exact.abs()
        assert bool((same | off & exact.isfinite()).all()), divisor


@pytest.mark.parametrize(
    ("divisor", "text"),
    [
        (1.0, "x"),
        (4.0, "x * 0.25"),
        (-0.5, "x * (-2.0)"),
        (3.0, "quotient_by(x, 3.0, 0.3333333432674408)"),
        (0.0, "quotient(x, 0.0)"),
        (1e30, "quotient(x, 1e+30)"),
        (INF, 'quotient(x, float("inf"))'),
    ],
)
def test_a_known_number_is_multiplied_by_its_reciprocal(divisor: float, text: str) -> None:
    assert by_number("x", divisor) == text


def test_other_divisors_are_divided_by() -> None:
    assert by_tensor("x", "y") == "quotient(x, y)"


@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")  # numpy's, of 0 / 0
def test_in_the_interpreter(tmp_path: Path) -> None:
    """It rounds what is multiplied before it is added, which is an ulp in Newton's step."""
    pytest.importorskip("triton")
    x, y = given()
    with interpreted(triton=True):
        module = strop.optimize(
            Quotients().eval(), options=Options(cache_dir=str(tmp_path), strict=True)
        )
        check(module(x, y), x, y, ulps=1)


@pytest.mark.gpu
def test_on_a_gpu(tmp_path: Path) -> None:
    x, y = given("cuda")
    module = strop.optimize(
        Quotients().eval(), options=Options(cache_dir=str(tmp_path), strict=True)
    )
    check(module(x, y), x, y, ulps=0)
