"""Look up how long attention takes on a CPU, by torch and by the kernel of ours: cases that were
measured on one thread, and the nearest of them to a call."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from strop.kernels.kernel import Problem

# Doublings of sizes: lengths and heads decide how fast the kernels are, the number of heads hardly.
OF_HEADS, OF_MASKING = 0.25, 1.0

# Nothing was measured on AArch64. Which of both is faster is guessed from processors of x86-64 that
# have vectors with, and without, products of bf16.
MEASURED_AS = {"neon": "avx2", "neon_bf16": "avx512_bf16"}


@dataclass(frozen=True, slots=True)
class CpuCase:
    """Hold what was measured: operands of (``heads`` of all batch elements, ``queries`` or
    ``keys``, ``head``), and the microseconds of a call. ``is_masked``: it has a mask of numbers or
    marks, or an order."""

    isa: str
    dtype: torch.dtype
    is_masked: bool
    heads: int
    queries: int
    keys: int
    head: int
    ours_us: float
    torchs_us: float

    @property
    def work(self) -> int:
        return self.heads * self.queries * self.keys * self.head


CpuCases = tuple[CpuCase, ...]
Sizes = tuple[int, int, int, int]


def times_us(problem: Problem, isa: str, cases: CpuCases) -> tuple[float, float]:
    """Return the microseconds that ours and torch's take on one thread: those of the nearest case,
    as much longer as there is more work. Infinity for ours where no case speaks of such a
    processor and type."""
    found = _nearest(problem, isa, cases)
    if found is None:
        return math.inf, 0.0
    case, sizes = found
    ratio = math.prod(sizes) / case.work
    return case.ours_us * ratio, case.torchs_us * ratio


def _nearest(problem: Problem, isa: str, cases: CpuCases) -> tuple[CpuCase, Sizes] | None:
    isa = MEASURED_AS.get(isa, isa)
    rows = [row for row in cases if row.isa == isa and row.dtype == problem.dtype]
    if not rows or any(len(shape) < 2 or 0 in shape for shape in problem.shapes):
        return None
    *batches, queries, head = problem.shapes[0]
    sizes = math.prod(batches), queries, problem.shapes[1][-2], head
    is_masked = problem.attr("causal") or len(problem.shapes) > 3
    return min(rows, key=lambda row: _doublings(row, *sizes, is_masked=is_masked)), sizes


def _doublings(
    row: CpuCase, heads: int, queries: int, keys: int, head: int, *, is_masked: bool
) -> float:
    others = abs(math.log2(row.queries / queries)) + abs(math.log2(row.keys / keys))
    others += abs(math.log2(row.head / head))
    of_heads = OF_HEADS * abs(math.log2(row.heads / heads))
    return of_heads + others + OF_MASKING * (is_masked != row.is_masked)
