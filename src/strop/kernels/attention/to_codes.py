"""Make e4m3 codes of values, and maybe of queries and keys, as ``codes`` reads them.

One launch, between the product that computes them and the attention: it reads each number once and
writes a byte. A query has a scale of its own; a block of keys, or of values, has one for all of its
rows, so that what is computed of a block is multiplied once. That costs little: e4m3 has an
exponent for each number, and a number must be a 2^15th of the largest of its block to lose a bit.
"""

from __future__ import annotations

import re

import torch

from strop.ir.dims import symbol
from strop.ir.eight_bit import FORMATS, LEAST
from strop.ir.functions import EARLY, FUNCTIONS, SM_90
from strop.ir.source import KernelSource
from strop.kernels.attention.codes import ONES
from strop.kernels.attention.tma import HELPERS

ONE = 0x38  # the code of 1
PITCH = 16  # of rows of codes, in bytes: the accelerator's strides are multiples of it

_HEAD = f"""\
{HELPERS}@triton.jit
{FUNCTIONS["e4m3_code"]}


@triton.jit
def codes_of(x, most, SM_90: tl.constexpr):
    return e4m3_code(x * (MOST_CODE / most), SM_90).to(tl.uint8)


@triton.jit
def NAME(PARAMS,
         BLOCK: tl.constexpr, HEAD: tl.constexpr, LANES: tl.constexpr, PITCH: tl.constexpr,
         ROWS: tl.constexpr, SM_90: tl.constexpr, EARLY: tl.constexpr):
{EARLY.replace("(0)", "(0) * tl.num_programs(1)")}\
    block, head = tl.program_id(0), tl.program_id(1)
    b, h, start = head // HEADS, head % HEADS, block * BLOCK
    at, col = tl.arange(0, BLOCK), tl.arange(0, LANES)
    blocks = (KEYS + BLOCK - 1) // BLOCK
"""
_QUERIES = """\
    rows = start + at
    is_query = (rows < QUERIES)[:, None] & (col < HEAD)[None, :]
    of_queries = Q + b * (Q_B * 8) + h * (Q_H * 8)
    q = tl.load(of_queries + rows[:, None] * (Q_S * 8) + col[None, :], is_query, 0.0)
    q = q.to(tl.float32)
    most_q = larger(tl.reduce(tl.abs(q), 1, larger), LEAST)
    to_q = CODES_Q + (head * QUERIES + rows)[:, None] * PITCH + col[None, :]
    tl.store(to_q, codes_of(q, most_q[:, None], SM_90), is_query)
    tl.store(SCALES_Q + head * QUERIES + rows, most_q * (1 / MOST_CODE), rows < QUERIES)
"""
_KEYS = """\
    if block < blocks:
        is_key = (rows < KEYS)[:, None] & (col < HEAD)[None, :]
        of_keys = K + b * (K_B * 8) + h * (K_H * 8)
        k = tl.load(of_keys + rows[:, None] * (K_S * 8) + col[None, :], is_key, 0.0)
        k = k.to(tl.float32)
        most_k = larger(tl.reduce(tl.reduce(tl.abs(k), 1, larger), 0, larger), LEAST)
        to_k = CODES_K + (head * KEYS + rows)[:, None] * PITCH + col[None, :]
        tl.store(to_k, codes_of(k, most_k, SM_90), is_key)
        tl.store(SCALES_K + head * blocks + block, most_k * (1 / MOST_CODE))
"""
# The order of keys is that of ``codes.key_at``.
_VALUES = """\
    if block < blocks:
        keys = start + at // 16 * 16 + at // 2 % 2 * 8 + at % 16 // 4 * 2 + at % 2
        is_value = (keys < KEYS)[:, None] & (col < HEAD)[None, :]
        of_values = V + b * (V_B * 8) + h * (V_H * 8)
        v = tl.load(of_values + keys[:, None] * (V_S * 8) + col[None, :], is_value, 0.0)
        v = v.to(tl.float32)
        most_v = larger(tl.reduce(tl.reduce(tl.abs(v), 1, larger), 0, larger), LEAST)
        codes = tl.trans(codes_of(v, most_v, SM_90))
        line = CODES_V + head * ROWS * (blocks * BLOCK) + start + at[None, :]
        tl.store(line + col[:, None] * (blocks * BLOCK), codes, (col < HEAD)[:, None])
        tl.store(SCALES_V + head * blocks + block, most_v * (1 / MOST_CODE))
        row = tl.arange(0, ROWS - HEAD)[:, None]
        ones = tl.where(row + at[None, :] * 0 == 0, ONE, 0).to(tl.uint8)
        tl.store(line + (HEAD + row) * (blocks * BLOCK), ones)
"""


def pitch(head: int) -> int:
    """Return the bytes from one row of codes of queries or keys to the next."""
    return -(-head // PITCH) * PITCH


def attention_codes(head: int, block: int, dtype: torch.dtype) -> KernelSource:
    """Return the kernel of all three, for a size of heads and blocks of so many keys.

    Params: q, k and v, (B, H, S, D) of ``dtype`` each, whose last dim is dense; bytes of q and k,
    (B, H, S, pitch) each, and of v (B, H, D + 8, blocks * ``block``); scales in fp32, of q (B, H,
    S), of k and v (B, H, blocks). Scalars: queries, keys, H; strides of B, H and S, of q, k and v,
    in units of eight numbers; blocks of queries or of keys, of whichever there are more; B * H. A
    row or a block with NaN or inf has no finite scale, so that nothing finite comes of it.
    """
    params = "Q K V CODES_Q CODES_K CODES_V SCALES_Q SCALES_K SCALES_V"
    scalars = "QUERIES KEYS HEADS Q_B Q_H Q_S K_B K_H K_S V_B V_H V_S s12 s13"
    text = _HEAD + _QUERIES + _KEYS + _VALUES
    return _source("attention_codes", text, params, scalars, (head, block), dtype)


def value_codes(head: int, block: int, dtype: torch.dtype) -> KernelSource:
    """Return the kernel of values alone.

    Params: v, its codes and their scales, as ``attention_codes`` has them. Scalars: keys, H; the
    strides of v; blocks; B * H.
    """
    scalars = "KEYS HEADS V_B V_H V_S s5 s6"
    params = "V CODES_V SCALES_V"
    return _source("value_codes", _HEAD + _VALUES, params, scalars, (head, block), dtype)


def _source(
    name: str, text: str, params: str, scalars: str, sizes: tuple[int, int], dtype: torch.dtype
) -> KernelSource:
    """Put names of params and scalars, in their order, and numbers into a text."""
    head, block = sizes
    pointers, numbers = params.split(), scalars.split()
    named = {own: f"p{n}" for n, own in enumerate(pointers)}
    named |= {own: f"s{n}" for n, own in enumerate(numbers)}
    known = {"NAME": name, "PARAMS": ", ".join(named.values())}
    known |= {"MOST_CODE": repr(FORMATS["fp8"].most), "LEAST": repr(LEAST), "ONE": repr(ONE)}
    for own, value in {**known, **named}.items():
        text = re.sub(rf"\b{own}\b", value, text)
    kinds = {"CODES": torch.uint8, "SCALES": torch.float32}
    return KernelSource(
        name,
        "triton",
        text,
        tuple(kinds.get(own[:-2], dtype) for own in pointers),
        (1,) * len(numbers),
        (symbol(f"s{len(numbers) - 2}"), symbol(f"s{len(numbers) - 1}")),
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
