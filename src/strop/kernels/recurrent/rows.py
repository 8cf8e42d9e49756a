"""Walk one layer of an LSTM, a GRU or a plain recurrent network on a CPU, in fp32.

``recurrent_cpu.h`` is the kernel: it packs the weight of hidden states once a call, for vectors
along the units, and computes all gates of some units of some rows at once. One kernel of a cell
serves all sizes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path

import torch

from strop.ir.device import Device
from strop.ir.recurrence import GATES, has_cell
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
    PartScratch,
    Problem,
    Scalar,
    Stride,
    scratch,
)

OP, NAME = "recurrence", "cpu_recurrence"
MOST_LANES = 16  # of a vector, to a multiple of which units are packed
PLACES = 7  # operands of a launch
DIMS = (3, 2, 2, 2, 1)  # of those before the result


@lru_cache
def source(kind: str) -> KernelSource:
    """Return the kernel of a cell. Params: gates, the weight, the hidden state and the cell's at
    the beginning, the bias, the result, packed weights. Scalars: steps, batch, units, whether it
    is reversed, whether there is a bias, and strides of the operands before the result."""
    name = f"{NAME}_{kind}"
    own = Path(__file__).with_name("recurrent_cpu.h").read_text()
    text = (
        f'#include "vmath.h"\n\n{header()}\n{own}\n'
        f'extern "C" void {name}(void* const* buffers, const int64_t* scalars) {{\n'
        f"  recurrent::walk<recurrent::{kind.upper()}>(buffers, scalars);\n"
        "}\n"
    )
    return KernelSource(
        name, "cpp", text, (torch.float32,) * PLACES, scalars=(1,) * (5 + sum(DIMS))
    )


def supports(call: Call, device: Device) -> str:
    if device.arch:
        return "runs on CPUs"
    return "" if call.dtype is torch.float32 else "takes fp32"


def cost_us(problem: Problem, device: Device) -> float:
    return FASTEST if all(map(math.prod, problem.shapes)) else NEVER


def launch(problem: Problem, device: Device) -> Launches | None:
    if not all(map(math.prod, problem.shapes)):
        return None
    kind = problem.attr("kind")
    (steps, batch, _), (_, units) = problem.shapes[:2]
    has_bias, cell = problem.attr("has_bias"), 3 if has_cell(kind) else 2
    bias = len(problem.shapes) - 1 if has_bias else 2
    # what a cell does not have, the kernel does not look at: any operand stands in its place
    given = [Operand(number, Lies.UNALIGNED) for number in (0, 1, 2, cell)]
    given += [Operand(bias, Lies.UNALIGNED), Operand(RESULT), Operand(scratch(0))]
    strides = [Stride(place, dim) for place, dims in enumerate(DIMS) for dim in range(dims)]
    wide = -(-units // MOST_LANES) * MOST_LANES
    packed = PartScratch((GATES[kind] * wide * units,), torch.float32)
    numbers = steps, batch, units, int(problem.attr("reversed")), int(has_bias)
    scalars: tuple[Scalar, ...] = (*numbers, *strides)
    return Launches((Launch(source(kind), tuple(given), scalars),), (packed,))


def forms(call: Call, device: Device) -> Iterable[KernelSource]:
    return (source(call.attr("kind")),)


ROW = Kernel(NAME, (OP,), supports, cost_us, launch, forms)
