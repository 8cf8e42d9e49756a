"""Scale a product of int8 codes and multiply the columns that it leaves out, as LLM.int8 does.

Values decide which columns these are, so a GPU has to: the host would wait for it. A first kernel
gathers them, of x and of the weight, into two panels, and counts them. The second scales what it
reads of the product of codes, and multiplies as many columns as there are: none, as a rule few, or
all of x, with zeros in the others, where there are more than a panel holds.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from strop.ir.device import Device
from strop.ir.dims import symbol
from strop.ir.functions import HALVES
from strop.ir.mixed_product import UNIT
from strop.ir.source import KernelSource
from strop.kernels.kernel import (
    FASTEST,
    RESULT,
    Call,
    Kernel,
    Launch,
    Launches,
    Lies,
    Operand,
    PartScratch,
    Problem,
    Stride,
    scratch,
)

MULTIPLE = 16  # of both sizes of the weight
PANEL = 1024  # columns that are gathered, as a rule more than there are
GATHERED_ROWS, GATHERED_COLUMNS = 8, 512  # that a program looks at in one step
TILE, WIDE_TILE = (64, 128, 32), (32, 32, 16)  # rows, columns, and depth of a step; in fp32
PARTS = 8  # steps whose sum is apart: one sum of a thousand products has twice cuBLAS's error
WIDTH = 16  # bytes: what strides of x are multiples of
TYPES = {**HALVES, torch.float32: "tl.float32"}

_GATHER = """\
import triton
import triton.language as tl


@triton.jit
def gathered_columns(p0, p1, p2, p3, p4, p5, s0, s1, s2, s3, ROWS: tl.constexpr,
                     COLS: tl.constexpr, PANEL: tl.constexpr, UNIT: tl.constexpr):
    programs = (s0 + ROWS - 1) // ROWS
    is_x = tl.program_id(0) < programs
    row = (tl.program_id(0) - tl.where(is_x, 0, programs)) * ROWS + tl.arange(0, ROWS)
    count = tl.program_id(0) * 0
    for first in range(0, s2, COLS):
        col = first + tl.arange(0, COLS)
        taken = tl.load(p1 + col, mask=col < s2, other=0).to(tl.int32)
        more = tl.sum(taken, 0)
        if more > 0:
            place = count + tl.associative_scan(taken, 0, tl.standard._sum_combine) - taken
            fits = ((taken > 0) & (place < PANEL))[None, :]
            if is_x:
                known = (row < s0)[:, None] & fits
                values = tl.load(p0 + row[:, None] * (s3 * UNIT) + col[None, :], mask=known)
                tl.store(p3 + row[:, None] * PANEL + place[None, :], values, mask=known)
            else:
                known = (row < s1)[:, None] & fits
                codes = tl.load(p2 + row[:, None] * s2 + col[None, :], mask=known)
                tl.store(p4 + row[:, None] * PANEL + place[None, :], codes, mask=known)
        count += more
    if tl.program_id(0) == 0:
        tl.store(p5, count)
"""

_PRODUCT = """\
import triton
import triton.language as tl


@triton.jit
def mixed_product({params}, s0, s1, s2, s3, ROWS: tl.constexpr, COLS: tl.constexpr,
                  DEPTH: tl.constexpr, PART: tl.constexpr, PANEL: tl.constexpr,
                  UNIT: tl.constexpr):
    tiles = (s1 + COLS - 1) // COLS
    row = tl.program_id(0) // tiles * ROWS + tl.arange(0, ROWS)
    col = tl.program_id(0) % tiles * COLS + tl.arange(0, COLS)
    k = tl.arange(0, DEPTH)
    in_rows, in_cols = row < s0, col < s1
    known = in_rows[:, None] & in_cols[None, :]
    count = tl.load(p8)
    acc = tl.full([ROWS, COLS], 0.0, tl.float32)
    if count > PANEL:
        x = p2 + row[:, None] * (s3 * UNIT) + k[None, :]
        codes = p4 + col[None, :] * s2 + k[:, None]
        for first in range(0, s2, PART):
            part = tl.full([ROWS, COLS], 0.0, tl.float32)
            for at in range(first, tl.minimum(first + PART, s2), DEPTH):
                inside = at + k < s2
                taken = tl.load(p3 + at + k, mask=inside, other=0).to(tl.int32) > 0
                a = tl.load(x + at, mask=in_rows[:, None] & taken[None, :], other=0.0)
                b = tl.load(codes + at, mask=inside[:, None] & in_cols[None, :], other=0)
                part = tl.dot(a, b.to(a.dtype), part, input_precision="ieee")
            acc += part
    else:
        x = p6 + row[:, None] * PANEL + k[None, :]
        codes = p7 + col[None, :] * PANEL + k[:, None]
        for first in range(0, count, PART):
            part = tl.full([ROWS, COLS], 0.0, tl.float32)
            for at in range(first, tl.minimum(first + PART, count), DEPTH):
                inside = at + k < count
                a = tl.load(x + at, mask=in_rows[:, None] & inside[None, :], other=0.0)
                b = tl.load(codes + at, mask=inside[:, None] & in_cols[None, :], other=0)
                part = tl.dot(a, b.to(a.dtype), part, input_precision="ieee")
            acc += part
    sums = tl.load(p0 + row[:, None] * s1 + col[None, :], mask=known, other=0).to(tl.float32)
    most = tl.load(p1 + row, mask=in_rows, other=0.0)
    scale = tl.load(p5 + col, mask=in_cols, other=0.0)
    y = sums * (most[:, None] * scale[None, :]) * {of_both}
    y += acc * (scale * {of_one})[None, :]
"""
_BIAS = """\
    y += tl.load(p9 + col, mask=in_cols, other=0.0).to(tl.float32)[None, :]
"""
_STORE = """\
    tl.store({out} + row[:, None] * s1 + col[None, :], y.to({dtype}), mask=known)
"""


def gathered_columns(dtype: torch.dtype) -> KernelSource:
    """Gather the columns of x and of codes that are taken into panels of PANEL columns.

    Params: x (M, K), whose strides are multiples of 16 bytes; which columns are taken (K,); codes
    (N, K); the panels (M, PANEL) and (N, PANEL), where columns behind the last are left as they
    are; and how many are taken, which may be more than PANEL. Scalars: M, N, K, and the stride of
    x in 16 bytes.
    """
    i8, i32 = torch.int8, torch.int32
    rows = (symbol("s0") + (GATHERED_ROWS - 1)) // GATHERED_ROWS
    others = (symbol("s1") + (GATHERED_ROWS - 1)) // GATHERED_ROWS
    constants = {"ROWS": GATHERED_ROWS, "COLS": GATHERED_COLUMNS, "PANEL": PANEL}
    return KernelSource(
        "gathered_columns",
        "triton",
        _GATHER,
        (dtype, torch.bool, i8, dtype, i8, i32),
        (1, MULTIPLE, MULTIPLE, 1),
        (rows + others,),
        constants=tuple({**constants, "UNIT": WIDTH // dtype.itemsize}.items()),
        num_warps=8,
    )


def mixed_product(dtype: torch.dtype, *, has_bias: bool) -> KernelSource:
    """Compute ``ir.mixed_product``; codes are multiplied as they are, and scaled with the sum.

    Params: sums, most, x, columns, codes, scales, the two panels and the count of
    ``gathered_columns``, bias if there is one, and the result (M, N), all dense but x. Scalars as
    there.
    """
    i8, i32, f32 = torch.int8, torch.int32, torch.float32
    types = (i32, f32, dtype, torch.bool, i8, f32, dtype, i8, i32, *([dtype] * (1 + has_bias)))
    names = [f"p{number}" for number in range(len(types))]
    head = _PRODUCT.format(params=", ".join(names), of_both=UNIT**2, of_one=UNIT)
    end = _STORE.format(out=names[-1], dtype=TYPES[dtype])
    tile_rows, tile_columns, depth = TILE if dtype in HALVES else WIDE_TILE
    across = (symbol("s1") + (tile_columns - 1)) // tile_columns
    down = (symbol("s0") + (tile_rows - 1)) // tile_rows
    constants = {"ROWS": tile_rows, "COLS": tile_columns, "DEPTH": depth}
    constants |= {"PART": PARTS * depth, "PANEL": PANEL}
    return KernelSource(
        "mixed_product",
        "triton",
        head + (_BIAS if has_bias else "") + end,
        types,
        (1, MULTIPLE, MULTIPLE, 1),
        (across * down,),
        constants=tuple({**constants, "UNIT": WIDTH // dtype.itemsize}.items()),
        num_warps=8,
    )


def supports(call: Call, device: Device) -> str:
    if not device.arch:
        return "runs on GPUs"
    weight = call.known(4)
    if call.dtype not in TYPES or weight is None or any(size % MULTIPLE for size in weight):
        return f"is for weights whose sizes are multiples of {MULTIPLE}, in 16 or 32 bits"
    return ""


def cost_us(problem: Problem, device: Device) -> float:
    return FASTEST


def _sources(call: Call | Problem) -> tuple[KernelSource, KernelSource]:
    has_bias = len(call.shapes) > 6
    return gathered_columns(call.dtype), mixed_product(call.dtype, has_bias=has_bias)


def launch(problem: Problem, device: Device) -> Launches:
    (rows, depth), (columns, _) = problem.shapes[2], problem.shapes[4]
    gather, product = _sources(problem)
    panels = tuple(map(Operand, map(scratch, range(3))))
    x = Operand(2, Lies.ROWS)
    unit = WIDTH // problem.dtype.itemsize
    given = tuple(Operand(n) if n != 2 else x for n in range(6))
    bias = tuple(map(Operand, range(6, len(problem.shapes))))
    sizes = (rows, columns, depth)
    parts = (
        Launch(gather, (x, Operand(3), Operand(4), *panels), (*sizes, Stride(0, 0, unit))),
        Launch(product, (*given, *panels, *bias, Operand(RESULT)), (*sizes, Stride(2, 0, unit))),
    )
    pieces = ((rows, PANEL), problem.dtype), ((columns, PANEL), torch.int8), ((1,), torch.int32)
    return Launches(parts, tuple(PartScratch(*piece) for piece in pieces))


def forms(call: Call, device: Device) -> Iterable[KernelSource]:
    return _sources(call)


ROW = Kernel("mixed_product", ("mixed_product",), supports, cost_us, launch, forms)
