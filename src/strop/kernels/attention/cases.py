"""Look up what was measured of attention: cases of one card, and the nearest of them to a call.

A table row is a measurement: a case, and the microseconds of each row of the kernel library that
computed it rightly. What is fastest in the nearest case is taken to be the fastest for the call; a
call that no case is near to runs as it does without a table (``libraries.SDPA``).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache

import torch

from strop.ir.device import Device
from strop.ir.functions import HALVES
from strop.kernels.attention.short import MaskedTile, Masking
from strop.kernels.attention.times import AnyTile
from strop.kernels.kernel import Call, Problem

# Doublings of sizes, in all, within which a case speaks for a call. Attention with neither mask nor
# order has rules of its own, fitted over many sizes: there a case speaks for its own size alone.
NEAR, SAME = 2.0, 0.5
OTHER_SPREAD, OTHER_DTYPE = 0.5, 0.25  # in doublings: a mask shared by others, another half type


@dataclass(frozen=True, slots=True)
class AttentionCase:
    """Describe a call. ``spread`` has a letter for each dim that the mask has beside that of keys:
    b, h, q for batch elements, heads and queries; along the others all share it. ``groups``: heads
    of queries for each head of keys."""

    batch: int
    heads: int
    queries: int
    keys: int
    head: int
    masking: Masking = Masking.NONE
    spread: str = ""
    groups: int = 1
    dtype: torch.dtype = torch.bfloat16

    def doublings(self, other: AttentionCase) -> float:
        """Say how far apart the sizes are; infinitely far where the work is of another kind."""
        kinds = ((c.head, c.masking, c.groups > 1) for c in (self, other))
        if len(set(kinds)) > 1:
            return math.inf
        apart = sum(abs(math.log2(a / b)) for a, b in zip(self._sizes, other._sizes, strict=True))
        return (
            apart
            + OTHER_SPREAD * len(set(self.spread) ^ set(other.spread))
            + OTHER_DTYPE * (self.dtype != other.dtype)
        )

    @property
    def _sizes(self) -> tuple[int, int, int]:
        return self.batch * self.heads, self.queries, self.keys

    @property
    def work(self) -> int:
        return math.prod(self._sizes)

    @property
    def reach(self) -> float:
        """Return the doublings within which a case speaks for this call."""
        return SAME if self.masking is Masking.NONE else NEAR


@dataclass(frozen=True, slots=True)
class MeasuredCase:
    """Hold the microseconds of a case, by rows of the kernel library; those that refused it, or
    were wrong, are not there. ``tiles``: the fastest of each row that has some."""

    case: AttentionCase
    us: Mapping[str, float]
    tiles: Mapping[str, AnyTile | MaskedTile] = field(default_factory=dict)

    def __hash__(self) -> int:
        return hash(self.case)


Cases = tuple[MeasuredCase, ...]


def masking_of(call: Call | Problem) -> Masking | None:
    """Say which scores count; None where both a mask and an order do, or a mask of a third type."""
    if call.mask is None and len(call.shapes) == 3:
        return Masking.CAUSAL if call.attr("causal") else Masking.NONE
    if call.attr("causal") or call.mask not in (torch.bool, call.dtype):
        return None
    return Masking.BOOL if call.mask is torch.bool else Masking.BIAS


@lru_cache(maxsize=4096)
def case_of(problem: Problem) -> AttentionCase | None:
    """Describe a call of half precision over operands (B, H, S, D); None where it is another."""
    q, k, v, *masks = problem.shapes
    masking = masking_of(problem)
    if masking is None or problem.dtype not in HALVES or any(len(x) != 4 for x in (q, k, v)):
        return None
    if not are_grouped(q, k, v) or (masks and not is_over(masks[0], (*q[:3], k[2]))):
        return None
    mask = (1,) * (4 - len(masks[0])) + masks[0] if masks else ()
    spread = "".join(letter for letter, size in zip("bhq", mask, strict=False) if size > 1)
    batch, heads, queries, head = q
    return AttentionCase(
        batch, heads, queries, k[2], head, masking, spread, heads // k[1], problem.dtype
    )


def are_grouped(q: tuple[int, ...], k: tuple[int, ...], v: tuple[int, ...]) -> bool:
    """Tell whether operands (B, H, S, D) match, none is empty, and each head of keys serves as many
    heads of queries."""
    return (
        k == v
        and (k[0], k[3]) == (q[0], q[3])
        and math.prod(q) * math.prod(k) > 0
        and q[1] % k[1] == 0
    )


def is_over(mask: tuple[int, ...], scores: tuple[int, ...]) -> bool:
    """Tell whether a mask spreads over the scores (B, H, S, K)."""
    pairs = zip(reversed(mask), reversed(scores), strict=False)
    return len(mask) <= len(scores) and all(size in (1, full) for size, full in pairs)


def nearest(problem: Problem, cases: Cases) -> MeasuredCase | None:
    """Return the case that speaks for these sizes; None where none does."""
    case = case_of(problem)
    if case is None or not cases:
        return None
    found = min(cases, key=lambda row: case.doublings(row.case))
    return found if case.doublings(found.case) <= case.reach else None


def speaks_of(call: Call, cases: Cases) -> Cases:
    """Return the cases that may speak for a call at some sizes."""
    heads = {shape[-1].value for shape in call.shapes[:3] if shape and shape[-1].is_const}
    masking = masking_of(call)
    return tuple(row for row in cases if {row.case.head} == heads and row.case.masking is masking)


def measured_us(problem: Problem, name: str, cases: Cases) -> float | None:
    """Return the microseconds of a row, by the case that speaks for these sizes, as much longer as
    there is more work; infinity where the row could not do it, and None where no case speaks."""
    case, found = case_of(problem), nearest(problem, cases)
    if case is None or found is None:
        return None
    return found.us.get(name, math.inf) * case.work / found.case.work


def unmeasured(call: Call, device: Device) -> str:
    """Return the reason for a no, as a clause."""
    heads = sorted({str(shape[-1]) for shape in call.shapes[:3] if shape})
    masking = masking_of(call)
    kind = "another kind of mask" if masking is None else f"masking {masking.value!r}"
    return f"was not measured for heads of {', '.join(heads)} and {kind} on {device.name}"
