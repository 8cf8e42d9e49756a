"""Say how the weights of a module lie in one flat piece of memory, so that all of them can be moved
in one copy and lie at the same places again, merged ones behind each other."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

ALIGNMENT_BYTES = 512  # as torch's own allocator aligns


@dataclass(frozen=True, slots=True)
class PlacedTensor:
    """Say where a tensor lies in a flat piece, in bytes, and how it is read there."""

    start: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    @property
    def size_bytes(self) -> int:
        return extent_bytes(self.shape, self.strides, self.dtype)

    def at(self, flat: Tensor) -> Tensor:
        """Return the tensor in ``flat``, with a storage of its own bytes alone, which keeps the
        memory of ``flat``. torch.save writes a tensor's whole storage."""
        first = flat.storage_offset() + self.start
        storage = flat.untyped_storage()[first : first + self.size_bytes]
        empty = torch.empty(0, dtype=self.dtype, device=flat.device)
        return empty.set_(storage, 0, self.shape, self.strides)


@dataclass(frozen=True, slots=True)
class WeightLayout:
    """Say where tensors, in the order in which they were given, lie in a flat piece of
    ``size_bytes``."""

    tensors: tuple[PlacedTensor, ...]
    size_bytes: int

    def all_at(self, flat: Tensor) -> list[Tensor]:
        """Return each tensor as it lies in ``flat``."""
        return [each.at(flat) for each in self.tensors]

    def holds(self, tensors: Sequence[Tensor], flat: Tensor) -> bool:
        """Tell whether exactly these tensors, as the first of the layout's, lie in ``flat``."""
        base = flat.data_ptr()
        return all(
            (t.data_ptr() == base + p.start or not t.numel())
            and (tuple(t.shape), t.stride(), t.dtype) == (p.shape, p.strides, p.dtype)
            and t.device == flat.device
            for t, p in zip(tensors, self.tensors, strict=False)
        )


def aligned(size_bytes: int) -> int:
    """Return the bytes that what lies in front of an aligned tensor takes."""
    return -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def extent_bytes(shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> int:
    """Return the bytes from a tensor's first element to its last."""
    if 0 in shape:
        return 0
    steps = zip(shape, strides, strict=True)
    return (1 + sum((size - 1) * stride for size, stride in steps)) * dtype.itemsize


def layout_of(tensors: Sequence[Tensor]) -> WeightLayout:
    """Return the layout in which tensors that overlap, as parts of a merged weight do with it, lie
    to each other as they do now, and all others one behind the other."""
    addresses, starts = list[int](), list[int]()
    behind, size = 0, 0
    for start, end in sorted(_span(t) for t in tensors if t.numel()):
        if not addresses or start >= behind:
            addresses.append(start)
            starts.append(aligned(size))
            behind = end
        behind = max(behind, end)
        size = starts[-1] + behind - addresses[-1]

    def placed(tensor: Tensor) -> PlacedTensor:
        place, start = bisect_right(addresses, tensor.data_ptr()) - 1, 0
        if tensor.numel():
            start = starts[place] + tensor.data_ptr() - addresses[place]
        return PlacedTensor(start, tuple(tensor.shape), tensor.stride(), tensor.dtype)

    return WeightLayout(tuple(map(placed, tensors)), size)


def _span(tensor: Tensor) -> tuple[int, int]:
    start = tensor.data_ptr()
    return start, start + extent_bytes(tensor.shape, tensor.stride(), tensor.dtype)
