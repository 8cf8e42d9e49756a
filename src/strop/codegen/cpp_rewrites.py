"""Softmax as C++ runs it best. Its sum of exponentials has one that is 1, and all are positive."""

from __future__ import annotations

from collections.abc import Iterator, Set
from dataclasses import replace

import torch

from strop.ir.loops import Apply, Kernel, Reduce, Schedule, Stmt, outs_of


def sums_of_powers(kernel: Kernel) -> frozenset[str]:
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


def with_products(kernel: Kernel) -> Kernel:
    """Products with the reciprocals of such sums: a quotient takes as long as ten products."""
    if kernel.schedule is not Schedule.ROW:
        return kernel
    sums = sums_of_powers(kernel)
    body = (new for stmt in kernel.body for new in _product(stmt, sums))
    return replace(kernel, body=tuple(dict.fromkeys(body)))


def _product(stmt: Stmt, sums: Set[str]) -> Iterator[Stmt]:
    if isinstance(stmt, Apply) and stmt.op == "div" and stmt.args[1] in sums:
        inverse = f"{stmt.args[1]}_inverse"
        yield Apply(inverse, "reciprocal", (stmt.args[1],), torch.float32)
        stmt = replace(stmt, op="mul", args=(stmt.args[0], inverse))
    yield stmt
