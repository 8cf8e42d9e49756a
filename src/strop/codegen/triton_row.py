"""Print the ROW schedule: reductions along rows that one program reads completely.

A row that fits stays in registers, as one piece or as several side by side (10,240 elements are
five pieces of 2,048: one piece of a power of two would leave a third of the lanes idle). A longer
one, or one of unknown length, is swept several times.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Iterator
from dataclasses import dataclass, replace

from strop.codegen import triton_reduce
from strop.codegen.effort import effort_of
from strop.codegen.triton_pairs import with_pairs
from strop.codegen.triton_text import (
    ALIGNED,
    Flat,
    Form,
    Printer,
    Tile,
    TileValue,
    fitting,
    is_transposing,
    is_whole,
    loads_first,
    next_power_of_two,
    of_whole_vectors,
    rounds_to_codes,
    tiles,
)
from strop.ir.dims import Expr
from strop.ir.loops import (
    Apply,
    Literal,
    Load,
    LoopKernel,
    Reduce,
    Stmt,
    Store,
    args_of,
    outs_of,
)
from strop.ir.source import Effort

LOOPED_COLS = 2048
STRIDED_COLS = 32  # of a loop where rows lie side by side in memory,
STRIDED_ROWS = 16  # how many of them a tile has at least,
STRIDED_ELEMENTS = 2048
MAX_STRIDED_COLS = 512  # and up to how many elements of each it holds
STRIDED_LIMITS = (32, 64, 128, 256, MAX_STRIDED_COLS)


@dataclass(frozen=True, slots=True)
class RowTile:
    """``pieces`` blocks of [rows, cols] hold the rows; 0 where they are swept."""

    rows: int
    cols: int
    pieces: int
    num_warps: int

    @property
    def held(self) -> int:
        """Return how many elements of a row value a thread has in registers."""
        return self.rows * self.cols * self.pieces // (32 * self.num_warps)


# Rows of up to so many elements: (rows, cols, warps) of a tile. Measured on an H100 in fp16 over
# LayerNorm, RMSNorm, softmax and residual + norm, 32 to 100,000 rows: each is within 7 % of the
# fastest of some 40 tiles everywhere. Short rows want few warps a row; long ones enough loads in
# flight.
TILES: tuple[tuple[int, tuple[int, int, int]], ...] = (
    (64, (16, 64, 4)),
    (128, (16, 128, 8)),
    (256, (4, 256, 4)),
    (384, (4, 64, 4)),
    (512, (8, 256, 8)),
    (1024, (1, 256, 1)),
    (2047, (1, 256, 2)),
    (2560, (1, 512, 4)),
    (16384, (1, 1024, 8)),
    (24576, (1, 4096, 32)),
    (49152, (1, 8192, 32)),  # 48 elements a thread of the 64 registers that 32 warps leave
)
# Other tiles above and up to so many elements: where every element takes an exponential, and where
# more than one value of the row's length is read.
HEAVY = ((384, 512, (4, 64, 4)), (512, 1024, (1, 256, 2)))
STREAMED = (
    (384, 512, (4, 64, 4)),
    (512, 1024, (1, 256, 2)),
    (1024, 2560, (1, 512, 4)),
    (4096, 16384, (1, 2048, 16)),
)
# Moments of several such values in still longer rows are faster swept than held.
STREAMED_MOST, STREAMED_SWEEP = 24576, (8192, 32)
# Bytes of all that a kernel reads and writes which about fill the cache (50 MB on an H100): what is
# read then leaves first, so that results stay. LayerNorm 16384x768 18.8 us to 16.4, residual +
# RMSNorm 4096x1280 14.1 to 13.1; with less, or much more, 5 to 30 % slower.
FILLING = (36 << 20, 64 << 20)
LONG_WARPS, MOST_QUANTISING = 16, 64  # of long rows that are streamed, and their registers
MAX_WAITING = 24  # elements a thread: with more, what is loaded early has no registers to wait in

# Limits of the variants for rows of unknown length: steps of 3/2 and 4/3, because idle lanes cost
# registers and with them loads in flight (10,240 elements in a tile of 16,384: 76 us for 59).
ALIGNED_LIMITS = tuple(sorted(k << n for n in range(5, 15) for k in (2, 3) if k << n >= 64))
SHORT_LIMITS = (1024, 4096, 8192)  # one program reduces so many elements as fast as several do
UNALIGNED_LIMITS = (64, 128, 256, 512, 1024, 2048, 4096)  # longer ones that do not divide are swept


def row_tile(kernel: LoopKernel, strided: bool, most: int | None = None) -> RowTile:
    """Choose how a kernel is cut. ``most`` limits the cols, for a variant."""
    num_cols = kernel.num_cols
    most = num_cols.value if num_cols.is_const else most
    if strided:
        return _strided_tile(kernel, most)
    if most is None or most > TILES[-1][0]:
        return RowTile(1, LOOPED_COLS, 0, 4)
    if most > STREAMED_MOST and _is_streamed(kernel) and _has_moments(kernel):
        return RowTile(1, STREAMED_SWEEP[0], 0, STREAMED_SWEEP[1])
    rows, cols, num_warps = next(tile for limit, tile in TILES if most <= limit)
    for others, applies in ((HEAVY, _is_heavy), (STREAMED, _is_streamed)):
        for above, upto, other in others:
            if above < most <= upto and applies(kernel):
                rows, cols, num_warps = other
    short = next_power_of_two(most)
    if short < cols:  # as many elements as of rows that fill the tile, or most threads are idle
        rows, cols = rows * (cols // short), short
    return RowTile(fitting(kernel.num_rows, rows), cols, -(-most // cols), num_warps)


def _is_heavy(kernel: LoopKernel) -> bool:
    return any(isinstance(stmt, Apply) and stmt.op == "exp" for stmt in kernel.body)


def _is_streamed(kernel: LoopKernel) -> bool:
    """Tell whether more than one value that differs along rows and cols is read."""
    rows, cols = ({axis.name for axis in axes} for axes in (kernel.rows, kernel.cols))
    loads = [stmt.index.axes for stmt in kernel.body if isinstance(stmt, Load)]
    return sum(bool(axes & rows and axes & cols) for axes in loads) > 1


def _has_moments(kernel: LoopKernel) -> bool:
    return any(isinstance(stmt, Reduce) and stmt.kind == "moments" for stmt in kernel.body)


def _strided_tile(kernel: LoopKernel, most: int | None) -> RowTile:
    if most is None or most > MAX_STRIDED_COLS:
        cols, pieces = STRIDED_COLS, 0
    else:
        cols, pieces = next_power_of_two(most), 1
    rows = max(STRIDED_ELEMENTS // cols, STRIDED_ROWS)
    if pieces and not kernel.num_cols.is_const:
        rows = STRIDED_ROWS  # few rows are to be several programs
    rows = fitting(kernel.num_rows, rows)
    return RowTile(rows, cols, pieces, 4 if rows * cols <= 4096 else 8)


def strided_forms(kernel: LoopKernel) -> Iterator[Form]:
    """Yield forms that hold rows of unknown length in registers where an operand lies across them.
    Others compute all that a reduction reads once for each reduction."""
    if not kernel.num_cols.is_const:
        yield from (Form(kernel, kernel.num_cols, most) for most in STRIDED_LIMITS)


def forms(kernel: LoopKernel) -> Iterator[Form]:
    """Yield the forms worth having for rows of unknown length, shortest first. Where the length is
    a root symbol, some know that it is a multiple of eight."""
    size = kernel.num_cols
    if size.is_const:
        return
    if size.is_multiple_of(ALIGNED):
        yield from (Form(kernel, size, most) for most in ALIGNED_LIMITS)
        return
    yield from of_whole_vectors(kernel, size, ALIGNED_LIMITS)
    yield from (Form(kernel, size, most) for most in UNALIGNED_LIMITS)


def short_forms(kernel: LoopKernel) -> Iterator[Form]:
    """Yield forms for short rows in one piece, where long ones are cut into parts."""
    if len(kernel.cols) == 1 and not kernel.num_cols.is_const and not is_transposing(kernel):
        yield from (Form(kernel, kernel.num_cols, most) for most in SHORT_LIMITS)


def row(printer: Printer, strided: bool, most: int | None = None) -> tuple[Expr, int]:
    """Prints the kernel; its grid and number of warps."""
    kernel = printer.kernel = with_pairs(printer.kernel)
    tile = row_tile(kernel, strided, most)
    printer.constants.update({"ROWS": tile.rows, "COLS": tile.cols})
    printer.out.add("first_row = tl.program_id(0) * ROWS")
    printer.out.add("row = first_row + tl.arange(0, ROWS)[:, None]")
    flat = Flat("row", kernel.rows, "r", wide=True, first="first_row", tile=tile.rows)
    masks = printer.mask("row", kernel.num_rows, tile.rows)
    printer.ids(flat, kernel.body)
    if tile.pieces:
        low, high = (limit // _bytes_a_program(kernel, tile) for limit in FILLING)
        printer.out.add(f"fills = (tl.num_programs(0) > {low}) & (tl.num_programs(0) < {high})")
        _Pieces(printer, flat, masks, tile).body()
    else:
        _in_sweeps(printer, flat, masks, tile.cols)
    return tiles(printer.scalars.symbolic(kernel.num_rows), tile.rows), tile.num_warps


def most_registers(kernel: LoopKernel, num_warps: int) -> int | None:
    """Limit the registers of a thread where long rows are quantised: arithmetic takes as long as
    memory there, and two programs on a multiprocessor wait for each in turn. A row of 15,360 behind
    GELU takes 80 registers without a limit, and 30 accesses to its stack with one (sm_90)."""
    return MOST_QUANTISING if num_warps == LONG_WARPS and rounds_to_codes(kernel) else None


def effort(printer: Printer, strided: bool, most: int | None) -> Effort:
    """Describe a program that holds its rows, or sweeps them once for each level of reductions:
    then it reads 25 GB/s on an H100, as if the loads of two steps were on their way."""
    kernel = printer.kernel
    tile = row_tile(kernel, strided, most)
    if tile.pieces:
        return effort_of(kernel, tile.rows * tile.cols * tile.pieces)
    sweep = printer.scalars.symbolic(kernel.num_cols) * _Sweeps(kernel).num_levels
    return effort_of(kernel, tile.rows * tile.cols, sweep, tile.cols, ahead=2)


def _bytes_a_program(kernel: LoopKernel, tile: RowTile) -> int:
    """Return the bytes of what is read or written once, at the most cols that the tile is for."""
    accesses = [stmt for stmt in kernel.body if isinstance(stmt, Load | Store)]
    params = {stmt.param for stmt in accesses if is_whole(kernel, stmt.index)}
    element = sum(kernel.params[param].dtype.itemsize for param in params)
    return max(element, 1) * tile.rows * tile.cols * tile.pieces


class _Pieces:
    """Print a kernel with all of a row in registers: a value along the cols is one block for each
    piece."""

    def __init__(self, printer: Printer, row: Flat, masks: dict[str, str], tile: RowTile) -> None:
        self.printer, self.kernel = printer, printer.kernel
        self.cols = frozenset(axis.name for axis in self.kernel.cols)
        self.shared = printer.values
        self.own: list[dict[str, TileValue]] = [{} for _ in range(tile.pieces)]
        # in tiles of several rows what belongs to a col is read for each of them: that only pays
        # where waiting for memory is long
        self.loads_first = tile.held <= MAX_WAITING and (
            tile.rows == 1 or _is_streamed(self.kernel)
        )
        self.tiles = [self._piece(n, row, masks, tile) for n in range(tile.pieces)]

    def _piece(self, number: int, row: Flat, masks: dict[str, str], tile: RowTile) -> Tile:
        printer, kernel = self.printer, self.kernel
        name = f"col{number}" if tile.pieces > 1 else "col"
        first = f"{number * tile.cols} + " if number else ""
        printer.out.add(f"{name} = {first}tl.arange(0, COLS)[None, :]")
        end = (number + 1) * tile.cols
        if not kernel.num_cols.is_const or end > kernel.num_cols.value:
            mask = f"{name}_mask"
            printer.out.add(f"{mask} = {name} < {printer.scalars.text(kernel.num_cols)}")
            masks = masks | {"c": mask}
        col = Flat(name, kernel.cols, "c")
        printer.ids(col, kernel.body)
        shape = {"r": "ROWS", "c": "COLS"}
        whole = Tile((row, col), shape, masks, row.tile > 1, "fills")
        first = f"{number * tile.cols // 2} + " if number else ""
        return replace(whole, half=printer.half(whole, col, first))

    def body(self) -> None:
        count = self.printer.scalars.text(self.kernel.num_cols)
        for stmt in loads_first(self.kernel.body) if self.loads_first else self.kernel.body:
            if isinstance(stmt, Reduce):
                operands = [self._operand(stmt, n) for n in range(len(self.tiles))]
                self.printer.values = self.shared
                triton_reduce.in_registers(self.printer, stmt, operands, count)
            elif self._is_along(stmt):
                for number, tile in enumerate(self.tiles):
                    self._select(number)
                    prefix = f"at{number}_" if number else ""
                    self.printer.statement(stmt, tile, prefix)
            else:
                self.printer.values = self.shared
                self.printer.statement(stmt, self.tiles[0])
        self.printer.values = self.shared

    def _select(self, number: int) -> None:
        self.printer.values = ChainMap(self.own[number], self.shared)

    def _operand(self, stmt: Reduce, number: int) -> tuple[str, str]:
        self._select(number)
        tile = self.tiles[number]
        return triton_reduce.operand(self.printer, stmt, tile), tile.masks.get("c", "")

    def _is_along(self, stmt: Stmt) -> bool:
        if any(arg in self.own[0] for arg in args_of(stmt)):
            return True
        return not isinstance(stmt, Reduce | Literal) and bool(self.cols & own_axes(stmt))


def own_axes(stmt: Stmt) -> frozenset[str]:
    """Return axes that the statement itself walks."""
    return stmt.index.axes if hasattr(stmt, "index") else frozenset()


def _in_sweeps(printer: Printer, row: Flat, masks: dict[str, str], cols: int) -> None:
    """Print one loop over the cols for each level of reductions, and one for what is left to
    store."""
    kernel = printer.kernel
    sweeps = _Sweeps(kernel)
    count = printer.scalars.text(kernel.num_cols)
    col = Flat("col", kernel.cols, "c")
    shape = {"r": "ROWS", "c": "COLS"}
    for level in range(sweeps.num_levels):
        outer = Tile((row, col), shape, masks)
        for stmt in sweeps.of_rows(level):
            printer.statement(stmt, outer)
        reductions, stmts = sweeps.of_cols(level)
        for stmt in reductions:
            triton_reduce.start(printer, stmt, outer)
        if not stmts:
            continue
        with printer.out.block(f"for first in range(0, {count}, COLS):"):
            printer.out.add("col = first + tl.arange(0, COLS)[None, :]")
            inner = masks | printer.mask("col", kernel.num_cols, cols)
            printer.ids(col, stmts)
            triton_reduce.step_weight(printer, reductions, "first", "COLS")
            tile = Tile((row, col), shape, inner)
            for stmt in stmts:
                if isinstance(stmt, Reduce):
                    triton_reduce.update(printer, stmt, tile)
                else:
                    printer.statement(stmt, tile)
        if any(stmt.kind == "moments" for stmt in reductions):
            lane = "tl.arange(0, COLS)[None, :]"
            printer.out.add(f"seen = ({count} - {lane} + COLS - 1) // COLS")
        for stmt in reductions:
            triton_reduce.settle(printer, stmt)
            triton_reduce.fold(printer, stmt, 1, "seen", count)
            triton_reduce.finish(printer, stmt, count, frozenset("r"))


class _Sweeps:
    """Sort the statements of a ROW kernel by the sweep over the cols in which they run.

    All stores along the cols are in the last one: memory that is read as well as written
    (``mutation``) has its old values until no sweep reads them again.
    """

    def __init__(self, kernel: LoopKernel) -> None:
        self.stmts = kernel.body
        self.cols = frozenset(axis.name for axis in kernel.cols)
        self.level: dict[str, int] = {}
        self.along: dict[str, bool] = {}  # varies along the cols
        for stmt in kernel.body:
            reduces = isinstance(stmt, Reduce)
            for out in outs_of(stmt):
                self.level[out] = self._level(stmt) + reduces
                self.along[out] = not reduces and self._is_along(stmt)
        self.num_levels = max([0, *(self._level(stmt) for stmt in kernel.body)]) + 1
        self.last = max(
            [
                0,
                *(
                    self._level(stmt)
                    for stmt in kernel.body
                    if isinstance(stmt, Reduce) or self._is_along(stmt)
                ),
            ]
        )

    def _level(self, stmt: Stmt) -> int:
        return max([0, *(self.level[arg] for arg in args_of(stmt))])

    def _is_along(self, stmt: Stmt) -> bool:
        return bool(self.cols & own_axes(stmt)) or any(self.along[arg] for arg in args_of(stmt))

    def of_rows(self, level: int) -> list[Stmt]:
        """Return statements outside of the loops that can run before the sweep of this level."""
        return [
            stmt
            for stmt in self.stmts
            if not isinstance(stmt, Reduce)
            and not self._is_along(stmt)
            and self._level(stmt) == level
        ]

    def of_cols(self, level: int) -> tuple[list[Reduce], list[Stmt]]:
        """Return the reductions of this level, and with them all that their sweep has to run."""
        roots = [
            stmt
            for stmt in self.stmts
            if (isinstance(stmt, Reduce) and self._level(stmt) == level)
            or (isinstance(stmt, Store) and self._is_along(stmt) and level == self.last)
        ]
        needed = {arg for stmt in roots for arg in args_of(stmt) if self.along[arg]}
        chosen: list[Stmt] = []
        for stmt in reversed(self.stmts):
            if stmt in roots:
                chosen.append(stmt)
            elif not isinstance(stmt, Reduce) and needed & set(outs_of(stmt)):
                chosen.append(stmt)
                needed |= {arg for arg in args_of(stmt) if self.along[arg]}
        return [stmt for stmt in roots if isinstance(stmt, Reduce)], chosen[::-1]
