"""Sums of a window's taps: the kernel in the interpreter and the compiler."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from strop.ir.device import CPU
from strop.ir.source import KernelSource
from strop.kernels import library
from strop.kernels.conv.folded_taps import ROW, folded_taps
from strop.kernels.kernel import Call
from strop.runtime.run.library_calls import CUDA_PLANNED_OUT, fold_taps, upsampled
from tests.codegen.test_triton_compile import compiled, resources
from tests.gpus import A100, H100, RTX_5090
from tests.kernels.launching import call, launched, problem

pytest.importorskip("triton")
from tests.kernels.interpreted import Interpreted

LAST = torch.channels_last


def run(weight: Tensor) -> tuple[Tensor, list[str]]:
    """The taps, and what ran for them."""
    outs, ins = weight.shape[:2]
    kernels, ran = Interpreted(), []
    library: Callable[..., Any] = CUDA_PLANNED_OUT["folded_taps"]({})

    def otherwise(inputs: Sequence[Tensor], out: Tensor) -> None:
        ran.append("torch")
        library(inputs, out)

    out = torch.full((4 * outs, ins, 2, 2), float("nan")).to(weight.dtype).to(memory_format=LAST)
    asked = problem("folded_taps", weight.shape, dtype=weight.dtype)
    found = launched(ROW.launch(asked, H100), kernels)
    found.writing(otherwise)([kernels.known(weight)], kernels.known(out))
    return out, [*ran, *kernels.ran]


def taps(outs: int, ins: int, dtype: torch.dtype = torch.float16) -> Tensor:
    torch.manual_seed(outs)
    return torch.randn(outs, ins, 3, 3).to(dtype).to(memory_format=LAST)


@pytest.mark.parametrize("sizes", [(8, 64), (24, 96), (1, 16)], ids=str)
def test_each_sum_is_rounded_once(sizes: tuple[int, int]) -> None:
    weight = taps(*sizes)
    found, ran = run(weight)
    assert ran == ["folded_taps"]
    assert torch.equal(found, fold_taps(weight.float()).half())


def test_torch_does_what_does_not_lie_dense() -> None:
    weight = taps(8, 64)
    found, ran = run(weight.contiguous())
    assert ran == ["torch"]
    assert torch.equal(found, run(weight)[0])


@pytest.mark.parametrize("size", [(5, 7), (1, 1), (2, 3)], ids=str)
def test_the_windows_are_the_convolution(size: tuple[int, int]) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 6, *size, dtype=torch.double)
    weight = torch.randn(4, 6, 3, 3, dtype=torch.double)
    larger = F.interpolate(x, scale_factor=2.0, mode="nearest")
    wanted = F.conv2d(larger, weight, padding=1)
    torch.testing.assert_close(upsampled(x, fold_taps(weight)), wanted)


@pytest.mark.parametrize(
    ("given", "is_able"),
    [
        (call("folded_taps", (32, 64, 3, 3)), True),
        (call("folded_taps", (32, 64, 3, 3), dtype=torch.bfloat16), True),
        (call("folded_taps", (32, 64, 3, 3), dtype=torch.float32), False),
        (call("folded_taps", (32, 72, 3, 3)), False),
        (call("folded_taps", ("n", 64, 3, 3)), False),
    ],
)
def test_which_calls(given: Call, is_able: bool) -> None:
    for device in (A100, H100, RTX_5090):
        reason = ROW.supports(given, device)
        assert reason == (
            "" if is_able else "adds taps in fp16 and bf16, of channels that are multiples of 16"
        )
        if is_able:
            choice = library.select(given, given.at({}), device)
            assert choice.kernel == "folded_taps"
            assert choice.sources == (folded_taps(32, 64, given.dtype),)
            assert choice.sources == tuple(library.forms(given, device))
            assert "torch" in dict(choice.beaten)
    assert ROW.supports(given, CPU) == "runs on GPUs"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_compiles(dtype: torch.dtype, tmp_path: Path) -> None:
    source: KernelSource = folded_taps(1280, 1280, dtype)
    assert resources(compiled(source, 90), tmp_path)[1] == 0  # nothing spilled
