"""Fetch rows of tables before they are read, where one loop walks over the places of rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from strop.codegen import nest
from strop.codegen.cpp_bags import MOST_FETCHED, ahead
from strop.ir.dims import product
from strop.ir.loops import Apply, CheckIndex, Literal, Load, Position, Stmt, args_of, outs_of

if TYPE_CHECKING:
    from strop.codegen.cpp_loops import Loops

FEWEST = 8  # elements of a row, below which a fetch costs as much as it saves
MOST_STATEMENTS = 12  # that find a place, as they run twice


@dataclass(frozen=True, slots=True)
class Fetch:
    """Hold what fetches a row of a table, ``ahead`` rows before it is read: the name of the
    function of its place, and the text with a gap for that."""

    place: str
    text: str
    ahead: int


def fetches(loops: Loops) -> list[Fetch]:
    """Print what says where a later row will look, and return what fetches it, for each lookup."""
    kernel = loops.kernel
    if loops.num_outer or not kernel.rows:
        return []
    found = list[Fetch]()
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
        text = f"sp::prefetch({base}, {{}}, {loops.scalars(stride)}, {width});"
        far = ahead(product(widths), kernel.params[load.param].dtype.itemsize)
        found.append(Fetch(name, text, far))
    return found


def print_first_fetches(loops: Loops, found: Sequence[Fetch]) -> None:
    """Print the fetches of the first rows, at the begin of the first task."""
    for far, some in _by_distance(found):
        count = f"sp::min<int64_t>({far}, {loops.scalars(loops.kernel.num_rows)})"
        with loops.out.block("if (!begin)"), loops.out.loop("row", count):
            for fetch in some:
                loops.out(fetch.text.format(f"{fetch.place}(row)"))


def print_fetches(loops: Loops, found: Sequence[Fetch], row: str) -> None:
    """Print the fetches for a later row, if there is one."""
    for far, some in _by_distance(found):
        with loops.out.block(f"if ({row} + {far} < {loops.scalars(loops.kernel.num_rows)})"):
            for fetch in some:
                loops.out(fetch.text.format(f"{fetch.place}({row} + {far})"))


def _by_distance(found: Sequence[Fetch]) -> Iterator[tuple[int, list[Fetch]]]:
    for far in dict.fromkeys(fetch.ahead for fetch in found):
        yield far, [fetch for fetch in found if fetch.ahead == far]


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
