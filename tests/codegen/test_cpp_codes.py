"""GELU of 16 bits by a shorter text, codes of 8 bits in one step, and moments of rows, in C++."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import strop
from strop.codegen.cpp import emit
from strop.ir.dims import symbol
from strop.ir.loops import LoopKernel, Schedule
from strop.options import Options
from strop.runtime.build.cache import DiskCache
from strop.runtime.build.native import NativeKernels
from tests.codegen import kernels
from tests.codegen.cpp_launch import launch
from tests.codegen.kernels import Writer, axis, index, reads, writes
from tests.frontend.tracing import Function

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16


def run(kernel: LoopKernel, tensors: list[torch.Tensor], folder: Path) -> None:
    emitted = emit(kernel)
    function = NativeKernels(DiskCache(folder)).build([emitted.source])[emitted.source]
    launch(function, emitted, tensors, {"n": tensors[0].numel()})


@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
def test_the_short_gelu_is_as_accurate_as_eager_for_every_number(dtype, tmp_path):
    x = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dtype)
    found, kernel = torch.empty_like(x), kernels.pointwise("gelu", [dtype], dtype).kernel
    assert "sp::half_gelu(" in emit(kernel).source.text
    run(kernel, [x, found], tmp_path)
    eager = F.gelu(x)
    # of infinity it is infinity, which some of torch's vectors miss
    assert torch.equal(found.isnan(), x.isnan() | (x == -float("inf")))
    wide = x.double()
    exact = F.gelu(wide)
    usual = wide.abs() < 8
    ours, theirs = ((y.double() - exact)[usual] for y in (found, eager))
    assert ours.abs().max() <= 1.001 * theirs.abs().max()
    assert ours.square().mean() <= 1.001 * theirs.square().mean()
    beyond = wide.isfinite() & ~usual
    assert torch.equal(found[beyond & (wide > 0)], x[beyond & (wide > 0)])
    assert found[beyond & (wide < 0)].double().abs().max() < 1e-13


def test_gelu_in_fp32_is_the_long_one():
    assert "sp::erf(" in emit(kernels.pointwise("gelu", [F32], F32).kernel).source.text


def codes_of(zero: float, least: float, most: float, dtype: torch.dtype) -> LoopKernel:
    w = Writer(F32)
    rounded = w.apply("round", w.load(0, index(i=1)))
    shifted = w.apply("add", rounded, w.literal(zero))
    limited = w.apply("clamp", shifted, w.literal(least), w.literal(most))
    w.store(1, index(i=1), w.apply("cast", limited, dtype=dtype))
    params = reads(F32) + writes(dtype)
    return LoopKernel("codes", Schedule.POINTWISE, (), (axis("i", symbol("n")),), params, w.take())


NUMBERS = [0.0, -0.0, 0.5, 1.5, 2.5, -0.5, -1.5, 126.5, 127.5, 254.5, 255.5, -3.49, 1e9, -1e9]
ENDLESS = [float("inf"), -float("inf"), 3e38, -3e38]


@pytest.mark.parametrize(
    ("zero", "least", "most", "dtype", "text"),
    [
        (117.0, 0.0, 255.0, torch.uint8, "sp::code("),
        (0.0, 0.0, 255.0, torch.uint8, "sp::code("),
        (255.0, 0.0, 255.0, torch.uint8, "sp::code("),
        (0.25, 0.0, 255.0, torch.uint8, "sp::between("),  # no whole number
        (-7.0, -128.0, 127.0, torch.int8, "sp::between("),  # NaN has no such code
        (3.0, 1.0, 250.0, torch.uint8, "sp::between("),
    ],
)
def test_codes_are_those_of_eager(zero, least, most, dtype, text, tmp_path):
    kernel = codes_of(zero, least, most, dtype)
    assert text in emit(kernel).source.text
    x = torch.tensor([*NUMBERS, *ENDLESS])
    x = torch.cat([x, torch.arange(-4000, 4000) / 8.0, 200 * torch.randn(1000)])
    if dtype is torch.uint8:  # the int8 of NaN is nobody's promise
        x = torch.cat([x, torch.tensor([float("nan")])])
    found = torch.empty(len(x), dtype=dtype)
    run(kernel, [x, found], tmp_path)
    wanted = (x.round() + zero).clamp(least, most)
    assert torch.equal(found, wanted.to(torch.int64).to(dtype))


@pytest.mark.parametrize("offset", [0.0, 1e4])
def test_moments_of_rows_of_every_length(offset, tmp_path):
    torch.manual_seed(0)
    options = Options(cache_dir=str(tmp_path), strict=True)
    for columns in (1, 2, 7, 8, 9, 15, 31, 32, 33, 64, 71, 256, 1000):
        function = Function(lambda x: F.layer_norm(x + 1, x.shape[-1:])).eval()
        strop.optimize(function, options=options)
        x = torch.randn(5, columns) + offset
        exact = F.layer_norm((x + 1).double(), (columns,))
        with torch.no_grad():
            # A mean is rounded to fp32, which two numbers that are nearly equal show most.
            eager = (F.layer_norm(x + 1, (columns,)).double() - exact).abs().max()
            most = 1e-5 + 1e-6 * offset + 2 * eager
            assert (function(x).double() - exact).abs().max() <= most, columns


def test_a_nan_or_infinity_stays_in_its_row(tmp_path):
    function = Function(lambda x: F.layer_norm(x * 2, x.shape[-1:])).eval()
    strop.optimize(function, options=Options(cache_dir=str(tmp_path), strict=True))
    x = torch.randn(6, 45)
    x[1, 44], x[3, 0], x[4, 17] = float("nan"), float("inf"), -float("inf")
    with torch.no_grad():
        found = function(x)
    assert found.isnan().all(1).tolist() == [False, True, False, True, True, False]
