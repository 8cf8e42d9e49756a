"""Cut a kernel where the pieces of a cat meet: each piece is a kernel of its own range.

A cat is printed as selects, which compute every piece for every element. Where conditions ask on
which side of a number a position along one axis is, and sizes tell in which order these numbers
are, each stretch between two of them has conditions that hold everywhere in it, or nowhere. Nothing
is left there of the other pieces. The ranges are run one after the other, by one kernel.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from strop.ir.dims import Expr, const, to_expr
from strop.ir.loops import (
    Apply,
    Axis,
    CheckIndex,
    Index,
    Literal,
    Load,
    LoopKernel,
    Position,
    Schedule,
    Stmt,
    Store,
    args_of,
    outs_of,
)
from strop.ir.ops import OPS

MOST_PIECES = 128  # of one kernel
# Pieces that alternate element by element are written in steps, which costs as much as to compute
# this many of them.
ALTERNATING = 6
# Fewer pieces are selected on a GPU: loads of the others are masked off, and cost next to nothing.
FEWEST_PROGRAMS = 5
SHORT_RUN = 16  # elements side by side of one piece
ONE, ZERO = const(1), const(0)


@dataclass(frozen=True, slots=True)
class _Test:
    """Stand for ``axis >= at``, or ``axis < at``."""

    axis: str
    at: Expr
    is_above: bool


def cut(kernel: LoopKernel, most_together: int = ALTERNATING) -> tuple[LoopKernel, ...]:
    """Return kernels of parts of the range of this one, which together do what it does; the kernel
    itself where there is nothing to cut. So many pieces that alternate stay ``most_together``."""
    if kernel.schedule is not Schedule.POINTWISE:
        return (kernel,)
    tests = _tests(kernel)
    for axis in dict.fromkeys(test.axis for test in tests.values()):
        bounds = _ordered(tests, _axis(kernel, axis))
        if bounds and _is_worth(kernel, axis, bounds, most_together):
            found = _parts(kernel, axis, tests, bounds)
            parts = [p for part in found for p in cut(part, most_together)]
            if len(parts) <= MOST_PIECES:
                return tuple(parts)
    return (kernel,)


def cut_loops(kernel: LoopKernel) -> tuple[LoopKernel, ...]:
    """Cut a kernel for a CPU, where no piece of much work is computed for elements of others."""
    return cut(kernel, 1 if any(map(_is_heavy, kernel.body)) else ALTERNATING)


def _is_heavy(stmt: Stmt) -> bool:
    if isinstance(stmt, Load):
        return stmt.bag is not None  # which adds up rows
    return isinstance(stmt, Apply) and OPS[stmt.op].is_heavy


def cut_programs(kernel: LoopKernel) -> tuple[LoopKernel, ...]:
    """Cut a kernel for a GPU, where each part has programs of its own."""
    parts = cut(kernel)
    return parts if len(parts) >= FEWEST_PROGRAMS else (kernel,)


def _axis(kernel: LoopKernel, name: str) -> Axis:
    return next(axis for axis in kernel.rows + kernel.cols if axis.name == name)


def _tests(kernel: LoopKernel) -> dict[str, _Test]:
    """Return the conditions that compare a position along one axis with a number."""
    made = {out: stmt for stmt in kernel.body for out in outs_of(stmt)}
    found: dict[str, _Test] = {}
    for stmt in kernel.body:
        if not isinstance(stmt, Apply) or stmt.op not in ("ge", "lt"):
            continue
        position, limit = (made[arg] for arg in stmt.args)
        if not isinstance(position, Position) or not isinstance(limit, Literal):
            continue
        strides, value = position.index.strides, limit.value
        if len(strides) == 1 and strides[0][1] == ONE and isinstance(value, int | Expr):
            at = to_expr(value) - position.index.offset
            found[stmt.out] = _Test(strides[0][0], at, stmt.op == "ge")
    return found


def _is_at_most(a: Expr, b: Expr) -> bool:
    """Tell whether a <= b, whatever the sizes are."""
    return not (b - a).may_be_negative


def _ordered(tests: Mapping[str, _Test], axis: Axis) -> list[Expr] | None:
    """Return the numbers within an axis that tests compare with, if their order is known."""
    bounds = list(dict.fromkeys(test.at for test in tests.values() if test.axis == axis.name))
    inside: list[Expr] = []
    for bound in bounds:
        if _is_at_most(bound, ZERO) or _is_at_most(axis.size, bound):
            continue
        place = next((n for n, other in enumerate(inside) if _is_at_most(bound, other)), None)
        inside.insert(len(inside) if place is None else place, bound)
    ends = [ZERO, *inside, axis.size]
    is_known = all(_is_at_most(a, b) for a, b in itertools.pairwise(ends))
    return inside if is_known else None


def _is_worth(kernel: LoopKernel, axis: str, bounds: Sequence[Expr], most_together: int) -> bool:
    """Tell whether loops over pieces cost less than to compute all of them everywhere."""
    stores = [stmt for stmt in kernel.body if isinstance(stmt, Store)]
    if not any(dict(store.index.strides).get(axis) == ONE for store in stores):
        return True
    ends = [ZERO, *bounds, _axis(kernel, axis).size]
    lengths = [b - a for a, b in itertools.pairwise(ends)]
    is_alternating = any(n.is_const and n.value < SHORT_RUN for n in lengths)
    return not is_alternating or len(lengths) > most_together


def _parts(
    kernel: LoopKernel, axis: str, tests: Mapping[str, _Test], bounds: Sequence[Expr]
) -> Iterator[LoopKernel]:
    """Yield a kernel for each stretch between two bounds."""
    ends = [ZERO, *bounds, _axis(kernel, axis).size]
    for start, end in itertools.pairwise(ends):
        known = {
            name: _is_at_most(test.at, start) == test.is_above
            for name, test in tests.items()
            if test.axis == axis
        }

        def cut_axis(other: Axis, size: Expr = end - start) -> Axis:
            return replace(other, size=size) if other.name == axis else other

        moved = [_moved(stmt, axis, start) for stmt in kernel.body]
        yield replace(
            kernel,
            rows=tuple(map(cut_axis, kernel.rows)),
            cols=tuple(map(cut_axis, kernel.cols)),
            body=_needed(_decided(moved, known)),
        )


def _moved(stmt: Stmt, axis: str, start: Expr) -> Stmt:
    """Count an axis from ``start`` on."""
    if not isinstance(stmt, Load | Position | Store):
        return stmt
    step = dict(stmt.index.strides).get(axis, ZERO)
    return replace(stmt, index=Index(stmt.index.offset + start * step, stmt.index.strides))


def _decided(stmts: Sequence[Stmt], known: Mapping[str, bool]) -> list[Stmt]:
    """Return the statements where some conditions are ``known``."""
    truth, same = dict(known), dict[str, str]()
    found: list[Stmt] = []
    for given in stmts:
        stmt = _with_names(given, same)
        if isinstance(stmt, Apply) and stmt.op == "logical_and":
            left = [arg for arg in stmt.args if truth.get(arg) is not True]
            if any(truth.get(arg) is False for arg in left):
                truth[stmt.out] = False
            elif not left:
                truth[stmt.out] = True
            elif len(left) == 1:
                same[stmt.out] = left[0]
                continue
        elif isinstance(stmt, Apply) and stmt.op == "where" and stmt.args[0] in truth:
            same[stmt.out] = stmt.args[1 if truth[stmt.args[0]] else 2]
            continue
        elif isinstance(stmt, Load | CheckIndex) and stmt.guard in truth:
            none = Literal(stmt.out, 0, stmt.dtype)  # nobody reads what is not loaded
            stmt = replace(stmt, guard=None) if truth[str(stmt.guard)] else none
        if isinstance(stmt, Apply) and stmt.out in truth:
            stmt = Literal(stmt.out, truth[stmt.out], stmt.dtype)
        found.append(stmt)
    return found


def _with_names(stmt: Stmt, names: Mapping[str, str]) -> Stmt:
    def new(name: str) -> str:
        return names.get(name, name)

    if isinstance(stmt, Apply):
        return replace(stmt, args=tuple(map(new, stmt.args)))
    if isinstance(stmt, Store):
        return replace(stmt, value=new(stmt.value))
    if isinstance(stmt, CheckIndex):
        return replace(stmt, value=new(stmt.value), guard=stmt.guard and new(stmt.guard))
    if isinstance(stmt, Load):
        lookups = tuple((new(name), stride) for name, stride in stmt.lookups)
        return replace(stmt, guard=stmt.guard and new(stmt.guard), lookups=lookups)
    return stmt


def _needed(stmts: Sequence[Stmt]) -> tuple[Stmt, ...]:
    """Return what stores need."""
    wanted: set[str] = set()
    found: list[Stmt] = []
    for stmt in reversed(stmts):
        if isinstance(stmt, Store) or not wanted.isdisjoint(outs_of(stmt)):
            wanted.update(args_of(stmt))
            found.insert(0, stmt)
    return tuple(found)
