"""Scans that are linear recurrences are one operator, for all lengths; others are taken apart."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import strop
from strop.frontend.inlined import scans
from strop.ir.linear_scan import linear_scan
from strop.options import Options
from strop.testing import assert_as_accurate_as_eager
from tests.frontend.tracing import Function

Combine = Callable[[Any, Any], Any]


def scan(combine: Combine, given: Any, dim: int = 1, *, reverse: bool = False) -> Any:
    return scans.associative_scan(combine, given, dim, reverse=reverse, combine_mode="generic")


def product(left: Any, right: Any) -> Any:
    return left[0] * right[0], right[0] * left[1] + right[1]


def turned(left: Any, right: Any) -> Any:
    return right[0] * left[0], torch.add(right[1], left[1] * right[0])


def fused(left: Any, right: Any) -> Any:
    return left[0].mul(right[0]), torch.addcmul(right[1], left[1], right[0])


def swapped(left: Any, right: Any) -> Any:
    """Combine with the pairs the other way round."""
    return left[0] * right[1] + right[0], left[1] * right[1]


ALIKE = {"product": product, "turned": turned, "fused": fused}

# what is none: the other direction, and other sums
OTHERS: dict[str, Combine] = {
    "backwards": lambda x, y: (x[0] * y[0], x[0] * y[1] + x[1]),
    "difference": lambda x, y: (x[0] * y[0], y[0] * x[1] - y[1]),
    "powers": lambda x, y: (x[0] * y[0], torch.add(y[1], y[0] * x[1], alpha=2)),
    "scaled": lambda x, y: (x[0] * y[0], (y[0] * x[1] + y[1]) * 0.5),
    "largest": lambda x, y: (torch.maximum(x[0], y[0]), torch.minimum(x[1], y[1])),
}


def program_of(module: Any) -> list[str]:
    (variant,) = module.forward.variants.all
    return [step.op for step in variant.program.call_steps]


def optimised(function: Callable[..., Any], folder: Path) -> Any:
    module = Function(function).eval()
    strop.optimize(module, options=Options(cache_dir=str(folder), strict=True, check=True))
    return module


def given(*shape: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    torch.manual_seed(sum(shape))
    return [torch.rand(shape).to(dtype), torch.randn(shape).to(dtype)]


@pytest.mark.parametrize("combine", ALIKE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_one_graph_for_all_lengths(combine: str, dtype: torch.dtype, tmp_path: Path) -> None:
    def states(a: Tensor, b: Tensor) -> Tensor:
        found: Tensor = scan(ALIKE[combine], (a, b))[1]
        return found * 2

    module = optimised(states, tmp_path)
    for rows, length in ((2, 9), (5, 7), (3, 64), (2, 33), (4, 2), (2, 100)):
        a, b = given(rows, length, 6, dtype=dtype)
        with torch.no_grad():
            exact = linear_scan(a.double(), b.double(), 1) * 2
            assert_as_accurate_as_eager(module(a, b), states(a, b), exact)
    assert program_of(module) == ["linear_scan"]
    forward = module.forward
    assert (forward.variants.num_captures, forward.counters.eager_calls) == (1, 0)
    assert not forward.counters.findings


def test_both_results(tmp_path: Path) -> None:
    """Running products are computed where somebody reads them, whichever of the two they are."""
    module = optimised(lambda a, b: scan(product, (a, b)), tmp_path / "first")
    other = optimised(lambda b, a: scan(swapped, (b, a)), tmp_path / "second")
    for length in (9, 70):
        a, b = given(3, length, 5)
        with torch.no_grad():
            eager, exact = scan(product, (a, b)), scan(product, (a.double(), b.double()))
            results = module(a, b), tuple(other(b, a))[::-1]
        for result in results:
            for found, plain, right in zip(result, eager, exact, strict=True):
                assert_as_accurate_as_eager(found, plain, right)
    assert program_of(module).count("linear_scan") == 1
    assert program_of(other).count("linear_scan") == 1


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("dim", [0, 1, 2, 3, -1])
def test_dims_and_directions(dim: int, reverse: bool, tmp_path: Path) -> None:
    def both(a: Tensor, b: Tensor) -> Any:
        return scan(product, (a, b), dim, reverse=reverse)

    module = optimised(both, tmp_path)
    for shape in ((2, 3, 4, 5), (3, 3, 6, 8)):  # dim 1 of four is channels: a graph for each
        a, b = given(*shape)
        with torch.no_grad():
            eager, exact = both(a, b), both(a.double(), b.double())
            for found, plain, right in zip(module(a, b), eager, exact, strict=True):
                assert found.shape == plain.shape
                assert_as_accurate_as_eager(found, plain, right)
    assert program_of(module).count("linear_scan") == 1


def test_sizes_of_one_and_views(tmp_path: Path) -> None:
    """Operands that lie otherwise than each other, that repeat, and that have one step or lane."""

    def states(a: Tensor, b: Tensor) -> Any:
        return scan(product, (a.transpose(0, 2), b))[1], scan(product, (a[:1].expand_as(a), a))[1]

    module = optimised(states, tmp_path)
    for n, length in ((4, 6), (1, 6), (4, 1), (1, 1), (2, 5)):
        a, b = given(n, length, 3)[0], given(3, length, n)[1]
        with torch.no_grad():
            eager, exact = states(a, b), states(a.double(), b.double())
            for found, plain, right in zip(module(a, b), eager, exact, strict=True):
                assert_as_accurate_as_eager(found, plain, right)


def test_no_element(tmp_path: Path) -> None:
    module = optimised(lambda a, b: scan(product, (a, b))[1], tmp_path)
    for shape in ((0, 5, 4), (2, 5, 4), (2, 5, 0)):
        a, b = given(*shape)
        with torch.no_grad():
            assert module(a, b).shape == shape


@pytest.mark.parametrize("name", [*OTHERS, "types"])
def test_other_functions_are_taken_apart(name: str, tmp_path: Path) -> None:
    """So are operands of two types."""

    def both(a: Tensor, b: Tensor) -> Any:
        return scan(OTHERS.get(name, product), (a, b.int() if name == "types" else b))

    module, (a, b) = optimised(both, tmp_path), given(2, 9, 4)
    with torch.no_grad():
        for found, plain in zip(module(a, b), both(a, b), strict=True):
            torch.testing.assert_close(found, plain)
    assert "linear_scan" not in program_of(module)


class Scanning(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.decay, self.factor = nn.Parameter(torch.rand(4)), nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        given = self.decay.sigmoid().expand_as(x), x * self.factor
        found: Tensor = scan(product, given)[1]
        return found


def test_gradients_are_torchs(tmp_path: Path) -> None:
    """Inside a gradient it is taken apart, so that nothing is dropped."""
    torch.manual_seed(0)
    module, plain = Scanning(), Scanning()
    plain.load_state_dict(module.state_dict())
    strop.optimize(module, train=True, options=Options(cache_dir=str(tmp_path), strict=True))
    for length in (6, 9):
        x = torch.randn(2, length, 4, requires_grad=True)
        found = torch.autograd.grad(module(x).square().sum(), (x, *module.parameters()))
        wanted = torch.autograd.grad(plain(x).square().sum(), (x, *plain.parameters()))
        torch.testing.assert_close(found, wanted)


def test_the_operator_itself_has_gradients() -> None:
    a, b = (x.double().requires_grad_() for x in given(5, 3, 2))
    assert torch.autograd.gradcheck(torch.ops.strop.linear_scan, (a, b))
