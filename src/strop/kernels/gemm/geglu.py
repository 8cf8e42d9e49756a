"""value * gelu(gate), where [value, gate] = x w^T + bias: one kernel, or one behind a GEMM.

The one kernel reads by the tensor memory accelerator (sm_90): each program computes a tile of both
halves, so what is twice as wide as the result is never written. Nothing is rounded between product
and result. Source of the formula: https://arxiv.org/abs/2002.05202.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from strop.ir.dims import Expr, symbol
from strop.ir.functions import EARLY, FUNCTIONS, HALVES
from strop.ir.source import KernelSource

DEPTH = 64  # of a step: 128 bytes, what lies in one row of shared memory
GROUP = 8  # row tiles whose programs lie next to each other: they read the same weights

_HEAD = f"""\
import triton
import triton.language as tl


@triton.jit
{FUNCTIONS["half_gelu"]}


"""
_BOXED = """\
@triton.jit
def tma_geglu(p0, p1, p2, p3, s0, s1, s2, ROWS: tl.constexpr, COLS: tl.constexpr,
              DEPTH: tl.constexpr, GROUP: tl.constexpr, STAGES: tl.constexpr, EARLY: tl.constexpr):
EARLY_LINES    first = tl.program_id(0) // (s1 * GROUP) * GROUP
    height = tl.minimum(s0 - first, GROUP)
    row = (first + tl.program_id(0) % (s1 * GROUP) % height) * ROWS
    col = tl.program_id(0) % (s1 * GROUP) // height * COLS
    value = tl.full([ROWS, COLS], 0.0, tl.float32)
    gate = tl.full([ROWS, COLS], 0.0, tl.float32)
    for step in tl.range(0, s2, num_stages=STAGES):
        x = p0.load([row, step * DEPTH])
        value = tl.dot(x, p1.load([col, step * DEPTH]).T, value)
        gate = tl.dot(x, p1.load([s1 * COLS + col, step * DEPTH]).T, gate)
BIAS    p2.store([row, col], (value * half_gelu(gate)).to(HALF))
"""
_BIAS = """\
    at = p3 + col + tl.arange(0, COLS)
    value += tl.load(at).to(tl.float32)[None, :]
    gate += tl.load(at + s1 * COLS).to(tl.float32)[None, :]
"""
_BEHIND = """\
@triton.jit
def geglu(p0, p1, p2, s0, WIDTH: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr):
EARLY_LINES    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    col = at % WIDTH
    place = p0 + at // WIDTH * (2 * WIDTH) + col
    value = tl.load(place, mask=at < s0, other=0.0).to(tl.float32)
    gate = tl.load(place + WIDTH, mask=at < s0, other=0.0).to(tl.float32)
BIAS    tl.store(p2 + at, (value * half_gelu(gate)).to(HALF), mask=at < s0)
"""
_BIAS_BEHIND = """\
    value += tl.load(p1 + col, mask=at < s0, other=0.0).to(tl.float32)
    gate += tl.load(p1 + WIDTH + col, mask=at < s0, other=0.0).to(tl.float32)
"""
BLOCK = 1024


@dataclass(frozen=True, slots=True)
class Tile:
    """``cols`` of the result, for which so many columns of each half are computed."""

    rows: int
    cols: int
    stages: int
    num_warps: int


def _text(text: str, bias: str, dtype: torch.dtype) -> str:
    text = text.replace("EARLY_LINES", EARLY).replace("BIAS", bias).replace("HALF", HALVES[dtype])
    return _HEAD + text


def tma_geglu(tile: Tile, dtype: torch.dtype, *, has_bias: bool) -> KernelSource:
    """Params: x (M, K), weights (2 N, K), the result (M, N), bias (2 N,), all dense; without bias
    the last is not read. K is a multiple of 64, N of ``tile.cols``. Sums are fp32. Scalars: tiles
    of rows, tiles of columns, K / 64."""
    constants = {
        "ROWS": tile.rows,
        "COLS": tile.cols,
        "DEPTH": DEPTH,
        "GROUP": GROUP,
        "STAGES": tile.stages,
        "EARLY": 1,
    }
    boxes = ((tile.rows, DEPTH), (tile.cols, DEPTH), (tile.rows, tile.cols), ())
    text = _text(_BOXED, _BIAS if has_bias else "", dtype)
    return KernelSource(
        "tma_geglu",
        "triton",
        text,
        (dtype,) * 4,
        (1,) * 3,
        (symbol("s0") * symbol("s1"),),
        constants=tuple(constants.items()),
        num_warps=tile.num_warps,
        boxes=boxes,
    )


def geglu(width: int, dtype: torch.dtype, *, has_bias: bool) -> KernelSource:
    """Params: the product (M, 2 N), bias (2 N,), the result (M, N), all dense; without bias it is
    not read. In fp32. Scalars: M * N. ``width`` is N, a multiple of 16."""
    text = _text(_BEHIND, _BIAS_BEHIND if has_bias else "", dtype)
    constants = (("WIDTH", width), ("BLOCK", BLOCK), ("EARLY", 1))
    return KernelSource(
        "geglu",
        "triton",
        text,
        (dtype,) * 3,
        (16,),
        ((symbol("s0") + (BLOCK - 1)) // BLOCK,),
        constants=constants,
    )


TILE = Tile(128, 128, 3, 8)
# Measured on an H100 in fp16 (gemm_tma of benchmarks/results), us of cuBLAS with a kernel behind
# it and ours: 8192x640 -> 2560 133 and 108, 2048x1280 -> 5120 105 and 94, 2048x640 -> 2560 32.1 and
# 32.3, 512x1280 -> 5120 28.5 and 31.9. 8192x320 -> 1280 took 52 and 37 there, where nothing is in
# the L2 cache, and was no faster within SD1.5's UNet, where the product is.
LEAST_PRODUCT_BYTES = 40 << 20  # the kernel behind the GEMM then waits for memory,
CACHE_BYTES = 50 << 20  # or for more of it than lies in the cache
LEAST_DEPTH = 640  # of products that the cache holds


def tile_of(rows: int, depth: int, width: int) -> Tile | None:
    """Of the one kernel, or None where the library's GEMM and a kernel behind it are faster."""
    product_bytes = 4 * rows * width
    is_long = product_bytes > CACHE_BYTES or depth >= LEAST_DEPTH
    is_ours = width % TILE.cols == 0 and product_bytes >= LEAST_PRODUCT_BYTES and is_long
    return TILE if is_ours else None


def boxed_at(shapes: Sequence[Sequence[int]], dtype: torch.dtype) -> list[KernelSource]:
    """The one kernel for operands of these sizes; nothing where the other way is faster."""
    *rows, depth = shapes[0]
    tile = tile_of(math.prod(rows), depth, shapes[1][0] // 2)
    return [tma_geglu(tile, dtype, has_bias=len(shapes) > 2)] if tile else []


def boxed_anywhere(shapes: Sequence[Sequence[Expr]], dtype: torch.dtype) -> list[KernelSource]:
    """At any sizes."""
    width, has_bias = shapes[1][0].value // 2, len(shapes) > 2
    return [tma_geglu(TILE, dtype, has_bias=has_bias)] if width % TILE.cols == 0 else []


def behind(shapes: Sequence[Sequence[Any]], dtype: torch.dtype) -> KernelSource:
    """What runs behind a library's product, whose weights are of a known size."""
    columns = shapes[1][0]
    width = (columns.value if isinstance(columns, Expr) else columns) // 2
    return geglu(width, dtype, has_bias=len(shapes) > 2)
