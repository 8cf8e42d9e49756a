"""Attention with heads wider than any library's fast kernel: two products and rows between them.

The VAE of Stable Diffusion has one head of 512. cuDNN and flash end at 256; what torch runs instead
took 348 us at 64 x 64 latents on an H100, a tenth of what its tensor cores can do. The scores are
fp32 and exist for a few queries at a time. Weights are rounded to half precision before the second
product, as every fused kernel does, and divided by the sum of the rounded ones after it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from strop.ir.dims import Expr
from strop.ir.functions import HALVES
from strop.kernels.exp_rows import exp_rows
from strop.runtime.kernels import BoundKernel, KernelLibrary

Call = Callable[[Sequence[Tensor]], Tensor]
WIDEST_OF_LIBRARIES = 256
SCORES_BYTES = 256 << 20  # of the fp32 scores that exist at once
QUERIES_MULTIPLE = 128  # a tile of the library's products


def is_wide(attrs: Mapping[str, Any], shapes: Sequence[Sequence[Expr]], dtype: torch.dtype) -> bool:
    """Whether these operands of an attention call, (B, H, S, D) each, are for this module."""
    widths = [shape[-1] for shape in shapes]
    return (
        len(shapes) == 3  # no mask
        and not attrs["causal"]
        and (attrs["scale"] is None or attrs["scale"] > 0)
        and dtype in HALVES
        and all(w.is_const and w.value % 8 == 0 for w in widths)
        and widths[0].value > WIDEST_OF_LIBRARIES
    )


class WideAttention:
    """One attention step on one stream. Its result is allocated, as a library's is."""

    def __init__(self, scale: float | None, otherwise: Call, kernels: KernelLibrary, stream: int
                 ) -> None:  # fmt: skip
        self._scale, self._otherwise = scale, otherwise
        self._kernels, self._stream = kernels, stream
        self._bound: dict[tuple[int, int], BoundKernel] = {}

    def __call__(self, inputs: Sequence[Tensor]) -> Tensor:
        q, k, v = inputs
        if q.shape[:2] != k.shape[:2] or k.shape[:3] != v.shape[:3] or not q.numel() * k.numel():
            return self._otherwise(inputs)  # broadcast, or empty
        b, heads, queries, _ = q.shape
        out = q.new_empty(b, queries, heads, v.shape[-1]).transpose(1, 2)
        flat = [x.reshape(b * heads, *x.shape[2:]) for x in (q, k, v)]
        step = chunk_of(queries, b * heads * k.shape[2])
        for begin in range(0, queries, step):
            part = self._part(flat[0][:, begin : begin + step], flat[1], flat[2])
            out[:, :, begin : begin + step] = part.view(b, heads, *part.shape[1:])
        return out

    def _part(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """(BH, Q, D), (BH, S, D), (BH, S, E) -> (BH, Q, E) in fp32."""
        scores = product(q, k.transpose(1, 2))
        scale = q.shape[-1] ** -0.5 if self._scale is None else self._scale
        weights = torch.empty_like(scores, dtype=q.dtype)
        sums = scores.new_empty(*scores.shape[:2], 1)
        self._exp_rows(scores, weights, sums, scale)
        return product(weights, v).div_(sums)

    def _exp_rows(self, scores: Tensor, weights: Tensor, sums: Tensor, scale: float) -> None:
        rows, length = sums.numel(), scores.shape[-1]
        kernel = self._bound.get((rows, length))
        if kernel is None:
            source = exp_rows(weights.dtype, scale, length)
            self._kernels.build([source])
            kernel = self._kernels.bind(source, [0, 0, 0], [length, rows], self._stream)
            self._bound[rows, length] = kernel
        for place, tensor in enumerate((scores, weights, sums)):
            kernel.set_pointer(place, tensor.data_ptr())
        kernel()


def chunk_of(queries: int, scores_a_query: int) -> int:
    """How many queries at a time."""
    most = SCORES_BYTES // (4 * scores_a_query) // QUERIES_MULTIPLE * QUERIES_MULTIPLE
    return min(max(most, QUERIES_MULTIPLE), queries)


def product(a: Tensor, b: Tensor) -> Tensor:
    """Half precision to fp32: scores and sums of weighted values are not rounded."""
    return torch.bmm(a, b, out_dtype=torch.float32)
