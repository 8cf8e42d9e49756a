"""Say in which memory format eager's operators on pictures give their results.

Sizes are those of the trace, so that nothing asks whether a size is 1: strides of a size of 1 say
nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


class UnknownSizeError(Exception):
    """The trace has nothing for a size that the values of a tensor decide, as for ``nonzero``."""


def traced(size: Any) -> int:
    """Return what the trace has for a size. Raises UnknownSizeError where it has nothing."""
    if not isinstance(size, torch.SymInt):
        return int(size)
    if (hint := size.node.hint) is None:
        raise UnknownSizeError(size)
    return int(hint)


def suggested(*tensors: Tensor) -> torch.memory_format:
    """Return channels-last if ATen takes one of these for pictures or videos that lie so, as does
    ``Tensor::suggest_memory_format``; else contiguous."""
    found = (_FORMATS[x.dim()] for x in tensors if x.dim() in _FORMATS and _lies_channels_last(x))
    return next(found, torch.contiguous_format)


def _lies_channels_last(x: Tensor) -> bool:
    sizes, strides = tuple(map(traced, x.shape)), tuple(map(traced, x.stride()))
    least = 0
    for dim in (1, *range(x.dim() - 1, 1, -1), 0):
        if not sizes[dim] or strides[dim] < least:
            return False
        if dim == 0 and least == strides[1]:
            return False  # one channel of one pixel
        least = strides[dim] * max(sizes[dim], 1)
    return strides[1] != 0


def pictures_on_cpu(like: Tensor, shape: Sequence[Any]) -> Tensor:
    """Make the same result for operators whose kernels on a GPU give contiguous results."""
    return pictures(like, shape) if like.device.type == "cpu" else like.new_empty(shape)


def pictures(like: Tensor, shape: Sequence[Any], *, by: Sequence[Tensor] = ()) -> Tensor:
    """Make an empty result of this shape, in the format that ``by``, or else ``like``, suggests."""
    return torch.empty(
        shape, dtype=like.dtype, device=like.device, memory_format=suggested(*(by or (like,)))
    )
