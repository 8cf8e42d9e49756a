"""Multiply many small matrices in fp32 on a CPU: (B, M, K) by (B, K, N), of any strides.

A library packs both operands of each product and asks what is to be done for each. ``small_cpu.h``
packs one, and has a tile of the result in registers. Each sum is in the order of its terms.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path

import torch

from strop.ir.device import Device
from strop.ir.source import KernelSource
from strop.kernels.attention.cpu import header
from strop.kernels.kernel import (
    FASTEST,
    NEVER,
    RESULT,
    Call,
    Kernel,
    Launch,
    Launches,
    Lies,
    Operand,
    Problem,
    Stride,
)

NAME = "small_products"
MOST, DEEPEST = 64, 128  # rows and columns of a result; terms of a sum: as in small_cpu.h


def supports(call: Call, device: Device) -> str:
    if not device.isa:
        return "runs on CPUs with AVX2, AVX-512 or NEON"
    if call.dtype is not torch.float32:
        return f"takes fp32, not {str(call.dtype).removeprefix('torch.')}"
    if any(len(shape) != 3 for shape in call.shapes):
        return "takes operands (B, M, K) and (B, K, N)"
    (_, rows, depth), (_, _, columns) = call.shapes
    if not all(size.is_const for size in (rows, depth, columns)):
        return "wants matrices of a known size"
    if max(rows.value, columns.value) > MOST or depth.value > DEEPEST:
        return f"takes results up to {MOST} x {MOST}, of sums of up to {DEEPEST} terms"
    return ""


def cost_us(problem: Problem, device: Device) -> float:
    a, b = problem.shapes
    is_one_each = a[0] == b[0] and math.prod(a) * math.prod(b) > 0
    return FASTEST if is_one_each else NEVER


@lru_cache
def source() -> KernelSource:
    """Return the kernel, which is one for all sizes."""
    own = Path(__file__).with_name("small_cpu.h").read_text()
    text = (
        f'#include "vmath.h"\n\n{header()}\n{own}\n'
        f'extern "C" void {NAME}(void* const* buffers, const int64_t* scalars) {{\n'
        "  products::products(buffers, scalars);\n"
        "}\n"
    )
    return KernelSource(NAME, "cpp", text, (torch.float32,) * 3, scalars=(1,) * 13)


def forms(call: Call, device: Device) -> Iterable[KernelSource]:
    return (source(),)


def launch(problem: Problem, device: Device) -> Launches | None:
    if cost_us(problem, device) == NEVER:
        return None
    (batch, rows, depth), (*_, columns) = problem.shapes
    operands = tuple(Operand(number, Lies.UNALIGNED) for number in (0, 1, RESULT))
    strides = (Stride(place, dim) for place in range(3) for dim in range(3))
    return Launches((Launch(source(), operands, (batch, rows, columns, depth, *strides)),))


ROW = Kernel(NAME, ("matmul",), supports, cost_us, launch, forms)
