"""LLM.int8's product of codes and of columns apart: the kernels in the interpreter and compiler."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from strop.ir.device import CPU
from strop.kernels import library
from strop.kernels.gemm.mixed_product import PANEL, ROW, gathered_columns, mixed_product
from strop.kernels.kernel import Call
from strop.runtime.run.library_calls import CUDA_PLANNED_OUT
from strop.testing import assert_as_accurate_as_eager
from tests.codegen.test_triton_compile import SHARED_LIMIT, compiled, resources
from tests.gpus import A100, H100, RTX_5090
from tests.kernels.launching import call, launched, problem

pytest.importorskip("triton")
from tests.kernels.interpreted import Interpreted

DTYPES = [torch.float16, torch.bfloat16, torch.float32]


@dataclass(frozen=True)
class Given:
    """Hold the operands of one call."""

    rows: int
    depth: int
    columns: int
    taken: Sequence[int]  # columns without codes
    dtype: torch.dtype = torch.float16
    has_bias: bool = True

    def operands(self) -> list[Tensor]:
        torch.manual_seed(self.rows)
        x = torch.randn(self.rows, self.depth).to(self.dtype)
        taken = torch.zeros(self.depth, dtype=torch.bool)
        taken[list(self.taken)] = True
        x[:, taken] *= 10
        most = torch.where(taken, 0, x.float().abs()).amax(1, keepdim=True)
        codes = torch.where(taken, 0, x.float() * (127 / most)).round().to(torch.int8)
        weight = torch.randint(-127, 128, (self.columns, self.depth), dtype=torch.int8)
        scales = torch.rand(self.columns) / self.depth**0.5
        sums = (codes.long() @ weight.t().long()).int()
        bias = [torch.randn(self.columns).to(self.dtype)] if self.has_bias else []
        return [sums, most, x, taken, weight, scales, *bias]


def in_full(operands: Sequence[Tensor]) -> Tensor:
    """Compute it in fp64."""
    sums, most, x, taken, weight, scales, *bias = operands
    y = sums.double() * most.double() * scales.double() / 127**2
    kept = torch.where(taken, x, 0).double()
    y += kept @ (weight.double() * scales.double()[:, None] / 127).t()
    return y + bias[0].double() if bias else y


def as_the_library(operands: Sequence[Tensor]) -> Tensor:
    """Compute it as bitsandbytes does: rounded before the second product, whose weight is too."""
    sums, most, x, taken, weight, scales, *bias = operands
    y = sums * (most * scales) / 127**2
    y = (y + bias[0] if bias else y).to(x.dtype)
    (places,) = taken.nonzero(as_tuple=True)
    dequantised = (weight[:, places] * scales[:, None] / 127).to(x.dtype)
    return y.addmm(x[:, places], dequantised.t())


def run(operands: Sequence[Tensor]) -> tuple[Tensor, list[str]]:
    """Return the result, and what ran for it."""
    kernels, ran = Interpreted(), []
    torch_does: Callable[..., Any] = CUDA_PLANNED_OUT["mixed_product"]({})

    def otherwise(inputs: Sequence[Tensor], out: Tensor) -> None:
        ran.append("torch")
        torch_does(inputs, out)

    sums, x = operands[0], operands[2]
    out = torch.full(sums.shape, float("nan")).to(x.dtype)
    asked = problem("mixed_product", *(t.shape for t in operands), dtype=x.dtype)
    found = launched(ROW.launch(asked, H100), kernels)
    given = [kernels.known(t) for t in operands]
    found.writing(otherwise)(given, kernels.known(out))
    return out, [*ran, *kernels.ran]


CASES = {  # none in bf16, which Triton's interpreter multiplies as if it were integers
    "none": Given(5, 64, 32, ()),
    "one": Given(5, 64, 32, (63,)),
    "a row": Given(1, 64, 32, (0, 5, 9)),
    "more tiles and steps": Given(70, 1040, 144, range(3, 1040, 25)),
    "no bias": Given(9, 64, 32, (7, 8), has_bias=False),
    "every column": Given(3, 64, 16, range(64)),
    "a full panel": Given(3, PANEL + 80, 16, range(40, PANEL + 40)),
    "more than a panel": Given(3, PANEL + 80, 16, range(40, PANEL + 41)),
    "fp32": Given(6, 96, 48, (1, 50), torch.float32),
}


@pytest.mark.parametrize("name", CASES)
def test_results(name: str) -> None:
    operands = CASES[name].operands()
    found, ran = run(operands)
    assert ran == ["gathered_columns", "mixed_product"]
    assert_as_accurate_as_eager(found, as_the_library(operands), in_full(operands))


def test_rows_of_x_may_have_a_stride() -> None:
    operands = Given(6, 64, 32, (2, 60)).operands()
    wanted, _ = run(operands)
    wide = torch.full((6, 72), float("nan"), dtype=torch.float16)
    wide[:, :64] = operands[2]
    operands[2] = wide[:, :64]
    found, ran = run(operands)
    assert ran == ["gathered_columns", "mixed_product"]
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("why", ["x", "codes"])
def test_torch_does_what_lies_otherwise(why: str) -> None:
    operands = Given(6, 64, 32, (2, 60)).operands()
    place = {"x": 2, "codes": 4}[why]
    operands[place] = operands[place].t().contiguous().t()
    found, ran = run(operands)
    assert ran == ["torch"]
    assert_as_accurate_as_eager(found, as_the_library(operands), in_full(operands))


def test_infinite_values_stay_so() -> None:
    operands = Given(4, 64, 32, (2,)).operands()
    operands[2][1, 2] = float("inf")
    found, _ = run(operands)
    assert not found[1].isfinite().any()
    assert found[[0, 2, 3]].isfinite().all()


def asked(depth: int = 64, columns: Any = 32, dtype: torch.dtype = torch.float16) -> Call:
    rows = ("m", columns), ("m", 1), ("m", depth)
    return call("mixed_product", *rows, (depth,), (columns, depth), (columns,), dtype=dtype)


@pytest.mark.parametrize(
    ("given", "is_ours"),
    [
        (asked(), True),
        (asked(dtype=torch.bfloat16), True),
        (asked(dtype=torch.float32), True),
        (asked(dtype=torch.float64), False),
        (asked(depth=72), False),
        (asked(columns=24), False),
    ],
)
def test_the_choice(given: Call, is_ours: bool) -> None:
    for device in (H100, A100, RTX_5090):
        choice = library.select(given, given.at({"m": 40}), device)
        assert choice.kernel == ("mixed_product" if is_ours else "cublas_of_all_columns")
        if is_ours:
            assert choice.sources == tuple(ROW.forms(given, device))
    assert "GPUs" in library.reasons(given, CPU)["mixed_product"]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_compiles(dtype: torch.dtype, tmp_path: Path) -> None:
    for source in (gathered_columns(dtype), mixed_product(dtype, has_bias=True)):
        assert resources(compiled(source, 90), tmp_path)[1] == 0  # nothing spilled
        for arch in (80, 120):
            assert compiled(source, arch).shared <= SHARED_LIMIT
