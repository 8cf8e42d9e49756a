"""Estimate how long a product takes on one thread of a CPU: with its weight as it lies, and
packed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch

from strop.ir.contractions import CONTRACTIONS
from strop.kernels.kernel import Problem

CONV = "conv2d"
# Processors that nobody measured, and those whose instructions for fp32 are theirs.
MEASURED_AS = {"avx512": "avx512_bf16"}
_FLOPS = {row.name: row.anchor.flops for row in CONTRACTIONS}


@dataclass(frozen=True, slots=True)
class Line:
    """Microseconds of a call: some to begin, and the operations and the bytes of the weight that
    are done with in one."""

    begin_us: float
    ops: float
    weight_bytes: float

    def us(self, work: Work) -> float:
        return self.begin_us + work.ops / self.ops + work.weight_bytes / self.weight_bytes


@dataclass(frozen=True, slots=True)
class Work:
    """Say what a product does, as a ``Line`` counts it."""

    ops: int
    weight_bytes: int

    @staticmethod
    @lru_cache(maxsize=4096)  # several rows ask about a problem, one after the other
    def of(problem: Problem) -> Work:
        ops = _FLOPS[problem.op](problem.shapes, dict(problem.attrs))
        return Work(ops, math.prod(problem.shapes[1]) * problem.dtype.itemsize)


@dataclass(frozen=True, slots=True)
class PackedCase:
    """Hold the lines of one kind of product, "linear" or "conv2d", on one kind of processor.
    ``watching`` has the rate at which the bits of weights are compared, and ``ours`` the line of a
    kernel of our own, which packs in each call."""

    isa: str
    dtype: torch.dtype
    kind: str
    plain: Line
    packed: Line
    watching: float
    ours: Line | None = None

    def times_us(self, work: Work) -> tuple[float, float]:
        """Return the times with the weight as it lies, and packed."""
        return self.plain.us(work), self.packed.us(work) + work.weight_bytes / self.watching


def case_of(
    op: str, dtype: torch.dtype, isa: str, cases: Sequence[PackedCase]
) -> PackedCase | None:
    """Return the lines of an operator on a kind of processor, or None where it was not measured."""
    kind = CONV if op == CONV else "linear"
    as_if = MEASURED_AS.get(isa, isa) if dtype is torch.float32 else isa
    wanted = as_if, dtype, kind
    return next((row for row in cases if (row.isa, row.dtype, row.kind) == wanted), None)
