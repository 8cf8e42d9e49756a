"""Prints a loop-IR kernel as one Triton function. A pure function: needs neither Triton nor a GPU.

Tiles are [ROWS, COLS] blocks of the two flattened levels. A value is a block of the dimensions it
varies along ([ROWS, 1], [1, COLS] or both), so hoisting needs no analysis. Divisions recover axis
ids from the flat ids, on vectors, and only for axes that an index does not walk with one stride.
"""

from __future__ import annotations

from dataclasses import replace

from strop.codegen import triton_column, triton_reduce, triton_row
from strop.codegen.triton_row import fitting
from strop.codegen.triton_text import Flat, Lines, Printer, Tile, next_power_of_two, runs, tiles
from strop.ir.dims import Expr, const, symbol
from strop.ir.loops import Kernel, Load, Reduce, Schedule, Store
from strop.ir.source import Emitted, KernelSource, Scratch, Split, Variant

POINTWISE_ELEMENTS = 1024  # 8 a thread: one 16-byte access of fp16, two of fp32
POINTWISE_COLS = 64  # of a 2-d tile: 128 bytes of fp16, and short vectors along the cols are cheap
TRANSPOSE_SIDE = 64  # rows and cols of a tile that is contiguous along both


def emit(kernel: Kernel) -> Emitted:
    """The Triton source of ``kernel`` and the sizes that it takes."""
    emitted = _emit(kernel)
    if kernel.schedule is not Schedule.ROW or _is_transposing(kernel):
        return emitted
    variants = []
    for form, most, multiple in triton_row.forms(kernel):
        found = _emit(form, most)
        scalars = found.scalars
        if form is not kernel:  # its root symbol stands for a part of the real one
            (root,) = kernel.num_cols.roots
            scalars = tuple(s.substitute({root: symbol(root) // multiple}) for s in scalars)
        variants.append(Variant(found.source, scalars, kernel.num_cols, most, multiple))
    return replace(emitted, variants=tuple(variants))


def stitched(kernel: Kernel) -> tuple[Variant, ...]:
    """Forms of a ROW kernel for rows that one program holds in registers."""
    forms = []
    for most in triton_row.STITCHED_LIMITS:
        size = kernel.num_cols
        if not size.is_const or size.value <= most:
            found = _emit(kernel, most)
            forms.append(Variant(found.source, found.scalars, size, most))
    return tuple(forms[:1] if kernel.num_cols.is_const else forms)


def _emit(kernel: Kernel, most: int | None = None) -> Emitted:
    printer = Printer(kernel)
    if kernel.schedule is Schedule.POINTWISE:
        grid, num_warps = _pointwise(printer)
        return _assemble(printer, grid, num_warps)
    if kernel.schedule is Schedule.ROW:
        grid, num_warps = triton_row.row(printer, _is_transposing(kernel), most)
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
    col_tiles = tiles(num_cols, cols)
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
    masks = {} if flat else printer.mask("row", num_rows, rows)
    masks |= printer.mask("col", num_cols, cols)
    tile = Tile(flats, shape, masks)
    for each in flats:
        printer.ids(each, kernel.body)
    for stmt in kernel.body:
        printer.statement(stmt, tile)
    symbolic = printer.scalars.symbolic
    return tiles(symbolic(num_rows), rows) * tiles(symbolic(num_cols), cols), num_warps


def _pointwise_tile(kernel: Kernel) -> tuple[int, int, int]:
    """(rows, cols, warps): long contiguous pieces, little waste."""
    num_rows, num_cols = kernel.num_rows, kernel.num_cols
    if num_rows == const(1):
        whole = next_power_of_two(num_cols.value) if num_cols.is_const else POINTWISE_ELEMENTS
        return 1, min(whole, POINTWISE_ELEMENTS), 4
    if _is_transposing(kernel):
        rows = fitting(num_rows, TRANSPOSE_SIDE)
        cols = fitting(num_cols, TRANSPOSE_SIDE)
        return rows, cols, 8
    cols = fitting(num_cols, POINTWISE_COLS)
    return fitting(num_rows, max(POINTWISE_ELEMENTS // cols, 1)), cols, 4


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
