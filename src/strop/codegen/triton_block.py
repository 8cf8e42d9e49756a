"""Print a ROW kernel whose rows are blocks: each program holds one [ROWS, COLS] block in registers.

The cols of a group of GroupNorm in channels-last memory are pixels x channels of the group, of
which only the channels lie side by side. Pixels down the block and channels across it keep the
loads wide, and what belongs to a channel is read once a block.
"""

from __future__ import annotations

from collections.abc import Iterator

from strop.codegen import triton_reduce
from strop.codegen.triton_pairs import with_pairs
from strop.codegen.triton_text import Flat, Form, Printer, Tile, loads_first, next_power_of_two
from strop.ir.dims import Expr, product
from strop.ir.loops import LoopKernel, Reduce, has_guards

MAX_ROWS = (64, 256, 1024)  # of a block: one form each
MAX_ELEMENTS = 32768  # 64 a thread
MAX_GUARDED_ELEMENTS = 16384  # pieces of a cat are loaded one beside the other: 64 would spill
MIN_WARPS, ELEMENTS_PER_WARP = 4, 512
MAX_WARPS = 16  # 128 registers a thread: with 32 warps the largest blocks spilled


def forms(kernel: LoopKernel) -> Iterator[Form]:
    """Yield forms of a kernel for rows that one program holds."""
    if len(kernel.cols) < 2 or not kernel.cols[-1].size.is_const:
        return
    rows = product(axis.size for axis in kernel.cols[:-1])
    limit = MAX_GUARDED_ELEMENTS if has_guards(kernel) else MAX_ELEMENTS
    for most in MAX_ROWS:
        fits = most * next_power_of_two(kernel.cols[-1].size.value) <= limit
        if fits and not (rows.is_const and rows.value > most):
            yield Form(kernel, rows, most)


def block(printer: Printer, most: int) -> tuple[Expr, int]:
    """Prints the kernel for at most so many rows of a block; its grid and number of warps."""
    kernel, add = with_pairs(printer.kernel), printer.out.add
    printer.kernel = kernel
    *outer, inner = kernel.cols
    cols = next_power_of_two(inner.size.value)
    printer.constants.update({"ROWS": most, "COLS": cols})
    add("program = tl.program_id(0)")
    add("row = tl.arange(0, ROWS)[:, None]")
    add("col = tl.arange(0, COLS)[None, :]")
    add(f"row_mask = row < {printer.scalars.text(product(axis.size for axis in outer))}")
    masks = {"r": "row_mask"} | printer.mask("col", inner.size, cols)
    flats = (
        Flat("program", kernel.rows, "", wide=True),
        Flat("row", tuple(outer), "r"),
        Flat("col", (inner,), "c"),
    )
    tile = Tile(flats, {"r": "ROWS", "c": "COLS"}, masks)
    for flat in flats:
        printer.ids(flat, kernel.body)
    count = printer.scalars.text(kernel.num_cols)
    for stmt in loads_first(kernel.body):
        if isinstance(stmt, Reduce):
            triton_reduce.in_block(printer, stmt, tile, count)
        else:
            printer.statement(stmt, tile)
    num_warps = max(MIN_WARPS, most * cols // ELEMENTS_PER_WARP // 2)
    return printer.scalars.symbolic(kernel.num_rows), min(num_warps, MAX_WARPS)
