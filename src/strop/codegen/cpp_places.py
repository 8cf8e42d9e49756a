"""Compute once a task where elements lie that each row of it looks up at the same places."""

from __future__ import annotations

from typing import TYPE_CHECKING

from strop.codegen.cpp_text import times
from strop.ir.loops import CheckIndex, Load, Schedule, outs_of

if TYPE_CHECKING:
    from strop.codegen.cpp_loops import Loops

LIMIT = 2**31  # of places that have 32 bits, whose vectors are twice as wide


def shared_lookups(loops: Loops) -> tuple[Load, ...]:
    """Return the lookups whose places all rows share: the pairs that a triangle of products has."""
    kernel = loops.kernel
    rows = frozenset(axis.name for axis in kernel.rows)
    if kernel.schedule is not Schedule.POINTWISE or not rows or not loops.is_flat:
        return ()
    if not kernel.num_cols.is_const or loops.staged or loops.bags:
        return ()
    found = []
    for stmt in kernel.body:
        if not isinstance(stmt, Load) or not stmt.lookups or stmt.guard or stmt.bag:
            continue
        walked = frozenset[str]().union(*(loops.space[name] for name, _ in stmt.lookups))
        if walked and not walked & rows and rows & stmt.index.axes:
            found.append(stmt)
    return tuple(found)


def print_places(loops: Loops) -> None:
    """Print what fills the buffers of such places."""
    for number, load in enumerate(loops.shared):
        name = f"q{number}"
        kind = _type(loops, load)
        loops.row_buffer(name, kind)
        with loops.cols():
            loops.col_values(place for place, _ in load.lookups)
            terms = ((f"{kind}{{{place}}}", loops.scalars(step)) for place, step in load.lookups)
            text = " + ".join(times(*term) for term in terms)
            loops.out(f"{name}[{loops.lane}] = static_cast<{kind}>({text});")
        loops.places[load.out] = name


def _type(loops: Loops, load: Load) -> str:
    """Return a type of 32 bits where no place needs more."""
    makers = {out: stmt for stmt in loops.kernel.body for out in outs_of(stmt)}
    reach = 0
    for name, step in load.lookups:
        check = makers[name]
        if not isinstance(check, CheckIndex) or not (check.size * step).is_const:
            return "int64_t"
        reach += abs((check.size * step).value)
    return "int32_t" if reach < LIMIT else "int64_t"
