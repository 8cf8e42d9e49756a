"""Answer calls that ask torch how a tensor lies in memory: reshape, flatten, contiguous, writes,
diagonals.

For a transposed tensor the answer depends on whether a size is 1, and asking plants a guard that
makes such a size another graph. Here the traced sizes answer, and no guard is planted: values are
the same either way, only the copy that is or is not made differs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._prims_common import is_contiguous_for_memory_format

from strop.frontend.diagonals import fill_diagonal
from strop.frontend.equal_pieces import PIECES
from strop.frontend.formats import suggested, traced
from strop.frontend.indexed import indexed, needs_operators, write_indexed


def _sizes_and_strides(x: Tensor) -> list[tuple[int, int]]:
    """Return sizes and strides as traced, without dims of size 1, whose strides mean nothing."""
    pairs = zip(map(traced, x.shape), map(traced, x.stride()), strict=True)
    return [(size, stride) for size, stride in pairs if size != 1]


def traced_sizes(shape: Sequence[Any]) -> list[int]:
    """Return what the trace has for these sizes."""
    return [traced(size) for size in shape]


def lies_as(x: Tensor, memory_format: torch.memory_format) -> bool:
    if memory_format == torch.contiguous_format:
        dims = _sizes_and_strides(x)
    else:  # channels last
        dims = _sizes_and_strides(x.permute(0, *range(2, x.dim()), 1))
    inner = [size for size, _ in dims[1:]] + [1]
    return all(stride == math.prod(inner[i:]) for i, (_, stride) in enumerate(dims))


def _can_view(x: Tensor, shape: Sequence[Any]) -> bool:
    return can_view(_sizes_and_strides(x), traced_sizes(shape))


def can_view(pairs: Sequence[tuple[int, int]], wanted: Sequence[int]) -> bool:
    """Tell whether dims of a ``wanted`` shape split or join dims, of these sizes and strides, that
    lie in memory as one."""
    runs: list[tuple[int, int]] = []
    for size, stride in pairs:
        if size == 1:
            continue
        if runs and runs[-1][1] == size * stride:
            runs[-1] = (runs[-1][0] * size, stride)
        else:
            runs.append((size, stride))
    left = [size for size, _ in runs]
    known = math.prod(size for size in wanted if size >= 0)
    for size in wanted:
        size = math.prod(s for s, _ in runs) // max(known, 1) if size < 0 else size
        if size == 1:
            continue
        if not left or not size or left[0] % size:
            return False
        left[0] //= size
        left = left[1:] if left[0] == 1 else left
    return not left


def _is_plain(x: Tensor) -> bool:
    """Tell whether torch's own answer costs no guard, or a traced size of 1 says little of
    others."""
    symbolic = [size for size in x.shape if isinstance(size, torch.SymInt)]
    return not symbolic or any(traced(size) <= 1 for size in symbolic)


def call_reshape(x: Tensor, *shape: Any, **named: Any) -> Tensor:
    wanted = named.get("shape", shape[0] if shape and not _is_size(shape[0]) else shape)
    if _is_plain(x):
        return x.reshape(wanted)
    if not _can_view(x, list(wanted)):
        return x.clone(memory_format=torch.contiguous_format).view(wanted)
    try:
        return x.view(wanted)
    except ValueError:  # the traced sizes happen to fit, others do not
        return x.reshape(wanted)


def _is_size(value: Any) -> bool:
    return isinstance(value, int | torch.SymInt)


def _call_flatten(x: Tensor, start_dim: int = 0, end_dim: int = -1) -> Tensor:
    if x.dim() < 2 or _is_plain(x):
        return x.flatten(start_dim, end_dim)
    start, end = start_dim % x.dim(), end_dim % x.dim()
    if start == end:
        return x
    joined = x.shape[start]
    for size in x.shape[start + 1 : end + 1]:
        joined = joined * size
    return call_reshape(x, [*x.shape[:start], joined, *x.shape[end + 1 :]])


def call_contiguous(
    x: Tensor, memory_format: torch.memory_format = torch.contiguous_format
) -> Tensor:
    if _is_plain(x) or lies_as(x, memory_format):
        if needs_operators(x):
            return torch.ops.aten.contiguous.default(x, memory_format=memory_format)  # type: ignore[no-any-return]
        return x.contiguous(memory_format=memory_format)
    return x.clone(memory_format=memory_format)


def as_pictures(x: Tensor, like: Tensor) -> Tensor:
    """Lay out ``x`` in the format that ``like`` suggests, for which eager would have made it."""
    return call_contiguous(x, suggested(like))


def _ask_bounds(x: Tensor, index: Any) -> None:
    """Say aloud whether bounds of slices count from the end and lie inside; torch would otherwise
    call the length of such a slice unknown."""
    places = index if isinstance(index, tuple) else (index,)
    dim, used = 0, sum(map(_dims_of, places))
    for place in places:
        bounds = (place.start, place.stop) if isinstance(place, slice) else ()
        for bound in bounds:
            if isinstance(bound, torch.SymInt) and bool(bound >= 0):
                bool(bound <= x.shape[dim])
        dim += x.dim() - used if place is Ellipsis else _dims_of(place)


def _dims_of(place: Any) -> int:
    """Return how many dims an index takes."""
    if place is None or place is Ellipsis or isinstance(place, bool):
        return 0
    return place.dim() if isinstance(place, Tensor) and place.dtype == torch.bool else 1


def _call_getitem(x: Tensor, index: Any) -> Tensor:
    _ask_bounds(x, index)
    return indexed(x, index) if needs_operators(x) else x[index]


def _call_setitem(x: Tensor, index: Any, value: Any) -> None:
    _ask_bounds(x, index)
    if needs_operators(x):
        write_indexed(x, index, value)
    else:
        x[index] = value


def _overlaps(input: Tensor) -> int:
    """Answer as ``torch._debug_has_internal_overlap``: 1 if elements share memory, else 0."""
    return int(any(stride == 0 for _, stride in _sizes_and_strides(input)))


@contextmanager
def overlap_by_traced_sizes() -> Iterator[None]:
    """Answer by traced sizes what torch asks before every write into a view. Other threads may see
    it too: their tensors have plain sizes, for which the answer is the same."""
    before = torch._debug_has_internal_overlap
    torch._debug_has_internal_overlap = _overlaps
    try:
        yield
    finally:
        torch._debug_has_internal_overlap = before


def _is_contiguous(x: Tensor, memory_format: torch.memory_format = torch.contiguous_format) -> bool:
    """Tell what torch 2.11 does not know of a computed value whose sizes are symbols: that it lies
    channels-last. A forward may go another way by the answer, so it is a guard."""
    if all(type(size) is int for size in x.shape):
        return x.is_contiguous(memory_format=memory_format)
    return is_contiguous_for_memory_format(x, memory_format=memory_format)


LAYOUTS: dict[Callable[..., Any], Callable[..., Any]] = {
    Tensor.reshape: call_reshape,
    torch.reshape: call_reshape,
    Tensor.flatten: _call_flatten,
    torch.flatten: _call_flatten,
    Tensor.contiguous: call_contiguous,
    Tensor.is_contiguous: _is_contiguous,
    Tensor.__getitem__: _call_getitem,
    Tensor.__setitem__: _call_setitem,
    Tensor.fill_diagonal_: fill_diagonal,
    **PIECES,
}
