"""Sums of a 3x3 window's taps for pictures twice as high and wide, four windows of 2x2 taps each.

Of a result's even rows the taps of its first row meet one row of the smaller picture, those of the
second and third the next one; of its odd rows those of the first two, and the third's. So it is
with columns.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from strop.ir.device import Device
from strop.ir.dims import symbol
from strop.ir.functions import HALVES
from strop.ir.source import KernelSource
from strop.kernels.kernel import (
    CHANNELS_LAST,
    FASTEST,
    RESULT,
    Call,
    Kernel,
    Launch,
    Launches,
    Operand,
    Problem,
)

MULTIPLE = 16  # of the input channels, whose accesses are 16 bytes wide

# By whether the result's row is odd, then by the smaller picture's row: which of the three it is.
SHARES = (((0,), (1, 2)), ((0, 1), (2,)))
BLOCK, NUM_WARPS = 1024, 4  # of a thread eight numbers: 16 bytes

_TEXT = """\
import triton
import triton.language as tl


@triton.jit
def folded_taps(p0, p1, s0, CI: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    known = at < s0
    whole = p0 + at // CI * (9 * CI) + at % CI
    folded = p1 + at // CI * (4 * CI) + at % CI
"""


def folded_taps(outs: int, ins: int, dtype: torch.dtype) -> KernelSource:
    """Turn weights (CO, 3, 3, CI) into taps (2, 2, CO, 2, 2, CI): odd rows, odd columns, channel,
    and place in the window. Both are dense; CI is a multiple of 16. Sums are made in fp32, and
    rounded once. The scalar is CO times CI."""
    return KernelSource(
        "folded_taps",
        "triton",
        _TEXT + "".join(_lines(outs, HALVES[dtype])),
        (dtype,) * 2,
        (16,),
        ((symbol("s0") + (BLOCK - 1)) // BLOCK,),
        constants=(("CI", ins), ("BLOCK", BLOCK)),
        num_warps=NUM_WARPS,
    )


def _lines(outs: int, half: str) -> list[str]:
    found = [
        f"    w{tap} = tl.load(whole + {tap} * CI, mask=known, other=0.0).to(tl.float32)\n"
        for tap in range(9)
    ]
    for number in range(16):
        down, right, row, column = (number >> place & 1 for place in (3, 2, 1, 0))
        taps = [3 * y + x for y in SHARES[down][row] for x in SHARES[right][column]]
        total = " + ".join(f"w{tap}" for tap in taps)
        place = f"{(2 * down + right) * outs * 4 + 2 * row + column} * CI"
        found.append(f"    tl.store(folded + {place}, ({total}).to({half}), mask=known)\n")
    return found


def supports(call: Call, device: Device) -> str:
    if not device.arch:
        return "runs on GPUs"
    weight = call.known(0)
    if call.dtype not in HALVES or weight is None or weight[1] % MULTIPLE:
        return f"adds taps in fp16 and bf16, of channels that are multiples of {MULTIPLE}"
    return ""


def cost_us(problem: Problem, device: Device) -> float:
    return FASTEST


def launch(problem: Problem, device: Device) -> Launches:
    outs, ins = problem.shapes[0][:2]
    operands = (Operand(0, order=CHANNELS_LAST), Operand(RESULT, order=CHANNELS_LAST))
    source = folded_taps(outs, ins, problem.dtype)
    return Launches((Launch(source, operands, (outs * ins,)),))


def forms(call: Call, device: Device) -> Iterable[KernelSource]:
    weight = call.known(0)
    return [folded_taps(weight[0], weight[1], call.dtype)] if weight else []


ROW = Kernel("folded_taps", ("folded_taps",), supports, cost_us, launch, forms)
