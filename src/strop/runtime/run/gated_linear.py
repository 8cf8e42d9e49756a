"""A linear and the gate behind it: in one kernel where that is faster, else a library's GEMM and a
kernel that reads what it has written."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from strop.kernels.gemm.geglu import DEPTH, geglu, tile_of, tma_geglu
from strop.runtime.build.loader import BoundKernel, KernelLoader
from strop.runtime.run.operands import LIMIT, NOWHERE, is_dense

OutCall = Callable[[Sequence[Tensor], Tensor], None]


class GatedLinear:
    """One such step on one stream: x (M, K), weight (2 N, K)[, bias (2 N,)] -> (M, N). What does
    not lie dense, or has too many numbers for 32 bits, is left to ``otherwise``. Without ``is_one``
    it is never one kernel."""

    def __init__(
        self,
        otherwise: OutCall,
        kernels: KernelLoader,
        stream: int,
        *,
        is_early: bool,
        is_one: bool = True,
    ) -> None:
        self._otherwise, self._may_be_one = otherwise, is_one
        self._kernels, self._stream, self._is_early = kernels, stream, is_early
        self._bound: dict[tuple[int, bool], BoundKernel] = {}

    def __call__(self, inputs: Sequence[Tensor], out: Tensor) -> None:
        x, weight, *bias = inputs
        if not all(map(is_dense, (x, weight, out))) or 2 * out.numel() >= LIMIT:
            self._otherwise(inputs, out)
            return
        is_one = (
            self._may_be_one
            and self._kernels.device.has_wgmma
            and tile_of(x.shape[0], x.shape[1], out.shape[1]) is not None
        )
        product = out if is_one else torch.mm(x, weight.t())
        key = (x.shape[0], is_one)
        kernel = self._bound.get(key)
        if kernel is None:
            bind = self._boxed if is_one else self._behind
            kernel = self._bound[key] = bind(x, weight, out, bool(bias))
        last = (bias or [weight])[0].data_ptr()  # without bias it is not read
        pointers = (
            (x.data_ptr(), weight.data_ptr(), out.data_ptr(), last)
            if is_one
            else (product.data_ptr(), last, out.data_ptr())
        )
        for place, pointer in enumerate(pointers):
            kernel.set_pointer(place, pointer)
        kernel()

    def _boxed(self, x: Tensor, weight: Tensor, out: Tensor, has_bias: bool) -> BoundKernel:
        tile = tile_of(x.shape[0], x.shape[1], out.shape[1])
        assert tile is not None
        source = tma_geglu(tile, x.dtype, has_bias=has_bias)
        self._kernels.build([source])  # unless the program's first call has done so
        scalars = [-(-len(x) // tile.rows), out.shape[1] // tile.cols, x.shape[1] // DEPTH]
        views = [(t.shape, t.stride()) for t in (x, weight, out)]
        return self._kernels.bind(
            source, [NOWHERE] * 4, scalars, self._stream, early=self._is_early, views=views
        )

    def _behind(self, x: Tensor, weight: Tensor, out: Tensor, has_bias: bool) -> BoundKernel:
        source = geglu(out.shape[1], x.dtype, has_bias=has_bias)
        self._kernels.build([source])
        return self._kernels.bind(source, [0] * 3, [out.numel()], self._stream)
