"""Compute the first columns of a linear whose weight has rows of zeros behind (``aligned_linear``).

A user's rows are dense, and begin at any element. On Hopper a product of ours stores such rows
itself. Other GEMMs write rows that begin at multiples of 16 bytes. So some rows at a time go to a
working buffer, and a kernel copies their columns: a buffer for all rows would be as large as the
result, 1.5 GiB for 32 x 512 words of GPT-2.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace

import torch

from strop.ir.device import Device
from strop.ir.dims import const, symbol
from strop.ir.functions import EARLY, HALVES
from strop.ir.source import KernelSource
from strop.kernels.gemm import rows as gemm
from strop.kernels.gemm import skinny
from strop.kernels.gemm.epilogues import TOGETHER
from strop.kernels.gemm.implicit import ConvShape
from strop.kernels.gemm.tile import PLAIN, GemmTile, Product
from strop.kernels.gemm.wgmma_gemm import wgmma_gemm
from strop.kernels.kernel import (
    NEVER,
    RESULT,
    Call,
    Kernel,
    Launch,
    Launches,
    Lies,
    Operand,
    PartScratch,
    Problem,
    Torch,
    scratch,
)
from strop.kernels.libraries import linear_us
from strop.kernels.tuned import tuned

OP = "trimmed_linear"
COLUMNS = "columns"  # its attribute: how many columns of the product the result has
# Of a working buffer. Rows are enough for 12 waves of tiles of GPT-2's vocabulary on 132
# multiprocessors, 0.13 ms, beside which two launches more are little.
MOST_BYTES = 112 << 20
UNIT, MOST_PARTS = 256, 64  # rows are cut at multiples of UNIT, into so many parts at most
MOST_NUMBERS = 2**31
# Numbers that programs store a microsecond beside their products: 2.0e6 to 2.7e6 by
# linear_any_width, on an H200.
STORED_A_US = 2.3e6
BLOCK = 2048  # columns that a program has under way at a time

_TEXT = f"""\
import triton
import triton.language as tl


@triton.jit
def trimmed(p0, p1, s0, s1, s2, BLOCK: tl.constexpr, EARLY: tl.constexpr):
{EARLY}    row = tl.program_id(0)
    for begin in range(0, s1, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        found = tl.load(p0 + row * s2 + at, mask=at < s1)
        tl.store(p1 + row * s1 + at, found, mask=at < s1)
"""


def trimmed(dtype: torch.dtype) -> KernelSource:
    """Return the kernel that copies columns. Params: rows (M, W), dense, and the result (M, N).
    Scalars: M, N, W."""
    grid = (symbol("s0"),)
    constants = (("BLOCK", BLOCK), ("EARLY", 1))
    return KernelSource(
        "trimmed", "triton", _TEXT, (dtype,) * 2, (1, 1, 1), grid, constants=constants
    )


def supports(call: Call, device: Device) -> str:
    if not device.arch:
        return "runs on GPUs"
    if call.dtype not in HALVES or len(call.shapes) != 2:
        return "computes a linear without bias in fp16 or bf16"
    return "" if call.known(1) else "wants weights of a known size"


def part_rows(problem: Problem) -> int:
    """Return how many rows are multiplied at a time."""
    rows = math.prod(problem.shapes[0][:-1])
    room = MOST_BYTES // (problem.shapes[1][0] * problem.dtype.itemsize)
    least = -(-rows // MOST_PARTS)
    return min(rows, max(room // UNIT, -(-least // UNIT), 1) * UNIT)


def _parts(problem: Problem) -> Iterator[tuple[int, Problem]]:
    """Yield where each part begins, and its product with all columns."""
    rows, size = math.prod(problem.shapes[0][:-1]), part_rows(problem)
    depth, weight = problem.shapes[0][-1], problem.shapes[1]
    for begin in range(0, rows, size):
        shape = min(size, rows - begin), depth
        yield begin, Problem("linear", (), (shape, weight), problem.dtype)


def cost_us(problem: Problem, device: Device) -> float:
    """Add the time of the products and that of copies, which reads and writes the result once
    more."""
    if (
        not math.prod(problem.shapes[0])
        or part_rows(problem) * problem.shapes[1][0] >= MOST_NUMBERS
    ):
        return NEVER
    if _few(problem, device) is not None:
        return skinny.cost_us(_narrow(problem), device)
    return min(_in_parts_us(problem, device), _whole(problem, device)[1])


def _in_parts_us(problem: Problem, device: Device) -> float:
    times = tuned(device).gemm.library
    found = 0.0
    for _, part in _parts(problem):
        copied = 2 * part.dtype.itemsize * part.shapes[0][0] * part.shapes[1][0]
        found += min(_ours_us(part, device), linear_us(part, device))
        found += times.gap_us + copied / times.behind_bytes
    return found


def _ours_us(part: Problem, device: Device) -> float:
    return NEVER if gemm.supports(part.call, device) else gemm.cost_us(part, device)


def _narrow(problem: Problem) -> Problem:
    """Return the linear by the rows of the weight that are the user's."""
    columns, depth = problem.attr(COLUMNS), problem.shapes[1][1]
    return Problem("linear", (), (problem.shapes[0], (columns, depth)), problem.dtype)


def _whole(problem: Problem, device: Device) -> tuple[gemm.GemmForm | None, float]:
    """Return the fastest product that stores dense rows itself, and its microseconds, or None and
    NEVER where there is none."""
    narrow = _narrow(problem)
    (columns, depth), of = narrow.shapes[1], gemm.picture_of(narrow)
    is_able = device.has_wgmma and depth % gemm.PIECE == 0 and of.width >= gemm.LEAST_ROWS
    if not is_able or of.width * columns >= MOST_NUMBERS:
        return None, NEVER
    times, stored_us = tuned(device).gemm, of.width * columns / STORED_A_US
    forms = (form_of_any_width(tile, of, sms=device.sms) for tile in _tiles(columns, device))
    return gemm.least((each, gemm.us_of(each, of, times) + stored_us) for each in forms)


def form_of_any_width(tile: GemmTile, of: ConvShape, *, sms: int) -> gemm.GemmForm:
    """Return the form of a linear that stores dense rows itself, by this tile."""
    return replace(gemm.form(tile, of, sms=sms), product=Product(tile, 1, any_width=True))


def able_to_store(tiles: Iterable[GemmTile]) -> Iterator[GemmTile]:
    """Yield those that may store dense rows themselves."""
    yield from (tile for tile in tiles if tile.split == 1 and tile.cols % TOGETHER == 0)


def _tiles(columns: int, device: Device) -> Iterator[GemmTile]:
    able = able_to_store(tuned(device).gemm.tiles[PLAIN])
    yield from (tile for tile in able if tile.cols <= columns)


def _few(problem: Problem, device: Device) -> Launches | None:
    """Return what multiplies few rows, which writes columns of any number itself, or None."""
    narrow = _narrow(problem)
    if skinny.supports(narrow.call, device):
        return None
    found = skinny.launch(narrow, device)
    if found is None:
        return None
    (only,) = (part for part in found.parts if isinstance(part, Launch))
    return Launches((_of_first_rows(only, problem),))


def _of_first_rows(product: Launch, problem: Problem) -> Launch:
    """Have a product of the narrow linear read the user's rows of the weight."""
    x, weight, *others = product.operands
    weight = replace(weight, piece=((0, 0, problem.attr(COLUMNS)),))
    return replace(product, operands=(x, weight, *others))


def _product(part: Problem, device: Device, begin: int) -> Launch | Torch:
    """Return the product of some rows, by the faster of ours and a library's, into the working
    buffer."""
    count, columns = part.shapes[0][0], part.shapes[1][0]
    x, shape = Operand(0, Lies.ANYHOW, piece=((0, begin, count),)), (count, columns)
    is_ours = _ours_us(part, device) < linear_us(part, device)
    ours = gemm.launch(part, device) if is_ours else None
    if ours is None:
        return Torch("linear", (x, Operand(1), Operand(scratch(0), shape=shape)))
    (only,) = (each for each in ours.parts if isinstance(each, Launch))

    def moved(operand: Operand) -> Operand:
        if operand.number == RESULT:
            return replace(operand, number=scratch(0), shape=shape)
        return replace(operand, piece=x.piece) if operand.number == 0 else operand

    return replace(only, operands=tuple(map(moved, only.operands)))


def launch(problem: Problem, device: Device) -> Launches:
    few = _few(problem, device)
    if few is not None:
        return few
    found, us = _whole(problem, device)
    if found is not None and us < _in_parts_us(problem, device):
        (only,) = gemm.launches_by(found, _narrow(problem)).parts
        assert isinstance(only, Launch)
        return Launches((_of_first_rows(only, problem),))
    wide, columns = problem.shapes[1][0], problem.attr(COLUMNS)
    source, parts = trimmed(problem.dtype), list[Launch | Torch]()
    for begin, part in _parts(problem):
        count = part.shapes[0][0]
        made = Operand(scratch(0), shape=(count, wide))
        result = Operand(RESULT, piece=((0, begin, count),))  # at a multiple of UNIT rows
        parts.append(_product(part, device, begin))
        parts.append(Launch(source, (made, result), (count, columns, wide)))
    return Launches(tuple(parts), (PartScratch((part_rows(problem), wide), problem.dtype),))


def forms(call: Call, device: Device) -> Iterable[KernelSource]:
    linear = Call("linear", (), call.shapes, call.dtype)
    weight = call.known(1)
    assert weight is not None
    found = [trimmed(call.dtype)]
    if device.has_wgmma and weight[1] % gemm.PIECE == 0:
        whole = (Product(tile, 1, any_width=True) for tile in _tiles(call.attr(COLUMNS), device))
        found += [wgmma_gemm(product, call.dtype) for product in whole]
    if not gemm.supports(linear, device):
        found += gemm.forms(linear, device)
    some = const(call.attr(COLUMNS)), const(weight[1])
    narrow = Call("linear", (), (call.shapes[0], some), call.dtype)
    if not skinny.supports(narrow, device):
        found += skinny.forms(narrow, device)
    return found


ROW = Kernel(OP, (OP,), supports, cost_us, launch, forms)
