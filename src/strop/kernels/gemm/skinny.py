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
_HEAD = f"""\
@triton.jit
def skinny_gemm(POINTERS, s0, s1, s2, s3, COLS: tl.constexpr, DEPTH: tl.constexpr,
             CHUNK: tl.constexpr, MORE EARLY: tl.constexpr):
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
    rows: int, depth: int, tile: SkinnyTile, dtype: torch.dtype, end: SkinnyEnd = PLAIN
) -> KernelSource:
    """out[m, n] = end(sum of x[m, k] * w[n, k]), for up to ``rows`` m. Sums are fp32, and rounded
    at the end alone.

    Params: x (M, K), whose last dim is dense and whose stride is a multiple of 8; weights (N, K),
    a bias (N,) where ``end`` has one, and the result (M, N), dense; addresses are multiples of 16
    bytes. K, which is ``depth``: a multiple of 64. Scalars: M, N, the stride of x in eights, and 1
    where kernels that may still run write the weights, else 0.
    """
    constants = {"COLS": tile.cols, "DEPTH": depth, "CHUNK": chunk_of(depth)}
    constants |= {SM_90: 1} if end.gelu else {}
    constants["EARLY"] = 1
    num_tensors = 3 + end.bias
    text = "".join(_lines(rows, depth, end)).replace("HALF", HALVES[dtype])
    text = text.replace("POINTERS", ", ".join(f"p{n}" for n in range(num_tensors)))
    text = text.replace("MORE ", f"{SM_90}: tl.constexpr, " if end.gelu else "")
    return KernelSource(
        NAME,
        "triton",
        text.replace("OUT", f"p{num_tensors - 1}"),
        (dtype,) * num_tensors,
        (1,) * 4,
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
    if end.bias:
        yield _BIAS
    yield from (_STORE.format(row=row, result=_result(row, end)) for row in range(rows))


def _result(row: int, end: SkinnyEnd) -> str:
    total = f"tl.sum(sums{row}, axis=1)" + (" + bias" if end.bias else "")
    return f"half_gelu_tanh({total}, {SM_90})" if end.gelu else total


def chunk_of(depth: int) -> int:
    """The largest power of two that divides it, of what a warp loads at once."""
    return min(depth & -depth, MOST_CHUNK)


def tile_of(columns: int, depth: int, sms: int) -> SkinnyTile:
    """Choose as many columns as registers hold, in programs enough for all multiprocessors."""
    a_warp = max(min(4, MOST_HALVES * LANES // depth), 1)
    a_warp = 1 << (a_warp.bit_length() - 1)
    warps = next((w for w in (8, 4) if columns >= 2 * sms * w * a_warp), 2)
    return SkinnyTile(warps * a_warp, warps)


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
    rows, (columns, depth) = math.prod(problem.shapes[0][:-1]), problem.shapes[1]
    most = _most_rows(rows)
    if most is None:
        return None
    end, tile = _end_of(problem), tile_of(columns, depth, device.sms)
    source = skinny_gemm(most, depth, tile, problem.dtype, end)
    operands = (
        Operand(0, Lies.ROWS),
        *map(Operand, range(1, len(problem.shapes))),
        Operand(RESULT),
    )
    return Launches((Launch(source, operands, (rows, columns, Stride(0, 0, PIECE), Late.WEIGHTS)),))


def forms(call: Call, device: Device) -> Iterable[KernelSource]:
    weight = call.known(1)
    assert weight is not None
    columns, depth = weight
    end, tile = _end_of(call), tile_of(columns, depth, device.sms)
    return [skinny_gemm(most, depth, tile, call.dtype, end) for most in ROWS]


def _end_of(asked: Call | Problem) -> SkinnyEnd:
    return SkinnyEnd(len(asked.shapes) > len(("x", "weights")), asked.op == "linear_gelu")


ROW = Kernel(NAME, ("linear", "linear_gelu"), supports, cost_us, launch, forms)
