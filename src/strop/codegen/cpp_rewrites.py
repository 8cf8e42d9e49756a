"""Softmax as C++ runs it best. Its sum of exponentials has one that is 1, and all are positive."""

from __future__ import annotations

from dataclasses import replace
from typing import TypeGuard

import torch

from strop.codegen.cpp_text import OF_NEGATIVE
from strop.ir.loops import Apply, Kernel, Reduce, Schedule, Stmt, outs_of


def _powers(kernel: Kernel) -> dict[str, str]:
    """Results of sum(exp(x - amax(x))) in fp32, between 1 and the number of elements -> the exp."""
    makers = {out: stmt for stmt in kernel.body for out in outs_of(stmt)}

    def is_one(stmt: Stmt) -> TypeGuard[Reduce]:
        if not isinstance(stmt, Reduce) or stmt.kind != "sum" or stmt.dtype is torch.float64:
            return False
        power = makers[stmt.arg]
        if not isinstance(power, Apply) or power.op != "exp":
            return False
        shifted = makers[power.args[0]]
        if not isinstance(shifted, Apply) or shifted.op != "sub":
            return False
        top = makers[shifted.args[1]]
        return isinstance(top, Reduce) and top.kind == "amax" and top.arg == shifted.args[0]

    return {out: stmt.arg for stmt in kernel.body if is_one(stmt) for out in stmt.outs}


def with_powers(kernel: Kernel) -> Kernel:
    """Such sums as reductions of their own kind, "powers": (sum, 1 / sum).

    What they divide becomes a product: a quotient takes as long as ten of them. Their exponentials
    get the attribute that makes them those of negative numbers.
    """
    if kernel.schedule is not Schedule.ROW:
        return kernel
    sums = _powers(kernel)
    powers = set(sums.values())

    def rewritten(stmt: Stmt) -> Stmt:
        if isinstance(stmt, Reduce) and stmt.outs[0] in sums:
            return replace(stmt, kind="powers", outs=(stmt.outs[0], f"{stmt.outs[0]}_inverse"))
        if isinstance(stmt, Apply) and stmt.op == "div" and stmt.args[1] in sums:
            return replace(stmt, op="mul", args=(stmt.args[0], f"{stmt.args[1]}_inverse"))
        if isinstance(stmt, Apply) and stmt.out in powers:
            return replace(stmt, attrs=(*stmt.attrs, OF_NEGATIVE))
        return stmt

    return replace(kernel, body=tuple(map(rewritten, kernel.body)))
