"""Prints loop IR as one C++ function: plain loops that the compiler vectorises.

    extern "C" void NAME(void* const* buffers, const int64_t* scalars)

``cpp_loops`` has the skeleton, ``cpp_reduce`` the reductions, ``cpp_text`` the words.
"""

from __future__ import annotations

from contextlib import nullcontext

from strop.codegen import cpp_bags, cpp_panels, nest, pieces
from strop.codegen.cpp_fetches import fetches, print_fetches, print_first_fetches
from strop.codegen.cpp_loops import HEAVY_FROM, Loops
from strop.codegen.cpp_panel_sweeps import PanelSweeps
from strop.codegen.cpp_parts import PartPrinter
from strop.codegen.cpp_places import print_places
from strop.codegen.cpp_reduce import ColumnReduction, RowSweeps, WholeReduction
from strop.codegen.cpp_rewrites import with_limits, with_powers
from strop.codegen.cpp_text import TYPES
from strop.codegen.cpp_tiles import print_cols, print_tiles
from strop.ir.code_panel import header
from strop.ir.loops import LoopKernel, Schedule
from strop.ir.source import Emitted, KernelSource

TASK_SIZE = 1024  # elements of a task, about: small ones share evenly between threads
STAGED_TASK_SIZE = 16384  # the same where a task begins with copies to row buffers
BLOCK_SIZE = 16384  # cols of a task where the cols are cut instead of the rows
SHORT_RUN = 8  # cols, of which g++ makes no vectors


def emit(kernel: LoopKernel) -> Emitted:
    """Print the C++ source of a kernel, and list the sizes that it takes. This is a pure
    function."""
    parts = pieces.cut_loops(kernel)
    loops = Loops(_rewritten(parts[0]))
    if len(parts) == 1:
        _print_all(loops)
    else:
        printer = PartPrinter(loops, _print_all)
        for part in parts:
            printer.add(_rewritten(part))
    source = KernelSource(
        name=kernel.name,
        language="cpp",
        text=_whole_text(loops),
        params=tuple(param.dtype for param in kernel.params),
        scalars=(1,) * len(loops.scalars.names),  # g++ takes no divisibility hints
        scratch=tuple(loops.scratch),
    )
    return Emitted(source, tuple(loops.scalars.names))


def _rewritten(kernel: LoopKernel) -> LoopKernel:
    return with_limits(with_powers(nest.simplify(kernel)))


def _print_all(loops: Loops) -> None:
    with loops.faults():
        cpp_panels.pack(loops)
        loops.uniform_values()
        cpp_panels.print_columns(loops)
        _print_loops(loops)


def _print_loops(loops: Loops) -> None:
    if loops.kernel.schedule is Schedule.COLUMN:
        _print_column(loops)
    elif loops.kernel.schedule is Schedule.ROW:
        _print_row(loops)
    elif loops.is_tiled:
        print_tiles(loops)
    elif _has_long_cols(loops):
        _print_blocks(loops)
    else:
        _print_pointwise(loops)


def _whole_text(loops: Loops) -> str:
    kernel = loops.kernel
    lines = [
        '#include "vmath.h"',
        "",
        *([header()] if loops.panels else []),
        f'extern "C" void {kernel.name}(void* const* buffers, const int64_t* scalars) {{',
    ]
    pointers = [f"{'' if p.is_output else 'const '}{TYPES[p.dtype]}*" for p in kernel.params]
    pointers += [f"{TYPES[scratch.dtype]}*" for scratch in loops.scratch]
    for i, pointer in enumerate(pointers):
        lines.append(f"  {pointer} const p{i} = static_cast<{pointer}>(buffers[{i}]);")
    for i in range(len(loops.scalars.names)):
        lines.append(f"  const int64_t s{i} = scalars[{i}];")
    return "\n".join([*lines, *loops.out.lines, "}", ""])


def _has_long_cols(loops: Loops) -> bool:
    cols = loops.kernel.num_cols
    is_apart = not loops.staged and not loops.bags and not loops.panels
    can_cut = loops.is_flat and is_apart
    return can_cut and (not cols.is_const or cols.value > BLOCK_SIZE or not loops.kernel.rows)


def _print_blocks(loops: Loops) -> None:
    """Print a POINTWISE kernel whose tasks are a chunk of rows times a block of cols: one row of a
    long block, or several of few cols."""
    out, rows, cols = loops.out, loops.kernel.rows, loops.scalars(loops.kernel.num_cols)
    out(f"const int64_t blocks = ({cols} + {BLOCK_SIZE - 1}) / {BLOCK_SIZE};")
    block = "const int64_t begin = {} * {};", "const int64_t end = {};"
    end = f"sp::min<int64_t>(begin + {BLOCK_SIZE}, {cols})"
    if not rows:
        with loops.parallel("task", "blocks", loops.work()):
            out(block[0].format("task", BLOCK_SIZE))
            out(block[1].format(end))
            loops.row_values(loops.kernel.body)
            print_cols(loops, "begin", "end")
        return
    num_rows = loops.scalars(loops.kernel.num_rows)
    _declare_step(loops)
    out(f"const int64_t chunks = ({num_rows} + step - 1) / step;")
    with loops.parallel("task", "chunks * blocks", loops.work()):
        out("const int64_t first = task / blocks * step;")
        out(f"const int64_t last = sp::min<int64_t>(first + step, {num_rows});")
        out(block[0].format("task % blocks", BLOCK_SIZE))
        out(block[1].format(end))
        if is_short := _may_be_short(loops):
            with out.block(f"if ({cols} < {SHORT_RUN})"):
                _print_along_rows(loops)
        with out.block("else") if is_short else nullcontext(), out.loop("row", "last", "first"):
            loops.decode("row", rows)
            loops.row_values(loops.kernel.body)
            print_cols(loops, "begin", "end")


def _may_be_short(loops: Loops) -> bool:
    """Say whether a part has so much to compute that vectors along its rows may pay, where it has
    few cols."""
    is_heavy = loops.threaded_from == HEAVY_FROM
    return loops.is_part and is_heavy and len(loops.kernel.rows) == 1


def _print_along_rows(loops: Loops) -> None:
    """Print the cols of a chunk of rows one after the other: the rows are what gets vectors."""
    ((row, _),), (col,) = loops.axis_loops(loops.kernel.rows), loops.col_loops()
    with loops.out.loop(*col):
        loops.simd()
        with loops.out.loop(row, "last", "first"):
            loops.row_values(loops.kernel.body)
            stores = loops.col_stores()
            loops.col_values(store.value for store in stores)
            loops.statements(stores)


def _print_pointwise(loops: Loops) -> None:
    """Print a POINTWISE kernel whose tasks are a chunk of rows."""
    _declare_step(loops)
    with loops.tasks():
        print_places(loops)
        cpp_panels.multiply(loops)
        later = fetches(loops)
        print_first_fetches(loops, later)
        cpp_bags.print_first_fetches(loops)
        with loops.rows():
            print_fetches(loops, later, "row")
            loops.row_values(loops.kernel.body)
            loops.fill_bags()
            print_cols(loops)


def _print_row(loops: Loops) -> None:
    sweeps = RowSweeps(loops)
    panels = PanelSweeps(loops)
    _declare_step(loops)
    with loops.tasks():
        cpp_panels.multiply(loops)
        if panels.fits:
            panels.print_rows()
            return
        later = fetches(loops)
        sweeps.declare_buffers()
        with loops.rows():
            print_fetches(loops, later, "row")
            sweeps.print_row()


def _print_column(loops: Loops) -> None:
    is_whole = loops.kernel.num_cols == nest.ONE
    column = WholeReduction(loops) if is_whole else ColumnReduction(loops)
    loops.out(f"const int64_t step = {column.step()};")
    with loops.tasks():
        column.print_task()
    column.merge()


def _declare_step(loops: Loops) -> None:
    if loops.panels:
        loops.out("const int64_t step = code_sums::PANEL;")
        return
    cols = loops.kernel.num_cols
    task = STAGED_TASK_SIZE if loops.staged or loops.shared else TASK_SIZE
    step = 1 + task // max(cols.value, 1) if cols.is_const else None
    size = f"sp::max<int64_t>({loops.scalars(cols)}, 1)"
    text = str(step) if step else f"1 + {task} / {size}"
    loops.out(f"const int64_t step = {text};")
