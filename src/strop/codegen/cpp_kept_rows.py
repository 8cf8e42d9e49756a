"""Print reductions of a row that a sweep has kept: functions of ``vmath.h`` add it up behind the
sweep, by vectors whose lanes are added by pairs."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from strop.codegen.cpp_text import scalar_type
from strop.ir.loops import LoopKernel, Reduce, Store, outs_of


def is_in_a_row(stmt: Reduce, keeps: Collection[str], kernel: LoopKernel) -> bool:
    """Tell whether a sweep that keeps these values keeps what this adds up, in a type that a
    function takes."""
    if stmt.arg not in keeps:
        return False
    return stmt.kind == "powers" or (stmt.kind == "moments" and _is_float(stmt.arg, kernel))


def _is_float(value: str, kernel: LoopKernel) -> bool:
    makers = (stmt for stmt in kernel.body if value in outs_of(stmt))
    return all(not isinstance(s, Store) and scalar_type(s.dtype) == "float" for s in makers)


def totals(stmt: Reduce, row: str) -> Iterator[str]:
    """Yield what adds up ``row``, an address and a size."""
    name = stmt.outs[0]
    if stmt.kind == "powers":
        yield f"const double total_{name} = sp::sum({row});"
        return
    yield f"const sp::Moments of_{name} = sp::moments({row});"
    yield f"const double first_{name} = of_{name}.first;"
    yield f"const double total_{name} = of_{name}.sum;"
    yield f"const double total_{stmt.outs[1]} = of_{name}.squares;"
