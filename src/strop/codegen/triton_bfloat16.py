"""Print how bf16 becomes fp32, and fp32 is rounded to it, for two neighbours at once.

By Triton's casts each number that is rounded takes ``F2F``, of which a multiprocessor starts 16 a
clock, and a shift; the upper one of two that are loaded takes ``PRMT`` and a shift. Two that lie
side by side in a thread are rounded by one ``F2FP``, and the upper one is widened by a mask. fp16
has such instructions by itself: its casts stay.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence, Set
from functools import lru_cache

import torch

from strop.ir.dims import const
from strop.ir.functions import SM_90
from strop.ir.loops import (
    Apply,
    Axis,
    Load,
    LoopKernel,
    OfPair,
    Stmt,
    Store,
    args_of,
    outs_of,
)
from strop.ir.ops import compute_dtype


def rounded(text: str) -> str:
    """Return a value of fp32, rounded to bf16 and wide again."""
    return f"rounded_to_bfloat16({text}, {SM_90})"


def widened(text: str) -> str:
    """Return a block of bf16 in fp32."""
    return f"widened({text}, {SM_90})"


@lru_cache(maxsize=512)
def narrow(kernel: LoopKernel) -> frozenset[str]:
    """Return values of bf16 that the compiler keeps so if casts say what they are: what is stored
    as it is, chosen among others, or added or multiplied and rounded again, which two numbers are
    at once. A value that is rounded and has another use as well is not among them."""
    return frozenset(_Narrow(kernel).found())


class _Narrow:
    """Follow values of bf16 from where they are read or rounded to where they are rounded."""

    def __init__(self, kernel: LoopKernel) -> None:
        self.kernel, self.stmts = kernel, kernel.body + kernel.tail
        self.users: dict[str, list[Stmt]] = defaultdict(list)
        self.exact: set[str] = set()  # numbers of bf16, whatever type they are computed in
        for stmt in self.stmts:
            for arg in args_of(stmt):
                self.users[arg].append(stmt)
            if self._is_exact(stmt):
                self.exact.update(outs_of(stmt))

    def found(self) -> set[str]:
        found: set[str] = set()
        for stmt in reversed(self.stmts):
            for out in self.exact.intersection(outs_of(stmt)):
                are_narrow = [self._is_narrow(user, found) for user in self.users[out]]
                if are_narrow and (all if _is_rounded(stmt) else any)(are_narrow):
                    found.add(out)
        return found

    def _is_exact(self, stmt: Stmt) -> bool:
        if isinstance(stmt, Load):
            return self.kernel.params[stmt.param].dtype is torch.bfloat16
        if isinstance(stmt, OfPair):
            return stmt.value in self.exact
        if not isinstance(stmt, Apply) or compute_dtype(stmt.dtype) is not torch.float32:
            return False
        is_passed = stmt.op in ("cast", "neg", "where") and self.exact.issuperset(stmt.args[-2:])
        return is_passed or _is_rounded(stmt)

    def _is_narrow(self, user: Stmt, found: Set[str]) -> bool:
        """Tell whether something needs no more than bf16 of a value that is exact."""
        if self._ends_rounded(user):
            return True
        if isinstance(user, OfPair):
            return user.out in found
        if not isinstance(user, Apply):
            return False
        if user.op in ("add", "sub", "mul") and dict(user.attrs).get("alpha", 1) == 1:
            # rounded from fp32, they are what they are in bf16
            are_exact = self.exact.issuperset(user.args)
            return are_exact and all(map(self._ends_rounded, self.users[user.out]))
        return user.out in (self.exact if user.op == "where" else found)

    def _ends_rounded(self, stmt: Stmt) -> bool:
        if isinstance(stmt, Store):
            return self.kernel.params[stmt.param].dtype is torch.bfloat16
        if isinstance(stmt, Apply) and stmt.op == "where":
            return all(map(self._ends_rounded, self.users[stmt.out]))
        return _is_rounded(stmt)


def _is_rounded(stmt: Stmt) -> bool:
    return isinstance(stmt, Apply) and stmt.op == "cast" and stmt.dtype is torch.bfloat16


def lies_in_twos(load: Load, cols: Sequence[Axis], *, is_masked: bool) -> bool:
    """Tell whether neighbours along the cols lie side by side in memory, the first of each two at
    an even place, so that one load reads both. ``is_masked``: some cols are behind the last."""
    long = [axis for axis in cols if axis.size != const(1)]
    if not long:
        return False
    last = long[-1]
    strides = dict(load.index.strides)
    if strides.pop(last.name, None) != const(1):
        return False
    others = [*strides.values(), *(stride for _, stride in load.lookups), load.index.offset]
    if len(long) > 1 or is_masked:
        others.append(last.size)
    return all(number.is_multiple_of(2) for number in others)
