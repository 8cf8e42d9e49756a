"""A kernel that reads and writes by the tensor memory accelerator."""

from __future__ import annotations

import torch

from strop.ir.dims import symbol
from strop.ir.source import KernelSource

ROWS, COLS = 16, 64
TEXT = """\
import triton
import triton.language as tl


@triton.jit
def shifted(p0, p1, p2, s0, s1, ROWS: tl.constexpr):
    row = tl.program_id(0) * ROWS
    factor = tl.load(p1)
    p2.store([row, 0], p0.load([row + s1, 0]) * factor)
"""


def shifted(dtype: torch.dtype = torch.float32, cols: int = COLS) -> KernelSource:
    """out[i] = in[i + s1] * factor, zeros from outside, of s0 rows."""
    rows = (symbol("s0") + (ROWS - 1)) // ROWS
    return KernelSource(
        "shifted",
        "triton",
        TEXT,
        (dtype,) * 3,
        (1, 1),
        (rows,),
        constants=(("ROWS", ROWS),),
        boxes=((ROWS, cols), (), (ROWS, cols)),
    )


def expected(x: torch.Tensor, factor: float, shift: int) -> torch.Tensor:
    out = torch.zeros_like(x)
    rows = range(max(0, -shift), min(len(x), len(x) - shift))
    for row in rows:
        out[row] = x[row + shift] * factor
    return out
