"""Find out which library calls on a CPU give the same bits whatever number of threads they have.

A library divides a product among its threads, and what is left at the edge of a share may be summed
in another order. So a small call has one thread, always: others would save it a few microseconds.
Of a larger one this is found out, by random operands of the very sizes. Our own kernels divide by
sizes alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from strop.ir.op import no_flops
from strop.ir.ops import OPS
from strop.runtime.run.operator_threads import with_threads
from strop.runtime.run.sizes import Look

# A call of so much takes 60 microseconds of one core (AVX-512), and 40 of two.
SMALL_FLOPS = 1 << 22
# A run of more has work enough for all cores, and its working memory is not wanted several times.
MOST_SHARED_FLOPS = 20 * 10**9
_MOST_KEPT = 8192  # answers


@dataclass(frozen=True, slots=True)
class LibraryCall:
    """This is a call, without its operands: how they look, and its result where the call writes
    where it is told. Calls that are equal are alike."""

    op: str
    attrs: tuple[tuple[str, Any], ...]
    operands: tuple[Look, ...]
    out: Look | None
    call: Callable[..., Any] = field(compare=False)
    kernel: str = ""  # the row of the kernel library that was chosen

    @property
    def flops(self) -> int:
        return flops_of(self.op, dict(self.attrs), [shape for shape, _, _ in self.operands])


def is_counted(op: str) -> bool:
    """Say whether it is known what an operator costs; of the others nothing is known here."""
    return OPS[op].anchor.flops is not no_flops


def flops_of(op: str, attrs: Mapping[str, Any], shapes: Sequence[Sequence[int]]) -> int:
    return OPS[op].anchor.flops(shapes, attrs)


def in_one_thread(call: Callable[..., Any]) -> Callable[..., Any]:
    """Return a call that has one thread, whatever its caller has."""
    return lambda *given: with_threads(1, partial(call, *given))


def halved(full: int) -> Iterator[int]:
    """Yield the numbers of threads that a call may have instead of ``full``."""
    while full > 1:
        full //= 2
        yield full


def shares_of(calls: Sequence[LibraryCall], full: int) -> tuple[int, ...]:
    """Return the numbers of threads with which all of these calls give the same bits as with
    ``full``. The first time, this takes as long as they do, several times."""
    if sum(call.flops for call in calls) > MOST_SHARED_FLOPS:
        return ()
    return tuple(n for n in halved(full) if all(_is_same(call, full, n) for call in calls))


@lru_cache(_MOST_KEPT)
def _is_same(call: LibraryCall, full: int, fewer: int) -> bool:
    source = torch.Generator().manual_seed(0)
    operands = [_random(look, source) for look in call.operands]
    first, second = (
        with_threads(count, partial(_result, call, operands)) for count in (full, fewer)
    )
    return torch.equal(first, second)


def _result(call: LibraryCall, operands: Sequence[Tensor]) -> Tensor:
    """Return the bits of a result."""
    if call.out is None:
        made = call.call(operands)
    else:
        made = _random(call.out, torch.Generator().manual_seed(1))
        call.call(operands, made)
    result: Tensor = made.contiguous().view(torch.uint8)
    return result


def _random(look: Look, source: torch.Generator) -> Tensor:
    """Make a tensor that looks so. What is of no float type is true, or one."""
    shape, strides, dtype = look
    extent = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    if dtype.is_floating_point:
        flat = torch.randn(extent, generator=source, device="cpu").to(dtype)
    else:
        flat = torch.ones(extent, dtype=dtype, device="cpu")
    return flat.as_strided(shape, strides)
