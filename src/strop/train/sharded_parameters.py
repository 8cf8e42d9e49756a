"""Cut the weights of a model over ranks, each of which steps its own.

Moments and averages of a weight lie on one rank alone. Gradients are summed where they are needed
(reduce-scatter), and stepped weights go to everybody (all-gather), which is as much traffic as one
sum over all ranks (ZeRO-1: https://arxiv.org/abs/1910.02054, sections 5.1 and 7.1).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, distributed
from torch.distributed import ReduceOp

from strop.train.flat_gradients import buckets_of, dense_strides, divide_sum, op_of_mean

IN_FLIGHT = 2  # buckets whose memory is not kept
_ALIGNED_BYTES = 16  # of each gradient, as the sweeps of the optimizer read


@dataclass(frozen=True)
class Room:
    """Hold memory for a bucket, with a row for each rank, in which what that rank steps lies, and a
    view of it for each parameter."""

    memory: Tensor
    views: tuple[Tensor, ...]

    @property
    def num_bytes(self) -> int:
        return self.memory.numel() * self.memory.element_size()


@dataclass(frozen=True)
class ShardedBucket:
    """Hold parameters whose gradients, and later weights, travel together.

    owners, starts: of each parameter the rank that steps it, and its place in that rank's row.
    shape: of the memory, a row for each rank.
    own, own_views: where the mean gradients of this rank come to lie, and the places there.
    kept: memory that stays between steps, if any does.
    """

    parameters: tuple[Tensor, ...]
    owners: tuple[int, ...]
    starts: tuple[int, ...]
    shape: tuple[int, int]
    own: Tensor
    own_views: tuple[Tensor, ...]
    kept: Room | None = None

    def room(self) -> Room:
        """Return the memory that is kept, or new memory of zeros."""
        if self.kept is not None:
            return self.kept
        memory = torch.zeros(self.shape, dtype=self.own.dtype, device=self.own.device)
        placed = zip(self.parameters, self.owners, self.starts, strict=True)
        return Room(memory, tuple(_view(memory[owner], p, start) for p, owner, start in placed))

    @torch.no_grad()
    def give_gradients(self, rank: int, has_gradient: Callable[[Tensor], bool]) -> None:
        """Let the parameters of a rank have its mean gradients, and others none."""
        places = iter(self.own_views)
        for parameter, owner in zip(self.parameters, self.owners, strict=True):
            mine = next(places) if owner == rank else None
            parameter.grad = mine if has_gradient(parameter) else None


@dataclass(frozen=True)
class SummedBucket:
    """Implement ``flat_gradients.Bucket`` by memory that stays: each rank gets the sums of what it
    steps."""

    bucket: ShardedBucket
    rank: int
    comes_early: bool

    @property
    def parameters(self) -> tuple[Tensor, ...]:
        return self.bucket.parameters

    @property
    def views(self) -> tuple[Tensor, ...]:
        return self.bucket.room().views

    def send(self) -> Any:
        own = self.bucket.own
        return reduce_scatter(own, self.bucket.room().memory, op_of_mean(own))

    def land(self, count: int) -> None:
        divide_sum(self.bucket.own, count)
        self.bucket.give_gradients(self.rank, lambda parameter: True)


class ShardedParameters:
    """These are the parameters of a model, cut over ``count`` ranks, of which this is ``rank``. All
    ranks cut alike, as the cut depends on sizes alone.

    ``keeps_rooms``: memory for all gradients stays, and they travel one behind the other; without
    it there is memory for ``IN_FLIGHT`` buckets at a time.
    """

    def __init__(
        self, parameters: Sequence[Tensor], rank: int, count: int, *, keeps_rooms: bool = True
    ) -> None:
        self.rank, self.count, self.parameters = rank, count, tuple(parameters)
        held = [0] * count
        self.buckets = [
            _bucket(part, rank, held, keeps_rooms=keeps_rooms) for part in buckets_of(parameters)
        ]
        self._most = len(self.buckets) if keeps_rooms else IN_FLIGHT

    @property
    def own(self) -> list[Tensor]:
        """Return the parameters that this rank steps, in the order of all."""
        owned = {
            id(parameter)
            for bucket in self.buckets
            for parameter, owner in zip(bucket.parameters, bucket.owners, strict=True)
            if owner == self.rank
        }
        return [parameter for parameter in self.parameters if id(parameter) in owned]

    def buckets_of(self, early: Sequence[Tensor], late: Sequence[Tensor]) -> list[SummedBucket]:
        """Return all buckets: first those of which all gradients come ``early``, in the order in
        which they are complete."""
        coming = {parameter: place for place, parameter in enumerate(early)}
        never = len(coming)
        lasts = [max(coming.get(p, never) for p in bucket.parameters) for bucket in self.buckets]
        order = sorted(range(len(lasts)), key=lasts.__getitem__)
        return [SummedBucket(self.buckets[at], self.rank, lasts[at] < never) for at in order]

    @torch.no_grad()
    def gather_weights(self) -> None:
        """Take over the weights that other ranks have stepped."""
        sent = deque[tuple[ShardedBucket, Room, Any]]()
        for bucket in self.buckets:
            if len(sent) == self._most:
                self._take_over(*sent.popleft())
            room = bucket.room()
            trios = zip(bucket.parameters, room.views, bucket.owners, strict=True)
            _copy([(view, p) for p, view, owner in trios if owner == self.rank])
            own = room.memory[self.rank]  # NCCL takes its input from its place in the result
            work = _all_gather(room.memory, own if own.is_cuda else own.clone())
            sent.append((bucket, room, work))
        while sent:
            self._take_over(*sent.popleft())

    def _take_over(self, bucket: ShardedBucket, room: Room, work: Any) -> None:
        work.wait()
        trios = zip(bucket.parameters, room.views, bucket.owners, strict=True)
        _copy([(p, view) for p, view, owner in trios if owner != self.rank])


def _copy(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Write into the first of each pair what is in the second."""
    if pairs:
        torch._foreach_copy_([into for into, _ in pairs], [source for _, source in pairs])


def _bucket(
    parameters: Sequence[Tensor], rank: int, held: list[int], *, keeps_rooms: bool
) -> ShardedBucket:
    """``held`` is how many elements each rank has of the buckets before, and then of this, too."""
    first = parameters[0]
    step = _ALIGNED_BYTES // first.element_size()
    owners, starts, ends = _cut([p.numel() for p in parameters], held, step)
    held[:] = [before + end for before, end in zip(held, ends, strict=True)]
    length = max(ends)
    own = torch.zeros(length, dtype=first.dtype, device=first.device)
    placed = zip(parameters, owners, starts, strict=True)
    made = ShardedBucket(
        tuple(parameters),
        tuple(owners),
        tuple(starts),
        (len(held), length),
        own,
        tuple(_view(own, p, start) for p, owner, start in placed if owner == rank),
    )
    return replace(made, kept=made.room()) if keeps_rooms else made


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


def reduce_scatter(own: Tensor, memory: Tensor, op: Any = ReduceOp.SUM) -> Any:
    """Begin to sum the rows of a memory over all ranks, each into ``own`` of its rank; returns what
    is to be waited for."""
    call = getattr(distributed, "reduce_scatter_single", None) or distributed.reduce_scatter_tensor
    return call(own, memory.flatten(), op, async_op=True)


def _all_gather(memory: Tensor, own: Tensor) -> Any:
    call = getattr(distributed, "all_gather_single", None) or distributed.all_gather_into_tensor
    return call(memory.flatten(), own, async_op=True)
