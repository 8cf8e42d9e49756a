"""How operands lie, where kernels are fed by the tensor memory accelerator."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

ALIGNMENT, LIMIT = 16, 2**31  # bytes, numbers of a tensor
NOWHERE = 1 << 20  # an aligned address, until the tensors are known


def is_dense(tensor: Tensor) -> bool:
    """Each of its numbers behind the other, and not too many for 32 bits."""
    is_aligned = tensor.data_ptr() % ALIGNMENT == 0
    return tensor.is_contiguous() and is_aligned and tensor.numel() < LIMIT


def dense(sizes: Sequence[int]) -> tuple[int, ...]:
    """Strides."""
    return tuple(math.prod(sizes[n + 1 :]) for n in range(len(sizes)))


def is_laid(tensor: Tensor) -> bool:
    """Whether the accelerator can read it: 16 bytes are the unit of strides, and none is zero."""
    *some, last = strides(tensor)
    return last == 1 and all(s > 0 and s * tensor.itemsize % ALIGNMENT == 0 for s in some)


def strides(tensor: Tensor) -> list[int]:
    """That of a dim of size 1 is never used, but has to be a good one."""
    some = tensor.shape[-1]
    return [s if n > 1 else some for n, s in zip(tensor.shape, tensor.stride(), strict=True)]
