"""Compute softmax without its division, which stands between two matrix products of an
attention."""

from __future__ import annotations

import math

import torch

from strop.ir.dims import symbol
from strop.ir.functions import HALVES
from strop.ir.source import KernelSource

COLS, NUM_WARPS = 2048, 8  # a row is read twice; 8 KB of it at once
MULTIPLE = 16  # of the length of rows whose accesses are 16 bytes wide

_TEXT = """\
import triton
import triton.language as tl


@triton.jit
def larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def exp_rows(p0, p1, p2, s0, s1, COLS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * s0
    at = tl.arange(0, COLS)
    tops = tl.full([COLS], float("-inf"), tl.float32)
    for first in range(0, s0, COLS):
        x = tl.load(p0 + row + first + at, mask=first + at < s0, other=float("-inf"))
        tops = larger(tops, x)
    top = tl.reduce(tops, 0, larger)
    total = tl.full([COLS], 0.0, tl.float32)
    for first in range(0, s0, COLS):
        mask = first + at < s0
        x = tl.load(p0 + row + first + at, mask=mask, other=float("-inf"))
        weight = tl.exp2((x - top) * SCALE).to(HALF)
        tl.store(p1 + row + first + at, weight, mask=mask)
        total += weight.to(tl.float32)
    tl.store(p2 + tl.program_id(0), tl.sum(total, 0))
"""


def exp_rows(dtype: torch.dtype, scale: float, length: int) -> KernelSource:
    """weights[r, c] = exp(scale * (scores[r, c] - max_c scores[r, c])), and sums[r] of these.

    Params: scores (R, C) fp32, weights (R, C) of ``dtype``, sums (R,) fp32 of the weights as they
    were rounded. Scalars: C, R. ``scale`` > 0; ``length`` is C: it decides how wide accesses are.
    A row with NaN or +inf gives NaN, as softmax does.
    """
    text = _TEXT.replace("SCALE", repr(scale * math.log2(math.e))).replace("HALF", HALVES[dtype])
    width = MULTIPLE if length % MULTIPLE == 0 else 1
    return KernelSource(
        "exp_rows",
        "triton",
        text,
        (torch.float32, dtype, torch.float32),
        (width, 1),
        (symbol("s1"),),
        constants=(("COLS", COLS),),
        num_warps=NUM_WARPS,
    )
