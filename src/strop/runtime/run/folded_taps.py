"""Sums of a window's taps by a kernel of ours, where the weights lie dense, channels last."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from strop.ir.source import KernelSource
from strop.runtime.build.loader import BoundKernel, KernelLoader
from strop.runtime.run.narrow_convolution import OutCall, is_dense


class FoldedTaps:
    """One step on one stream; ``otherwise`` does what the kernel cannot."""

    def __init__(
        self, source: KernelSource, otherwise: OutCall, kernels: KernelLoader, stream: int
    ) -> None:
        self._source, self._otherwise = source, otherwise
        self._kernels, self._stream = kernels, stream
        self._bound: BoundKernel | None = None

    def __call__(self, inputs: Sequence[Tensor], out: Tensor) -> None:
        (weight,) = inputs
        if not (is_dense(weight) and is_dense(out)):
            self._otherwise(inputs, out)
            return
        if self._bound is None:
            self._kernels.build([self._source])  # unless the program's first call has done so
            count = weight.shape[0] * weight.shape[1]
            self._bound = self._kernels.bind(self._source, [0, 0], [count], self._stream)
        for place, tensor in enumerate((weight, out)):
            self._bound.set_pointer(place, tensor.data_ptr())
        self._bound()
