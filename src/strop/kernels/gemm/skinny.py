"""A linear of few rows, such as of the time of a step or of a decoded token: as fast as its weights
can be read.

Every program asks for all its weights before it waits for the kernel before it, which does not
write them, so that what comes late are the few numbers that they are multiplied with. A library's
GEMM begins when that kernel has ended, and fills tiles that are nearly empty.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from strop.ir.contractions import FEW_ROWS, FEW_ROWS_DEPTH, FEW_ROWS_UNIT, has_few_rows
from strop.ir.device import Device
from strop.ir.dims import const, product, symbol
from strop.ir.functions import FUNCTIONS, HALVES, SM_90
from strop.ir.source import MOST_EARLY_PROGRAMS, KernelSource
from strop.kernels.kernel import (
    NEVER,
    RESULT,
    Call,
    Kernel,
    Late,
    Launch,
    Launches,
    Lies,
    Operand,
    Problem,
    Scalar,
    Stride,
)
from strop.kernels.tuned import tuned

NAME = "skinny_gemm"
_IMPORTS = """\
import triton
import triton.language as tl


"""
_GELU = f"""\
@triton.jit
{FUNCTIONS["half_gelu_tanh"]}


"""
_BEGIN = f"""\
    if EARLY:
        if tl.num_programs(0) <= {MOST_EARLY_PROGRAMS}:
            tl.extra.cuda.gdc_launch_dependents()
            if s3:
                tl.extra.cuda.gdc_wait()
"""
_WAITS = f"""\
    if EARLY:
        if tl.num_programs(0) <= {MOST_EARLY_PROGRAMS}:
            tl.extra.cuda.gdc_wait()
"""
_HEAD = f"""\
@triton.jit
def skinny_gemm(POINTERS, s0, s1, s2, s3, COLS: tl.constexpr, DEPTH: tl.constexpr,
             CHUNK: tl.constexpr, MORE EARLY: tl.constexpr):
{_BEGIN}    col = tl.program_id(0) * COLS + tl.arange(0, COLS)
    k = tl.arange(0, CHUNK)
    weights = p1 + col[:, None] * DEPTH + k[None, :]
    there = (col < s1)[:, None]
"""
# Weights that lie as (K, N): a program reads a few columns of all rows at once.
_HEAD_BY_COLUMNS = f"""\
@triton.jit
def skinny_gemm(POINTERS, s0, s1, s2, s3, s4, COLS: tl.constexpr, DEPTH: tl.constexpr,
             CHUNK: tl.constexpr, MORE EARLY: tl.constexpr):
{_BEGIN}    width = s4 * UNIT
    col = tl.program_id(0) * COLS + tl.arange(0, COLS)
    k = tl.arange(0, CHUNK)
    there = (k < DEPTH)[:, None] & (col < width)[None, :]
    weights = p1 + k[:, None] * width + col[None, :]
    w = tl.load(weights, mask=there, other=0.0, eviction_policy="evict_first")
{_WAITS}"""
_ROW_BY_COLUMNS = """\
    x{row} = tl.load(p0 + tl.minimum(s0 - 1, {row}) * s2 * UNIT + k, mask=k < DEPTH, other=0.0)
    sums{row} = w.to(tl.float32) * x{row}.to(tl.float32)[:, None]
"""
_LOAD = """\
    w{n} = tl.load(weights + {at}, mask=there, other=0.0, eviction_policy="evict_first")
"""
_WAIT = f"""\
{_WAITS}    x = p0 + tl.full([COLS, 1], 0, tl.int32) + k[None, :]  # laid out as the weights are
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
_BIAS = """\
    bias = tl.load(p2 + col, mask=col < s1, other=0.0).to(tl.float32)
"""
_STORE = """\
    tl.store(OUT + {row} * s1 + col, ({result}).to(HALF), mask=(col < s1) & ({row} < s0))
"""
# Of the kernels that there are; with more, products take longer than the weights.
ROWS = (2, FEW_ROWS)
UNIT, PIECE = FEW_ROWS_UNIT, 8  # numbers: what a row, and its stride, is a multiple of
MOST_CHUNK, LANES = 256, 32
# Of a thread: weights where it has several columns, and registers in all.
MOST_HALVES, MOST_REGISTERS = 80, 128
# Of weights by columns: those of a sector of 32 bytes; the depth up to which a program has as many;
# weights of a thread as far as warps go, and warps.
SECTOR, DEEP, HALVES_BY_COLUMNS, MOST_WARPS = 16, 2048, 64, 16


@dataclass(frozen=True, slots=True)
class SkinnyTile:
    """Describe a tile of columns, each a row of weights, and the warps that share them."""

    cols: int
    num_warps: int


@dataclass(frozen=True, slots=True)
class SkinnyEnd:
    """Say what becomes of a sum: a bias is added, and GELU's tanh form taken."""

    bias: bool = False
    gelu: bool = False


PLAIN = SkinnyEnd()


def skinny_gemm(
    rows: int,
    depth: int,
    tile: SkinnyTile,
    dtype: torch.dtype,
    end: SkinnyEnd = PLAIN,
    *,
    by_columns: bool = False,
) -> KernelSource:
    """out[m, n] = end(sum of x[m, k] * w[n, k]), for up to ``rows`` m. Sums are fp32, and rounded
    at the end alone.

    Params: x (M, K), whose last dim is dense and whose stride is a multiple of 8; weights (N, K),
    a bias (N,) where ``end`` has one, and the result (M, N), dense; addresses are multiples of 16
    bytes. K, which is ``depth``: a multiple of 64. Scalars: M, N, the stride of x in eights, and 1
    where kernels that may still run write the weights, else 0. ``by_columns``: weights are (K, N),
    and N in eights, of which it is a multiple, is a fifth scalar.
    """
    chunk = _power_from(depth) if by_columns else chunk_of(depth)
    constants = {"COLS": tile.cols, "DEPTH": depth, "CHUNK": chunk}
    constants |= {SM_90: 1} if end.gelu else {}
    constants["EARLY"] = 1
    num_tensors = 3 + end.bias
    lines = _lines_by_columns(rows, end) if by_columns else _lines(rows, depth, end)
    text = "".join(lines).replace("HALF", HALVES[dtype]).replace("UNIT", str(PIECE))
    text = text.replace("POINTERS", ", ".join(f"p{n}" for n in range(num_tensors)))
    text = text.replace("MORE ", f"{SM_90}: tl.constexpr, " if end.gelu else "")
    return KernelSource(
        NAME,
        "triton",
        text.replace("OUT", f"p{num_tensors - 1}"),
        (dtype,) * num_tensors,
        (1,) * (5 if by_columns else 4),
        ((symbol("s1") + (tile.cols - 1)) // tile.cols,),
        constants=tuple(constants.items()),
        num_warps=tile.num_warps,
        max_registers=MOST_REGISTERS,
    )


def _lines(rows: int, depth: int, end: SkinnyEnd) -> Iterator[str]:
    chunk = chunk_of(depth)
    yield _IMPORTS
    if end.gelu:
        yield _GELU
    yield _HEAD
    yield from (_LOAD.format(n=n, at=n * chunk) for n in range(depth // chunk))
    yield _WAIT
    yield from (_ROW.format(row=row, piece=PIECE) for row in range(rows))
    for n in range(depth // chunk):
        yield _WIDEN.format(n=n)
        yield from (_PRODUCT.format(row=row, at=n * chunk) for row in range(rows))
    yield from _end(rows, end, axis=1)


def _lines_by_columns(rows: int, end: SkinnyEnd) -> Iterator[str]:
    yield _IMPORTS
    if end.gelu:
        yield _GELU
    yield _HEAD_BY_COLUMNS
    yield from (_ROW_BY_COLUMNS.format(row=row) for row in range(rows))
    yield from _end(rows, end, axis=0)


def _end(rows: int, end: SkinnyEnd, axis: int) -> Iterator[str]:
    if end.bias:
        yield _BIAS
    yield from (_STORE.format(row=row, result=_result(row, end, axis)) for row in range(rows))


def _result(row: int, end: SkinnyEnd, axis: int) -> str:
    total = f"tl.sum(sums{row}, axis={axis})" + (" + bias" if end.bias else "")
    return f"half_gelu_tanh({total}, {SM_90})" if end.gelu else total


def chunk_of(depth: int) -> int:
    """The largest power of two that divides it, of what a warp loads at once."""
    return min(depth & -depth, MOST_CHUNK)


def _power_from(depth: int) -> int:
    """The least power of two that is not below it."""
    return 1 << (depth - 1).bit_length()


def tile_of(columns: int, depth: int, sms: int) -> SkinnyTile:
    """Choose as many columns as registers hold, in programs enough for all multiprocessors."""
    a_warp = max(min(4, MOST_HALVES * LANES // depth), 1)
    a_warp = 1 << (a_warp.bit_length() - 1)
    warps = next((w for w in (8, 4) if columns >= 2 * sms * w * a_warp), 2)
    return SkinnyTile(warps * a_warp, warps)


def tile_by_columns(depth: int) -> SkinnyTile:
    """Choose columns, and warps enough to ask for all their rows at once. A sector of memory has 16
    of them; of longer ones than registers hold, two programs share it."""
    cols = SECTOR if depth <= DEEP else SECTOR // 2
    warps = _power_from(depth) * cols // (LANES * HALVES_BY_COLUMNS)
    return SkinnyTile(cols, min(max(warps, 4), MOST_WARPS))


def supports(call: Call, device: Device) -> str:
    if not device.arch:
        return "runs on GPUs"
    if len(call.shapes) > 3 or call.dtype not in HALVES or call.attrs:
        return "computes a dense linear in fp16 or bf16"
    least = product(call.shapes[0][:-1]).least
    if least is None or least > max(ROWS):
        return f"is for up to {max(ROWS)} rows"
    weight = call.known(1)
    if weight is None or not weight[0]:
        return "wants weights of a known size"
    if not has_few_rows(1, const(weight[1])):
        return f"wants a depth that is a multiple of {UNIT}, up to {FEW_ROWS_DEPTH}"
    if call.by_columns and weight[0] % PIECE:
        return f"reads rows of weights in pieces of {PIECE}"
    return ""


def _most_rows(rows: int) -> int | None:
    return next((most for most in ROWS if 0 < rows <= most), None)


def cost_us(problem: Problem, device: Device) -> float:
    """Return the microseconds that the weights take to come."""
    if _most_rows(math.prod(problem.shapes[0][:-1])) is None:
        return NEVER
    times = tuned(device).gemm.library
    return times.weight_begin_us + 2 * math.prod(problem.shapes[1]) / times.weight_bytes


def launch(problem: Problem, device: Device) -> Launches | None:
    rows, columns = math.prod(problem.shapes[0][:-1]), problem.shapes[1][0]
    most = _most_rows(rows)
    if most is None:
        return None
    source = _form(most, problem, problem.shapes[1], device)
    weights = Operand(1, order=(1, 0)) if problem.by_columns else Operand(1)
    biases = map(Operand, range(2, len(problem.shapes)))
    operands = (Operand(0, Lies.ROWS), weights, *biases, Operand(RESULT))
    scalars: tuple[Scalar, ...] = (rows, columns, Stride(0, 0, PIECE), Late.WEIGHTS)
    if problem.by_columns:
        scalars = (*scalars, columns // PIECE)
    return Launches((Launch(source, operands, scalars),))


def forms(call: Call, device: Device) -> Iterable[KernelSource]:
    weight = call.known(1)
    assert weight is not None
    return [_form(most, call, weight, device) for most in ROWS]


def _form(
    rows: int, asked: Call | Problem, weights: tuple[int, ...], device: Device
) -> KernelSource:
    columns, depth = weights
    by_columns = asked.by_columns
    tile = tile_by_columns(depth) if by_columns else tile_of(columns, depth, device.sms)
    return skinny_gemm(rows, depth, tile, asked.dtype, _end_of(asked), by_columns=by_columns)


def _end_of(asked: Call | Problem) -> SkinnyEnd:
    return SkinnyEnd(len(asked.shapes) > len(("x", "weights")), asked.op == "linear_gelu")


ROW = Kernel(NAME, ("linear", "linear_gelu"), supports, cost_us, launch, forms)
