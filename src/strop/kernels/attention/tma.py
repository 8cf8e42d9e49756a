"""Attention with short heads, read by the tensor memory accelerator.

FlashAttention-2 (https://arxiv.org/abs/2307.08691): one pass over the keys, a running maximum, fp32
sums. A head that is no power of two is two parts, or the next power of two, for which the
accelerator brings zeros: 40 is 32 + 16, or 64. The weights of a row are added by the tensor cores
too, as a product with ones.
"""

from __future__ import annotations

import math
import textwrap
from dataclasses import dataclass

import torch

from strop.ir.dims import symbol
from strop.ir.functions import EARLY, HALVES
from strop.ir.source import KernelSource

LEAST_COLUMNS = 16  # of a product

HELPERS = """\
import triton
import triton.language as tl


@triton.jit
def larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


"""
_HEAD = """\
@triton.jit
def tma_attention(PARAMS, s0, s1, s2, s3, FIRST: tl.constexpr, REST: tl.constexpr,
                  QUERIES: tl.constexpr, KEYS: tl.constexpr, STAGES: tl.constexpr,
                  EARLY: tl.constexpr):
EARLY_LINES    start = tl.program_id(0) * QUERIES
    b = tl.program_id(1) // s2
    h = tl.program_id(1) % s2
    acc0 = tl.full([QUERIES, FIRST], 0.0, tl.float32)
    if REST:
        acc1 = tl.full([QUERIES, REST], 0.0, tl.float32)
    most = tl.full([QUERIES], -float("inf"), tl.float32)
    total = tl.full([QUERIES, 8], 0.0, tl.float32)
    ones = tl.full([KEYS, 8], 1.0, HALF)
"""
# Outside of loops a load is waited for before the next one begins.
_QUERIES = """\
    q0 = p0.load([b, h, start, 0]).reshape([QUERIES, FIRST])
    if REST:
        q1 = p4.load([b, h, start, FIRST]).reshape([QUERIES, REST])
"""
# Loads of a step that stand side by side share a barrier.
_LOAD = """\
        k0_{n} = p1.load([b, h, at + {n} * KEYS, 0]).reshape([KEYS, FIRST])
        v0_{n} = p2.load([b, h, at + {n} * KEYS, 0]).reshape([KEYS, FIRST])
        if REST:
            k1_{n} = p5.load([b, h, at + {n} * KEYS, FIRST]).reshape([KEYS, REST])
            v1_{n} = p6.load([b, h, at + {n} * KEYS, FIRST]).reshape([KEYS, REST])
"""
_SCORE = """\
        s = tl.dot(q0, k0_{n}.T)
        if REST:
            s = tl.dot(q1, k1_{n}.T, s)
"""
_MASK = """\
        s = tl.where((at + tl.arange(0, KEYS) < s1)[None, :], s, -float("inf"))
"""
# The maximum is of unscaled scores, so that scaling and subtracting are one instruction.
_WEIGH = """\
        new = larger(most, tl.reduce(s, 1, larger) * FACTOR)
        p = tl.exp2(s * FACTOR - new[:, None]).to(HALF)
        shrink = tl.exp2(most - new)[:, None]
        most = new
        total = tl.dot(p, ones, total * shrink)
        acc0 = tl.dot(p, v0_{n}, acc0 * shrink)
        if REST:
            acc1 = tl.dot(p, v1_{n}, acc1 * shrink)
"""
_TAIL = """\
    share = (8.0 / tl.sum(total, 1))[:, None]
    p3.store([b, h, start, 0], (acc0 * share).to(HALF).reshape([1, 1, QUERIES, FIRST]))
    if REST:
        rest = (acc1 * share).to(HALF).reshape([1, 1, QUERIES, REST])
        p7.store([b, h, start, FIRST], rest)
"""


@dataclass(frozen=True, slots=True)
class TmaTile:
    """Say what a program has at once. ``stages``: steps whose keys and values are on the way."""

    queries: int
    keys: int
    stages: int
    num_warps: int
    parts: int = 2  # of a head, at most; one is padded to a power of two
    blocks: int = 1  # of keys in a step without a mask; 0: each step has one
    with_queries: bool = False  # a step without others loads these too: one wait less


def parts_of(head: int, parts: int) -> tuple[int, int]:
    """Columns of the products that a head is cut into; 0: there is no second one."""
    padded = 1 << (head - 1).bit_length()
    if padded == head or parts == 1:
        return padded, 0
    rest = head - padded // 2
    return padded // 2, max(LEAST_COLUMNS, 1 << (rest - 1).bit_length())


def tma_attention(head: int, scale: float, tile: TmaTile, dtype: torch.dtype) -> KernelSource:
    """out[b, h, i] = sum_j softmax_j(scale * q[b, h, i] . k[b, h, j]) v[b, h, j], scale > 0.

    Params: q, k, v and the result, (B, H, S, D) each, and the four once more where a head has two
    parts. Their last dim is dense; addresses and the other strides are multiples of 16 bytes.
    Scalars: queries, keys, H, B * H. Sums are fp32; weights are rounded to ``dtype``, and the row
    is divided by the sum of the rounded ones. NaN or +inf in a row of scores gives NaN.
    """
    first, rest = parts_of(head, tile.parts)
    boxes = tuple(
        (1, 1, rows, columns)
        for columns in (first, rest)
        if columns
        for rows in (tile.queries, tile.keys, tile.keys, tile.queries)
    )
    constants = {
        "FIRST": first,
        "REST": rest,
        "QUERIES": tile.queries,
        "KEYS": tile.keys,
        "STAGES": tile.stages,
        "EARLY": 1,
    }
    text = _text(tile)
    for name, value in (
        ("PARAMS", ", ".join(f"p{n}" for n in range(len(boxes)))),
        ("HALF", HALVES[dtype]),
        ("FACTOR", repr(scale * math.log2(math.e))),
        ("EARLY_LINES", EARLY.replace("(0)", "(0) * tl.num_programs(1)")),  # a grid of two dims
    ):
        text = text.replace(name, value)
    grid = ((symbol("s0") + (tile.queries - 1)) // tile.queries, symbol("s3"))
    return KernelSource(
        "tma_attention",
        "triton",
        text,
        (dtype,) * len(boxes),
        (1,) * 4,
        grid,
        constants=tuple(constants.items()),
        num_warps=tile.num_warps,
        boxes=boxes,
    )


def _text(tile: TmaTile) -> str:
    """Steps of whole blocks of keys, without a mask, and then of what is left of them."""
    assert not (tile.blocks and tile.with_queries)
    lines, numbers, step = [HELPERS, _HEAD], range(tile.blocks), f"KEYS * {tile.blocks}"
    if not tile.with_queries:
        lines.append(_QUERIES)
    if tile.blocks:
        lines.append(f"    whole = s1 // ({step}) * ({step})\n")
        lines.append(f"    for at in tl.range(0, whole, {step}, num_stages=STAGES):\n")
        lines += [_LOAD.format(n=n) for n in numbers]
        lines += [(_SCORE + _WEIGH).format(n=n) for n in numbers]
    first = "whole" if tile.blocks else "0"
    lines.append(f"    for at in tl.range({first}, s1, KEYS, num_stages=STAGES):\n")
    if tile.with_queries:
        lines.append(textwrap.indent(_QUERIES, "    "))
    lines.append((_LOAD + _SCORE + _MASK + _WEIGH).format(n=0))
    return "".join((*lines, _TAIL))
