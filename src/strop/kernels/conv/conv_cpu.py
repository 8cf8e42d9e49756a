"""Convolve on a CPU, in fp32 and bf16: pictures (B, C, H, W) whose channels are dense.

``conv_cpu.h`` is the kernel: by the blocks of linears (``gemm/blocks_cpu.h``) it packs a part of
the weight at a time, in each call, so that no packed copy is kept and none is ever stale. Sums are
fp32, by parts of at most 144 steps, with one rounding at the end. A library wants the weight in
blocks of its own, which take memory, and a look at all bits of the weight in each call
(``packed.rows``). It runs where it was measured as faster (``tuned.packed_cpu``).
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
from strop.kernels.gemm.linear_cpu import FETCHED_ROWS, MAY_BE, blocks, can_multiply
from strop.kernels.kernel import (
    CHANNELS_LAST,
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
    Stride,
)
from strop.kernels.packed.costs import CONV, Work, case_of
from strop.kernels.tuned.packed_cpu import CASES

NAME = "cpu_conv"
MOST_TAPS = 64  # of a window: conv_cpu.h has a bit for each
MOST_STEPS, MOST_WORDS = 144, 128  # of a part of the weight; of one tap
X, WEIGHT, BIAS = range(3)
_DIMS = 4


def supports(call: Call, device: Device) -> str:
    if not device.isa:
        return "runs on CPUs with AVX2 or AVX-512"
    if call.dtype not in TYPES:
        return f"takes fp32 and bf16, not {str(call.dtype).removeprefix('torch.')}"
    isa = MAY_BE.get(device.isa, device.isa)
    if not can_multiply(call.dtype, isa):
        return "multiplies bf16 on CPUs with AVX-512 BF16"
    sizes = call.known(WEIGHT)
    if sizes is None or len(sizes) != _DIMS:
        return "wants weights (O, C, h, w) of a known size"
    if call.attr("groups") != 1:
        return "takes one group"
    if sizes[2] * sizes[3] > MOST_TAPS:
        return f"takes windows of up to {MOST_TAPS} pixels"
    if call.dtype is torch.bfloat16 and sizes[1] % 2:
        return "takes pairs of bf16, so that channels need an even number"
    case = case_of(call.op, call.dtype, isa, CASES)
    return "" if case is not None and case.ours else f"was not measured on {device.isa}"


def cost_us(problem: Problem, device: Device) -> float:
    case = case_of(problem.op, problem.dtype, device.isa, CASES)
    if case is None or case.ours is None or not all(map(math.prod, problem.shapes)):
        return NEVER
    return case.ours.us(Work.of(problem)) if min(_sides(problem)) > 0 else NEVER


def _sides(problem: Problem) -> tuple[int, ...]:
    """Return rows and columns of the result."""
    shapes = (problem.shapes[X][2:], problem.shapes[WEIGHT][2:])
    places = map(problem.attr, ("stride", "padding", "dilation"))
    both = zip(*shapes, *places, strict=True)
    return tuple(
        (side + 2 * pad - step * (size - 1) - 1) // by + 1 for side, size, by, pad, step in both
    )


@lru_cache
def source(dtype: torch.dtype) -> KernelSource:
    """Return the kernel for operands of a type, which is one for all sizes. Params: x, the weight,
    the result. Scalars: batch, channels out, height, width, channels in, window, stride, padding,
    dilation, rows and columns of the result, the strides of x, of the weight and of the result,
    whether there is a bias, and what is fetched."""
    name = f"{NAME}_{str(dtype).removeprefix('torch.')}"
    own = Path(__file__).with_name("conv_cpu.h").read_text()
    is_paired = "true" if dtype is torch.bfloat16 else "false"
    call = f"convolutions::convolve<{TYPES[dtype]}, {is_paired}>"
    text = (
        f'#include "vmath.h"\n\n{header()}\n{blocks()}\n{own}\n'
        f'extern "C" void {name}(void* const* buffers, const int64_t* scalars) {{\n'
        f"  {call}(buffers, scalars);\n"
        "}\n"
    )
    return KernelSource(name, "cpp", text, (dtype,) * 3, scalars=(1,) * (28 + NUM_FETCHED))


def forms(call: Call, device: Device) -> Iterable[KernelSource]:
    return (source(call.dtype),)


def launch(problem: Problem, device: Device) -> Launches | None:
    if not all(map(math.prod, problem.shapes)) or min(made := _sides(problem)) < 1:
        return None
    (batch, ins, *sides), (outs, _, *window) = problem.shapes[:2]
    pairs = [problem.attr(name) for name in ("stride", "padding", "dilation")]
    biases = [Operand(BIAS, Lies.RUNS)] * (len(problem.shapes) > BIAS)
    pixels = (Operand(X, Lies.PIXELS), Operand(RESULT, Lies.PIXELS))
    operands = (pixels[0], Operand(WEIGHT, Lies.UNALIGNED), pixels[1], *biases)
    scalars = (
        *(batch, outs, *sides, ins, *window, *pairs[0], *pairs[1], *pairs[2], *made),
        *(Stride(place, dim) for place in (0, 1, 2) for dim in range(_DIMS)),
        len(biases),
        *[0] * NUM_FETCHED,
    )
    taps, each = math.prod(window), 2 if problem.dtype is torch.bfloat16 else 1
    at_once = each * min(MOST_STEPS // taps, MOST_WORDS)
    fetched = Fetched(WEIGHT, min(outs, FETCHED_ROWS), taps * min(ins, at_once), (ins, *window))
    part = Launch(source(problem.dtype), operands, scalars, fetched)
    return Launches((part,), (), (batch, outs, *made), CHANNELS_LAST)


ROW = Kernel(NAME, (CONV,), supports, cost_us, launch, forms)
