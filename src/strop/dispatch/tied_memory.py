"""Find weights that share memory though they are different Parameters, as two layers do that are
tied by ``b.weight.data = a.weight.data``, or a layer whose weight is some rows of another's.

A write to one is a write to the other. So such a weight is never moved for a program: it would be
tied no longer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor

_OWN_MEMORY = ("cpu", "cuda")  # types of devices whose addresses say which memory that is


def tied(tensors: Sequence[Tensor]) -> frozenset[int]:
    """Return the numbers of those that share memory with another one."""
    spans = sorted(_spans(tensors))
    found = set[int]()
    reached, whose = ("", -1, 0), -1  # the end of what has been walked over, and whose that is
    for kind, place, start, end, number in spans:
        if (kind, place) == reached[:2] and start < reached[2]:
            found |= {number, whose}
        if (kind, place, end) > reached:
            reached, whose = (kind, place, end), number
    return frozenset(found)


def _spans(tensors: Sequence[Tensor]) -> Iterator[tuple[str, int, int, int, int]]:
    """Yield where each tensor lies: its device, the first byte and the one behind the last."""
    for number, tensor in enumerate(tensors):
        device, start = tensor.device, tensor.data_ptr()
        if start and device.type in _OWN_MEMORY:
            yield device.type, device.index or 0, start, start + _span_bytes(tensor), number


def _span_bytes(tensor: Tensor) -> int:
    if tensor.is_contiguous():
        return tensor.nbytes
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return (1 + sum((size - 1) * step for size, step in steps)) * tensor.itemsize
