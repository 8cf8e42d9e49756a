"""Say how tensors lie in memory, and the same in another order."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from strop.errors import ShapeError


def reshaped(tensor: Tensor | None, shape: tuple[int, ...]) -> Tensor:
    assert tensor is not None
    return tensor if tensor.shape == shape else tensor.view(shape)


def is_laid_out(tensor: Tensor, strides: Sequence[int]) -> bool:
    """Tell whether it has these strides wherever there is more than one element to step over."""
    return not tensor.numel() or all(
        a == b or size <= 1
        for a, b, size in zip(tensor.stride(), strides, tensor.shape, strict=True)
    )


def laid_out(value: Tensor, strides: Sequence[int]) -> Tensor:
    """A library result in the memory order of the plan, copied if the library chose another."""
    if value.stride() == strides or is_laid_out(value, strides):
        return value
    copy = torch.empty_strided(value.shape, strides, dtype=value.dtype, device=value.device)
    return copy.copy_(value)


@dataclass(frozen=True, slots=True)
class ArgumentLayouts:
    """Hold how a plan wants its arguments, by place. A training step has hundreds, which usually
    all lie so: they are compared at once, which spares the host a few calls for each."""

    dtypes: list[torch.dtype]
    strides: list[tuple[int, ...]]

    def are_met(self, tensors: Sequence[Tensor]) -> bool:
        """Tell whether all are as wanted, strides of dims of size 1 too."""
        return [t.dtype for t in tensors] == self.dtypes and (
            [t.stride() for t in tensors] == self.strides
        )

    def laid_out(self, given: Sequence[Tensor | None]) -> list[Tensor]:
        """Return these arguments, or copies of them that lie as wanted. A size, or another number,
        has no tensor, and nothing reads it."""
        tensors = [
            _nothing(dtype) if tensor is None else tensor
            for tensor, dtype in zip(given, self.dtypes, strict=True)
        ]
        if self.are_met(tensors):
            return tensors
        return [
            laid_out(read_as(tensor, dtype), strides)
            for tensor, dtype, strides in zip(tensors, self.dtypes, self.strides, strict=True)
        ]

    def checked(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return these arguments as kernels read them. Raises ShapeError for one that lies
        otherwise."""
        read = []
        for number, given in enumerate(tensors):
            tensor, strides = read_as(given, self.dtypes[number]), self.strides[number]
            if tensor.stride() != strides and not is_laid_out(tensor, strides):
                raise ShapeError(
                    f"argument {number} has strides {tensor.stride()}, the plan {strides}"
                )
            read.append(tensor)
        return read


@cache
def _nothing(dtype: torch.dtype) -> Tensor:
    return torch.empty(0, dtype=dtype)


def read_as(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return complex numbers as pairs of real ones, in the same memory, for who reads real ones,
    and floats of 8 bits as bytes for who reads bytes."""
    if tensor.dtype == dtype:
        return tensor
    if tensor.is_complex() and not dtype.is_complex:
        return torch.view_as_real(tensor)
    is_short = tensor.is_floating_point() and tensor.itemsize == 1
    return tensor.view(dtype) if is_short and dtype is torch.uint8 else tensor


def written_as(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Undo ``read_as``."""
    if tensor.dtype == dtype:
        return tensor
    return torch.view_as_complex(tensor) if dtype.is_complex else tensor.view(dtype)


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """Return how many bytes of memory tensors lie in, each byte once whoever shares it."""
    total, behind = 0, 0
    for start, end in sorted(_span(tensor) for tensor in tensors if tensor.numel()):
        total += max(0, end - max(start, behind))
        behind = max(behind, end)
    return total


def _span(tensor: Tensor) -> tuple[int, int]:
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    last = sum((size - 1) * stride for size, stride in steps)
    start = tensor.data_ptr()
    return start, start + (last + 1) * tensor.itemsize
