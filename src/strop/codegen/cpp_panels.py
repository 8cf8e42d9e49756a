"""Print panels of sums of products of codes: rows of them that a kernel makes before it reads them.

The weight is packed before the tasks. Each task then multiplies its rows, takes off what zero
points of the weight have added, and reads them where they lie in a cache. ``rt/code_sums.h`` and
``rt/kept_codes.h`` have the functions that are called.
"""

from __future__ import annotations

import torch

from strop.codegen import nest, pieces
from strop.codegen.cpp_loops import Loops
from strop.codegen.cpp_text import scalar_type
from strop.ir.code_panel import MOST_BYTES, CodePanel
from strop.ir.dims import product
from strop.ir.loops import Apply, Load, LoopKernel, Schedule, Store, args_of
from strop.ir.ops import compute_dtype


def fits(kernel: LoopKernel) -> bool:
    """Tell whether panels of a kernel can be printed: each of its params with a panel is read in
    whole rows, which are those of the kernel."""
    panels = [p.panel for p in kernel.params if p.panel is not None]
    if kernel.schedule is Schedule.COLUMN or len(pieces.cut_loops(kernel)) > 1:
        return False
    simple = nest.simplify(kernel)
    loops = Loops(simple)
    is_by_rows = not loops.num_outer and not loops.is_tiled
    if not is_by_rows or not loops.is_flat or sum(p.stack_bytes for p in panels) > MOST_BYTES:
        return False
    loads = [s for s in simple.body if isinstance(s, Load) and simple.params[s.param].panel]
    return all(_is_of_rows(simple, load) for load in loads)


def _is_of_rows(kernel: LoopKernel, load: Load) -> bool:
    """Tell whether a load reads the sums at a row and col of the kernel, one behind the other."""
    panel = kernel.params[load.param].panel
    assert panel is not None
    if load.dtype is not torch.int32 or load.guard or load.lookups:
        return False
    has_columns = kernel.num_cols.is_const and kernel.num_cols.value == panel.columns
    return has_columns and _is_dense(kernel, load)


def _is_dense(kernel: LoopKernel, load: Load) -> bool:
    """Tell whether a load reads one element behind the other, from where the param begins."""
    strides, axes = dict(load.index.strides), kernel.rows + kernel.cols
    steps = (product(a.size for a in axes[n + 1 :]) for n in range(len(axes)))
    return load.index.offset == nest.ZERO and all(
        strides.get(axis.name, nest.ZERO) == step or axis.size == nest.ONE
        for axis, step in zip(axes, steps, strict=True)
    )


def pack(loops: Loops) -> None:
    """Print what is done before all tasks: each weight is packed. With few rows it is packed into
    memory that stays, unless its bits are those that were packed there."""
    for number, panel in loops.panels.items():
        place = len(loops.kernel.params) + len(loops.scratch)
        loops.scratch.extend(panel.scratch)
        memory = (f"reinterpret_cast<code_sums::Word*>(p{place + n})" for n in range(2))
        rows = loops.scalars(loops.kernel.num_rows)
        given = f"{rows}, p{panel.weight}, {panel.columns}, {panel.depth}, {', '.join(memory)}"
        loops.out(f"const code_sums::Word* const packed{number} = code_sums::packed_for({given});")
        loops.out(f"int32_t begins{number}[code_sums::up_to({panel.columns}, 16)];")
        begins = f"{panel.columns}, {panel.depth}, {panel.zero}, begins{number}"
        loops.out(f"code_sums::begins_of(packed{number}, {begins});")
        if panel.zeros is not None:
            loops.out(f"int32_t room{number}[{panel.columns}];")
            used = f"code_sums::used_zeros(p{panel.zeros}, {panel.columns}, room{number})"
            loops.out(f"const int32_t* const zeros{number} = {used};")


def print_columns(loops: Loops) -> None:
    """Print what is computed of columns alone, scales and biases, once for all rows: numbers of 32
    bits that each row loads."""
    if not loops.panels or not loops.kernel.rows or not loops.is_flat:
        return
    for stmt in _of_columns(loops):
        name = f"{stmt.out}_columns"
        loops.row_buffer(name, scalar_type(stmt.dtype))
        with loops.cols():
            loops.col_values([stmt.out])
            loops.out(f"{name}[{loops.lane}] = {stmt.out};")
        loops.buffers[stmt.out] = name


def _of_columns(loops: Loops) -> list[Apply | Load]:
    """Return the values of columns that rows read, other than what lies in 32 bits anyway."""
    body = loops.kernel.body
    read = {
        arg
        for stmt in body
        if not isinstance(stmt, Store) and loops.varies_over(stmt) - loops.col_names
        for arg in args_of(stmt)
    }
    return [
        stmt
        for stmt in body
        if isinstance(stmt, Apply | Load)
        if stmt.out in read and loops.varies_over(stmt) and stmt.out not in loops.buffers
        if loops.varies_over(stmt) <= loops.col_names and compute_dtype(stmt.dtype).itemsize == 4
        if isinstance(stmt, Apply) or loops.kernel.params[stmt.param].dtype.itemsize < 4
    ]


def multiply(loops: Loops) -> None:
    """Print what is done before the rows of a task: their sums are made."""
    _fetch(loops)
    for number, panel in loops.panels.items():
        _multiply(loops, number, panel)


def _fetch(loops: Loops) -> None:
    """Print what brings rows into a cache while the sums are made: the codes of the next task, and
    what is read beside the sums of this one."""
    if not loops.panels or not loops.kernel.rows:
        return
    for number, panel in loops.panels.items():
        size = f"code_sums::PANEL * {panel.depth}"
        loops.out(f"sp::prefetch(p{number}, end, {panel.depth}, {size});")
    for number in sorted(_rows_beside(loops)):
        cols = loops.kernel.num_cols
        loops.out(f"sp::prefetch(p{number}, begin, {cols}, code_sums::PANEL * {cols});")


def _rows_beside(loops: Loops) -> set[int]:
    """Return the params that are read, as the sums are, at each row and col one behind the
    other."""
    loads = (s for s in loops.kernel.body if isinstance(s, Load) and s.param not in loops.panels)
    return {
        load.param
        for load in loads
        if not (load.guard or load.lookups or load.bag) and _is_dense(loops.kernel, load)
    }


def _multiply(loops: Loops, number: int, panel: CodePanel) -> None:
    out, sizes = loops.out, f"{panel.columns}, {panel.depth}"
    width = f"code_sums::up_to({panel.columns}, code_sums::LANES)"
    out(f"constexpr int64_t width{number} = {width};")
    out(f"alignas(64) int32_t sums{number}[code_sums::PANEL * width{number}];")
    with out.block(""):
        words = f"code_sums::PANEL * code_sums::row_words({panel.depth})"
        out(f"alignas(64) code_sums::Word copied[{words}];")
        rows = f"p{number} + begin * {panel.depth}, end - begin"
        packed = f"packed{number}, begins{number}, copied, sums{number}"
        out(f"code_sums::multiply({rows}, {sizes}, {packed});")
        if panel.zeros is not None:
            to = f"{panel.zero}, sums{number}, width{number}"
            out(f"code_sums::take_off(zeros{number}, {rows}, {sizes}, {to});")
