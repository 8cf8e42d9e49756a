"""Softmax as C++ runs it best. Its sum of exponentials has one that is 1, and all are positive."""

from __future__ import annotations

from dataclasses import replace

import torch

from strop.ir.loops import Apply, Kernel, Reduce, Schedule, Stmt, outs_of


def _sums_of_powers(kernel: Kernel) -> frozenset[str]:
    """Results of sum(exp(x - amax(x))) in fp32, which lie between 1 and the number of elements."""
    makers = {out: stmt for stmt in kernel.body for out in outs_of(stmt)}

    def is_one(stmt: Stmt) -> bool:
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

    return frozenset(out for stmt in kernel.body if is_one(stmt) for out in outs_of(stmt))


def with_powers(kernel: Kernel) -> Kernel:
    """Such sums as reductions of their own kind, "powers": (sum, 1 / sum).

    What they divide becomes a product: a quotient takes as long as ten of them.
    """
    if kernel.schedule is not Schedule.ROW:
        return kernel
    sums = _sums_of_powers(kernel)

    def rewritten(stmt: Stmt) -> Stmt:
        if isinstance(stmt, Reduce) and stmt.outs[0] in sums:
            return replace(stmt, kind="powers", outs=(stmt.outs[0], f"{stmt.outs[0]}_inverse"))
        if isinstance(stmt, Apply) and stmt.op == "div" and stmt.args[1] in sums:
            return replace(stmt, op="mul", args=(stmt.args[0], f"{stmt.args[1]}_inverse"))
        return stmt

    return replace(kernel, body=tuple(map(rewritten, kernel.body)))
