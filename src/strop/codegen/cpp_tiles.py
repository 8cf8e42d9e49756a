"""Print POINTWISE kernels that transpose: tasks are a chunk of rows, done in tiles of cols.

A tile walks its rows in the inner loop where that writes what is contiguous along them: vectors
are stored whole, and read as gathers. The other way each store of a vector goes to as many cache
lines, which all lie in one set of the cache where their distance is a large power of two: 16
pictures of 16 channels and 64 x 64 pixels took 1.73 ns an element on a Zen 5, and take 0.18. Few
cols are too short for vectors, whichever side is contiguous.
"""

from __future__ import annotations

from dataclasses import replace

from strop.codegen import nest
from strop.codegen.cpp_loops import Loops
from strop.ir.loops import Index, Load, Stmt, Store

TILE = (64, 16)  # rows and cols: both sides use whole cache lines
VECTOR = 16  # lanes of fp32
FEW_COLS = 8
FAR = "far"  # the row, where a step of one is far in memory


def print_tiles(loops: Loops) -> None:
    """Print the whole kernel."""
    out, cols = loops.out, loops.scalars(loops.kernel.num_cols)
    rows_of_tile, cols_of_tile = TILE
    is_inside = _walks_rows_inside(loops)
    if is_inside and not _has_few_cols(loops):
        rows_of_tile = VECTOR
    out(f"const int64_t step = {rows_of_tile};")
    with loops.tasks(), out.loop("left", cols, step=str(cols_of_tile)):
        out(f"const int64_t right = sp::min<int64_t>(left + {cols_of_tile}, {cols});")
        if is_inside:
            _print_cols_of_rows(loops)
            return
        with loops.rows():
            loops.row_values(loops.kernel.body)
            print_cols(loops, "left", "right")


def print_cols(loops: Loops, begin: str = "0", end: str = "") -> None:
    """Print the values of one row, or of a part of it, and what they are stored to."""
    stores = loops.col_stores()
    if stores:
        with loops.cols(begin, end):
            loops.col_values(store.value for store in stores)
            loops.statements(stores)


def _walks_rows_inside(loops: Loops) -> bool:
    kernel = loops.kernel
    row, col = kernel.rows[-1], kernel.cols[-1].name
    if loops.shared or loops.panels or (row.size.is_const and row.size.value < VECTOR):
        return False
    stores = [stmt for stmt in kernel.body if isinstance(stmt, Store)]
    if len(stores) != len(loops.col_stores()):
        return False
    return _has_few_cols(loops) or any(
        nest.stride_of(s.index, row.name) == nest.ONE != nest.stride_of(s.index, col)
        for s in stores
    )


def _is_far(stmt: Load, row: str) -> bool:
    """Tell whether neighbouring rows are not neighbours in memory."""
    return nest.stride_of(stmt.index, row) not in (nest.ZERO, nest.ONE)


def _gathered(stmt: Stmt, row: str) -> Stmt:
    """Read by steps of a size that g++ does not see: it makes scalar code of powers of two."""
    if not isinstance(stmt, Load) or not _is_far(stmt, row):
        return stmt
    strides = ((FAR if axis == row else axis, stride) for axis, stride in stmt.index.strides)
    return replace(stmt, index=Index(stmt.index.offset, tuple(strides)))


def _has_few_cols(loops: Loops) -> bool:
    size = loops.kernel.num_cols
    return size.is_const and size.value <= FEW_COLS


def _print_cols_of_rows(loops: Loops) -> None:
    """Print a loop over the cols of a tile, and in it one over the rows, in vectors."""
    stores, row = loops.col_stores(), loops.kernel.rows[-1].name
    roots = (store.value for store in stores)
    stmts = nest.closure(loops.kernel.body, roots, frozenset(loops.printed))
    name, _ = loops.col_loops()[-1]
    loops.out("const int64_t one = 1 + sp::unseen_zero();")
    with loops.out.loop(name, "right", "left"):
        loops.statements(stmt for stmt in stmts if row not in loops.varies_over(stmt))
        loops.simd()
        with loops.out.loop("row", "end", "begin"):
            loops.decode("row", loops.inner_rows)
            loops.out(f"const int64_t {FAR} = row * one;")
            varying = (stmt for stmt in stmts if row in loops.varies_over(stmt))
            loops.statements(_gathered(stmt, row) for stmt in varying)
            loops.statements(stores)
