"""Print the COLUMN schedule where few rows are reduced, for each of many others.

A program of a slab of rows for each of the others would have nothing to do: of deformable attention
in BEVFormer, which sums 4 samples of 32 channels for each of a million heads of queries, a kernel
of a million such programs took 7 ms on an H200. Here a program has many of the others side by
side, and goes through the reduced rows one by one: there is nothing to fold, and no scratch.
"""

from __future__ import annotations

from collections.abc import Iterator

from strop.codegen.effort import effort_of
from strop.codegen.triton_reduce import (
    finish,
    places_last,
    settle,
    start,
    step_weight,
    update,
    without_reduced,
)
from strop.codegen.triton_text import Flat, Form, Printer, Tile, fitting, tiles
from strop.ir.dims import Expr, const, product
from strop.ir.loops import LoopKernel, Reduce, Schedule
from strop.ir.source import Effort

MOST_ROWS = 16  # that are reduced, one after the other
MOST_COLS, WIDE_COLS = 256, 64  # of a tile that has all cols, and of one that has not
ELEMENTS, WARPS = 1024, 4  # of a tile: 8 a thread, 16 bytes of a load in fp16
FEW = 2**16  # results, which leave most of a GPU without a tile: slabs have more programs


def forms(kernel: LoopKernel) -> Iterator[Form]:
    """Yield the form for few results, which is that of slabs."""
    results = _results(kernel)
    if is_short(kernel, None) and not results.is_const:
        yield Form(kernel, results, FEW)


def is_short(kernel: LoopKernel, most: int | None) -> bool:
    """Tell whether a kernel is printed this way, for at most so many results: it keeps all of its
    cols, and reduces few rows for each of others."""
    if kernel.schedule is not Schedule.COLUMN or most == FEW:
        return False
    rows, results = _reduced(kernel), _results(kernel)
    return (
        rows.is_const
        and rows.value <= MOST_ROWS
        and kernel.num_cols != const(1)
        and _others(kernel) != const(1)
        and not any(axis.reduced for axis in kernel.cols)
        and not (results.is_const and results.value <= FEW)
    )


def _results(kernel: LoopKernel) -> Expr:
    return _others(kernel) * kernel.num_cols


def _reduced(kernel: LoopKernel) -> Expr:
    return product(axis.size for axis in kernel.rows if axis.reduced)


def _others(kernel: LoopKernel) -> Expr:
    return product(axis.size for axis in kernel.rows if not axis.reduced)


def short_column(printer: Printer) -> tuple[Expr, int, Effort]:
    """Print the kernel. Returns its grid, the number of warps and what a program does."""
    kernel, others, num_cols = printer.kernel, _others(printer.kernel), printer.kernel.num_cols
    has_all = num_cols.is_const and num_cols.value <= MOST_COLS
    cols = fitting(num_cols, MOST_COLS) if has_all else WIDE_COLS
    groups = fitting(others, max(ELEMENTS // cols, 1))
    printer.constants.update({"ROWS": groups, "COLS": cols})
    par, col, row = _flats(kernel)
    col_tiles = tiles(num_cols, cols)
    _tile_ids(printer, col_tiles)
    masks = {"r": "par_mask"} if printer.mask("par", others, groups) else {}
    masks |= printer.mask("col", num_cols, cols)
    shape = {"r": "ROWS", "c": "COLS"}
    for flat in (par, col):
        printer.ids(flat, (*kernel.body, *kernel.tail))
    _sweep(printer, row, Tile((par, row, col), shape, masks))
    behind = Tile((par, col), shape, masks)
    for stmt in kernel.tail:
        printer.statement(stmt, behind)
    symbolic = printer.scalars.symbolic
    grid = tiles(symbolic(others), groups) * tiles(symbolic(num_cols), cols)
    return grid, WARPS, effort_of(kernel, groups * cols, _reduced(kernel))


def _tile_ids(printer: Printer, col_tiles: Expr) -> None:
    add = printer.out.add
    add("tile = tl.program_id(0)")
    one, count = col_tiles == const(1), printer.scalars.text(col_tiles)
    add(f"par = {'tile' if one else f'tile // {count}'} * ROWS + tl.arange(0, ROWS)[:, None]")
    add(f"col = {'' if one else f'tile % {count} * COLS + '}tl.arange(0, COLS)[None, :]")


def _flats(kernel: LoopKernel) -> tuple[Flat, Flat, Flat]:
    others = tuple(axis for axis in kernel.rows if not axis.reduced)
    rows = tuple(axis for axis in kernel.rows if axis.reduced)
    col = Flat("col", kernel.cols, "c", wide=not kernel.num_cols.is_const)
    return Flat("par", others, "r", wide=True), col, Flat("row", rows, wide=True)


def _sweep(printer: Printer, row: Flat, tile: Tile) -> None:
    """Print the loop over the reduced rows. What lies outside of a tile's masks is computed, and
    never stored."""
    kernel, add = printer.kernel, printer.out.add
    count = printer.scalars.text(_reduced(kernel))
    reductions = [stmt for stmt in kernel.body if isinstance(stmt, Reduce)]
    hoisted = without_reduced(kernel)
    for stmt in hoisted:
        printer.statement(stmt, tile)
    for reduction in reductions:
        start(printer, reduction, tile)
    whole = Tile(tile.flats, tile.shape, {})
    with printer.out.block(f"for first in range(0, {count}):"):
        add("row = first + tl.full([], 0, tl.int32)")
        printer.ids(row, kernel.body)
        step_weight(printer, reductions, "row", "1")
        for stmt in places_last(kernel):
            if isinstance(stmt, Reduce):
                update(printer, stmt, whole)
            elif stmt not in hoisted:
                printer.statement(stmt, tile)
    for reduction in reductions:
        settle(printer, reduction)
        finish(printer, reduction, count, frozenset("rc"))
