"""Make e4m3 codes of values, as the attention of ``codes`` reads them.

A block of keys has one scale for all of its values, so that what is computed of a block is
multiplied once. That costs little: e4m3 has an exponent for each number, and a number must be a
2^15th of the largest of its block to lose a bit.
"""

from __future__ import annotations

import torch

from strop.ir.dims import symbol
from strop.ir.eight_bit import FORMATS, LEAST
from strop.ir.functions import EARLY, FUNCTIONS, SM_90
from strop.ir.source import KernelSource
from strop.kernels.attention.codes import ONES
from strop.kernels.attention.tma import HELPERS

MOST, ONE = FORMATS["fp8"].most, 0x38  # the largest code, and the one of 1

# The order of keys is that of ``codes.key_at``.
_TEXT = f"""\
{HELPERS}@triton.jit
{FUNCTIONS["e4m3_code"]}


@triton.jit
def value_codes(p0, p1, p2, s0, s1, s2, s3, s4, s5, s6, BLOCK: tl.constexpr, HEAD: tl.constexpr,
                LANES: tl.constexpr, ROWS: tl.constexpr, SM_90: tl.constexpr, EARLY: tl.constexpr):
{EARLY.replace("(0)", "(0) * tl.num_programs(1)")}\
    block, head = tl.program_id(0), tl.program_id(1)
    at, col = tl.arange(0, BLOCK), tl.arange(0, LANES)
    keys = block * BLOCK + at // 16 * 16 + at // 2 % 2 * 8 + at % 16 // 4 * 2 + at % 2
    is_value = (keys < s0)[:, None] & (col < HEAD)[None, :]
    values = p0 + head // s1 * (s2 * 8) + head % s1 * (s3 * 8)
    v = tl.load(values + keys[:, None] * (s4 * 8) + col[None, :], is_value, 0.0).to(tl.float32)
    most = larger(tl.reduce(tl.reduce(tl.abs(v), 1, larger), 0, larger), {LEAST!r})
    codes = tl.trans(e4m3_code(v * ({MOST!r} / most), SM_90).to(tl.uint8))
    line = p1 + head * ROWS * (s5 * BLOCK) + block * BLOCK + at[None, :]
    tl.store(line + col[:, None] * (s5 * BLOCK), codes, (col < HEAD)[:, None])
    row = tl.arange(0, ROWS - HEAD)[:, None]
    ones = tl.where(row + at[None, :] * 0 == 0, {ONE}, 0).to(tl.uint8)
    tl.store(line + (HEAD + row) * (s5 * BLOCK), ones)
    tl.store(p2 + head * s5 + block, most * (1 / {MOST!r}))
"""


def value_codes(head: int, block: int, dtype: torch.dtype) -> KernelSource:
    """Return the kernel for a size of heads and blocks of so many keys.

    Params: v, (B, H, S, D) of ``dtype``, whose last dim is dense; bytes (B, H, D + 8, blocks *
    ``block``); scales in fp32, (B, H, blocks). Scalars: keys, H; strides of B, H and S, in units of
    eight numbers; blocks; B * H. A block with NaN or inf has no finite scale, so that nothing
    finite comes of it.
    """
    return KernelSource(
        "value_codes",
        "triton",
        _TEXT,
        (dtype, torch.uint8, torch.float32),
        (1,) * 7,
        (symbol("s5"), symbol("s6")),
        constants=(
            ("BLOCK", block),
            ("HEAD", head),
            ("LANES", 1 << (head - 1).bit_length()),
            ("ROWS", head + ONES),
            (SM_90, 1),
            ("EARLY", 1),
        ),
        num_warps=8 if block * head > 64 * 64 else 4,
    )
