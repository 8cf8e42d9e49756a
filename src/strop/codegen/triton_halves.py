"""Compute what is the same in both cols of a pair in half a tile, which has each pair once.

The cosines of rotary embedding may have a number for each pair. Read for each col, that is a load
of one number at a time, whose layout is none of the tile's: all of it goes through shared memory.
Half a tile has them side by side. A thread has in it the pairs that it has in the whole tile.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import lru_cache

from strop.codegen.triton_guards import PURE, is_pure
from strop.ir.loops import (
    Apply,
    CheckIndex,
    Load,
    LoopKernel,
    OfPair,
    S,
    Stmt,
    args_of,
    outs_of,
    spaces,
    with_args,
)


def with_halves(kernel: LoopKernel) -> LoopKernel:
    """Return the kernel with an ``OfPair`` of both between what is computed for pairs and what is
    for cols, if it reads anything for pairs; else the kernel itself. Its last col axis has two
    elements."""
    writing = _Halving(kernel)
    is_read = any(isinstance(s, Load) and s.out in writing.halves for s in kernel.body)
    return replace(kernel, body=writing.body()) if is_read else kernel


@lru_cache(maxsize=512)
def halves(kernel: LoopKernel) -> frozenset[str]:
    """Return the values that differ along the cols and are computed for pairs: of these those of
    both cols are taken."""
    space = spaces(kernel)
    cols = frozenset(axis.name for axis in kernel.cols)
    found = {s.value for s in kernel.body if isinstance(s, OfPair) and s.take == "both"}
    for stmt in reversed(kernel.body):
        if not found.isdisjoint(outs_of(stmt)):
            found.update(arg for arg in args_of(stmt) if space[arg] & cols)
    return frozenset(found)


@dataclass
class _Halving:
    """Write a body anew. What guards and indices are computed from is there for both cols, where
    it tells how memory is walked, and for pairs."""

    kernel: LoopKernel
    written: list[Stmt] = field(default_factory=list)
    names: dict[tuple[str, str], str] = field(default_factory=dict)  # of a value in another form

    def __post_init__(self) -> None:
        self.space = spaces(self.kernel)
        self.made = {out: stmt for stmt in self.kernel.body for out in outs_of(stmt)}
        self.cols = frozenset(axis.name for axis in self.kernel.cols)
        self.halves: set[str] = set()
        for stmt in self.kernel.body:
            if isinstance(stmt, Apply | CheckIndex | Load) and self._is_half(stmt):
                self.halves.add(stmt.out)

    def _is_half(self, stmt: Apply | CheckIndex | Load) -> bool:
        space = self.space[stmt.out]
        is_alike = bool(space & self.cols) and self.kernel.cols[-1].name not in space
        return is_alike and not is_pure(stmt.out, self.made)

    def body(self) -> tuple[Stmt, ...]:
        for stmt in self.kernel.body:
            is_half = not self.halves.isdisjoint(outs_of(stmt))
            change = self._of_half if is_half else self._of_both
            self.written.append(self._with(stmt, change))
        return tuple(self.written)

    def _with(self, stmt: S, change: Callable[[str], str]) -> S:
        return with_args(stmt, {name: change(name) for name in args_of(stmt)})

    def _of_both(self, name: str) -> str:
        """Return the name of a value for cols."""
        if name not in self.halves:
            return name
        if (name, "both") not in self.names:
            self.names[name, "both"] = f"{name}_both"
            dtype = self.made[name].dtype  # type: ignore[union-attr]  # it has one result
            self.written.append(OfPair(f"{name}_both", "both", name, dtype))
        return self.names[name, "both"]

    def _of_half(self, name: str) -> str:
        """Return the name of a value for pairs, having computed it anew if it is there for cols."""
        if name in self.halves or not self.space[name] & self.cols:
            return name
        if (name, "half") not in self.names:
            stmt = self.made[name]
            assert isinstance(stmt, PURE)
            self.names[name, "half"] = f"{name}_half"
            self.written.append(replace(self._with(stmt, self._of_half), out=f"{name}_half"))
        return self.names[name, "half"]
