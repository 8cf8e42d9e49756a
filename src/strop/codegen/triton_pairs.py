"""Read pairs of cols once, where a kernel reads ``x[2 i]`` and ``x[2 i + 1]`` in both of a pair.

Rotary embedding turns pairs of neighbours: each element needs its partner. As the index of the
partner is not that of the col, its loads are of two bytes, half of them masked: 19 kernels of
Flux.1 took 344 us where their bytes take 44. A pair lies in one thread, so one wide load of both
serves all of them, and what is computed from an even or odd element alone is the even or odd
element of the same computed for all: little but a choice among registers is left.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from strop.codegen.triton_guards import PURE, Conditions, Guards, freed
from strop.codegen.triton_halves import with_halves
from strop.codegen.triton_text import is_transposing
from strop.ir.dims import Expr, const
from strop.ir.loops import (
    Apply,
    Index,
    Literal,
    Load,
    LoopKernel,
    OfPair,
    Position,
    S,
    Stmt,
    args_of,
    outs_of,
    spaces,
    with_args,
)


@dataclass(frozen=True, slots=True)
class PairLoad:
    """Stand for the loads that read both elements of a pair of cols: all of one param, from one
    place. Their index without the last col is ``index``."""

    param: int
    index: Index
    lookups: tuple[tuple[str, Expr], ...]
    dtype: torch.dtype


Members = Mapping[str, Sequence[Load]]  # by what they read: "whole", "even", "odd"


@dataclass(frozen=True, slots=True)
class PairMember:
    """Tell which element of a pair a load reads, and when the pair is to be read: where all of any
    of these sets of conditions hold."""

    pair: PairLoad
    take: str
    conditions: frozenset[Conditions]


def with_pairs(kernel: LoopKernel) -> LoopKernel:
    """Return the kernel with one load for each pair, and one for both of its cols where these read
    the same, if there is any; else the kernel itself."""
    if len(kernel.cols) < 2 or kernel.cols[-1].size != const(2) or is_transposing(kernel):
        return kernel
    free = freed(kernel)
    made = with_halves(_with_whole_pairs(free))
    return kernel if made is free else made


def _with_whole_pairs(kernel: LoopKernel) -> LoopKernel:
    made = {out: stmt for stmt in kernel.body for out in outs_of(stmt)}
    space = spaces(kernel)
    guards = Guards(made, space, kernel.cols[-1:])
    found = {
        load.out: PairMember(pair, take, conditions)
        for pair, members in _members(kernel, space).items()
        if members.keys() != {"whole"} and (conditions := _conditions(guards, members)) is not None
        for take, loads in members.items()
        for load in loads
    }
    return replace(kernel, body=_Rewriting(kernel, found, made, space).body()) if found else kernel


def _members(kernel: LoopKernel, space: Mapping[str, frozenset[str]]) -> Mapping[PairLoad, Members]:
    """Return by pair the loads of its elements.

    The element beside one that may be read may be read too: pointers are aligned to more than two
    elements. What is read in the place of the 0 of a guard that does not hold matters to nobody:
    loads have guards in a cat alone, which chooses by the same conditions."""
    found: dict[PairLoad, dict[str, list[Load]]] = defaultdict(lambda: defaultdict(list))
    pair = kernel.cols[-1].name
    for stmt in kernel.body:
        if not isinstance(stmt, Load) or any(pair in space[name] for name, _ in stmt.lookups):
            continue  # a place may be there in one of both cols alone
        if place := _place(kernel, stmt):
            found[place[0]][place[1]].append(stmt)
    return found


def _place(kernel: LoopKernel, load: Load) -> tuple[PairLoad, str] | None:
    *_, inner, pair = kernel.cols
    strides = dict(load.index.strides)
    step = strides.pop(pair.name, None)
    if strides.get(inner.name) != const(2) or step not in (None, const(1)):
        return None
    offset = load.index.offset
    is_odd = step is None and not offset.is_multiple_of(2)
    base = offset - const(1) if is_odd else offset
    if is_odd and not base.is_multiple_of(2):
        return None
    rest = tuple((axis, stride) for axis, stride in load.index.strides if axis != pair.name)
    found = PairLoad(load.param, Index(base, rest), load.lookups, load.dtype)
    return found, "whole" if step is not None else "odd" if is_odd else "even"


def _conditions(guards: Guards, members: Members) -> frozenset[Conditions] | None:
    """Return conditions, the same in both cols of a pair, of which any must hold; none if loads
    cannot share one guard."""
    found = set()
    for load in (load for loads in members.values() for load in loads):
        own = frozenset[str]() if load.guard is None else guards.conditions(load.guard)
        if own is None:
            return None
        found.add(own)
    return frozenset({frozenset()}) if frozenset() in found else frozenset(found)


@dataclass
class _Rewriting:
    """Write the body of a kernel anew. A value that is an even or odd one of pairs is not computed,
    but the same for all cols, of which it is taken where something else needs it."""

    kernel: LoopKernel
    pairs: Mapping[str, PairMember]
    made: Mapping[str, Stmt]
    spaces: Mapping[str, frozenset[str]]
    written: list[Stmt] = field(default_factory=list)
    names: dict[str, str] = field(default_factory=dict)  # of values that are here as they were
    halves: dict[str, tuple[str, str]] = field(default_factory=dict)  # take, and of which value
    known: dict[str, str] = field(default_factory=dict)  # names of what is computed already

    def __post_init__(self) -> None:
        cols = frozenset(axis.name for axis in self.kernel.cols)
        self.alike = {name for name, space in self.spaces.items() if not space & cols}

    def body(self) -> tuple[Stmt, ...]:
        for stmt in self.kernel.body:
            self._rewrite(stmt)
        return tuple(self.written)

    def _rewrite(self, stmt: Stmt) -> None:
        if isinstance(stmt, Load) and stmt.out in self.pairs:
            member = self.pairs[stmt.out]
            name = self._whole(stmt.out, member)
            if member.take == "whole":
                self.names[stmt.out] = name
            else:
                self.halves[stmt.out] = member.take, name
        elif isinstance(stmt, Apply) and (take := self._common_take(stmt)):
            args = tuple(self.halves[a][1] if a in self.halves else self._now(a) for a in stmt.args)
            whole = replace(stmt, out=f"{stmt.out}_whole", args=args)
            self.halves[stmt.out] = take, self._write_once(whole)
        elif isinstance(stmt, PURE):
            if stmt.out not in self.names:  # as a guard may be, early
                self.names[stmt.out] = self._write_once(self._renamed(stmt))
        else:
            self.written.append(self._renamed(stmt))

    def _common_take(self, stmt: Apply) -> str:
        """Return "even" or "odd" where all operands that differ along the cols are that."""
        takes = {self.halves[arg][0] for arg in stmt.args if arg in self.halves}
        alike = all(arg in self.halves or arg in self.alike for arg in stmt.args)
        return takes.pop() if len(takes) == 1 and alike else ""

    def _now(self, name: str) -> str:
        """Return the name of a value here, having taken it of its pairs if it is such a one."""
        if name in self.halves:
            take, whole = self.halves[name]
            dtype = self.made[name].dtype  # type: ignore[union-attr]  # a Load or an Apply
            return self._write_once(OfPair(name, take, whole, dtype))
        return self.names.get(name, name)

    def _renamed(self, stmt: S) -> S:
        return with_args(stmt, {name: self._now(name) for name in args_of(stmt)})

    def _write_once(self, stmt: Apply | Literal | OfPair | Position) -> str:
        """Write a statement unless its like is there; return the name of the value."""
        key = repr(replace(stmt, out=""))
        if key not in self.known:
            self.known[key] = stmt.out
            self.written.append(stmt)
        return self.known[key]

    def _whole(self, name: str, member: PairMember) -> str:
        """Return the name of what all lanes of a pair read, having written its load the first
        time."""
        pair = member.pair
        key = repr(pair)
        if key not in self.known:
            self.known[key] = f"{name}_pair"
            guard = self._guard(member.conditions)
            strides = (*pair.index.strides, (self.kernel.cols[-1].name, const(1)))
            index = Index(pair.index.offset, strides)
            lookups = tuple((self._now(name), stride) for name, stride in pair.lookups)
            load = Load(f"{name}_pair", pair.param, index, pair.dtype, guard, lookups)
            self.written.append(load)
        return self.known[key]

    def _guard(self, any_of: frozenset[Conditions]) -> str | None:
        """Write whether all of any of these sets of conditions hold."""
        if frozenset() in any_of:
            return None
        alternatives = sorted(map(sorted, any_of))  # a set has another order in each process
        names = [self._joined("logical_and", names) for names in alternatives]
        return self._joined("logical_or", sorted(names))

    def _joined(self, op: str, names: Sequence[str]) -> str:
        first, *others = [self._early(name) for name in names]
        for other in others:
            stmt = Apply(f"{first}_{op}_{other}", op, (first, other), torch.bool)
            first = self._write_once(stmt)
        return first

    def _early(self, name: str) -> str:
        """Write a condition, and what it is computed from, ahead of its time."""
        if name in self.made and name not in self.names:
            for arg in args_of(self.made[name]):
                self._early(arg)
            self._rewrite(self.made[name])
        return self.names.get(name, name)
