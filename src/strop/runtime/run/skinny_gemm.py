"""Linears of few rows by a kernel of ours, where the operands lie as it wants them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from strop.kernels.gemm.skinny import PIECE, sources_at
from strop.runtime.build.loader import BoundKernel, KernelLoader
from strop.runtime.run.operands import ALIGNMENT, LIMIT, is_dense

OutCall = Callable[[Sequence[Tensor], Tensor], None]


class SkinnyGemm:
    """One linear on one stream: x (M, K), weight (N, K) -> (M, N). ``otherwise`` does what lies
    otherwise.

    ``is_early``: it may begin before the launch before it has ended. ``is_steady``: no launch of
    the same run writes the weights, which it then does not wait for.
    """

    def __init__(
        self,
        otherwise: OutCall,
        kernels: KernelLoader,
        stream: int,
        *,
        is_early: bool,
        is_steady: bool,
    ) -> None:
        self._otherwise, self._kernels, self._stream = otherwise, kernels, stream
        self._is_early, self._is_steady = is_early, is_steady
        self._bound: dict[tuple[torch.Size, tuple[int, ...]], BoundKernel] = {}

    def __call__(self, inputs: Sequence[Tensor], out: Tensor) -> None:
        x, weight = inputs
        if not (_is_read(x) and is_dense(weight) and is_dense(out) and out.numel()):
            self._otherwise(inputs, out)
            return
        key = (x.shape, x.stride())
        if key not in self._bound:
            self._bound[key] = self._bind(x, weight)
        kernel = self._bound[key]
        for place, tensor in enumerate((x, weight, out)):
            kernel.set_pointer(place, tensor.data_ptr())
        kernel()

    def _bind(self, x: Tensor, weight: Tensor) -> BoundKernel:
        sources = sources_at("linear", {}, (x.shape, weight.shape), x.dtype)
        self._kernels.build(sources)  # unless the program's first call has done so
        scalars = [len(x), len(weight), x.stride(0) // PIECE, int(not self._is_steady)]
        return self._kernels.bind(sources[0], [0] * 3, scalars, self._stream, early=self._is_early)


def _is_read(x: Tensor) -> bool:
    """Whether rows can be read in pieces of 16 bytes."""
    is_dense_row = x.dim() == 2 and x.stride(1) == 1 and x.stride(0) % PIECE == 0
    return is_dense_row and x.data_ptr() % ALIGNMENT == 0 and len(x) * x.stride(0) < LIMIT
