"""A linear of few rows, such as of the time of a step: as fast as its weights can be read.

Every program asks for all its weights before it waits for the kernel before it, which does not
write them, so that what comes late are the few numbers that they are multiplied with. A library's
GEMM begins when that kernel has ended, and fills tiles that are nearly empty.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from strop.ir.dims import Expr, product, symbol
from strop.ir.functions import HALVES
from strop.ir.graph import Node
from strop.ir.source import MOST_EARLY_PROGRAMS, KernelSource
from strop.kernels.gemm.choice import MULTIPLE, SMS

NAME = "skinny_gemm"
_HEAD = f"""\
import triton
import triton.language as tl


@triton.jit
def skinny_gemm(p0, p1, p2, s0, s1, s2, s3, COLS: tl.constexpr, DEPTH: tl.constexpr,
             CHUNK: tl.constexpr, EARLY: tl.constexpr):
    if EARLY:
        if tl.num_programs(0) <= {MOST_EARLY_PROGRAMS}:
            tl.extra.cuda.gdc_launch_dependents()
            if s3:
                tl.extra.cuda.gdc_wait()
    col = tl.program_id(0) * COLS + tl.arange(0, COLS)
    k = tl.arange(0, CHUNK)
    weights = p1 + col[:, None] * DEPTH + k[None, :]
    there = (col < s1)[:, None]
"""
_LOAD = """\
    w{n} = tl.load(weights + {at}, mask=there, other=0.0, eviction_policy="evict_first")
"""
_WAIT = f"""\
    if EARLY:
        if tl.num_programs(0) <= {MOST_EARLY_PROGRAMS}:
            tl.extra.cuda.gdc_wait()
    x = p0 + tl.full([COLS, 1], 0, tl.int32) + k[None, :]  # laid out as the weights are
"""
_ROW = """\
    x{row} = x + tl.minimum(s0 - 1, {row}) * s2 * {piece}
    sums{row} = tl.full([COLS, CHUNK], 0.0, tl.float32)
"""
_WIDEN = """\
    w = w{n}.to(tl.float32)
"""
_PRODUCT = """\
    sums{row} += w * tl.load(x{row} + {at}).to(tl.float32)
"""
_STORE = """\
    tl.store(p2 + {row} * s1 + col, tl.sum(sums{row}, axis=1).to(HALF),
             mask=(col < s1) & ({row} < s0))
"""
ROWS = (2, 4)  # of the kernels that there are; with more, products take longer than the weights
UNIT, PIECE = 64, 8  # numbers: what a row, and its stride, is a multiple of
MOST_CHUNK, LANES = 256, 32
MOST_HALVES, MOST_REGISTERS = 80, 128  # of a thread: of weights, and in all


@dataclass(frozen=True, slots=True)
class Tile:
    """Of columns, each a row of weights, and the warps that share them."""

    cols: int
    num_warps: int


def skinny_gemm(rows: int, depth: int, tile: Tile, dtype: torch.dtype) -> KernelSource:
    """out[m, n] = sum of x[m, k] * w[n, k], for up to ``rows`` m. Sums are fp32.

    Params: x (M, K), whose last dim is dense and whose stride is a multiple of 8; weights (N, K)
    and the result (M, N), dense; addresses are multiples of 16 bytes. K, which is ``depth``: a
    multiple of 64. Scalars: M, N, the stride of x in eights, and 1 where kernels that may still
    run write the weights, else 0.
    """
    constants = {"COLS": tile.cols, "DEPTH": depth, "CHUNK": chunk_of(depth), "EARLY": 1}
    return KernelSource(
        NAME,
        "triton",
        "".join(_lines(rows, depth)).replace("HALF", HALVES[dtype]),
        (dtype,) * 3,
        (1,) * 4,
        ((symbol("s1") + (tile.cols - 1)) // tile.cols,),
        constants=tuple(constants.items()),
        num_warps=tile.num_warps,
        max_registers=MOST_REGISTERS,
    )


def _lines(rows: int, depth: int) -> Iterator[str]:
    chunk = chunk_of(depth)
    yield _HEAD
    yield from (_LOAD.format(n=n, at=n * chunk) for n in range(depth // chunk))
    yield _WAIT
    yield from (_ROW.format(row=row, piece=PIECE) for row in range(rows))
    for n in range(depth // chunk):
        yield _WIDEN.format(n=n)
        yield from (_PRODUCT.format(row=row, at=n * chunk) for row in range(rows))
    yield from (_STORE.format(row=row) for row in range(rows))


def chunk_of(depth: int) -> int:
    """The largest power of two that divides it, of what a warp loads at once."""
    return min(depth & -depth, MOST_CHUNK)


def tile_of(columns: int, depth: int) -> Tile:
    """As many columns as registers hold, in programs enough for all processors."""
    a_warp = min(4, MOST_HALVES * LANES // depth)
    a_warp = 1 << (a_warp.bit_length() - 1)
    warps = next((w for w in (8, 4) if columns >= 2 * SMS * w * a_warp), 2)
    return Tile(warps * a_warp, warps)


def fits(node: Node) -> bool:
    """Whether it is a linear like those that have been measured, and of few rows at some sizes."""
    if node.op != "linear" or len(node.inputs) != 2 or node.dtype not in HALVES:
        return False
    x, weight = node.inputs
    least = product(x.shape[:-1]).least
    if not all(size.is_const for size in weight.shape) or least is None or least > max(ROWS):
        return False
    columns, depth = (size.value for size in weight.shape)
    return depth % MULTIPLE == 0 and 0 < depth <= MOST_HALVES * LANES and columns > 0


def sources_at(
    op: str, attrs: Mapping[str, Any], shapes: Sequence[Sequence[int]], dtype: torch.dtype
) -> list[KernelSource]:
    """What is launched for operands (..., K) and (N, K); nothing where there are more rows."""
    columns, depth = shapes[1]
    rows = math.prod(shapes[0][:-1])
    most = next((most for most in ROWS if 0 < rows <= most), None)
    return [skinny_gemm(most, depth, tile_of(columns, depth), dtype)] if most else []


def sources_anywhere(
    op: str, attrs: Mapping[str, Any], shapes: Sequence[Sequence[Expr]], dtype: torch.dtype
) -> list[KernelSource]:
    """What is launched with such weights at any sizes."""
    columns, depth = (size.value for size in shapes[1])
    return [skinny_gemm(most, depth, tile_of(columns, depth), dtype) for most in ROWS]
