"""Compute attention of short sequences, with a mask, a bias, a causal order, or none of them.

Encoders of texts have some hundred tokens, and T5 adds a bias to all scores of a head, which is as
large as the scores: reading it is most of the work. It is read in the type that it has, 16 bytes
at once, on its way together with keys and values. Programs of the same queries of several batch
elements run beside each other, so that one of them brings a bias that they share from memory and
the others find it in the cache; or one program takes several batch elements, and reads it once for
them (``MaskedTile.batch``).

FlashAttention-2 (https://arxiv.org/abs/2307.08691) with plain loads: one pass over the keys, a
running maximum, fp32 sums. Queries may be more heads than keys: each head of keys serves several.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

import torch

from strop.ir.dims import symbol
from strop.ir.functions import EARLY, HALVES
from strop.ir.source import KernelSource

UNIT = 8  # elements of 16 bytes: what strides are multiples of, and counted in
LEAST_COLUMNS = 16  # of a product


class Masking(Enum):
    """Say which scores count, and what is added to them."""

    NONE = "none"
    CAUSAL = "causal"  # a query attends to the keys that are no later than itself
    BIAS = "bias"  # numbers of the queries' type are added
    BOOL = "bool"  # False adds minus infinity


@dataclass(frozen=True, slots=True)
class MaskedTile:
    """Say what a program has at once. ``stages``: blocks of keys and values on the way. ``batch``:
    so many batch elements share what is read of the mask."""

    queries: int
    keys: int
    stages: int
    num_warps: int
    batch: int = 1


@dataclass(frozen=True, slots=True)
class ShortAttention:
    """Say what is computed. ``is_wide``: the keys of a mask's row are whole pieces
    of 16 bytes, and rows begin at multiples of them."""

    head: int
    scale: float
    masking: Masking
    is_wide: bool = False

    @property
    def has_mask(self) -> bool:
        return self.masking in (Masking.BIAS, Masking.BOOL)

    def mask_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return torch.bool if self.masking is Masking.BOOL else dtype

    @property
    def mask_unit(self) -> int:
        """Return what keys and the strides of a mask are multiples of, and counted in."""
        if not self.is_wide:
            return 1
        return 2 * UNIT if self.masking is Masking.BOOL else UNIT


# s0 to s5: queries, keys (in units of a wide mask), heads, batch elements, heads of queries for a
# head of keys, programs; s6 to s14: strides of q, k and v by batch element, head and token; s15 to
# s18: of the mask by batch element, head, query and key.
_HEAD = """\
import triton
import triton.language as tl


@triton.jit
def larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def short_attention(PARAMS, SCALARS, HEAD: tl.constexpr, COLUMNS: tl.constexpr,
                    QUERIES: tl.constexpr, KEYS: tl.constexpr, STAGES: tl.constexpr,
                    EARLY: tl.constexpr):
EARLY_LINES    elements = (s3 + BATCH - 1) // BATCH
    first = tl.program_id(0) % elements * BATCH
    tiles = (s0 + QUERIES - 1) // QUERIES
    start = tl.program_id(0) // elements % tiles * QUERIES
    h = tl.program_id(0) // elements // tiles
    row = start + tl.arange(0, QUERIES)
    column = tl.arange(0, COLUMNS)
    key = tl.arange(0, KEYS)
    keys = s1 * MASK_UNIT
    known = (row < s0)[:, None] & (column < HEAD)[None, :]
"""
_ELEMENT = """\
    b{n} = first + {n}
    q{n} = tl.load(p0 + b{n} * (s6 * 8) + h * (s7 * 8) + row[:, None] * (s8 * 8) + column[None, :],
                 mask=known & (b{n} < s3), other=0.0)
    keys{n} = p1 + b{n} * (s9 * 8) + h // s4 * (s10 * 8) + column[:, None]
    values{n} = p2 + b{n} * (s12 * 8) + h // s4 * (s13 * 8) + column[None, :]
    acc{n} = tl.full([QUERIES, COLUMNS], 0.0, tl.float32)
    most{n} = tl.full([QUERIES], -float("inf"), tl.float32)
    total{n} = tl.full([QUERIES], 0.0, tl.float32)
"""
_MASK = """\
    marks = p3 + first * (s15 * MASK_UNIT) + h * (s16 * MASK_UNIT)
    marks = marks + row[:, None] * (s17 * MASK_UNIT)
"""
_LOOP = """\
    for at in tl.range(0, END, KEYS, num_stages=STAGES):
        there = at + key < keys
"""
_MASK_STEP = """\
        marked = tl.load(marks + (at + key)[None, :]KEY_STEP,
                         mask=(row < s0)[:, None] & there[None, :], other=0)
"""
_ADDED = {
    Masking.NONE: "",
    Masking.CAUSAL: "",
    Masking.BIAS: f"        added = marked.to(tl.float32) * {math.log2(math.e)!r}\n",
    Masking.BOOL: '        added = tl.where(marked != 0, 0.0, -float("inf"))\n',
}
_COUNTS = {Masking.CAUSAL: "there[None, :] & ((at + key)[None, :] <= row[:, None])"}
_SCORE = """\
        k = tl.load(keys{n} + (at + key)[None, :] * (s11 * 8),
                    mask=there[None, :] & (column < HEAD)[:, None] & (b{n} < s3), other=0.0)
        s = tl.dot(q{n}, k) * FACTOR
"""
# A row none of whose scores counts has no greatest one: its weights are 0.
_WEIGH = """\
        s = tl.where(COUNTS, s, -float("inf"))
        new = larger(most{n}, tl.reduce(s, 1, larger))
        base = BASE
        p = tl.exp2(s - base[:, None]).to(HALF)
        shrink = tl.exp2(most{n} - base)
        total{n} = total{n} * shrink + tl.sum(p.to(tl.float32), 1)
        v = tl.load(values{n} + (at + key)[:, None] * (s14 * 8),
                    mask=there[:, None] & (column < HEAD)[None, :] & (b{n} < s3), other=0.0)
        acc{n} = tl.dot(p, v, acc{n} * shrink[:, None])
        most{n} = new
"""
_STORE = """\
    out{n} = acc{n} / tl.where(total{n} == 0.0, 1.0, total{n})[:, None]
    tl.store(RESULT + ((b{n} * s0 + row[:, None]) * s2 + h) * HEAD + column[None, :],
             out{n}.to(HALF), mask=known & (b{n} < s3))
"""
NUM_SCALARS, MASK_SCALARS = 15, 4


def short_attention(of: ShortAttention, tile: MaskedTile, dtype: torch.dtype) -> KernelSource:
    """out[b, h, i] = sum_j softmax_j(scale * q[b, h, i] . k[b, h // g, j] + mask[b, h, i, j])
    v[b, h // g, j].

    Params: q, k and v, (B, H, S, D) each, whose last dim is dense and whose addresses and other
    strides are multiples of 16 bytes; the mask, if there is one; the result, dense as (B, S, H, D).
    Scalars: as the text says. Sums are fp32; weights are rounded to ``dtype``, and the row is
    divided by the sum of the rounded ones. NaN or +inf in a row of scores gives NaN. A row of -inf
    alone gives 0 where there is a mask or an order, as torch's formula does, and else NaN.
    """
    masks = (of.mask_dtype(dtype),) if of.has_mask else ()
    wide_mask = of.has_mask and of.is_wide
    scalars = NUM_SCALARS + (MASK_SCALARS - wide_mask if of.has_mask else 0)
    constants = {
        "HEAD": of.head,
        "COLUMNS": max(LEAST_COLUMNS, 1 << (of.head - 1).bit_length()),
        "QUERIES": tile.queries,
        "KEYS": tile.keys,
        "STAGES": tile.stages,
        "EARLY": 1,
    }
    text = _text(of, tile)
    for name, value in (
        ("PARAMS", ", ".join(f"p{n}" for n in range(4 + of.has_mask))),
        ("SCALARS", ", ".join(f"s{n}" for n in range(scalars))),
        ("EARLY_LINES", EARLY),
        ("RESULT", f"p{3 + of.has_mask}"),
        ("MASK_UNIT", str(of.mask_unit)),
        ("KEY_STEP", "" if of.is_wide else " * s18"),
        ("HALF", HALVES[dtype]),
        ("BATCH", str(tile.batch)),
        ("FACTOR", repr(of.scale * math.log2(math.e))),
    ):
        text = text.replace(name, value)
    return KernelSource(
        "short_attention",
        "triton",
        text,
        (dtype, dtype, dtype, *masks, dtype),
        (1,) * scalars,
        (symbol("s5"),),
        constants=tuple(constants.items()),
        num_warps=tile.num_warps,
    )


def _text(of: ShortAttention, tile: MaskedTile) -> str:
    numbers, is_causal = range(tile.batch), of.masking is Masking.CAUSAL
    lines = [_HEAD, *(_ELEMENT.format(n=n) for n in numbers)]
    if of.has_mask:
        lines.append(_MASK)
    lines.append(_LOOP.replace("END", "tl.minimum(keys, start + QUERIES)" if is_causal else "keys"))
    if of.has_mask:
        lines += (_MASK_STEP, _ADDED[of.masking])
    counts = _COUNTS.get(of.masking, "there[None, :]")
    base = 'tl.where(new == -float("inf"), 0.0, new)' if of.masking is not Masking.NONE else "new"
    weigh = _WEIGH.replace("COUNTS", counts).replace("BASE", base)
    for n in numbers:
        lines.append(_SCORE.format(n=n))
        if of.has_mask:
            lines.append("        s = s + added\n")
        lines.append(weigh.format(n=n))
    lines += (_STORE.format(n=n) for n in numbers)
    return "".join(lines)
