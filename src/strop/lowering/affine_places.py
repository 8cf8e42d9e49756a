"""Read at an offset what is looked up at a place that is affine over axes and always inside its
dim: the check, the wait for it and single elements are then saved. Masks of attention are indexed
so, by ``arange`` for each dim."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from strop.ir.dims import Expr, const
from strop.ir.loops import (
    Apply,
    CheckIndex,
    Index,
    Literal,
    Load,
    Position,
    Reduce,
    Stmt,
    Store,
    args_of,
    outs_of,
)

SizeOf = Callable[[str], Expr]


def without_affine_places(stmts: Sequence[Stmt], size_of: SizeOf) -> list[Stmt]:
    """Return the statements with such places added to the indices of what they move."""
    affine: dict[str, Index] = {}
    inside: dict[str, Index] = {}
    found: list[Stmt] = []
    for stmt in stmts:
        own = _affine(stmt, affine)
        if own is not None:
            affine[outs_of(stmt)[0]] = own
        place = affine.get(stmt.value) if isinstance(stmt, CheckIndex) else None
        if isinstance(stmt, CheckIndex) and place and _is_inside(place, stmt.size, size_of):
            inside[stmt.out] = place
        if isinstance(stmt, Load) and any(name in inside for name, _ in stmt.lookups):
            stmt = _moved(stmt, inside)
        found.append(stmt)
    return _without_unused(found, frozenset(inside)) if inside else found


def _affine(stmt: Stmt, affine: dict[str, Index]) -> Index | None:
    if isinstance(stmt, Store | Reduce | Load) or stmt.dtype != torch.int64:
        return None
    if isinstance(stmt, Position):
        return stmt.index
    if isinstance(stmt, Literal):
        value = stmt.value
        if isinstance(value, Expr):
            return Index(value, ())
        is_whole = isinstance(value, int) and not isinstance(value, bool)
        return Index(const(int(value)), ()) if is_whole else None
    if not isinstance(stmt, Apply) or any(arg not in affine for arg in stmt.args):
        return None
    if stmt.op == "cast":
        return affine[stmt.args[0]]
    if stmt.op == "add" and dict(stmt.attrs).get("alpha", 1) == 1:
        left, right = (affine[arg] for arg in stmt.args)
        return _sum(left, right, const(1))
    return None


def _sum(left: Index, right: Index, factor: Expr) -> Index:
    strides = dict(left.strides)
    for axis, stride in right.strides:
        strides[axis] = strides.get(axis, const(0)) + stride * factor
    kept = tuple((axis, stride) for axis, stride in strides.items() if stride != const(0))
    return Index(left.offset + right.offset * factor, kept)


def _is_inside(place: Index, size: Expr, size_of: SizeOf) -> bool:
    """Tell whether the place is in range whatever the sizes are, which are positive."""
    if not place.offset.is_const or place.offset.value < 0:
        return False
    largest = place.offset
    for axis, stride in place.strides:
        if not stride.is_const or stride.value < 0:
            return False
        largest = largest + (size_of(axis) - 1) * stride
    rest = size - 1 - largest
    return rest.is_const and rest.value >= 0


def _moved(stmt: Load, inside: dict[str, Index]) -> Load:
    index = stmt.index
    for name, stride in stmt.lookups:
        if name in inside:
            index = _sum(index, inside[name], stride)
    lookups = tuple((name, stride) for name, stride in stmt.lookups if name not in inside)
    return replace(stmt, index=index, lookups=lookups)


def _without_unused(stmts: Sequence[Stmt], inside: frozenset[str]) -> list[Stmt]:
    """Drop what nothing reads any more; a check of what may be outside stays."""
    wanted: set[str] = set()
    kept: list[Stmt] = []
    for stmt in reversed(stmts):
        is_check = isinstance(stmt, CheckIndex) and stmt.out not in inside
        if isinstance(stmt, Store | Reduce) or is_check or not wanted.isdisjoint(outs_of(stmt)):
            wanted.update(args_of(stmt))
            kept.append(stmt)
    return kept[::-1]
