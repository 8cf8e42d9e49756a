"""Convolutions and linears by products in PTX, where the operands lie as these want them and the
sizes are ones for which they are the faster ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from strop.kernels.gemm.choice import LINEARS, OPS, Form, form_of, picture_of
from strop.kernels.gemm.implicit import Picture
from strop.kernels.gemm.tile import SUM
from strop.kernels.gemm.wgmma_gemm import wgmma_gemm
from strop.kernels.ptx import LINE
from strop.runtime.build.driver import View
from strop.runtime.build.loader import BoundKernel, KernelLoader
from strop.runtime.run.operands import (
    ALIGNMENT,
    LIMIT,
    NOWHERE,
    dense,
    is_dense,
    is_laid,
    strides,
)

OutCall = Callable[[Sequence[Tensor], Tensor], None]
Choose = Callable[[Picture, str], Form | None]


class WgmmaGemm:
    """One step on one stream: one of ``products.OPS``, by operands as these have them, of which the
    input may have gaps. ``otherwise`` does what the kernel cannot, or what is done faster without
    it. A sum is added to where it lies, or to a copy of it.

    ``is_early``: it may begin before the launch before it has ended. ``is_steady``: no launch of
    the same run writes the weights, which it then does not wait for.
    """

    def __init__(
        self,
        op: str,
        attrs: Mapping[str, Any],
        otherwise: OutCall,
        kernels: KernelLoader,
        stream: int,
        *,
        is_early: bool,
        is_steady: bool,
        choose: Choose = form_of,
    ) -> None:
        self._op, self._attrs, self._otherwise, self._choose = op, attrs, otherwise, choose
        self._kernels, self._stream = kernels, stream
        self._is_early, self._is_steady = is_early, is_steady
        self._bound: dict[tuple[torch.Size, tuple[int, ...]], BoundKernel | None] = {}

    def __call__(self, inputs: Sequence[Tensor], out: Tensor) -> None:
        x, weight, *more = inputs
        pixels, window, result, *others = map(self._rows, (x, weight, out, *more))
        is_read = is_laid(pixels) and x.data_ptr() % ALIGNMENT == 0 and 0 < x.numel() < LIMIT
        if not (is_read and out.numel() and all(map(is_dense, (window, result, *others)))):
            self._otherwise(inputs, out)
            return
        key = (x.shape, x.stride())
        if key not in self._bound:
            self._bound[key] = self._bind(x, weight, pixels)
        kernel = self._bound[key]
        if kernel is None:
            self._otherwise(inputs, out)
            return
        last = (others or [window])[-1]  # biases; where there are none it is not read
        if OPS[self._op] == SUM and more[0].data_ptr() != out.data_ptr():
            out.copy_(more[0])
        for place, tensor in enumerate((pixels, window, result, last)):
            kernel.set_pointer(place, tensor.data_ptr())
        kernel()

    def _rows(self, tensor: Tensor) -> Tensor:
        """Channels last; a linear has them there."""
        return tensor if self._op in LINEARS else tensor.permute(0, 2, 3, 1)

    def _bind(self, x: Tensor, weight: Tensor, pixels: Tensor) -> BoundKernel | None:
        of = picture_of(self._op, self._attrs, (x.shape, weight.shape))
        form = self._choose(of, OPS[self._op])
        if form is None:
            return None
        source = wgmma_gemm(form.product, x.dtype)
        self._kernels.build([source])  # unless the program's first call has done so
        if self._op in LINEARS:  # one line of one picture
            pixels = pixels[None, None]
        columns = (weight.shape[0], weight[0].numel())
        box = (*form.box, LINE)
        views: list[View] = [(pixels.shape, strides(pixels), box), (columns, (columns[1], 1))]
        if form.results:
            views.append((of.result, dense(of.result), form.results))
        scalars = form.scalars(of.ins, late=not self._is_steady)
        return self._kernels.bind(
            source, [NOWHERE] * 4, scalars, self._stream, early=self._is_early, views=views
        )
