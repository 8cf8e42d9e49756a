"""Multiply rows by a weight on a CPU: x (M, K) by w (N, K) transposed, in fp32 and bf16.

A library's linear begins with much to decide, and oneDNN's is slow where its code is in no cache:
in a step of a small UNet most linears took two to ten times as long as their operations do.
``blocks_cpu.h`` packs a part of the weight at a time, in each call, so that nothing of it is ever
stale, multiplies all rows by it, and fetches the next part meanwhile. Sums are fp32, by parts of
128 steps, with one rounding at the end. Few rows in fp32, and few columns, are summed along the
depth instead (``linear_cpu.h``), without packing: in as many parts as a vector has lanes, and so
nearer than a library's. It runs where it was measured as faster (``tuned.packed_cpu``, and ``FEW``
on a Zen 5).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path

import torch

from strop.ir.device import Device
from strop.ir.source import KernelSource
from strop.kernels.attention.cpu import TYPES, header
from strop.kernels.kernel import (
    NEVER,
    NUM_FETCHED,
    RESULT,
    Call,
    Fetched,
    Kernel,
    Launch,
    Launches,
    Lies,
    Operand,
    Problem,
    Scalar,
    Stride,
)
from strop.kernels.packed.costs import Line, Work, case_of
from strop.kernels.tuned.packed_cpu import CASES

WITH_BF16 = "avx512_bf16"  # whose instructions for pairs of bf16 it was written for
# Artefacts for AVX-512 run on processors with BF16 as well, which choose it: it is to be in them.
MAY_BE = {"avx512": WITH_BF16}
NAME = "cpu_linear"
X, WEIGHT, BIAS = range(3)
FEWEST_ROWS = 8  # in fp32, of a tile: sums of fewer run along the depth
STEPS, FETCHED_ROWS = 128, 64  # of a part of a weight, as blocks_cpu.h packs it
FEW = Line(1.0, 110000.0, 60000.0)


def supports(call: Call, device: Device) -> str:
    if not device.isa:
        return "runs on CPUs with AVX2 or AVX-512"
    if call.dtype not in TYPES:
        return f"takes fp32 and bf16, not {str(call.dtype).removeprefix('torch.')}"
    isa = MAY_BE.get(device.isa, device.isa)
    if not can_multiply(call.dtype, isa):
        return "multiplies bf16 on CPUs with AVX-512 BF16"
    if call.dtype is torch.bfloat16 and ((sizes := call.known(WEIGHT)) is None or sizes[1] % 2):
        return "takes pairs of bf16, so that sums need an even length"
    case = case_of(call.op, call.dtype, isa, CASES)
    return "" if case is not None and case.ours else f"was not measured on {device.isa}"


def can_multiply(dtype: torch.dtype, isa: str) -> bool:
    """Tell whether a kind of processor multiplies what the kernel is for."""
    return bool(isa) and dtype in TYPES and (dtype is torch.float32 or isa == WITH_BF16)


def cost_us(problem: Problem, device: Device) -> float:
    case = case_of(problem.op, problem.dtype, device.isa, CASES)
    (*rows, _), (columns, _) = problem.shapes[:2]
    if case is None or case.ours is None or not math.prod(rows) * columns:
        return NEVER
    is_few = problem.dtype is torch.float32 and math.prod(rows) < FEWEST_ROWS
    return (FEW if is_few else case.ours).us(Work.of(problem))


@lru_cache
def source(dtype: torch.dtype) -> KernelSource:
    """Return the kernel for operands of a type, which is one for all sizes. Params: x, the weight,
    the result. Scalars: M, N, K, strides, whether there is a bias, and what is fetched."""
    is_paired = dtype is torch.bfloat16
    name = f"{NAME}_{str(dtype).removeprefix('torch.')}"
    own = Path(__file__).with_name("linear_cpu.h").read_text()
    call = f"linears::linear<{TYPES[dtype]}, {'true' if is_paired else 'false'}>"
    text = (
        f'#include "vmath.h"\n\n{header()}\n{blocks()}\n{own}\n'
        f'extern "C" void {name}(void* const* buffers, const int64_t* scalars) {{\n'
        f"  {call}(buffers, scalars);\n"
        "}\n"
    )
    return KernelSource(name, "cpp", text, (dtype,) * 3, scalars=(1,) * (8 + NUM_FETCHED))


@lru_cache
def blocks() -> str:
    """Return the text of ``blocks_cpu.h``, by which convolutions multiply, too."""
    return Path(__file__).with_name("blocks_cpu.h").read_text()


def forms(call: Call, device: Device) -> Iterable[KernelSource]:
    return (source(call.dtype),)


def launch(problem: Problem, device: Device) -> Launches | None:
    (*rows, depth), (columns, _) = problem.shapes[:2]
    if not math.prod(rows) * depth * columns or len(rows) != 1:
        return None
    biases = [Operand(BIAS, Lies.RUNS)] * (len(problem.shapes) > BIAS)
    weight = Operand(WEIGHT, Lies.UNALIGNED)
    rows_lie = Lies.LINES if problem.dtype is torch.bfloat16 else Lies.RUNS  # pairs of bf16
    operands = (Operand(X, rows_lie), weight, Operand(RESULT, Lies.RUNS), *biases)
    scalars: tuple[Scalar, ...] = (
        *(math.prod(rows), columns, depth),
        *(Stride(0, 0), Stride(1, 0), Stride(1, 1), Stride(2, 0)),
        len(biases),
        *[0] * NUM_FETCHED,
    )
    each = 2 if problem.dtype is torch.bfloat16 else 1
    length = min(depth, each * STEPS)
    fetched = Fetched(WEIGHT, min(columns, FETCHED_ROWS), length, (depth,))
    return Launches((Launch(source(problem.dtype), operands, scalars, fetched),))


ROW = Kernel(NAME, ("linear",), supports, cost_us, launch, forms)
