"""Count what a kernel's programs do, for estimates of its time: instructions for each element, and
trips to memory that wait for each other. A pure function of the kernel; nothing is compiled."""

from __future__ import annotations

import torch

from strop.ir.dims import Expr, const
from strop.ir.loops import (
    Apply,
    CheckIndex,
    Literal,
    Load,
    LoopKernel,
    OfPair,
    Position,
    Reduce,
    Stmt,
    Store,
    args_of,
    outs_of,
    spaces,
)
from strop.ir.ops import OPS
from strop.ir.source import Effort

# Instructions of an sm_90 for an element, fitted to machine code: T5's bias of attention has 56 of
# them, 45 by these numbers; with checks of two positions it had 92 (93). Addresses and integers of
# 64 bits are several instructions each.
LOAD, STORE, LOOKUP, CHECK, POSITION, REDUCE = 2, 3, 16, 18, 1, 3
SIMPLE, WIDE, HEAVY = 1, 4, 24
WIDE_TYPES = (torch.int64, torch.float64)


def effort_of(
    kernel: LoopKernel, elements: int, sweep: Expr | None = None, stride: int = 1, ahead: int = 1
) -> Effort:
    """Describe a kernel whose programs take steps of ``elements`` each, ``stride`` of a ``sweep``
    at a time, with the loads of ``ahead`` steps on their way at once."""
    instructions = sum(map(_instructions, _inner(kernel)))
    return Effort(instructions, elements, trips_of(kernel), sweep or const(1), stride, ahead)


def trips_of(kernel: LoopKernel) -> int:
    """Return how many loads wait for each other in one step, at most."""
    trips: dict[str, int] = {}
    for stmt in kernel.body:
        waited = max((trips[arg] for arg in args_of(stmt)), default=0)
        own = waited + isinstance(stmt, Load) if not isinstance(stmt, Reduce) else 0
        trips.update(dict.fromkeys(outs_of(stmt), own))
    return max(1, *trips.values()) if trips else 1


def _inner(kernel: LoopKernel) -> list[Stmt]:
    """Return what is done for each element, not once for a row of a tile."""
    cols = {axis.name for axis in kernel.cols if axis.size != const(1)}
    if not cols:
        return list(kernel.body)
    space = spaces(kernel)
    return [
        stmt
        for stmt in kernel.body
        if any(space[name] & cols for name in (*args_of(stmt), *_names_of(stmt)))
    ]


def _names_of(stmt: Stmt) -> tuple[str, ...]:
    return () if isinstance(stmt, Reduce) else outs_of(stmt)


def _instructions(stmt: Stmt) -> int:
    if isinstance(stmt, Load):
        return LOAD + LOOKUP * len(stmt.lookups)
    if isinstance(stmt, Apply):
        if OPS[stmt.op].is_heavy:
            return HEAVY
        return WIDE if stmt.dtype in WIDE_TYPES else SIMPLE
    simple: dict[type[Stmt], int] = {Store: STORE, CheckIndex: CHECK, Position: POSITION}
    simple |= {Reduce: REDUCE, Literal: 0, OfPair: SIMPLE}
    return simple[type(stmt)]
