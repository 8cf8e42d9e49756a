"""Prints a loop-IR kernel as one Triton function. A pure function: needs neither Triton nor a GPU.

Tiles are [ROWS, COLS] blocks of the two flattened levels. A value is a block of the dimensions it
varies along ([ROWS, 1], [1, COLS] or both), so hoisting needs no analysis. Divisions recover axis
ids from the flat ids, on vectors, and only for axes that an index does not walk with one stride.
"""

from __future__ import annotations

from strop.codegen import triton_column, triton_reduce
from strop.codegen.triton_text import (
    Flat,
    Lines,
    Printer,
    Tile,
    next_power_of_two,
    runs,
)
from strop.ir.dims import Expr, const
from strop.ir.loops import (
    Kernel,
    Literal,
    Load,
    Reduce,
    Schedule,
    Stmt,
    Store,
    args_of,
    has_places,
    outs_of,
)
from strop.ir.source import FAULTS, Emitted, KernelSource, Scratch, Split

POINTWISE_ELEMENTS = 1024  # 8 a thread: one 16-byte access of fp16, two of fp32
POINTWISE_COLS = 64  # of a 2-d tile: 128 bytes of fp16, and short vectors along the cols are cheap
TRANSPOSE_SIDE = 64  # rows and cols of a tile that is contiguous along both
ROW_ELEMENTS = 2048  # 16 a thread
MAX_PERSISTENT_COLS = 8192
LOOPED_COLS = 2048
STRIDED_COLS = 32  # of a loop where rows lie side by side in memory,
STRIDED_ROWS = 16  # how many of them a tile has at least,
MAX_STRIDED_COLS = 512  # and up to how many elements of each it holds


def emit(kernel: Kernel) -> Emitted:
    """The Triton source of ``kernel`` and the sizes that it takes."""
    printer = Printer(kernel)
    if kernel.schedule is Schedule.POINTWISE:
        grid, num_warps = _pointwise(printer)
        return _assemble(printer, grid, num_warps)
    if kernel.schedule is Schedule.ROW:
        grid, num_warps = _row(printer)
        return _assemble(printer, grid, num_warps)
    plan = triton_column.column(printer)
    return _assemble(printer, plan.grid, plan.num_warps, plan.scratch, plan.split)


def _assemble(
    printer: Printer,
    grid: Expr,
    num_warps: int,
    scratch: tuple[tuple[str, Scratch], ...] = (),
    split: Split | None = None,
) -> Emitted:
    kernel = printer.kernel
    if has_places(kernel):
        scratch = (*scratch, ("faults", FAULTS))
    args = [f"p{i}" for i in range(len(kernel.params))]
    args += [name for name, _ in scratch]
    args += [f"s{i}" for i in range(len(printer.scalars.sizes))]
    args += ["splits"] if split else []
    args += [f"{name}: tl.constexpr" for name in printer.constants]
    lines = Lines(depth=0)
    lines.lines += ["import triton", "import triton.language as tl"]
    if any("libdevice." in line for line in printer.out.lines):
        lines.lines.append("from triton.language.extra import libdevice")
    lines.lines += ["", ""]
    for kind in sorted({s.kind for s in kernel.body if isinstance(s, Reduce)}):
        if kind in triton_reduce.HELPERS:
            name, body = triton_reduce.HELPERS[kind]
            lines.lines += ["@triton.jit", f"def {name}(a, b):", f"    return {body}", "", ""]
    lines.lines += ["@triton.jit", f"def {kernel.name}({', '.join(args)}):"]
    source = KernelSource(
        name=kernel.name,
        language="triton",
        text="\n".join(lines.lines + printer.out.lines) + "\n",
        params=tuple(param.dtype for param in kernel.params),
        scalars=printer.scalars.classes,
        grid=(grid,),
        scratch=tuple(buffer for _, buffer in scratch),
        split=split,
        constants=tuple(printer.constants.items()),
        num_warps=num_warps,
        max_registers=triton_column.MAX_REGISTERS if split else None,
    )
    return Emitted(source, tuple(printer.scalars.sizes))


# POINTWISE


def _pointwise(printer: Printer) -> tuple[Expr, int]:
    kernel = printer.kernel
    num_rows, num_cols = kernel.num_rows, kernel.num_cols
    rows, cols, num_warps = _pointwise_tile(kernel)
    flat = num_rows == const(1)
    printer.constants.update({"COLS": cols} if flat else {"ROWS": rows, "COLS": cols})
    col_tiles = _tiles(num_cols, cols)
    add = printer.out.add
    add("tile = tl.program_id(0)")
    if flat:
        add("col = tile * COLS + tl.arange(0, COLS)")
        shape = {"c": "COLS"}
    else:
        one = col_tiles == const(1)
        row_tile = "tile" if one else f"tile // {printer.scalars.text(col_tiles)}"
        col_tile = "" if one else f"tile % {printer.scalars.text(col_tiles)} * COLS + "
        add(f"first_row = {row_tile} * ROWS")
        add("row = first_row + tl.arange(0, ROWS)[:, None]")
        add(f"col = {col_tile}tl.arange(0, COLS)[None, :]")
        shape = {"r": "ROWS", "c": "COLS"}
    row = Flat("row", kernel.rows, "r", wide=True, first="first_row", tile=rows)
    col = Flat("col", kernel.cols, "c")
    flats = (col,) if flat else (row, col)  # rows of size 1 have no term in any index
    masks = {} if flat else _mask(printer, "row", num_rows, rows)
    masks |= _mask(printer, "col", num_cols, cols)
    tile = Tile(flats, shape, masks)
    for each in flats:
        printer.ids(each, kernel.body)
    for stmt in kernel.body:
        printer.statement(stmt, tile)
    symbolic = printer.scalars.symbolic
    return _tiles(symbolic(num_rows), rows) * _tiles(symbolic(num_cols), cols), num_warps


def _tiles(size: Expr, tile: int) -> Expr:
    return (size + (tile - 1)) // tile


def _mask(printer: Printer, name: str, size: Expr, tile: int) -> dict[str, str]:
    if size.is_multiple_of(tile):
        return {}
    printer.out.add(f"{name}_mask = {name} < {printer.scalars.text(size)}")
    return {name[0]: f"{name}_mask"}


def _pointwise_tile(kernel: Kernel) -> tuple[int, int, int]:
    """(rows, cols, warps): long contiguous pieces, little waste."""
    num_rows, num_cols = kernel.num_rows, kernel.num_cols
    if num_rows == const(1):
        whole = next_power_of_two(num_cols.value) if num_cols.is_const else POINTWISE_ELEMENTS
        return 1, min(whole, POINTWISE_ELEMENTS), 4
    if _is_transposing(kernel):
        rows = _fitting(num_rows, TRANSPOSE_SIDE)
        cols = _fitting(num_cols, TRANSPOSE_SIDE)
        return rows, cols, 8
    cols = _fitting(num_cols, POINTWISE_COLS)
    return _fitting(num_rows, max(POINTWISE_ELEMENTS // cols, 1)), cols, 4


def _fitting(size: Expr, tile: int) -> int:
    return min(tile, next_power_of_two(size.value)) if size.is_const else tile


def _is_transposing(kernel: Kernel) -> bool:
    """True if some access is contiguous along the rows only."""
    row, col = Flat("row", kernel.rows), Flat("col", kernel.cols)
    for stmt in kernel.body:
        if isinstance(stmt, Load | Store):
            down = [run.stride for run in runs(row, stmt.index)]
            across = [run.stride for run in runs(col, stmt.index)]
            if const(1) in down and across and const(1) not in across:
                return True
    return False


# ROW


def _row(printer: Printer) -> tuple[Expr, int]:
    kernel = printer.kernel
    num_rows, num_cols = kernel.num_rows, kernel.num_cols
    strided = _is_transposing(kernel)
    most = MAX_STRIDED_COLS if strided else MAX_PERSISTENT_COLS
    persistent = num_cols.is_const and num_cols.value <= most
    looped = STRIDED_COLS if strided else LOOPED_COLS
    cols = next_power_of_two(num_cols.value) if persistent else looped
    least = STRIDED_ROWS if strided else 1
    rows = _fitting(num_rows, max(ROW_ELEMENTS // cols, least))
    printer.constants.update({"ROWS": rows, "COLS": cols})
    printer.out.add("first_row = tl.program_id(0) * ROWS")
    printer.out.add("row = first_row + tl.arange(0, ROWS)[:, None]")
    row = Flat("row", kernel.rows, "r", wide=True, first="first_row", tile=rows)
    masks = _mask(printer, "row", num_rows, rows)
    printer.ids(row, kernel.body)
    if persistent:
        _row_in_registers(printer, row, masks, cols)
    else:
        _row_in_sweeps(printer, row, masks, cols)
    grid = _tiles(printer.scalars.symbolic(num_rows), rows)
    return grid, 4 if rows * cols <= 4096 else 8


def _row_in_registers(printer: Printer, row: Flat, masks: dict[str, str], cols: int) -> None:
    kernel = printer.kernel
    printer.out.add("col = tl.arange(0, COLS)[None, :]")
    masks = masks | _mask(printer, "col", kernel.num_cols, cols)
    col = Flat("col", kernel.cols, "c")
    printer.ids(col, kernel.body)
    tile = Tile((row, col), {"r": "ROWS", "c": "COLS"}, masks, spread=row.tile > 1)
    count = printer.scalars.text(kernel.num_cols)
    for stmt in kernel.body:
        if isinstance(stmt, Reduce):
            triton_reduce.in_registers(printer, stmt, tile, count)
        else:
            printer.statement(stmt, tile)


def _row_in_sweeps(printer: Printer, row: Flat, masks: dict[str, str], cols: int) -> None:
    """One loop over the cols for each level of reductions, and one for what is left to store."""
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
            inner = masks | _mask(printer, "col", kernel.num_cols, cols)
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
    """Which statements of a ROW kernel run in which sweep over the cols."""

    def __init__(self, kernel: Kernel) -> None:
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

    def _level(self, stmt: Stmt) -> int:
        return max([0, *(self.level[arg] for arg in args_of(stmt))])

    def _is_along(self, stmt: Stmt) -> bool:
        own = (
            stmt.index.axes
            if not isinstance(stmt, Reduce | Literal) and hasattr(stmt, "index")
            else ()
        )
        return bool(self.cols & frozenset(own)) or any(self.along[arg] for arg in args_of(stmt))

    def of_rows(self, level: int) -> list[Stmt]:
        """Statements outside of the loops that can run before the sweep of this level."""
        return [
            stmt
            for stmt in self.stmts
            if not isinstance(stmt, Reduce)
            and not self._is_along(stmt)
            and self._level(stmt) == level
        ]

    def of_cols(self, level: int) -> tuple[list[Reduce], list[Stmt]]:
        """The reductions of this level, and with them all that their sweep has to run."""
        roots = [
            stmt
            for stmt in self.stmts
            if self._level(stmt) == level
            and (isinstance(stmt, Reduce) or (isinstance(stmt, Store) and self._is_along(stmt)))
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
