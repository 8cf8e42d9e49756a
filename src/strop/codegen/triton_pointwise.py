"""Print the POINTWISE schedule: tiles over rows and cols, or over flat elements where nothing has
rows.

A kernel has a form for few elements, whose small tiles keep many programs busy, and one for many,
where each thread has several wide loads in flight.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from strop.codegen import pieces
from strop.codegen.triton_pairs import with_pairs
from strop.codegen.triton_text import (
    ALIGNED,
    NO_LIMIT,
    Flat,
    Form,
    Printer,
    Tile,
    fitting,
    is_transposing,
    of_whole_vectors,
    runs,
    tiles,
)
from strop.ir.dims import Expr, const, product, symbol
from strop.ir.loops import Axis, Load, LoopKernel, has_guards, indices_of

# Measured on an H100 in fp16 over GEGLU, bias + GELU, scale + shift + SiLU and SiLU, 2,048 to 160
# million elements: within 7 % of the fastest of some 40 tiles.
FEW = 2**20  # elements
SMALL = (8, 64, 4)  # rows, cols and warps of a tile for few
POINTWISE_ELEMENTS = 1024  # of any other tile: 8 a thread
POINTWISE_COLS = 64  # 128 bytes of fp16, and short vectors along the cols are cheap
FLAT_ELEMENTS, UNALIGNED_ELEMENTS = 1024, 512
TRANSPOSE_SIDE = 64  # rows and cols of a tile that is contiguous along both
# Few of these: a picture of 3x65x65 is eight tiles of that side, and took 5.7 us of an H200.
TRANSPOSE_SMALL = (16, 32, 4)
TRANSPOSE_FEW = 2**17
# These are for tiles that read something once for all of their rows: they have enough rows to
# share it, and warps that lie above each other. GroupNorm's second half at 2x320x128x128 takes
# 17.8 us, and 26.4 with (64, 64, 8).
REPEATED_FEW = (32, 32, 4)
REPEATED = (32, 64, 2)
# Elements and warps of a tile of one long line without regard to rows, for many and for few: no
# lane is idle, whatever the number of cols. For many within 4 % of the fastest of some 25 tiles of
# bias + GELU, GEGLU and batch norm with and without a residual. Few wait for memory once: two
# elements a thread. 49 batch norms of ResNet-50 at batch 1: 81 us, 91 with (512, 4) up to 2**20.
LINE = ((1024, 4), (512, 8))
LINE_FEW = 2**18
ONE = Axis("one", const(1))


def forms(kernel: LoopKernel) -> Iterator[Form]:
    """Yield the faster forms of a kernel, whose number of elements is not known."""
    size = kernel.num_rows * kernel.num_cols
    if size.is_const:
        return
    if is_transposing(kernel):
        yield Form(kernel, size, TRANSPOSE_FEW)
        return
    long = [axis for axis in kernel.cols if axis.size != const(1)]
    is_odd = kernel.num_rows == const(1) and len(long) == 1 and not size.is_multiple_of(ALIGNED)
    if is_odd and len(pieces.cut_programs(kernel)) == 1:
        eighths = replace(long[0], size=symbol("eighths") * ALIGNED)
        cols = tuple(eighths if axis == long[0] else axis for axis in kernel.cols)
        aligned, meaning = replace(kernel, cols=cols), {"eighths": size // ALIGNED}
        yield Form(aligned, size, FEW, ALIGNED, meaning)
        yield Form(aligned, size, NO_LIMIT, ALIGNED, meaning)
    else:
        yield Form(kernel, size, _few(kernel))
        if len(long) == 1 and not long[0].size.is_multiple_of(ALIGNED):
            # masks and biases of attention: T5's bias has 56 instructions for each element, not 92
            yield from of_whole_vectors(kernel, long[0].size, [NO_LIMIT])


def _few(kernel: LoopKernel) -> int:
    """Return up to how many elements small tiles are faster."""
    if is_transposing(kernel):
        return TRANSPOSE_FEW
    return LINE_FEW if _is_line(kernel) else FEW


def pointwise(printer: Printer, most: int | None = None) -> tuple[Expr, int]:
    """Prints the kernel, for at most so many elements; its grid and number of warps."""
    kernel = printer.kernel = with_pairs(printer.kernel)
    rows, cols, num_warps = pointwise_tile(kernel, most)
    if not rows:  # the axes of the rows are found in the ids of the cols
        kernel = printer.kernel = replace(kernel, rows=(), cols=kernel.rows + kernel.cols)
        rows = 1
    outer, inner = _outer_and_inner(kernel)
    num_outer, num_rows = (product(axis.size for axis in axes) for axes in (outer, inner))
    num_cols = kernel.num_cols
    flat = kernel.num_rows == const(1)
    printer.constants.update({"COLS": cols} if flat else {"ROWS": rows, "COLS": cols})
    row_tiles, col_tiles = tiles(num_rows, rows), tiles(num_cols, cols)
    _tile_ids(printer, row_tiles, col_tiles, bool(outer), flat)
    shape = {"c": "COLS"} if flat else {"r": "ROWS", "c": "COLS"}
    row = Flat("row", inner, "r", wide=True, first="first_row", tile=rows)
    col = Flat("col", kernel.cols, "c")
    flats = (col,) if flat else (row, col)  # rows of size 1 have no term in any index
    if outer:
        flats = (Flat("outer", outer, "", wide=True), *flats)
    masks = {} if flat else printer.mask("row", num_rows, rows)
    masks |= printer.mask("col", num_cols, cols)
    tile = Tile(flats, shape, masks)
    for each in flats:
        printer.ids(each, kernel.body)
    if not flat:
        tile = replace(
            tile, half=printer.half(tile, col, _first(printer, col_tiles, "(COLS // 2)"))
        )
    for stmt in kernel.body:
        printer.statement(stmt, tile)
    symbolic = printer.scalars.symbolic
    grid = tiles(symbolic(num_rows), rows) * tiles(symbolic(num_cols), cols)
    return (grid * symbolic(num_outer) if outer else grid), num_warps


def _tile_ids(
    printer: Printer, row_tiles: Expr, col_tiles: Expr, has_outer: bool, flat: bool
) -> None:
    """Prints which rows and cols this program has."""
    add, text = printer.out.add, printer.scalars.text
    add(f"tile = {printer.program}")
    if has_outer:
        per_outer = text(row_tiles * col_tiles)
        add(f"outer = tile // {per_outer}")
        add(f"tile = tile % {per_outer}")
    if flat:
        add("col = tile * COLS + tl.arange(0, COLS)")
        return
    row_tile = "tile" if col_tiles == const(1) else f"tile // {text(col_tiles)}"
    add(f"first_row = {row_tile} * ROWS")
    add("row = first_row + tl.arange(0, ROWS)[:, None]")
    add(f"col = {_first(printer, col_tiles, 'COLS')}tl.arange(0, COLS)[None, :]")


def _first(printer: Printer, col_tiles: Expr, cols: str) -> str:
    """Return the number of a tile's first col, of so many, and a sign."""
    return "" if col_tiles == const(1) else f"tile % {printer.scalars.text(col_tiles)} * {cols} + "


def _outer_and_inner(kernel: LoopKernel) -> tuple[tuple[Axis, ...], tuple[Axis, ...]]:
    """Return row axes that have one value in each tile, and the others.

    Where something is the same for all pixels of a picture, no tile has pixels of two pictures:
    the tile then reads it once.
    """
    *outer, inner = kernel.rows or (ONE,)
    many = max((len(monomial) for monomial, _ in inner.size.terms), default=0) > 1
    if not outer or not (many or inner.size.divisor >= REPEATED[0]):
        return (), kernel.rows
    names = {axis.name for axis in outer}
    for stmt in kernel.body:
        if isinstance(stmt, Load) and names & stmt.index.axes and inner.name not in stmt.index.axes:
            return tuple(outer), (inner,)
    return (), kernel.rows


def pointwise_tile(kernel: LoopKernel, most: int | None) -> tuple[int, int, int]:
    """Choose (rows, cols, warps): long contiguous pieces, little waste. Without rows the elements
    are one line."""
    num_rows, num_cols = kernel.num_rows, kernel.num_cols
    size = num_rows * num_cols
    few = most == _few(kernel) or (size.is_const and size.value <= _few(kernel))
    if num_rows == const(1):
        aligned = num_cols.is_multiple_of(ALIGNED) and not few
        return 1, fitting(num_cols, FLAT_ELEMENTS if aligned else UNALIGNED_ELEMENTS), 4
    if _outer_and_inner(kernel)[0]:
        rows, cols, num_warps = REPEATED_FEW if few else REPEATED
        return rows, fitting(num_cols, cols), num_warps
    if _is_line(kernel):
        return (0, *LINE[few])
    if is_transposing(kernel):
        side = TRANSPOSE_SIDE
        rows, cols, num_warps = TRANSPOSE_SMALL if few else (side, side, 8)
        return fitting(num_rows, rows), fitting(num_cols, cols), num_warps
    if _has_few_long_rows(kernel):
        return 1, UNALIGNED_ELEMENTS if few else FLAT_ELEMENTS, 4
    if few:
        rows, cols, num_warps = SMALL
        cols = fitting(num_cols, cols)
        return fitting(num_rows, rows * (SMALL[1] // cols)), cols, num_warps
    cols = fitting(num_cols, POINTWISE_COLS)
    return fitting(num_rows, max(POINTWISE_ELEMENTS // cols, 1)), cols, 4


def _has_few_long_rows(kernel: LoopKernel) -> bool:
    """Tell whether there may be as few rows as one, each of many elements: a slice of the tokens of
    a batch. A tile of several rows then has idle lanes: the picture's part of attention's result in
    Flux.1 (one row of 12.6 million elements) took 120 us in tiles of 16 rows, where its bytes take
    18."""
    num_rows, num_cols = kernel.num_rows, kernel.num_cols
    is_long = not num_cols.is_const and num_cols.divisor >= POINTWISE_COLS
    return is_long and len(num_rows.roots) < 2 and num_rows.divisor < SMALL[0]


def _is_line(kernel: LoopKernel) -> bool:
    """Tell whether ids of rows and cols are cheap to find in one flat id: all rows are walked with
    one stride, and what a thread loads at once lies in one row. Guards, as a cat has them, want
    tiles that lie in one piece of it."""
    num_cols = kernel.num_cols
    if not num_cols.is_const or not num_cols.is_multiple_of(ALIGNED) or has_guards(kernel):
        return False
    if kernel.num_rows == const(1) or _outer_and_inner(kernel)[0] or is_transposing(kernel):
        return False
    row = Flat("row", kernel.rows)
    found = (run for index in indices_of(kernel) for run in runs(row, index))
    return all(run.leading and run.inner == const(1) for run in found)
