"""Cut the weights of a model over ranks, each of which steps its own.

Moments and averages of a weight lie on one rank alone. Gradients are summed where they are needed
(reduce-scatter), and stepped weights go to everybody (all-gather), which is as much traffic as one
sum over all ranks (ZeRO-1: https://arxiv.org/abs/1910.02054, sections 5.1 and 7.1).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, distributed

from strop.train.flat_gradients import buckets_of, dense_strides

_ALIGNED_BYTES = 16  # of each gradient, as the sweeps of the optimizer read


@dataclass(frozen=True)
class ShardedBucket:
    """Hold parameters whose gradients, and later weights, travel together. ``memory`` has a row for
    each rank, in which what that rank steps lies, and ``views`` a place in it for each parameter.
    ``own`` is where the mean gradients of this rank come to lie, ``own_views`` the places there."""

    parameters: tuple[Tensor, ...]
    owners: tuple[int, ...]
    memory: Tensor
    views: tuple[Tensor, ...]
    own: Tensor
    own_views: tuple[Tensor, ...]


class ShardedParameters:
    """These are the parameters of a model, cut over ``count`` ranks, of which this is ``rank``. All
    ranks cut alike, as the cut depends on sizes alone."""

    def __init__(self, parameters: Sequence[Tensor], rank: int, count: int) -> None:
        self._rank, self._count, self._parameters = rank, count, tuple(parameters)
        held = [0] * count
        self._buckets = [_bucket(part, rank, held) for part in buckets_of(parameters)]

    @property
    def own(self) -> list[Tensor]:
        """Return the parameters that this rank steps, in the order of all."""
        owned = {
            id(parameter)
            for bucket in self._buckets
            for parameter, owner in zip(bucket.parameters, bucket.owners, strict=True)
            if owner == self._rank
        }
        return [parameter for parameter in self._parameters if id(parameter) in owned]

    @property
    def has_gradients(self) -> list[bool]:
        """Tell of each parameter whether it has a gradient."""
        return [parameter.grad is not None for parameter in self._parameters]

    @torch.no_grad()
    def average_gradients(self) -> None:
        """Give each parameter of this rank the mean of its gradients over all ranks, and have no
        gradient of the others. A NaN or inf of one rank is one on the rank that steps."""
        sent = []
        for bucket in self._buckets:
            for parameter, view in zip(bucket.parameters, bucket.views, strict=True):
                if parameter.grad is None:
                    view.zero_()  # a weight lies there
            pairs = zip(bucket.parameters, bucket.views, strict=True)
            given = [(view, p.grad) for p, view in pairs if p.grad is not None]
            _copy(given)
            sent.append(_reduce_scatter(bucket.own, bucket.memory))
        for bucket, work in zip(self._buckets, sent, strict=True):
            work.wait()
            bucket.own.div_(self._count)
            places = iter(bucket.own_views)
            for parameter, owner in zip(bucket.parameters, bucket.owners, strict=True):
                mine = next(places) if owner == self._rank else None
                parameter.grad = None if parameter.grad is None else mine

    @torch.no_grad()
    def gather_weights(self) -> None:
        """Take over the weights that other ranks have stepped."""
        sent = []
        for bucket in self._buckets:
            trios = [*zip(bucket.parameters, bucket.views, bucket.owners, strict=True)]
            _copy([(view, p) for p, view, owner in trios if owner == self._rank])
            sent.append(_all_gather(bucket.memory, bucket.memory[self._rank].clone()))
        for bucket, work in zip(self._buckets, sent, strict=True):
            work.wait()
            trios = [*zip(bucket.parameters, bucket.views, bucket.owners, strict=True)]
            _copy([(p, view) for p, view, owner in trios if owner != self._rank])


def _copy(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Write into the first of each pair what is in the second."""
    if pairs:
        torch._foreach_copy_([into for into, _ in pairs], [source for _, source in pairs])


def _bucket(parameters: Sequence[Tensor], rank: int, held: list[int]) -> ShardedBucket:
    """``held`` is how many elements each rank has of the buckets before, and then of this, too."""
    first = parameters[0]
    step = _ALIGNED_BYTES // first.element_size()
    owners, starts, ends = _cut([p.numel() for p in parameters], held, step)
    held[:] = [before + end for before, end in zip(held, ends, strict=True)]
    length = max(ends)
    memory = torch.zeros(len(held), length, dtype=first.dtype, device=first.device)
    own = torch.zeros(length, dtype=first.dtype, device=first.device)
    placed = [*zip(parameters, owners, starts, strict=True)]
    return ShardedBucket(
        tuple(parameters),
        tuple(owners),
        memory,
        tuple(_view(memory[owner], p, start) for p, owner, start in placed),
        own,
        tuple(_view(own, p, start) for p, owner, start in placed if owner == rank),
    )


def _cut(
    sizes: Sequence[int], held: Sequence[int], step: int
) -> tuple[list[int], list[int], list[int]]:
    """Return for each size its rank, and where it begins there, and for each rank where it ends.
    The largest are dealt out first, each to the rank that has least."""
    owners, starts, ends = [0] * len(sizes), [0] * len(sizes), [0] * len(held)
    for place in sorted(range(len(sizes)), key=lambda place: -sizes[place]):
        rank = min(range(len(held)), key=lambda rank: (ends[rank], held[rank]))
        owners[place], starts[place] = rank, ends[rank]
        ends[rank] += -(-sizes[place] // step) * step
    return owners, starts, ends


def _view(row: Tensor, parameter: Tensor, start: int) -> Tensor:
    at = row.storage_offset() + start
    return row.as_strided(parameter.shape, dense_strides(parameter), at)


def _reduce_scatter(own: Tensor, memory: Tensor) -> Any:
    call = getattr(distributed, "reduce_scatter_single", None) or distributed.reduce_scatter_tensor
    return call(own, memory.flatten(), async_op=True)


def _all_gather(memory: Tensor, own: Tensor) -> Any:
    call = getattr(distributed, "all_gather_single", None) or distributed.all_gather_into_tensor
    return call(memory.flatten(), own, async_op=True)
