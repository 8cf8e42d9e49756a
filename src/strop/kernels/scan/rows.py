"""Walk linear recurrences, h[t] = a[t] * h[t - 1] + b[t], in one kernel.

Operands are (batch, rows, steps, inner). Elements do not depend on each other, so each lane walks
its own, whatever the length: one kernel serves all sizes and strides. States are of
``ir.linear_scan.STATES``, and each is rounded once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path

import torch

from strop.ir.device import Device
from strop.ir.dims import symbol
from strop.ir.functions import EARLY
from strop.ir.linear_scan import STATES
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
    Problem,
    Stride,
)

OP, ON_CPU, ON_GPU = "linear_scan", "cpu_scan", "linear_scan"
_CPP = {
    torch.float32: "float, double",
    torch.float64: "double, double",
    torch.float16: "sp::fp16, float",
    torch.bfloat16: "sp::bf16, float",
}
_TRITON = {
    torch.float16: "tl.float16",
    torch.bfloat16: "tl.bfloat16",
    torch.float32: "tl.float32",
    torch.float64: "tl.float64",
}
BLOCK, NUM_WARPS = 64, 2  # elements of a program, of which there are to be many
AHEAD = 8  # steps whose operands are on their way at once: each step waits for the one before

_HEAD = f"""\
import triton
import triton.language as tl


@triton.jit
def linear_scan(p0, p1, p2, s0, s1, s2, s3, s4, s5, s6, s7, s8, s9, s10, s11, s12, s13, s14, s15,
                BLOCK: tl.constexpr, EARLY: tl.constexpr):
{EARLY}    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    known = at < s0 * s1 * s3
    inner, row, batch = at % s3, at // s3 % s1, at // s3 // s1
    a = p0 + batch * s4 + row * s5 + inner * s7
    b = p1 + batch * s8 + row * s9 + inner * s11
    out = p2 + batch * s12 + row * s13 + inner * s15
    state = tl.load(b, mask=known, other=0.0).to(STATE)
    tl.store(out, state.to(TYPE), mask=known)
    for first in range(1, s2, {AHEAD}):
"""
_LOADS = """\
        is_{n} = known & (first + {n} < s2)
        a_{n} = tl.load(a + (first + {n}) * s6, mask=is_{n}, other=0.0).to(STATE)
        b_{n} = tl.load(b + (first + {n}) * s10, mask=is_{n}, other=0.0).to(STATE)
"""
_STEP = """\
        state = state * a_{n} + b_{n}
        tl.store(out + (first + {n}) * s14, state.to(TYPE), mask=is_{n})
"""


@lru_cache
def on_cpu(dtype: torch.dtype) -> KernelSource:
    """Return the kernel for operands of a type. Params: a, b, the result. Scalars: the four
    sizes, and the four strides of each param."""
    name = f"{ON_CPU}_{str(dtype).removeprefix('torch.')}"
    own = Path(__file__).with_name("scan_cpu.h").read_text()
    text = (
        f'#include "vmath.h"\n\n{own}\n'
        f'extern "C" void {name}(void* const* buffers, const int64_t* scalars) {{\n'
        f"  scans::scan<{_CPP[dtype]}>(buffers, scalars);\n"
        "}\n"
    )
    return KernelSource(name, "cpp", text, (dtype,) * 3, scalars=(1,) * 16)


@lru_cache
def on_gpu(dtype: torch.dtype) -> KernelSource:
    """Return the kernel for operands of a type, with params and scalars as ``on_cpu``."""
    steps = range(AHEAD)
    text = _HEAD + "".join(_LOADS.format(n=n) for n in steps)
    text += "".join(_STEP.format(n=n) for n in steps)
    text = text.replace("STATE", _TRITON[STATES[dtype]]).replace("TYPE", _TRITON[dtype])
    lanes = symbol("s0") * symbol("s1") * symbol("s3")
    grid = ((lanes + (BLOCK - 1)) // BLOCK,)
    constants = (("BLOCK", BLOCK), ("EARLY", 1))
    return KernelSource(
        ON_GPU,
        "triton",
        text,
        (dtype,) * 3,
        (1,) * 16,
        grid,
        constants=constants,
        num_warps=NUM_WARPS,
    )


def _supports_on_cpu(call: Call, device: Device) -> str:
    if device.arch:
        return "runs on CPUs"
    return "" if call.dtype in STATES else "takes floats of 16, 32 and 64 bits"


def _supports_on_gpu(call: Call, device: Device) -> str:
    if not device.arch:
        return "runs on GPUs"
    return "" if call.dtype in STATES else "takes floats of 16, 32 and 64 bits"


def cost_us(problem: Problem, device: Device) -> float:
    return FASTEST if math.prod(problem.shapes[0]) else NEVER


def launch(problem: Problem, device: Device) -> Launches | None:
    if not math.prod(problem.shapes[0]):
        return None
    operands = tuple(Operand(number, Lies.UNALIGNED) for number in (0, 1, RESULT))
    strides = (Stride(place, dim) for place in range(3) for dim in range(4))
    source = (on_gpu if device.arch else on_cpu)(problem.dtype)
    return Launches((Launch(source, operands, (*problem.shapes[0], *strides)),))


def forms(call: Call, device: Device) -> Iterable[KernelSource]:
    return ((on_gpu if device.arch else on_cpu)(call.dtype),)


CPU_ROW = Kernel(ON_CPU, (OP,), _supports_on_cpu, cost_us, launch, forms)
GPU_ROW = Kernel(ON_GPU, (OP,), _supports_on_gpu, cost_us, launch, forms)
