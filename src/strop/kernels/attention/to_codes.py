"""Make e4m3 codes of queries, keys and values, as ``codes`` reads them.

One launch for all three, between the product that computes them and the attention: it reads each
number once and writes a byte. A query has a scale of its own; a block of keys, or of values, has
one for all of its rows, so that what is computed of a block is multiplied once. That costs little:
e4m3 has a mantissa of its own for each number, and a number must be a 2^15th of the largest of its
block to lose a bit.
"""

from __future__ import annotations

import torch

from strop.ir.dims import symbol
from strop.ir.eight_bit import FORMATS, LEAST
from strop.ir.functions import EARLY, FUNCTIONS, SM_90
from strop.ir.source import KernelSource
from strop.kernels.attention.codes import ONES
from strop.kernels.attention.tma import HELPERS

ONE = 0x38  # the code of 1
PITCH = 16  # of rows of codes, in bytes: the accelerator's strides are multiples of it

_TEXT = (
    HELPERS
    + """\
@triton.jit
E4M3_CODE


@triton.jit
def codes_of(x, most, SM_90: tl.constexpr):
    return e4m3_code(x * (MOST_CODE / most), SM_90).to(tl.uint8)


@triton.jit
def attention_codes(p0, p1, p2, p3, p4, p5, p6, p7, p8,
                    s0, s1, s2, s3, s4, s5, s6, s7, s8, s9, s10, s11, s12, s13,
                    BLOCK: tl.constexpr, HEAD: tl.constexpr, LANES: tl.constexpr,
                    PITCH: tl.constexpr, ROWS: tl.constexpr, SM_90: tl.constexpr,
                    EARLY: tl.constexpr):
EARLY_LINES    block, head = tl.program_id(0), tl.program_id(1)
    b, h, start = head // s2, head % s2, block * BLOCK
    at, col = tl.arange(0, BLOCK), tl.arange(0, LANES)
    rows = start + at
    blocks = (s1 + BLOCK - 1) // BLOCK
    is_query = (rows < s0)[:, None] & (col < HEAD)[None, :]
    of_queries = p0 + b * (s3 * 8) + h * (s4 * 8)
    x = tl.load(of_queries + rows[:, None] * (s5 * 8) + col[None, :], is_query, 0.0)
    x = x.to(tl.float32)
    most = larger(tl.reduce(tl.abs(x), 1, larger), LEAST)
    place = p3 + (head * s0 + rows)[:, None] * PITCH + col[None, :]
    tl.store(place, codes_of(x, most[:, None], SM_90), is_query)
    tl.store(p6 + head * s0 + rows, most * (1 / MOST_CODE), rows < s0)
    if block < blocks:
        is_key = (rows < s1)[:, None] & (col < HEAD)[None, :]
        of_keys = p1 + b * (s6 * 8) + h * (s7 * 8)
        y = tl.load(of_keys + rows[:, None] * (s8 * 8) + col[None, :], is_key, 0.0)
        y = y.to(tl.float32)
        top = larger(tl.reduce(tl.reduce(tl.abs(y), 1, larger), 0, larger), LEAST)
        to = p4 + (head * s1 + rows)[:, None] * PITCH + col[None, :]
        tl.store(to, codes_of(y, top, SM_90), is_key)
        tl.store(p7 + head * blocks + block, top * (1 / MOST_CODE))
        # the key at each place: codes.key_at
        keys = start + at // 16 * 16 + at // 2 % 2 * 8 + at % 16 // 4 * 2 + at % 2
        is_value = (keys < s1)[:, None] & (col < HEAD)[None, :]
        of_values = p2 + b * (s9 * 8) + h * (s10 * 8)
        z = tl.load(of_values + keys[:, None] * (s11 * 8) + col[None, :], is_value, 0.0)
        z = z.to(tl.float32)
        peak = larger(tl.reduce(tl.reduce(tl.abs(z), 1, larger), 0, larger), LEAST)
        codes = tl.trans(codes_of(z, peak, SM_90))
        line = p5 + head * ROWS * (blocks * BLOCK) + start + at[None, :]
        tl.store(line + col[:, None] * (blocks * BLOCK), codes, (col < HEAD)[:, None])
        tl.store(p8 + head * blocks + block, peak * (1 / MOST_CODE))
        row = tl.arange(0, ROWS - HEAD)[:, None]
        ones = tl.where(row + at[None, :] * 0 == 0, ONE, 0).to(tl.uint8)
        tl.store(line + (HEAD + row) * (blocks * BLOCK), ones)
"""
)


def pitch(head: int) -> int:
    """Return the bytes from one row of codes of queries or keys to the next."""
    return -(-head // PITCH) * PITCH


def attention_codes(head: int, block: int, dtype: torch.dtype) -> KernelSource:
    """Return the kernel for a size of heads and blocks of so many keys.

    Params: q, k and v, (B, H, S, D) of ``dtype`` each, whose last dim is dense; bytes of q and k,
    (B, H, S, pitch) each, and of v (B, H, D + 8, blocks * ``block``); scales in fp32, of q (B, H,
    S), of k and v (B, H, blocks). Scalars: queries, keys, H; strides of B, H and S, of q, k and v,
    in units of eight numbers; blocks of queries or of keys, of whichever there are more; B * H. A
    row or a block with NaN or inf has no finite scale, so that nothing finite comes of it.
    """
    text = _TEXT.replace("E4M3_CODE", FUNCTIONS["e4m3_code"])
    text = text.replace("EARLY_LINES", EARLY.replace("(0)", "(0) * tl.num_programs(1)"))
    for name, value in (("MOST_CODE", FORMATS["fp8"].most), ("LEAST", LEAST), ("ONE", ONE)):
        text = text.replace(name, repr(value))
    return KernelSource(
        "attention_codes",
        "triton",
        text,
        (*(dtype,) * 3, *(torch.uint8,) * 3, *(torch.float32,) * 3),
        (1,) * 14,
        (symbol("s12"), symbol("s13")),
        constants=(
            ("BLOCK", block),
            ("HEAD", head),
            ("LANES", 1 << (head - 1).bit_length()),
            ("PITCH", pitch(head)),
            ("ROWS", head + ONES),
            (SM_90, 1),
            ("EARLY", 1),
        ),
        num_warps=8 if block * head > 64 * 64 else 4,
    )
