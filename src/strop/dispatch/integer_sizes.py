"""Whole numbers among a call's arguments that are sizes, such as the frames of a video.

LTX gets a tensor of so many tokens, and by ``num_frames``, ``height`` and ``width`` what they are
tokens of; Qwen-Image gets these three in a tuple in a list, for each picture of the batch. Where
such numbers multiply to a size of a tensor, each travels as the first size of an empty tensor: then
it is a symbol of the trace, as every size is, and one graph serves all values. Other whole numbers
are constants of their graphs.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
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

Group = tuple[int, ...]  # whole numbers that stand side by side
Parts = Mapping[Group, Sequence[Skeleton]]
_MOST_TENSORS = 256  # kept, of the values of one module's sizes


class WholeNumbers:
    """Know which whole numbers of one module's calls are sizes."""

    def __init__(self) -> None:
        self._constant: set[Skeleton] = set()  # calls whose code needs the numbers themselves
        self._made: dict[tuple[int, torch.device], Tensor] = {}

    def as_sizes(self, skeleton: Skeleton, tensors: list[Tensor], beside: Beside) -> Skeleton:
        """The skeleton of a call's arguments with a SizeRef for each number that is a size; behind
        the ``tensors`` come those that these refer to."""
        groups = [group for group in dict.fromkeys(_groups(skeleton)) if group]
        values = [value for group in groups for value in group]
        if len(values) < 2:  # a single one is never taken for a size
            return skeleton
        runs = _runs(groups, _sizes(tensors))
        if not runs or without_numbers(skeleton) in self._constant:
            return skeleton
        device, parts = tensors[0].device, list[Skeleton](map(number_text, values))
        for number in sorted({number for run in runs for number in run}):
            parts[number] = SizeRef(len(tensors))
            tensors.append(self._tensor(values[number], device))
            beside.num_sizes += 1
        left = iter(parts)
        return _with(skeleton, {group: [next(left) for _ in group] for group in groups})

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


def _runs(groups: Sequence[Group], sizes: Collection[int]) -> list[range]:
    """Find which consecutive numbers of a group multiply to a size, long runs first. A single one
    is a size only beside a run of several: by itself, it may be anything."""
    values, found = [value for group in groups for value in group], list[range]()
    for length in range(max(map(len, groups), default=0), 0, -1):
        for run in _stretches(groups, length):
            is_size = _multiplied(values, run) in sizes and min(values[n] for n in run) > 0
            is_apart = all(set(run).isdisjoint(other) for other in found)
            if is_size and is_apart and (length > 1 or found):
                found.append(run)
    return found


def _stretches(groups: Sequence[Group], length: int) -> Iterator[range]:
    """Yield all consecutive numbers, so many, that are in one group."""
    begin = 0
    for group in groups:
        for start in range(begin, begin + len(group) - length + 1):
            yield range(start, start + length)
        begin += len(group)


def _multiplied(values: Sequence[int], run: range) -> int:
    return math.prod(values[n] for n in run)


def with_sizes(shapes: Shapes, tensors: Sequence[Tensor], count: int) -> Shapes:
    """The same with the last ``count`` of a call's ``tensors``, which are whole numbers."""
    given, wholes = tensors[: len(tensors) - count], tensors[len(tensors) - count :]
    values, names = [t.shape[0] for t in wholes], [f"n{number}" for number in range(count)]
    sizes = {
        _multiplied(values, run): product(symbol(names[n]) for n in run)
        for run in _runs([tuple(values)], _sizes(given))
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


def _groups(skeleton: Skeleton) -> Iterator[Group]:
    """Yield the whole numbers that stand side by side: those among the arguments themselves, and
    those of each list or tuple in them. Equal ones are of one kind: sizes of all pictures of a
    batch."""
    _, (_, *by_place), (_, *by_name) = skeleton
    yield from _groups_of([*by_place, *(item for _, item in by_name)])


def _groups_of(items: Sequence[Skeleton]) -> Iterator[Group]:
    yield _wholes(items)
    for item in items:
        if _is_list(item):
            yield from _groups_of(item[1:])


def _wholes(items: Sequence[Skeleton]) -> Group:
    return tuple(int(item[1]) for item in items if _is_whole(item))


def _is_whole(item: Skeleton) -> bool:
    return isinstance(item, tuple) and item[0] == "int"


def _is_list(item: Skeleton) -> bool:
    return isinstance(item, tuple) and item[0] in ("list", "tuple")


def _with(skeleton: Skeleton, parts: Parts) -> Skeleton:
    """Put these in the place of the whole numbers, group by group."""
    kind, (places, *by_place), (names, *by_name) = skeleton
    found = _with_of([*by_place, *(item for _, item in by_name)], parts)
    names_of = [name for name, _ in by_name]
    return (
        kind,
        (places, *found[: len(by_place)]),
        (names, *zip(names_of, found[len(by_place) :], strict=True)),
    )


def _with_of(items: Sequence[Skeleton], parts: Parts) -> list[Skeleton]:
    own, found = iter(parts.get(_wholes(items), ())), list[Skeleton]()
    for item in items:
        if _is_list(item):
            found.append((item[0], *_with_of(item[1:], parts)))
        else:
            found.append(next(own) if _is_whole(item) else item)
    return found


def _constant(skeleton: Skeleton, tensors: Sequence[Tensor]) -> Skeleton:
    if isinstance(skeleton, SizeRef):
        return number_text(tensors[skeleton.index].shape[0])
    if not isinstance(skeleton, tuple):
        return skeleton
    return tuple(_constant(part, tensors) for part in skeleton)
