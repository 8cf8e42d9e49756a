"""Convolutions with few channels on one side, by a kernel of ours where the operands lie as it
wants them: dense channels-last weights and result, and what it reads in 16-byte pieces aligned.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from strop.ir.source import KernelSource
from strop.kernels.conv.narrow import MULTIPLE, reads_pieces
from strop.runtime.build.loader import BoundKernel, KernelLoader

OutCall = Callable[[Sequence[Tensor], Tensor], None]
Form = tuple[torch.Size, tuple[int, ...]]  # of the input
ALIGNMENT = 16  # bytes


class NarrowConvolution:
    """One convolution step on one stream; ``otherwise`` does what the kernel cannot."""

    def __init__(
        self, source: KernelSource, otherwise: OutCall, kernels: KernelLoader, stream: int
    ) -> None:
        self._source, self._otherwise = source, otherwise
        self._kernels, self._stream = kernels, stream
        self._bound: dict[Form, BoundKernel] = {}

    def __call__(self, inputs: Sequence[Tensor], out: Tensor) -> None:
        x, weight, *bias = inputs
        if bias or not (is_dense(weight) and is_dense(out) and self._takes(x)):
            self._otherwise(inputs, out)
            return
        kernel = self._bound.get((x.shape, x.stride()))
        if kernel is None:
            kernel = self._bound[x.shape, x.stride()] = self._bind(x, out)
        for place, tensor in enumerate((x, weight, out)):
            kernel.set_pointer(place, tensor.data_ptr())
        kernel()

    def _takes(self, x: Tensor) -> bool:
        batch, channel, line, column = x.stride()
        if reads_pieces(self._source) and (
            channel != 1 or any(step % MULTIPLE for step in (batch, line, column))
        ):
            return False
        return x.data_ptr() % ALIGNMENT == 0 and max(x.stride()) * max(x.shape) < 2**31

    def _bind(self, x: Tensor, out: Tensor) -> BoundKernel:
        batch, _, height, width = out.shape
        numbers = [batch * height * width, height * width, width, *x.shape[2:], *x.stride()]
        self._kernels.build([self._source])  # unless the program's first call has done so
        return self._kernels.bind(self._source, [0, 0, 0], numbers, self._stream)


def is_dense(tensor: Tensor) -> bool:
    """Each of its numbers behind the other, channels last, and not too many for 32 bits."""
    is_last = tensor.is_contiguous(memory_format=torch.channels_last)
    return is_last and tensor.data_ptr() % ALIGNMENT == 0 and tensor.numel() < 2**31
