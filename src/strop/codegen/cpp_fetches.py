"""Fetch rows of tables before they are read, where one loop walks over the places of rows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from strop.codegen import nest
from strop.codegen.cpp_bags import AHEAD, MOST_FETCHED
from strop.ir.dims import product
from strop.ir.loops import Apply, CheckIndex, Literal, Load, Position, Stmt, args_of, outs_of

if TYPE_CHECKING:
    from strop.codegen.cpp_loops import Loops

FEWEST = 8  # elements of a row, below which a fetch costs as much as it saves
MOST_STATEMENTS = 12  # that find a place, as they run twice


def fetches(loops: Loops) -> list[tuple[str, str]]:
    """Print what says where a later row will look, and return what fetches it: for each lookup a
    pair of the place's function and the text of the fetch."""
    kernel = loops.kernel
    if loops.num_outer or not kernel.rows:
        return []
    found = []
    for number, (load, check) in enumerate(_lookups(loops)):
        name = f"place{number}_of"
        stmts = nest.closure(kernel.body, [check.value], frozenset(loops.printed))
        with loops.out.block(f"const auto {name} = [&](const int64_t row)"):
            loops.decode("row", kernel.rows)
            loops.statements(stmts)
            loops.out(f"return {check.value};")
        loops.out.lines[-1] += ";"
        base = f"p{load.param}"
        if load.index.offset.terms:
            base = f"({base} + {loops.scalars(load.index.offset)})"
        (_, stride), *_ = load.lookups
        widths = [axis.size for axis in kernel.cols if axis.name in load.index.axes]
        width = f"sp::min<int64_t>({MOST_FETCHED}, {loops.scalars(product(widths))})"
        found.append((name, f"sp::prefetch({base}, {{}}, {loops.scalars(stride)}, {width});"))
    return found


def print_fetches(loops: Loops, found: list[tuple[str, str]], row: str) -> None:
    """Print the fetches for a later row, if there is one."""
    if not found:
        return
    with loops.out.block(f"if ({row} + {AHEAD} < {loops.scalars(loops.kernel.num_rows)})"):
        for name, text in found:
            loops.out(text.format(f"{name}({row} + {AHEAD})"))


def _lookups(loops: Loops) -> Iterator[tuple[Load, CheckIndex]]:
    """Yield lookups of rows that lie side by side in memory, with what checks their place."""
    kernel = loops.kernel
    makers = {out: stmt for stmt in kernel.body for out in outs_of(stmt)}
    for load in kernel.body:
        if not isinstance(load, Load) or load.bag is not None or len(load.lookups) != 1:
            continue
        check = makers[load.lookups[0][0]]
        cols = [axis for axis in kernel.cols if axis.name in load.index.axes]
        is_row = len(cols) == 1 and nest.stride_of(load.index, cols[0].name) == nest.ONE
        if not isinstance(check, CheckIndex) or check.wraps or load.guard or not is_row:
            continue
        if not cols[0].size.is_const or cols[0].size.value < FEWEST:
            continue
        if len(load.index.axes) == 1 and _is_simple(loops, check, makers):
            yield load, check


def _is_simple(loops: Loops, check: CheckIndex, makers: dict[str, Stmt]) -> bool:
    """Tell whether a place is made of a few numbers of its row."""
    if check.out not in loops.outside:
        return False
    seen, stack = set[str](), [check.value]
    while stack:
        name = stack.pop()
        if name in seen:
            continue
        seen.add(name)
        stmt = makers[name]
        is_plain = isinstance(stmt, Apply | Literal | Position)
        if isinstance(stmt, Load):
            is_plain = not (stmt.guard or stmt.lookups or stmt.bag)
        if not is_plain or len(seen) > MOST_STATEMENTS:
            return False
        stack += args_of(stmt)
    return True
