"""Every pointwise row of the operator table, as C++, against its torch reference."""

from __future__ import annotations

import itertools
import math
import re
from pathlib import Path

import pytest
import torch

import strop
from strop.codegen.cpp import emit
from strop.ir.op import SIMPLE
from strop.ir.ops import POINTWISE, Op, Operands, Types
from strop.ir.pointwise import DIVISION
from strop.ir.pointwise_activations import GRADIENTS
from strop.runtime.build.cache import DiskCache
from strop.runtime.build.native import NativeKernels
from tests.codegen import kernels
from tests.codegen.cpp_launch import launch, rms_ulp

FLOATS = (torch.float32, torch.float64)  # halves are stored as everywhere: tests/ops has them
INTEGERS = (torch.int64, torch.int32, torch.uint8)
SPECIAL = (math.nan, math.inf, -math.inf, 0.0, -0.0, 1.0, -2.0)

ROWS = {op.name: op for op in POINTWISE if op.name != "cast"}
AMBIGUOUS = {op.name for op in GRADIENTS}  # with NaN as the second operand
DIVIDE = {op.name for op in DIVISION}
HEAVY = {op.name for op in POINTWISE if op.is_heavy}
HEADER = Path(strop.__file__).parent / "codegen" / "rt" / "vmath.h"


def serves(op: Op, dtype: torch.dtype) -> bool:
    is_truth = op.operands is Operands.TRUTH
    return dtype is torch.bool if is_truth else Types.of(dtype) in op.types


CASES = [
    (name, dtype)
    for name, op in ROWS.items()
    for dtype in (*FLOATS, *INTEGERS, torch.bool)
    if serves(op, dtype)
]


def sample_of(op: Op, dtype: torch.dtype) -> kernels.Sample:
    args = [dtype] * op.arity
    if op.operands is Operands.SELECT:
        args[0] = torch.bool
    is_test = op.operands in (Operands.PROMOTED, Operands.TRUTH)
    return kernels.pointwise(op.name, args, torch.bool if is_test else dtype, op.attrs)


@pytest.fixture(scope="module")
def native(tmp_path_factory: pytest.TempPathFactory) -> NativeKernels:
    kernels_of_module = NativeKernels(DiskCache(tmp_path_factory.mktemp("cache")))
    kernels_of_module.build([emit(sample_of(ROWS[n], d).kernel).source for n, d in CASES])
    return kernels_of_module


def results(native: NativeKernels, name: str, operands: list[torch.Tensor], dtype: torch.dtype):
    """(what the kernel gives, what torch gives in fp64)"""
    op = ROWS[name]
    sample = sample_of(op, dtype)
    emitted = emit(sample.kernel)
    out = torch.empty(operands[0].numel(), dtype=sample.kernel.params[-1].dtype)
    function = native.build([emitted.source])[emitted.source]
    launch(function, emitted, [*operands, out], {"n": out.numel()})
    exact = [x.double() if x.is_floating_point() else x for x in operands]
    assert op.reference is not None
    return out, op.reference(*exact, **op.attrs)


def _operand(draw: torch.Tensor, low: float, high: float, dtype: torch.dtype) -> torch.Tensor:
    return draw > 0.5 if dtype is torch.bool else (draw * (high - low) + low).to(dtype)


@pytest.mark.parametrize(("name", "dtype"), CASES, ids=str)
def test_value(native: NativeKernels, name: str, dtype: torch.dtype):
    op = ROWS[name]
    generator = torch.Generator().manual_seed(1)
    low, high = op.example if dtype.is_floating_point else (0 if dtype is torch.uint8 else -9, 9)
    draws = [torch.rand(1003, generator=generator).double() for _ in range(ROWS[name].arity)]
    operands = [_operand(draw, low, high, dtype) for draw in draws]
    if op.operands is Operands.SELECT:
        operands[0] = torch.rand(1003, generator=generator) > 0.5
    if name in DIVIDE and not dtype.is_floating_point:
        operands[1][operands[1] == 0] = 5  # eager raises
    got, want = results(native, name, operands, dtype)
    if got.dtype.is_floating_point:
        # fp32 functions are within 5 ulp at worst (vmath.h) and rounded once more on the store
        assert rms_ulp(got, want) <= 1.5
    else:
        assert torch.equal(got, want.to(got.dtype))


@pytest.mark.parametrize(("name", "dtype"), [c for c in CASES if c[1] in FLOATS], ids=str)
def test_nan_and_infinity(native: NativeKernels, name: str, dtype: torch.dtype):
    """Special values give what torch gives."""
    select = ROWS[name].operands is Operands.SELECT
    count = ROWS[name].arity
    rows = list(itertools.product(SPECIAL, repeat=count))
    if name in AMBIGUOUS:
        rows = [row for row in rows if not math.isnan(row[1])]
    operands = [torch.tensor(column, dtype=dtype) for column in zip(*rows, strict=True)]
    if select:
        operands[0] = operands[0] > 0
    got, want = results(native, name, operands, dtype)
    assert torch.equal(got.double().isnan(), want.double().isnan())
    assert torch.equal(got.isinf(), want.isinf())
    close = torch.isclose(got.double(), want.double(), rtol=0.01, atol=1e-7, equal_nan=True)
    assert close.all()


STORED = (torch.float16, torch.bfloat16, *FLOATS, *INTEGERS, torch.int8, torch.int16, torch.bool)
CASTS = list(itertools.product(STORED, repeat=2))


def test_casts_equal_torch(tmp_path):
    native = NativeKernels(DiskCache(tmp_path / "cache"))
    emitted = {pair: emit(kernels.pointwise("cast", pair[:1], pair[1]).kernel) for pair in CASTS}
    functions = native.build([e.source for e in emitted.values()])
    values = torch.arange(-500, 500, dtype=torch.float64) * 0.2231
    for (source, target), one in emitted.items():
        x = (values if source.is_floating_point else values % 2 * 100).to(source)
        out = torch.zeros(1000, dtype=target)
        launch(functions[one.source], one, [x, out], {"n": 1000})
        assert torch.equal(out, x.to(target)), (source, target)


def test_heavy_rows_are_those_that_call_long_functions():
    """Read off the C++ text, so a new row needs no entry in a second table."""
    assert {"exp", "gelu", "gelu_tanh", "mish", "silu", "pow", "sin"} <= HEAVY
    assert not HEAVY & {"add", "clamp", "div", "maximum", "relu", "rsqrt", "sqrt", "where"}
    defined = set(re.findall(r"\b(\w+)\(", HEADER.read_text()))
    assert defined >= SIMPLE, SIMPLE - defined
