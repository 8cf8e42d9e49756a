"""Attention by a kernel of ours, where operands lie as it wants them and it is the faster one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from strop.ir.source import KernelSource
from strop.kernels.attention.choice import AnyTile, scalars_of, source_of, tile_of
from strop.runtime.build.loader import BoundKernel, KernelLoader
from strop.runtime.run.operands import ALIGNMENT, is_laid, strides

Call = Callable[[Sequence[Tensor]], Tensor]
Choose = Callable[[int, int, int, int], AnyTile | None]  # head, batch * heads, queries, keys
Form = tuple[tuple[torch.Size, tuple[int, ...]], ...]  # sizes and strides of q, k and v
MOST_PROGRAMS = 65535  # along the second dim of a grid, which counts heads


class TmaAttention:
    """One attention step on one stream. Its result is allocated, as a library's is."""

    def __init__(
        self,
        otherwise: Call,
        kernels: KernelLoader,
        stream: int,
        *,
        scale: float | None = None,
        is_early: bool = False,
        choose: Choose = tile_of,
    ) -> None:
        self._scale, self._otherwise, self._choose = scale, otherwise, choose
        self._kernels, self._stream, self._is_early = kernels, stream, is_early
        self._tiles: dict[Form, AnyTile | None] = {}  # None: for the library
        self._bound: dict[Form, BoundKernel] = {}

    def __call__(self, inputs: Sequence[Tensor]) -> Tensor:
        form = tuple((t.shape, t.stride()) for t in inputs)
        if form not in self._tiles:
            self._tiles[form] = self._tile(*inputs)
        tile = self._tiles[form]
        if tile is None or any(t.data_ptr() % ALIGNMENT for t in inputs):
            return self._otherwise(inputs)
        batch, heads, queries, head = inputs[0].shape
        out = inputs[0].new_empty(batch, queries, heads, head).transpose(1, 2)
        source = self._source(tile, head, out.dtype)
        tensors = (*inputs, out) * (len(source.params) // 4)
        kernel = self._bound.get(form)
        if kernel is None:
            kernel = self._bound[form] = self._bind(tile, source, tensors)
        for place, tensor in enumerate(tensors):
            kernel.set_pointer(place, tensor.data_ptr())
        kernel()
        return out

    def _tile(self, q: Tensor, k: Tensor, v: Tensor) -> AnyTile | None:
        """For these sizes and strides; None if there is none, or a slower one."""
        if not (_match(q, k, v) and all(map(is_laid, (q, k, v)))):
            return None
        batch, heads, queries, head = q.shape
        return self._choose(head, batch * heads, queries, k.shape[2])

    def _source(self, tile: AnyTile, head: int, dtype: torch.dtype) -> KernelSource:
        return source_of(head, head**-0.5 if self._scale is None else self._scale, tile, dtype)

    def _bind(self, tile: AnyTile, source: KernelSource, tensors: Sequence[Tensor]) -> BoundKernel:
        (batch, heads, queries, _), keys = tensors[0].shape, tensors[1].shape[2]
        self._kernels.build([source])  # unless another step has done so
        return self._kernels.bind(
            source,
            [t.data_ptr() for t in tensors],
            scalars_of(tile, batch, heads, queries, keys),
            self._stream,
            early=self._is_early,
            views=[(t.shape, strides(t)) for t in tensors],
        )


def _match(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """(B, H, S, D) with equal B, H and D, not empty, and not too many for 32 bits."""
    batch, heads, _, head = q.shape
    return (
        k.shape == v.shape
        and (*k.shape[:2], k.shape[3]) == (batch, heads, head)
        and all(0 < t.numel() < 2**31 for t in (q, k))
        and batch * heads <= MOST_PROGRAMS
    )
