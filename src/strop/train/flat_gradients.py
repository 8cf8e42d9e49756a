"""Average gradients over ranks in a few long messages.

A message a parameter would be hundreds, most of them short. Here gradients lie behind each other in
flat buckets: one bucket is copied together while the network has the one before it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp, all_reduce

from strop.errors import TrainingError
from strop.runtime.run.sizes import Look
from strop.wording import counted

BUCKET_BYTES = 64 << 20
_ALIGNED_BYTES = 16  # of each gradient, as the sweeps of the optimizer read


@dataclass(frozen=True, slots=True)
class Arrival:
    """Know a gradient again, without holding it: where it lies, and which version of it."""

    address: int
    version: int

    @staticmethod
    def of(gradient: Tensor) -> Arrival:
        return Arrival(gradient.data_ptr(), gradient._version)

    def is_of(self, parameter: Tensor) -> bool:
        """Tell whether this is all of the parameter's gradient."""
        return parameter.grad is not None and self == Arrival.of(parameter.grad)


class Bucket(Protocol):
    """Carry gradients of some parameters over ranks together. ``comes_early``: somebody tells of
    each of them when it is complete."""

    @property
    def parameters(self) -> tuple[Tensor, ...]: ...

    @property
    def views(self) -> tuple[Tensor, ...]:
        """Return where the gradient of each parameter comes to lie."""
        ...

    @property
    def comes_early(self) -> bool: ...

    def send(self) -> Any:
        """Begin to sum over ranks; returns what is to be waited for."""
        ...

    def land(self, count: int) -> None:
        """Give parameters their gradients, which are the mean over ``count`` ranks."""
        ...


@dataclass(frozen=True)
class FlatBucket:
    """Hold parameters, the memory of their gradients, and a view of it for each; all ranks get all
    of the sums. Memory of another type than the gradients' is what travels: gradients are rounded
    into it, and become what it holds in the end."""

    parameters: tuple[Tensor, ...]
    memory: Tensor
    views: tuple[Tensor, ...]
    comes_early: bool
    group: ProcessGroup | None

    def send(self) -> Any:
        return all_reduce(self.memory, op_of_mean(self.memory), self.group, async_op=True)

    def land(self, count: int) -> None:
        divide_sum(self.memory, count)
        pairs = list(zip(self.parameters, self.views, strict=True))
        if self.memory.dtype == self.parameters[0].dtype:
            for parameter, view in pairs:
                parameter.grad = view
            return
        have = [(p.grad, view) for p, view in pairs if p.grad is not None]
        torch._foreach_copy_([own for own, _ in have], [view for _, view in have])


def op_of_mean(memory: Tensor) -> Any:
    """Return what NCCL computes means by. gloo cannot: it sums, and ``divide_sum`` follows."""
    return ReduceOp.AVG if memory.is_cuda else ReduceOp.SUM


def divide_sum(memory: Tensor, count: int) -> None:
    """Make means of what ``op_of_mean`` has left as sums over ``count`` ranks."""
    if not memory.is_cuda:
        memory.div_(count)


def copy_into(views: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
    """Copy each gradient into its view, unless it lies there. One that lies there in another order
    is copied twice."""
    into, given = [], []
    for view, gradient in zip(views, gradients, strict=True):
        is_there = gradient.data_ptr() == view.data_ptr()
        if not is_there or gradient.stride() != view.stride():
            into.append(view)
            given.append(gradient.clone() if is_there else gradient)
    if into:
        torch._foreach_copy_(into, given)


def home_at(place: Tensor, look: Look) -> Tensor | None:
    """Return the memory of a place as a tensor of another look, with a count of versions of its
    own; None where that look does not fill it, or is of another type."""
    shape, strides, dtype = look
    if place.dtype != dtype or not _fills(shape, strides, place.numel()):
        return None
    start = place.storage_offset()
    return place.new_empty(0).set_(place.untyped_storage(), start, shape, strides)


def _fills(shape: Sequence[int], strides: Sequence[int], count: int) -> bool:
    """Tell whether a tensor has so many elements, without a gap between them."""
    span = 1 + sum((size - 1) * step for size, step in zip(shape, strides, strict=True))
    return span == count == math.prod(shape)


class SentGradients:
    """Sends the buckets of one backward pass after the other, always in the same order."""

    def __init__(self, buckets: Sequence[Bucket]) -> None:
        self.buckets = tuple(buckets)
        self.parameters = {p for bucket in buckets for p in bucket.parameters}
        self.types = {p: p.grad.dtype for p in self.parameters if p.grad is not None}
        self._bucket_of = {
            p: at
            for at, bucket in enumerate(buckets)
            if bucket.comes_early
            for p in bucket.parameters
        }
        self._places = {
            p: view
            for bucket in buckets
            if bucket.comes_early
            for p, view in zip(bucket.parameters, bucket.views, strict=True)
        }
        self._begin()

    def _begin(self) -> None:
        self._here: dict[int, dict[Tensor, Tensor]] = {}  # by bucket: its gradients so far
        self._arrivals: dict[Tensor, Arrival] = {}  # of gradients that have been copied
        self._filled: set[int] = set()
        self._sent: list[Any] = []

    @property
    def num_early(self) -> int:
        return sum(bucket.comes_early for bucket in self.buckets)

    @property
    def num_sent(self) -> int:
        """Count the buckets of this pass that are on their way."""
        return len(self._sent)

    @property
    def is_unfinished(self) -> bool:
        """Tell whether a pass has begun whose gradients nobody has asked for."""
        return bool(self._sent or self._filled or self._here)

    def fits(self, parameters: Sequence[Tensor]) -> bool:
        """Tell whether these are the parameters. Raises TrainingError for a gradient of another
        type than before."""
        types = {p: p.grad.dtype for p in parameters if p.grad is not None}
        for parameter, dtype in types.items():
            if (before := self.types.get(parameter, dtype)) != dtype:
                raise TrainingError(
                    f"a gradient is in {dtype}, which was in {before} in the first step: what a "
                    "step computes must not change. Make the step anew where it does"
                )
        return types.keys() == self.types.keys()

    def home(self, parameter: Tensor, look: Look) -> Tensor | None:
        """Return the place of an early gradient in its bucket, as a tensor with a count of versions
        of its own. A graph may see it in another shape than the parameter's."""
        place = self._places.get(parameter)
        return None if place is None else home_at(place, look)

    @torch.no_grad()
    def take(self, parameter: Tensor, gradient: Tensor) -> bool:
        """Take a gradient that is complete, and send its bucket if that is all there and those
        before it have been sent. It becomes the parameter's all the same."""
        at = self._bucket_of.get(parameter)
        if at is None:
            return False
        if parameter in self._arrivals or parameter in self._here.get(at, ()):
            raise TrainingError(
                "a weight has had two gradients in one backward pass, and in the first one only "
                "one: what a step calls must not change. Make the step anew where it does"
            )
        here = self._here.setdefault(at, {})
        here[parameter] = gradient
        bucket = self.buckets[at]
        if len(here) == len(bucket.parameters):
            self._fill(at, [here[p] for p in bucket.parameters])
            self._arrivals.update((p, Arrival.of(g)) for p, g in here.items())
            del self._here[at]  # autograd copies a gradient that somebody else holds
            while len(self._sent) in self._filled:
                self._send()
        return False

    def take_whole(self, parameter: Tensor) -> None:
        """Take a gradient that torch has put together."""
        if parameter.grad is not None:
            self.take(parameter, parameter.grad)

    def _fill(self, at: int, gradients: Sequence[Tensor]) -> None:
        copy_into(self.buckets[at].views, gradients)
        self._filled.add(at)

    def _send(self) -> None:
        self._sent.append(self.buckets[len(self._sent)].send())

    @torch.no_grad()
    def average(self, count: int) -> None:
        """Send the other buckets, and give each parameter that has a gradient the mean over all
        ranks. Raises TrainingError if a gradient that was sent has changed since."""
        self._here.clear()
        changed = [p for p, seen in self._arrivals.items() if not seen.is_of(p)]
        idle = [p for bucket in self.buckets for p in bucket.parameters if p.grad is None]
        for at in range(len(self._sent), len(self.buckets)):
            if at not in self._filled:
                self._fill(at, list(map(_gradient, self.buckets[at].parameters)))
            self._send()
        for bucket, work in zip(self.buckets, self._sent, strict=True):
            work.wait()
            bucket.land(count)
        for parameter in idle:
            parameter.grad = None
        self._begin()
        if changed:
            raise TrainingError(
                f"{counted(len(changed), 'gradient')} had already been averaged over ranks when "
                "something else changed or added to them, which it did not do in the first step: "
                "what a step does must not change. Make the step anew where it does"
            )

    @torch.no_grad()
    def abandon(self) -> None:
        """End a pass that has failed: other ranks may have sent more of its buckets, or fewer, so
        all are sent. What has been averaged is dropped."""
        while len(self._sent) < len(self.buckets):
            self._send()
        for work in self._sent:
            work.wait()
        self._begin()


def _gradient(parameter: Tensor) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


def flat_buckets(
    early: Sequence[Tensor],
    late: Sequence[Tensor],
    group: ProcessGroup | None = None,
    narrow: torch.dtype | None = None,
) -> list[FlatBucket]:
    """Lay out the gradients of parameters: first those that come early, in their order. Those in
    fp32 travel in the type ``narrow``, if there is one."""
    made = partial(_bucket, group=group, narrow=narrow)
    first = [made(part, comes_early=True) for part in buckets_of(early[::-1])]
    return [*first, *(made(part, comes_early=False) for part in buckets_of(late))]


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


def _bucket(
    parameters: Sequence[Tensor],
    group: ProcessGroup | None,
    narrow: torch.dtype | None,
    *,
    comes_early: bool,
) -> FlatBucket:
    first = parameters[0].grad
    assert first is not None
    dtype = narrow if narrow and first.dtype == torch.float32 else first.dtype
    step = _ALIGNED_BYTES // dtype.itemsize
    starts, end = [], 0
    for parameter in parameters:
        starts.append(end)
        end += -(-parameter.numel() // step) * step
    memory = torch.zeros(end, dtype=dtype, device=first.device)
    views = [
        memory.as_strided(p.shape, dense_strides(p), start)
        for p, start in zip(parameters, starts, strict=True)
    ]
    return FlatBucket(tuple(parameters), memory, tuple(views), comes_early, group)


def dense_strides(parameter: Tensor) -> tuple[int, ...]:
    """Return the strides of dense memory in the parameter's order."""
    return torch.empty_like(parameter, device="meta").stride()
