"""Rewrite softmax and casts to codes as C++ runs them best.

The sum of exponentials of a softmax has one that is 1, and all are positive. Numbers that are
limited before they become codes of 8 bits need no detour by 64 bits.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from strop.codegen.cpp_text import CODED, LIMITED, OF_NEGATIVE
from strop.ir.loops import Apply, Literal, LoopKernel, Reduce, Schedule, Stmt, args_of, outs_of
from strop.ir.ops import compute_dtype

_CODES = (torch.uint8, torch.int8)
_MOST, _MOST_CODE = float(2**30), float(2**20)


@dataclass(frozen=True, slots=True)
class _Powers:
    """Compute ``total`` = sum(exp(x - amax(x))) in fp32, which lies between 1 and the number of
    elements."""

    total: Reduce
    power: Apply
    shifted: Apply
    top: Reduce


def _powers(kernel: LoopKernel) -> tuple[_Powers, ...]:
    makers = {out: stmt for stmt in kernel.body for out in outs_of(stmt)}
    found = []
    for total in kernel.body:
        if not isinstance(total, Reduce) or total.kind != "sum" or total.dtype is torch.float64:
            continue
        power = makers[total.arg]
        if not isinstance(power, Apply) or power.op != "exp":
            continue
        shifted = makers[power.args[0]]
        if not isinstance(shifted, Apply) or shifted.op != "sub":
            continue
        top = makers[shifted.args[1]]
        if isinstance(top, Reduce) and top.kind == "amax" and top.arg == shifted.args[0]:
            found.append(_Powers(total, power, shifted, top))
    return tuple(found)


def _is_softmax(kernel: LoopKernel, found: _Powers) -> bool:
    """Tell whether powers are only summed and divided by their sum: NaN in one of them reaches
    all."""

    def users(name: str) -> list[Stmt]:
        return [stmt for stmt in kernel.body + kernel.tail if name in args_of(stmt)]

    (total,) = found.total.outs
    quotients = [stmt for stmt in users(found.power.out) if stmt is not found.total]
    return (
        users(found.top.outs[0]) == [found.shifted]
        and users(found.shifted.out) == [found.power]
        and all(isinstance(q, Apply) and q.op == "div" and q.args[1] == total for q in quotients)
    )


def with_powers(kernel: LoopKernel) -> LoopKernel:
    """Write such sums as reductions of their own kind, "powers": (sum, 1 / sum).

    What they divide becomes a product: a quotient takes as long as ten of them. Their exponentials
    get the attribute that makes them those of negative numbers. The amax of a softmax becomes a
    "top", which need not care for NaN.
    """
    if kernel.schedule is not Schedule.ROW:
        return kernel
    found = _powers(kernel)
    sums = {p.total.outs[0] for p in found}
    powers = {p.power.out for p in found}
    tops = {p.top.outs[0] for p in found if _is_softmax(kernel, p)}

    def rewritten(stmt: Stmt) -> Stmt:
        if isinstance(stmt, Reduce) and stmt.outs[0] in sums:
            return replace(stmt, kind="powers", outs=(stmt.outs[0], f"{stmt.outs[0]}_inverse"))
        if isinstance(stmt, Reduce) and stmt.outs[0] in tops:
            return replace(stmt, kind="top")
        if isinstance(stmt, Apply) and stmt.op == "div" and stmt.args[1] in sums:
            return replace(stmt, op="mul", args=(stmt.args[0], f"{stmt.args[1]}_inverse"))
        if isinstance(stmt, Apply) and stmt.out in powers:
            return replace(stmt, attrs=(*stmt.attrs, OF_NEGATIVE))
        return stmt

    return replace(kernel, body=tuple(map(rewritten, kernel.body)))


def with_limits(kernel: LoopKernel) -> LoopKernel:
    """Mark casts to codes of numbers in fp32 that known limits keep within int32, and the limits
    that nothing else reads, to which the sign of a zero is all one. Codes of rounded numbers become
    one statement, ``sp::code``."""
    makers = {out: stmt for stmt in kernel.body for out in outs_of(stmt)}
    casts = {
        stmt.out: makers[stmt.args[0]]
        for stmt in kernel.body
        if isinstance(stmt, Apply) and stmt.op == "cast" and stmt.dtype in _CODES
        if _is_limit(makers.get(stmt.args[0]), makers)
    }
    if not casts:
        return kernel
    read = {
        arg
        for stmt in (*kernel.body, *kernel.tail)
        if not casts.keys() & set(outs_of(stmt))
        for arg in args_of(stmt)
    }

    def rewritten(stmt: Stmt) -> Stmt:
        if not isinstance(stmt, Apply):
            return stmt
        limit = casts.get(stmt.out)
        if limit is not None and (args := _of_code(limit, makers)):
            return replace(stmt, args=args, attrs=(*stmt.attrs, CODED))
        if limit is not None or (stmt in casts.values() and read.isdisjoint(outs_of(stmt))):
            return replace(stmt, attrs=(*stmt.attrs, LIMITED))
        return stmt

    return replace(kernel, body=tuple(map(rewritten, kernel.body)))


def _of_code(limit: Stmt, makers: Mapping[str, Stmt]) -> tuple[str, ...]:
    """Return x, a zero point, and two limits, if a limited number is round(x) plus the zero point,
    all of them whole; else nothing. The least is 0, which NaN becomes in eager, too."""
    assert isinstance(limit, Apply)
    value, least, most = limit.args
    added = makers.get(value)
    if not isinstance(added, Apply) or added.op != "add" or dict(added.attrs).get("alpha", 1) != 1:
        return ()
    rounded, zero = makers.get(added.args[0]), added.args[1]
    if not isinstance(rounded, Apply) or rounded.op != "round" or rounded.attrs:
        return ()
    known = [_number_of(makers.get(name)) for name in (zero, least, most)]
    is_code = all(n is not None and n == int(n) and abs(n) < _MOST_CODE for n in known)
    return (*rounded.args, zero, least, most) if is_code and known[1] == 0 else ()


def _number_of(stmt: Stmt | None) -> float | None:
    is_number = isinstance(stmt, Literal) and isinstance(stmt.value, int | float)
    return float(stmt.value) if is_number and math.isfinite(stmt.value) else None  # type: ignore[union-attr,arg-type]


def _is_limit(stmt: Stmt | None, makers: Mapping[str, Stmt]) -> bool:
    """Tell whether this is a clamp in fp32 to two numbers."""
    if not isinstance(stmt, Apply) or stmt.op != "clamp":
        return False
    if compute_dtype(stmt.dtype) is not torch.float32:
        return False
    ends = [_number_of(makers.get(arg)) for arg in stmt.args[1:]]
    return all(end is not None and abs(end) <= _MOST for end in ends)
