"""Bind a call that one kernel of ours does on a CPU, as generated kernels are bound.

How its operands lie follows from the plan, so that it is looked at once: pointers are in place
where memory stands still, and what moves is patched where it is put. A call then costs the host
what a generated kernel costs, and not a look at each of its tensors.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from strop.kernels.kernel import NUM_FETCHED, Late, Launch, Lies, Operand, Stride
from strop.runtime.build.native import BoundNativeKernel
from strop.runtime.run.launched_calls import (
    ALIGNMENT,
    ANYWHERE,
    LIMIT,
    LINES,
    WIDE,
    has_lines,
    has_pixels,
)


class OperandPlace(NamedTuple):
    """Say where an operand lies: ``number`` is its buffer, None for working memory, and ``move``
    how many bytes it begins behind that. ``pointer`` is where it lies now, 0 for a buffer that is
    yet to come."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    pointer: int
    number: int | None = None
    move: int = 0

    @staticmethod
    def of(tensor: Tensor) -> OperandPlace:
        return OperandPlace(tuple(tensor.shape), tensor.stride(), tensor.data_ptr())


def scalars_at(launch: Launch, places: Sequence[OperandPlace]) -> list[int] | None:
    """Return the scalars of a launch whose operands lie at these places, or None where the kernel
    wants them otherwise."""
    if not all(map(_lies, launch.operands, places)):
        return None
    found = [each if isinstance(each, int) else _stride(each, places) for each in launch.scalars]
    wide = (x for x, unit in zip(found, launch.source.scalars, strict=True) if unit == WIDE)
    return None if any(x % WIDE for x in wide) else found


class KnownScalars:
    """Remember the scalars of the launches of one plan: a model has many equal calls, whose
    operands lie alike."""

    def __init__(self) -> None:
        self._found: dict[Hashable, list[int] | None] = {}

    def at(self, launch: Launch, places: Sequence[OperandPlace]) -> list[int] | None:
        """Return what ``scalars_at`` does."""
        looks = [(p.shape, p.strides, p.pointer and not p.pointer % ALIGNMENT) for p in places]
        key = (id(launch), *looks)  # the plan keeps the launch alive
        if key not in self._found:
            self._found[key] = scalars_at(launch, places)
        return self._found[key]


def _stride(scalar: Stride | Late, places: Sequence[OperandPlace]) -> int:
    assert isinstance(scalar, Stride)  # ``Launches.only`` says so
    return places[scalar.operand].strides[scalar.dim] // scalar.unit


@dataclass(frozen=True, slots=True)
class NativeCall:
    """Hold a launch that is bound, and where its operands lie."""

    kernel: BoundNativeKernel
    launch: Launch
    places: Sequence[OperandPlace]

    def tell(self, other: NativeCall) -> None:
        """Tell this launch what the other one reads first, as ``kernel.Fetched`` has it: what does
        not lie so, or is yet to come, is not fetched."""
        fetched = other.launch.fetched
        if fetched is None:
            return
        place, size = other.places[fetched.operand], other.launch.source.params[0].itemsize
        if not place.pointer or not _is_dense_behind(place.strides, fetched.dims):
            return
        row_bytes, length_bytes = place.strides[0] * size, fetched.length * size
        first = len(self.launch.scalars) - NUM_FETCHED
        for n, value in enumerate((place.pointer, row_bytes, length_bytes, fetched.rows)):
            self.kernel.set_scalar(first + n, value)


def fetch_ahead(calls: Iterable[NativeCall]) -> None:
    """Have each of these launches, in the order in which they run, fetch what the next one reads
    first: a weight comes from memory, for which it would have to wait."""
    fetching = [call for call in calls if call.launch.fetched is not None]
    for call, other in itertools.pairwise(fetching):
        call.tell(other)


def _is_dense_behind(strides: Sequence[int], dims: Sequence[int]) -> bool:
    """Tell whether all dims but the first, which have these sizes, lie without gaps."""
    expected = 1
    for step, size in zip(reversed(strides[1:]), reversed(dims), strict=True):
        if size > 1 and step != expected:
            return False
        expected *= size
    return True


def _lies(operand: Operand, place: OperandPlace) -> bool:
    if not 0 < math.prod(place.shape) < LIMIT:
        return False
    if (unit := LINES.get(operand.lies)) and not has_lines(place.shape, place.strides, unit):
        return False
    if operand.lies is Lies.PIXELS and not has_pixels(place.shape, place.strides):
        return False
    if operand.lies not in ANYWHERE:
        is_aligned = place.pointer and place.pointer % ALIGNMENT == 0
        return bool(is_aligned) and operand.lies is Lies.DENSE and _is_dense(place)
    reach = sum((n - 1) * step for n, step in zip(place.shape, place.strides, strict=True))
    return reach < LIMIT


def _is_dense(place: OperandPlace) -> bool:
    expected = 1
    for size, step in zip(reversed(place.shape), reversed(place.strides), strict=True):
        if size > 1 and step != expected:
            return False
        expected *= size
    return True
