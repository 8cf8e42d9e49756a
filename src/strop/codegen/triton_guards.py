"""Free guards of what they ask about the col of a pair, where what they guard is the same in both.

A product of complex numbers whose parts lie in two tables is written to the even cols by one sum
and to the odd ones by another, as pieces of a cat: each reads the tables for its own cols. Guards
tell these loads apart and nothing else does. Without them one is left for both cols: kernels of
Z-Image's queries and keys had 16 loads of four bytes a thread in the place of two of 16.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from strop.ir.dims import Expr, const
from strop.ir.loops import (
    Apply,
    Axis,
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
    with_args,
)
from strop.ir.ops import OPS

PURE = Apply | Literal | Position  # of these guards are computed
MOST_PLACES = 2**16  # at which it is tried whether a condition holds

Made = Mapping[str, Stmt]  # by name
Conditions = frozenset[str]  # names of values that hold all at once


def is_pure(name: str, made: Made) -> bool:
    """Tell whether nothing is read for a value."""
    stmt = made[name]
    return isinstance(stmt, PURE) and all(is_pure(arg, made) for arg in args_of(stmt))


@dataclass(frozen=True)
class Guards:
    """Find what guards ask besides conditions on some ``axes`` alone, whose sizes are known."""

    made: Made
    spaces: Mapping[str, frozenset[str]]
    axes: tuple[Axis, ...]

    def conditions(self, guard: str) -> Conditions | None:
        """Return what has to hold besides conditions on the axes. Returns None if these are mixed,
        hold nowhere, or if something is read for them."""
        own = {axis.name for axis in self.axes}
        kept, holds = set(), torch.tensor(True)
        waiting = [guard]
        while waiting:
            name = waiting.pop()
            stmt, space = self.made[name], self.spaces[name]
            if isinstance(stmt, Apply) and stmt.op == "logical_and":
                waiting += stmt.args
            elif space and space <= own and (values := self._values(name)) is not None:
                holds = holds & values
            elif own & space or not is_pure(name, self.made):
                return None
            else:
                kept.add(name)
        return frozenset(kept) if holds.any() else None

    def _values(self, name: str) -> torch.Tensor | None:
        """Return a value that depends on the axes alone, all over them, if that is known."""
        stmt = self.made[name]
        if isinstance(stmt, Position):
            return self._places(stmt)
        if isinstance(stmt, Literal):
            return None if isinstance(stmt.value, Expr) else torch.tensor(stmt.value)
        if not isinstance(stmt, Apply) or (reference := OPS[stmt.op].reference) is None:
            return None
        args = [self._values(arg) for arg in stmt.args]
        if any(arg is None for arg in args):
            return None
        result: torch.Tensor = reference(*args, **dict(stmt.attrs))
        return result

    def _places(self, stmt: Position) -> torch.Tensor | None:
        offset, strides = stmt.index.offset, dict(stmt.index.strides)
        if not (offset.is_const and all(stride.is_const for stride in strides.values())):
            return None
        places = torch.tensor(offset.value)
        for number, axis in enumerate(self.axes):
            shape = [1] * number + [-1] + [1] * (len(self.axes) - 1 - number)
            stride = strides.get(axis.name, const(0)).value
            places = places + stride * torch.arange(axis.size.value).reshape(shape)
        return places


def freed(kernel: LoopKernel) -> LoopKernel:
    """Return the kernel with freed guards, in which nothing is computed twice. Its last col axis
    has two elements.

    What is read for one col may be read for another that it is the same for, and what is read in
    the place of the 0 of a guard that does not hold matters to nobody: guards are of a cat alone,
    which chooses by the same conditions. A place is as wrong for one col as for all of them."""
    while (free := _Freeing(kernel).kernel()) != kernel:  # a place is that of an id, a load's of it
        kernel = free
    return kernel


@dataclass
class _Freeing:
    given: LoopKernel
    written: list[Stmt] = field(default_factory=list)
    names: dict[str, str] = field(default_factory=dict)  # of values that are another one
    known: dict[str, str] = field(default_factory=dict)  # names of what is computed already

    def __post_init__(self) -> None:
        self.made = {out: stmt for stmt in self.given.body for out in outs_of(stmt)}
        self.spaces = spaces(self.given)

    def kernel(self) -> LoopKernel:
        for stmt in self.given.body:
            renamed = with_args(stmt, self.names)
            if isinstance(renamed, Reduce | Store):
                self.written.append(renamed)
                continue
            if isinstance(renamed, Load | CheckIndex):
                assert isinstance(stmt, Load | CheckIndex)
                renamed = replace(renamed, guard=self._guard(stmt))
            self.names[renamed.out] = self._write_once(renamed)
        return replace(self.given, body=tuple(self.written))

    def _guard(self, stmt: Load | CheckIndex) -> str | None:
        if stmt.guard is None:
            return None
        for axes in self._axes(stmt):
            conditions = Guards(self.made, self.spaces, axes).conditions(stmt.guard)
            if conditions is not None:
                return self._joined(sorted(conditions))
        return self.names.get(stmt.guard, stmt.guard)

    def _axes(self, stmt: Load | CheckIndex) -> Sequence[tuple[Axis, ...]]:
        """Return axes that a guard may leave out, the most first: those of the cols for all of
        which the same is read or checked."""
        read = [stmt.value] if isinstance(stmt, CheckIndex) else [n for n, _ in stmt.lookups]
        walked = frozenset().union(*(self.spaces[name] for name in read))
        walked |= stmt.index.axes if isinstance(stmt, Load) else frozenset()
        others = tuple(axis for axis in self.given.cols if axis.name not in walked)
        is_known = all(axis.size.is_const for axis in others)
        is_small = is_known and math.prod(axis.size.value for axis in others) <= MOST_PLACES
        pair = others[-1:] if others[-1:] == self.given.cols[-1:] else ()
        return [axes for axes in (others if is_small else (), pair) if axes]

    def _joined(self, conditions: Sequence[str]) -> str | None:
        if not conditions:
            return None
        first, *others = [self.names.get(name, name) for name in conditions]
        for other in others:
            name = f"{first}_logical_and_{other}"
            first = self._write_once(Apply(name, "logical_and", (first, other), torch.bool))
        return first

    def _write_once(self, stmt: PURE | CheckIndex | Load | OfPair) -> str:
        key = repr(replace(stmt, out=""))
        if key not in self.known:
            self.known[key] = stmt.out
            self.written.append(stmt)
        return self.known[key]
