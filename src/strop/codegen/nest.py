"""Turns a kernel's loops into the ones that get printed: merged axes, sweeps, staged values.

Nothing here knows about a language. ``simplify`` returns an equal kernel with as few axes as its
indices allow; ``lane_stride`` says which indices survive flattening all cols into one lane axis;
``plan_sweeps`` cuts a ROW body into passes over the cols and picks the values to keep between them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch

from strop.ir.dims import Expr, const
from strop.ir.loops import (
    Apply,
    Axis,
    Index,
    Load,
    LoopKernel,
    Position,
    Reduce,
    Schedule,
    Stmt,
    Store,
    args_of,
    indices_of,
    outs_of,
)
from strop.ir.ops import OPS, Op

ONE, ZERO = const(1), const(0)

# Computing a value again costs vector instructions; keeping it costs a store and loads.
_DIVIDING = ("/", "sqrt")  # in the C++ of a row
_KEEP_FROM = 3
_CUT_FROM = 128  # cols


def stride_of(index: Index, axis: str) -> Expr:
    return next((stride for name, stride in index.strides if name == axis), ZERO)


def simplify(kernel: LoopKernel) -> LoopKernel:
    """Drop axes of size 1, put the unit-stride col last, merge axes that every index allows."""
    rows = [axis for axis in kernel.rows if axis.size != ONE]
    cols = [axis for axis in kernel.cols if axis.size != ONE] or [kernel.cols[-1]]
    if kernel.schedule is not Schedule.COLUMN:
        cols.sort(key=lambda axis: _num_contiguous(kernel, axis))
    indices = tuple(indices_of(kernel))
    rows, cols = _merge(rows, indices), _merge(cols, indices)
    if kernel.schedule is Schedule.POINTWISE and rows:
        merged = _merge(rows + cols, indices)
        if len(merged) == 1:  # a partial merge would leave fewer rows to run in parallel
            rows, cols = [], merged
    return _renamed(kernel, rows, cols)


def _num_contiguous(kernel: LoopKernel, axis: Axis) -> int:
    accesses = (stmt.index for stmt in kernel.body if isinstance(stmt, Load | Store))
    return sum(stride_of(index, axis.name) == ONE for index in accesses)


def _merge(axes: Sequence[Axis], indices: Sequence[Index]) -> list[Axis]:
    """Merge a pair of axes; the inner one keeps its name, and its strides are those of the pair."""
    merged: list[Axis] = []
    for axis in axes:
        if merged and _can_merge(merged[-1], axis, indices):
            axis = replace(axis, size=merged.pop().size * axis.size)
        merged.append(axis)
    return merged


def _can_merge(outer: Axis, inner: Axis, indices: Iterable[Index]) -> bool:
    return outer.reduced == inner.reduced and all(
        stride_of(index, outer.name) == stride_of(index, inner.name) * inner.size
        for index in indices
    )


def _renamed(kernel: LoopKernel, rows: Sequence[Axis], cols: Sequence[Axis]) -> LoopKernel:
    """Rename axes to r0, r1, ... and c0, c1, ..., so that texts do not depend on given names."""
    names = {axis.name: f"r{i}" for i, axis in enumerate(rows)}
    names |= {axis.name: f"c{i}" for i, axis in enumerate(cols)}

    def rename(stmt: Stmt) -> Stmt:
        if not isinstance(stmt, Load | Position | Store):
            return stmt
        strides = ((axis, stride) for axis, stride in stmt.index.strides if axis in names)
        kept = tuple((names[axis], stride) for axis, stride in sorted(strides, key=_axis_order))
        return replace(stmt, index=Index(stmt.index.offset, kept))

    order = [axis.name for axis in (*rows, *cols)]

    def _axis_order(term: tuple[str, Expr]) -> int:
        return order.index(term[0])

    return replace(
        kernel,
        rows=tuple(replace(axis, name=names[axis.name]) for axis in rows),
        cols=tuple(replace(axis, name=names[axis.name]) for axis in cols),
        body=tuple(rename(stmt) for stmt in kernel.body),
        tail=tuple(rename(stmt) for stmt in kernel.tail),
    )


def lane_stride(index: Index, cols: Sequence[Axis]) -> Expr | None:
    """Return the stride of this index along all cols flattened into one axis, None if there is
    none."""
    stride = stride_of(index, cols[-1].name)
    step = stride * cols[-1].size
    for axis in reversed(cols[:-1]):
        if stride_of(index, axis.name) != step:
            return None
        step = step * axis.size
    return stride


def irregular(kernel: LoopKernel) -> tuple[Load | Position, ...] | None:
    """Return the statements that need a copy in lane order before all cols can be flattened.

    None if flattening is impossible: a store, or a load that needs other values (a guard, a place),
    is not affine in the lane.
    """
    found: list[Load | Position] = []
    for stmt in kernel.body:
        if not isinstance(stmt, Load | Position | Store):
            continue
        if isinstance(stmt, Load) and stmt.bag is not None:
            continue  # it has a row buffer of its own
        if lane_stride(stmt.index, kernel.cols) is not None:
            continue
        if isinstance(stmt, Store) or (isinstance(stmt, Load) and (stmt.guard or stmt.lookups)):
            return None
        found.append(stmt)
    return tuple(found)


def is_transposing(kernel: LoopKernel) -> bool:
    """Tell whether something is contiguous along the last row axis and strided along the cols."""
    if kernel.schedule is not Schedule.POINTWISE or not kernel.rows:
        return False
    row, col = kernel.rows[-1].name, kernel.cols[-1].name
    accesses = (stmt.index for stmt in kernel.body if isinstance(stmt, Load | Store))
    return any(
        stride_of(index, row) == ONE and stride_of(index, col) not in (ZERO, ONE)
        for index in accesses
    )


def closure(stmts: Sequence[Stmt], roots: Iterable[str], known: frozenset[str]) -> tuple[Stmt, ...]:
    """Return the statements that compute ``roots`` from ``known`` values, in order."""
    wanted = set(roots) - known
    found: list[Stmt] = []
    for stmt in reversed(stmts):
        if wanted.intersection(outs_of(stmt)):
            found.append(stmt)
            wanted.update(set(args_of(stmt)) - known)
    return tuple(reversed(found))


def needs(stmts: Sequence[Stmt], roots: Iterable[str], known: frozenset[str]) -> set[str]:
    """Return the ``known`` values that computing ``roots`` starts from."""
    used = {arg for stmt in closure(stmts, roots, known) for arg in args_of(stmt)}
    return used.union(roots) & known


@dataclass(frozen=True, slots=True)
class Sweep:
    """Describe one pass over the cols of a row."""

    level: int
    reduces: tuple[Reduce, ...]
    stores: tuple[Store, ...]
    stmts: tuple[Stmt, ...] = ()
    keeps: tuple[str, ...] = ()  # values written to row buffers here
    reads: tuple[tuple[str, torch.dtype], ...] = ()  # values read from row buffers
    cut: tuple[str, ...] = ()  # what it computes for the next sweep alone

    @property
    def roots(self) -> tuple[str, ...]:
        found = tuple(r.arg for r in self.reduces) + tuple(s.value for s in self.stores)
        return found + self.cut


@dataclass(frozen=True, slots=True)
class SweepPlan:
    levels: dict[str, int]  # reductions in sequence before a value is known
    sweeps: tuple[Sweep, ...]
    kept: tuple[str, ...]  # values that live in a row buffer from their first sweep on


def plan_sweeps(
    kernel: LoopKernel, outside: frozenset[str], stores: tuple[Store, ...]
) -> SweepPlan:
    """Plan the passes over the cols of one row; ``outside`` are the values that do not vary over
    cols."""
    levels = _levels(kernel)
    sweeps = [
        sweep
        for sweep in _bare_sweeps(kernel, levels, stores, _cuts(kernel, outside))
        if sweep.roots
    ]
    cost = _costs(kernel, outside)
    bodies = [closure(kernel.body, sweep.roots, outside) for sweep in sweeps]
    kept = _shared_frontier(sweeps, bodies, {v for v, c in cost.items() if c >= _KEEP_FROM})
    kept |= {value for sweep in sweeps for value in sweep.cut}
    dtypes = {out: s.dtype for s in kernel.body if not isinstance(s, Store) for out in outs_of(s)}
    written: dict[str, None] = {}
    final = []
    for sweep in sweeps:
        stmts = closure(kernel.body, sweep.roots, outside.union(written))
        used = {arg for stmt in stmts for arg in args_of(stmt)}.union(sweep.roots)
        reads = tuple((value, dtypes[value]) for value in written if value in used)
        keeps = tuple(out for stmt in stmts for out in outs_of(stmt) if out in kept)
        written.update(dict.fromkeys(keeps))
        final.append(replace(sweep, stmts=stmts, keeps=keeps, reads=reads))
    return SweepPlan(levels, tuple(final), tuple(written))


def _levels(kernel: LoopKernel) -> dict[str, int]:
    levels: dict[str, int] = {}
    for stmt in kernel.body:
        level = max((levels[arg] for arg in args_of(stmt)), default=0)
        for out in outs_of(stmt):
            levels[out] = level + isinstance(stmt, Reduce)
    return levels


def _bare_sweeps(
    kernel: LoopKernel, levels: dict[str, int], stores: tuple[Store, ...], cuts: Sequence[str]
) -> Iterable[Sweep]:
    reduces = [stmt for stmt in kernel.body if isinstance(stmt, Reduce)]
    depth = max((levels[out] for r in reduces for out in r.outs), default=0)
    for level in range(depth + 1):
        yield from (Sweep(level, (), (), cut=(v,)) for v in cuts if levels[v] == level)
        if level < depth:
            yield Sweep(level, tuple(r for r in reduces if levels[r.arg] == level), ())
    yield Sweep(depth, (), stores)


def _cuts(kernel: LoopKernel, outside: frozenset[str]) -> tuple[str, ...]:
    """Return what a kernel of panels computes in sweeps of its own: the operand of an operator such
    as erf, and its result. Its steps wait for each other, and a processor has more elements at
    work where a loop has fewer steps. Elsewhere rows are shorter than what that takes."""
    columns = [param.panel.columns for param in kernel.params if param.panel is not None]
    applied = [stmt for stmt in kernel.body if isinstance(stmt, Apply) and OPS[stmt.op].is_heavy]
    if len(applied) != 1 or len(applied[0].args) != 1 or max(columns, default=0) < _CUT_FROM:
        return ()
    if not outside.isdisjoint((*applied[0].args, applied[0].out)):
        return ()
    return (*applied[0].args, applied[0].out)


def _costs(kernel: LoopKernel, outside: frozenset[str]) -> dict[str, float]:
    cost: dict[str, float] = dict.fromkeys(outside, 0.0)
    for stmt in kernel.body:
        own = 1.0
        if isinstance(stmt, Apply) and _is_costly(OPS[stmt.op]):
            own = 8.0
        elif isinstance(stmt, Load) and kernel.params[stmt.param].dtype.itemsize < 4:
            own = 2.0
        for out in outs_of(stmt):
            cost.setdefault(out, own + sum(cost[arg] for arg in args_of(stmt)))
    return cost


def _is_costly(op: Op) -> bool:
    return op.is_heavy or any(text in op.cpp for text in _DIVIDING)


def _shared_frontier(
    sweeps: Sequence[Sweep], bodies: Sequence[tuple[Stmt, ...]], costly: set[str]
) -> frozenset[str]:
    """Return costly values of several sweeps that something outside the shared part uses."""
    names = [{out for stmt in body for out in outs_of(stmt)} for body in bodies]
    shared = {v for some in names for v in some if sum(v in other for other in names) > 1}
    used = {root for sweep in sweeps for root in sweep.roots}
    for body in bodies:
        for stmt in body:
            if not shared.issuperset(outs_of(stmt)):
                used.update(args_of(stmt))
    return frozenset(shared & used & costly)
