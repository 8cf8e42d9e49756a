"""Convolve int8 codes on a CPU, to exact sums in int32 (``ir.code_conv``).

``code_conv_cpu.h`` is the kernel: products of the codes of windows, by the same tiles as linears of
codes. The weight is packed once for each content of it.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path

import torch

from strop.ir.code_panel import HEAD, header, packed_words
from strop.ir.device import Device
from strop.ir.source import KernelSource
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
    PartScratch,
    Problem,
    Stride,
    scratch,
)

NAME = "code_conv"
X, WEIGHT, ZEROS = range(3)


def supports(call: Call, device: Device) -> str:
    if not device.isa:
        return "runs on CPUs with AVX2, AVX-512 or NEON"
    if call.attr("groups") != 1:
        return "takes one group"
    return "" if call.known(WEIGHT) else "wants weights of a known size"


def cost_us(problem: Problem, device: Device) -> float:
    return FASTEST if all(map(all, problem.shapes)) else NEVER


@lru_cache
def source(has_zeros: bool) -> KernelSource:
    """Return the kernel. Params: x, the weight, the sums, kept memory, and maybe zero points in
    int64. Scalars: batch, height, width, channels in and out, window, stride, padding, dilation,
    rows and columns of the result, the zero point of x, the strides of the weight, of x and of
    the sums, and that of the zero points."""
    name = f"{NAME}_with_zeros" if has_zeros else NAME
    own = Path(__file__).with_name("code_conv_cpu.h").read_text()
    told = "true" if has_zeros else "false"
    text = (
        f'#include "vmath.h"\n\n{header()}\n{own}\n'
        f'extern "C" void {name}(void* const* buffers, const int64_t* scalars) {{\n'
        f"  code_convs::convolve(buffers, scalars, {told});\n"
        "}\n"
    )
    params = (torch.int8, torch.int8, torch.int32, torch.int32, *[torch.int64] * has_zeros)
    return KernelSource(name, "cpp", text, params, scalars=(1,) * (28 + has_zeros))


def forms(call: Call, device: Device) -> Iterable[KernelSource]:
    return (source(len(call.shapes) > ZEROS),)


def launch(problem: Problem, device: Device) -> Launches | None:
    (batch, ins, *sides), weight, *zeros = problem.shapes
    window, depth = weight[2:], ins * weight[2] * weight[3]
    stride, padding, dilation = (problem.attr(k) for k in ("stride", "padding", "dilation"))
    made = (
        (side + 2 * pad - step * (size - 1) - 1) // by + 1
        for side, size, by, pad, step in zip(sides, window, stride, padding, dilation, strict=True)
    )
    scalars = (
        *(batch, *sides, ins, weight[0], *window, *stride, *padding, *dilation, *made),
        problem.attr("zero"),
        *(Stride(operand, dim) for operand in (1, 0, 2) for dim in range(4)),
        *(Stride(4, 0) for _ in zeros),
    )
    numbers = (X, WEIGHT, RESULT, scratch(0), *(ZEROS for _ in zeros))
    operands = tuple(Operand(number, Lies.UNALIGNED) for number in numbers)
    words = HEAD + packed_words(weight[0], depth)
    kept = PartScratch((words,), torch.int32, packs=WEIGHT)
    part = Launch(source(bool(zeros)), operands, scalars)
    return Launches((part,), (kept,))


ROW = Kernel(NAME, ("code_conv2d",), supports, cost_us, launch, forms)
