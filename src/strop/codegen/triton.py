"""Prints a loop-IR kernel as one Triton function. A pure function: needs neither Triton nor a GPU.

Tiles are [ROWS, COLS] blocks of the two flattened levels. A value is a block of the dimensions it
varies along ([ROWS, 1], [1, COLS] or both), so hoisting needs no analysis. Divisions recover axis
ids from the flat ids, on vectors, and only for axes that an index does not walk with one stride.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache

from strop.codegen import (
    pieces,
    triton_block,
    triton_column,
    triton_pieces,
    triton_pointwise,
    triton_reduce,
    triton_row,
    triton_short_column,
)
from strop.codegen.effort import effort_of
from strop.codegen.triton_lines import Lines
from strop.codegen.triton_text import Form, Printer, is_transposing
from strop.errors import CodegenError
from strop.ir.dims import Expr
from strop.ir.functions import EARLY, FUNCTIONS, SM_90
from strop.ir.loops import Load, LoopKernel, Reduce, Schedule, has_places
from strop.ir.source import (
    BOUNDS_CHECK,
    Effort,
    Emitted,
    KernelForm,
    KernelSource,
    Scratch,
    Split,
)


def emit(kernel: LoopKernel) -> Emitted:
    """Print the Triton source of ``kernel``, and list the sizes that it takes. Raises CodegenError
    for bags of rows, which have no text in Triton."""
    if any(isinstance(stmt, Load) and stmt.bag is not None for stmt in kernel.body):
        raise CodegenError(
            f"{kernel.name}: kernels of a CPU alone add up bags of rows; a graph for a GPU leaves"
            " them to torch (strop.frontend.lookups)"
        )
    return replace(_printed(kernel), variants=tuple(map(_variant, _forms(kernel))))


def emit_at(kernel: LoopKernel, sizes: Mapping[str, int]) -> KernelSource:
    """Return the one form of ``emit`` that runs at these sizes."""
    form = next((form for form in _forms(kernel) if form.fits(sizes)), None)
    return _printed(form.kernel, form.most).source if form else _printed(kernel).source


def _forms(kernel: LoopKernel) -> Iterable[Form]:
    if triton_short_column.is_short(kernel, None):
        return triton_short_column.forms(kernel)
    if kernel.schedule is Schedule.COLUMN:
        return triton_column.forms(kernel)
    by_row = kernel.schedule is Schedule.ROW
    if not by_row:
        return triton_pointwise.forms(kernel)
    return triton_row.strided_forms(kernel) if is_transposing(kernel) else triton_row.forms(kernel)


def _variant(form: Form, *, as_block: bool = False) -> KernelForm:
    found = _printed(form.kernel, form.most, as_block=as_block)
    scalars = tuple(size.substitute(form.meaning) for size in found.scalars)
    return KernelForm(found.source, scalars, form.size, form.most, form.multiple)


def stitched(kernel: LoopKernel) -> tuple[KernelForm, ...]:
    """Return forms of a ROW kernel for rows that one program holds in registers: as a block, or
    flat where they lie in one piece."""
    short = tuple(map(_variant, triton_row.short_forms(kernel)))
    return short + tuple(_variant(form, as_block=True) for form in triton_block.forms(kernel))


def stitched_at(kernel: LoopKernel, sizes: Mapping[str, int]) -> KernelSource | None:
    """Return the one of them that runs at these sizes, if there is one."""
    for as_block, forms in ((False, triton_row.short_forms), (True, triton_block.forms)):
        form = next((form for form in forms(kernel) if form.fits(sizes)), None)
        if form:
            return _printed(form.kernel, form.most, as_block=as_block).source
    return None


def _printed(kernel: LoopKernel, most: int | None = None, *, as_block: bool = False) -> Emitted:
    return _emit(kernel, kernel.numbers, most, as_block)


# what the first call needs is printed before the rest, in which it is again
@lru_cache(maxsize=512)
def _emit(
    kernel: LoopKernel, numbers: tuple[str, ...], most: int | None, as_block: bool
) -> Emitted:
    printer = Printer(kernel)
    if as_block:
        assert most is not None
        return _assemble(printer, *triton_block.block(printer, most))
    parts = pieces.cut_programs(kernel)
    if len(parts) > 1:
        return _assemble_parts(printer, parts, most)
    if kernel.schedule is Schedule.POINTWISE:
        grid, num_warps = triton_pointwise.pointwise(printer, most)
        elements = printer.constants.get("ROWS", 1) * printer.constants["COLS"]
        effort = effort_of(printer.kernel, elements)
        return _assemble(printer, grid, num_warps, effort=effort)
    if kernel.schedule is Schedule.ROW:
        grid, num_warps = triton_row.row(printer, is_transposing(kernel), most)
        effort = triton_row.effort(printer, is_transposing(kernel), most)
        registers = triton_row.most_registers(kernel, num_warps)
        return _assemble(printer, grid, num_warps, effort=effort, most_registers=registers)
    if triton_short_column.is_short(kernel, most):
        grid, num_warps, effort = triton_short_column.short_column(printer)
        return _assemble(printer, grid, num_warps, effort=effort)
    plan = triton_column.column(printer, None if most == triton_short_column.FEW else most)
    return _assemble(
        printer, plan.grid, plan.num_warps, plan.scratch, plan.split, effort=plan.effort
    )


def _assemble_parts(printer: Printer, parts: Sequence[LoopKernel], most: int | None) -> Emitted:
    kernel = printer.kernel
    arguments = [f"p{i}" for i in range(len(kernel.params))]
    arguments += ["faults"] if has_places(kernel) else []
    made = triton_pieces.parts_of(kernel.name, parts, arguments, most)
    printer.out, printer.scalars = made.body, made.scalars
    return _assemble(printer, made.grid, made.num_warps, functions=made.functions.lines)


def _assemble(
    printer: Printer,
    grid: Expr,
    num_warps: int,
    scratch: tuple[tuple[str, Scratch], ...] = (),
    split: Split | None = None,
    functions: Sequence[str] = (),
    effort: Effort | None = None,
    most_registers: int | None = None,
) -> Emitted:
    kernel = printer.kernel
    printed = [*functions, *printer.out.lines]
    if has_places(kernel):
        scratch = (*scratch, ("faults", BOUNDS_CHECK))
    if any(SM_90 in line for line in printed):
        printer.constants[SM_90] = 1
    printer.constants["EARLY"] = 1
    args = [f"p{i}" for i in range(len(kernel.params))]
    args += [name for name, _ in scratch]
    args += [f"s{i}" for i in range(len(printer.scalars.sizes))]
    args += ["splits"] if split else []
    args += [f"{name}: tl.constexpr" for name in printer.constants]
    lines = Lines(depth=0)
    lines.lines += ["import triton", "import triton.language as tl"]
    if any("libdevice." in line for line in printed):
        lines.lines.append("from triton.language.extra import libdevice")
    lines.lines += ["", ""]
    for kind in sorted({s.kind for s in kernel.body if isinstance(s, Reduce)}):
        if kind in triton_reduce.HELPERS:
            name, body = triton_reduce.HELPERS[kind]
            lines.lines += ["@triton.jit", f"def {name}(a, b):", f"    return {body}", "", ""]
    for name, text in FUNCTIONS.items():
        if any(f"{name}(" in line for line in printed):
            lines.lines += ["@triton.jit", *text.splitlines(), "", ""]
    lines.lines += functions
    lines.lines += ["@triton.jit", f"def {kernel.name}({', '.join(args)}):", *EARLY.splitlines()]
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
        max_registers=triton_column.MAX_REGISTERS if split else most_registers,
        effort=effort,
    )
    return Emitted(source, tuple(printer.scalars.sizes))
