"""Whole numbers among a call's arguments that are sizes, such as the frames of a video.

LTX gets a tensor of so many tokens, and by ``num_frames``, ``height`` and ``width`` what they are
tokens of. Where such numbers multiply to a size of a tensor, each travels as the first size of an
empty tensor: then it is a symbol of the trace, as every size is, and one graph serves all values.
Other whole numbers are constants of their graphs.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from strop.dispatch.signature import (
    NUM_ARGUMENTS,
    Beside,
    Shapes,
    SizeRef,
    Skeleton,
    number_text,
    without_numbers,
)
from strop.ir.dims import Expr, product, symbol
from strop.ir.tensor_spec import TensorSpec

_MOST_TENSORS = 256  # kept, of the values of one module's sizes


class WholeNumbers:
    """Know which whole numbers of one module's calls are sizes."""

    def __init__(self) -> None:
        self._constant: set[Skeleton] = set()  # calls whose code needs the numbers themselves
        self._made: dict[tuple[int, torch.device], Tensor] = {}

    def as_sizes(self, skeleton: Skeleton, tensors: list[Tensor], beside: Beside) -> Skeleton:
        """The skeleton of a call's arguments with a SizeRef for each number that is a size; behind
        the ``tensors`` come those that these refer to."""
        values = list(_values(skeleton))
        if len(values) < 2:  # a single one is never taken for a size
            return skeleton
        runs = _runs(values, _sizes(tensors))
        if not runs or without_numbers(skeleton) in self._constant:
            return skeleton
        device, parts = tensors[0].device, list[Skeleton](map(number_text, values))
        for number in sorted({number for run in runs for number in run}):
            parts[number] = SizeRef(len(tensors))
            tensors.append(self._tensor(values[number], device))
            beside.num_sizes += 1
        return _with(skeleton, iter(parts))

    def fix(self, skeleton: Skeleton, tensors: Sequence[Tensor]) -> Skeleton:
        """The skeleton of such a call with constants, as those of its like are from now on."""
        self._constant.add(without_numbers(skeleton[:NUM_ARGUMENTS]))
        return _constant(skeleton, tensors)

    def _tensor(self, value: int, device: torch.device) -> Tensor:
        """Return the same tensor for the same value: what depends on it alone is kept through a
        loop."""
        key = value, device
        made = self._made.get(key)
        if made is None:
            if len(self._made) >= _MOST_TENSORS:
                self._made.clear()
            made = torch.empty((value, 0), dtype=torch.uint8, device=device)
            self._made[key] = made
        return made


def _runs(values: Sequence[int], sizes: Collection[int]) -> list[range]:
    """Find which consecutive numbers multiply to a size, long runs first. A single one is a size
    only beside a run of several: by itself, it may be anything."""
    count, found = len(values), list[range]()
    for length in range(count, 0, -1):
        for start in range(count - length + 1):
            run = range(start, start + length)
            is_size = _multiplied(values, run) in sizes and min(values[n] for n in run) > 0
            is_apart = all(set(run).isdisjoint(other) for other in found)
            if is_size and is_apart and (length > 1 or found):
                found.append(run)
    return found


def _multiplied(values: Sequence[int], run: range) -> int:
    return math.prod(values[n] for n in run)


def with_sizes(shapes: Shapes, tensors: Sequence[Tensor], count: int) -> Shapes:
    """The same with the last ``count`` of a call's ``tensors``, which are whole numbers."""
    given, wholes = tensors[: len(tensors) - count], tensors[len(tensors) - count :]
    values, names = [t.shape[0] for t in wholes], [f"n{number}" for number in range(count)]
    sizes = {
        _multiplied(values, run): product(symbol(names[n]) for n in run)
        for run in _runs(values, _sizes(given))
    }
    tied: dict[str, Expr] = {}
    for spec, t in zip(shapes.specs, given, strict=True):
        for text, size in zip(spec.shape[1:], t.shape[1:], strict=True):
            if size in sizes and text in shapes.hints:
                tied.setdefault(text, sizes[size])
                break  # of tokens and features, which may be as many, tokens come first
    specs = [
        replace(spec, shape=tuple(str(size.substitute(tied)) for size in spec.sizes))
        for spec in shapes.specs
    ]
    specs += [
        TensorSpec((name, "0"), t.dtype, t.device) for name, t in zip(names, wholes, strict=True)
    ]
    least = 1 if shapes.is_exact else 2
    hints = {name: size for name, size in shapes.hints.items() if name not in tied}
    hints |= {name: max(value, least) for name, value in zip(names, values, strict=True)}
    other = shapes.otherwise and with_sizes(shapes.otherwise, tensors, count)
    return replace(shapes, specs=tuple(specs), hints=hints, otherwise=other)


def _sizes(tensors: Sequence[Tensor]) -> set[int]:
    """Return the sizes, but for batches, and dims that others are broadcast along."""
    return {size for t in tensors for size in t.shape[1:] if size > 1}


def _values(skeleton: Skeleton) -> Iterator[int]:
    """The whole numbers among the arguments themselves, in order."""
    for item in _arguments(skeleton):
        if _is_whole(item):
            yield int(item[1])


def _arguments(skeleton: Skeleton) -> Iterator[Skeleton]:
    _, (_, *by_place), (_, *by_name) = skeleton
    yield from by_place
    yield from (item for _, item in by_name)


def _is_whole(item: Skeleton) -> bool:
    return isinstance(item, tuple) and item[0] == "int"


def _with(skeleton: Skeleton, parts: Iterator[Skeleton]) -> Skeleton:
    """Put these in the place of the whole numbers."""
    kind, (places, *by_place), (names, *by_name) = skeleton
    return (
        kind,
        (places, *[next(parts) if _is_whole(item) else item for item in by_place]),
        (names, *[(k, next(parts) if _is_whole(item) else item) for k, item in by_name]),
    )


def _constant(skeleton: Skeleton, tensors: Sequence[Tensor]) -> Skeleton:
    if isinstance(skeleton, SizeRef):
        return number_text(tensors[skeleton.index].shape[0])
    if not isinstance(skeleton, tuple):
        return skeleton
    return tuple(_constant(part, tensors) for part in skeleton)
