"""Average gradients over ranks, beginning while the backward pass goes on.

Gradients travel in flat buckets (see ``flat_gradients``). The first pass is watched: a compiled
backward graph tells of each gradient when it is complete, torch of those that it computes itself,
and buckets follow the order in which those of rank 0 came. From the second pass on a bucket is sent
as soon as its last gradient is there (https://arxiv.org/abs/2006.15704, section 3.2.3). All ranks
send the same buckets in one order, whatever graphs they run.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from strop.dispatch.gradient_listeners import listening
from strop.errors import TrainingError
from strop.runtime.run.sizes import Look
from strop.train.flat_gradients import Arrival, Bucket, SentGradients, flat_buckets

AllOf = Callable[[Any, str], list[Any]]  # the values of all ranks, by a value and what it is for
LayOut = Callable[[Sequence[Tensor], Sequence[Tensor]], Sequence[Bucket]]  # by ``flat_buckets``


class WatchedPass:
    """Notes when the gradients of one backward pass come, and from where."""

    def __init__(self) -> None:
        self._graphs: dict[Tensor, tuple[int, Arrival | None]] = {}
        self._whole: dict[Tensor, int] = {}
        self._times = itertools.count()

    def home(self, leaf: Tensor, look: Look) -> None:
        """Have memory made for a gradient."""

    def take(self, leaf: Tensor, gradient: Tensor) -> bool:
        """Note a gradient by one graph, without holding it: autograd would copy what somebody else
        holds."""
        again = leaf in self._graphs  # then it is a part of the gradient only
        self._graphs[leaf] = next(self._times), None if again else Arrival.of(gradient)
        return False

    def take_whole(self, leaf: Tensor) -> None:
        """Note that torch has put together all of a gradient."""
        self._whole[leaf] = next(self._times)

    def order(self) -> tuple[list[Tensor], set[Tensor]]:
        """Return leaves as their gradients were complete, and of which of them one graph told."""
        by_graph = {
            leaf: time
            for leaf, (time, seen) in self._graphs.items()
            if seen is not None and seen.is_of(leaf)
        }
        times = self._whole | by_graph
        return sorted(times, key=times.__getitem__), set(by_graph)


@contextmanager
def _hooks(leaves: Sequence[Tensor], take_whole: Callable[[Tensor], None]) -> Iterator[None]:
    """Have torch tell of each gradient that it has put together in here."""
    trained = [leaf for leaf in leaves if leaf.requires_grad]
    handles = [leaf.register_post_accumulate_grad_hook(take_whole) for leaf in trained]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class AveragedGradients:
    """Put the mean over ranks in the place of each gradient of ``parameters``.

    ``backward`` is around the backward pass of a step that has only one, and ``finish`` comes
    before the gradients are read. ``all_of`` speaks to the other hosts; ``meeting`` is what waiting
    for other ranks happens in; ``lay_out`` makes the buckets. ``generation`` changes whenever
    gradients come to lie elsewhere.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        count: int,
        all_of: AllOf,
        meeting: Callable[[str], AbstractContextManager[Any]] = nullcontext,
        lay_out: LayOut = flat_buckets,
    ) -> None:
        self.parameters, self.count = tuple(parameters), count
        self._all_of, self._meeting, self._lay_out = all_of, meeting, lay_out
        self.generation = 0
        self._forget()

    def _forget(self) -> None:
        """Have the next pass watched."""
        self._sent: SentGradients | None = None
        self._watched = WatchedPass()
        self._by_graph = self._by_torch = self.parameters  # who tells of their gradients
        self.generation += 1

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Send gradients of the pass in here as they come. Gradients of passes before it would be
        missing in them, so where there are any, all are sent by ``finish``."""
        if self.count == 1 or any(p.grad is not None for p in self.parameters):
            yield
            return
        if self._sent is not None and self._sent.is_unfinished:  # the step before has failed
            self._sent.abandon()
        self._watched = WatchedPass()
        listener = self._watched if self._sent is None else self._sent
        with listening(self._by_graph, listener), _hooks(self._by_torch, listener.take_whole):
            yield

    @torch.no_grad()
    def finish(self) -> None:
        """Send what has not been sent, and wait for all. A NaN or inf of one rank is one on all.
        The sums have one order, so that all ranks get the same bits. Raises TrainingError if a
        gradient that was sent has changed since."""
        if self.count == 1:
            return
        active = [p for p in self.parameters if p.grad is not None]
        if self._sent is None:
            self._sent = self._divide(active)
        sent, fits = self._sent, self._sent.fits(active)
        self._average(sent)
        if not fits:  # some of these buckets had been sent before that was known
            self._agree(active, [])
            others = [p for p in active if p not in sent.parameters]
            if others:
                self._average(SentGradients(self._lay_out([], others)))
            self._forget()

    @property
    def num_early(self) -> int:
        """Count the buckets that are sent before the backward pass ends."""
        return 0 if self._sent is None else self._sent.num_early

    @property
    def num_sent(self) -> int:
        """Count the buckets of this pass that are on their way."""
        return 0 if self._sent is None else self._sent.num_sent

    def _divide(self, active: Sequence[Tensor]) -> SentGradients:
        """Divide what has gradients into buckets, as the pass that was watched has shown."""
        order, by_graph = self._watched.order()
        self._by_graph = tuple(p for p in order if p in by_graph)
        self._by_torch = tuple(p for p in order if p not in by_graph)
        said = self._agree(active, order)
        everywhere = set.intersection(*map(set, said))
        early = [self.parameters[place] for place in said[0] if place in everywhere]
        late = set(active).difference(early)
        self.generation += 1
        return SentGradients(self._lay_out(early, [p for p in active if p in late]))

    def _agree(self, active: Sequence[Tensor], order: Sequence[Tensor]) -> list[list[int]]:
        """Return the order of each rank, as places of parameters. Raises TrainingError unless all
        have gradients of the same ones."""
        places = {parameter: place for place, parameter in enumerate(self.parameters)}
        own = [places[p] for p in active], [places[p] for p in order]
        said = self._all_of(own, "parameters with a gradient")
        if any(other[0] != said[0][0] for other in said):
            raise TrainingError(
                "ranks do not have gradients of the same weights: all must run the same model, "
                "with the same parts of it frozen"
            )
        return [other[1] for other in said]

    def _average(self, sent: SentGradients) -> None:
        with self._meeting("average of gradients"):
            sent.average(self.count)


def averaged_over(group: ProcessGroup, parameters: Sequence[Tensor]) -> AveragedGradients:
    """Return what averages gradients over a process group. Raises TrainingError unless all of its
    ranks have the same bits in all parameters."""

    def all_of(value: Any, what: str) -> list[Any]:
        found: list[Any] = [None] * group.size()
        torch.distributed.all_gather_object(found, value, group)
        return found

    said = all_of(bit_sums(parameters), "weights")
    odd = [rank for rank, other in enumerate(said) if other != said[0]]
    if odd:
        raise TrainingError(
            f"ranks 0 and {odd[0]} of the process group do not begin with the same weights: load "
            "the same file on all, or send those of rank 0 with torch.distributed.broadcast"
        )
    return AveragedGradients(
        parameters, group.size(), all_of, lay_out=partial(flat_buckets, group=group)
    )


@torch.no_grad()
def bit_sums(tensors: Sequence[Tensor]) -> list[int]:
    """Return sums over the bits of all tensors: equal on ranks whose tensors are."""
    kinds = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    sums = [
        t.detach().contiguous().view(kinds[t.element_size()]).sum(dtype=torch.int64)
        for t in tensors
    ]
    found: list[int] = torch.stack(sums).tolist()
    return found
