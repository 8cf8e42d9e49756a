"""Average gradients over ranks in a few long messages.

A message a parameter would be hundreds, most of them short. Here gradients lie behind each other in
flat buckets: one bucket is copied together while the network has the one before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

BUCKET_BYTES = 64 << 20
_ALIGNED_BYTES = 16  # of each gradient, as the sweeps of the optimizer read


@dataclass(frozen=True)
class _Bucket:
    """Hold parameters, the memory of their gradients, and a view of it for each."""

    parameters: tuple[Tensor, ...]
    memory: Tensor
    views: tuple[Tensor, ...]


class FlatGradients:
    """Holds the buckets of parameters that have gradients."""

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self._looks = _looks(parameters)
        self._buckets = [_bucket(part) for part in buckets_of(parameters)]

    def fits(self, parameters: Sequence[Tensor]) -> bool:
        """Tell whether these are the parameters, with gradients of the same kind."""
        return self._looks == _looks(parameters)

    @torch.no_grad()
    def average(self, count: int) -> None:
        """Sum the gradients over all ranks and divide by their number; a NaN or inf of one rank is
        one on all. The sums have one order, so that all ranks get the same bits."""
        sent = []
        for bucket in self._buckets:
            torch._foreach_copy_(bucket.views, _grads(bucket.parameters))
            sent.append(torch.distributed.all_reduce(bucket.memory, async_op=True))
        for bucket, work in zip(self._buckets, sent, strict=True):
            work.wait()
            bucket.memory.div_(count)
            for parameter, view in zip(bucket.parameters, bucket.views, strict=True):
                parameter.grad = view


def _grads(parameters: Sequence[Tensor]) -> list[Tensor]:
    return [p.grad for p in parameters if p.grad is not None]


def _looks(parameters: Sequence[Tensor]) -> list[tuple[int, torch.dtype]]:
    return [(id(p), p.grad.dtype) for p in parameters if p.grad is not None]


def buckets_of(parameters: Sequence[Tensor]) -> list[list[Tensor]]:
    """Return parts of about ``BUCKET_BYTES``, in each of which all parameters are of one type and
    on one device. The last layers come first: their gradients are ready first."""
    kinds = groupby(sorted(parameters, key=_kind), _kind)
    return [part for _, group in kinds for part in _cut(list(group))]


def _kind(parameter: Tensor) -> str:
    return f"{parameter.dtype} {parameter.device}"  # a gradient has its parameter's


def _cut(parameters: list[Tensor]) -> list[list[Tensor]]:
    parts: list[list[Tensor]] = [[]]
    size = 0
    for parameter in reversed(parameters):
        if size >= BUCKET_BYTES:
            parts.append([])
            size = 0
        parts[-1].append(parameter)
        size += parameter.numel() * parameter.element_size()
    return parts


def _bucket(parameters: Sequence[Tensor]) -> _Bucket:
    first = parameters[0].grad
    assert first is not None
    step = _ALIGNED_BYTES // first.element_size()
    starts, end = [], 0
    for parameter in parameters:
        starts.append(end)
        end += -(-parameter.numel() // step) * step
    memory = torch.zeros(end, dtype=first.dtype, device=first.device)
    views = [
        memory.as_strided(p.shape, dense_strides(p), start)
        for p, start in zip(parameters, starts, strict=True)
    ]
    return _Bucket(tuple(parameters), memory, tuple(views))


def dense_strides(parameter: Tensor) -> tuple[int, ...]:
    """Return the strides of dense memory in the parameter's order."""
    return torch.empty_like(parameter, device="meta").stride()
