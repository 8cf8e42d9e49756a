"""Sum gradients into the shares of ranks while the backward pass goes on.

As soon as all gradients of a bucket are there, they are sent to the ranks that step their weights
(reduce-scatter), and their memory is freed. So a rank keeps the sums of its own share, and at most
two buckets on their way (ZeRO-2: https://arxiv.org/abs/1910.02054, section 5.2). Buckets travel in
one order on all ranks: that in which those of rank 0 were complete in the first backward pass.

Autograd hands out the gradients of a compiled graph together, when all of it has run. So the graph
writes them into their buckets, tells of each when it is complete, and autograd gets none.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from strop.dispatch.gradient_edges import leaves_of_one_graph
from strop.dispatch.gradient_listeners import listening
from strop.errors import TrainingError
from strop.runtime.run.sizes import Look
from strop.train.flat_gradients import copy_into, home_at
from strop.train.sharded_parameters import (
    IN_FLIGHT,
    Room,
    ShardedBucket,
    ShardedParameters,
    reduce_scatter,
)


@dataclass(frozen=True)
class _Sent:
    """Hold a bucket on its way. ``received`` is where this rank's sums come to lie."""

    bucket: ShardedBucket
    room: Room
    received: Tensor
    work: Any


class ShardedGradients:
    """Take the gradients of sharded parameters as they come, and leave each rank the means of its
    own.

    A step is backward passes, each within ``backward`` where modules are compiled, and each ended
    by ``end_pass``, and then ``finish``. ``meeting`` is what waiting for other ranks happens in,
    and ``agree`` returns what rank 0 hands it. ``peak_bytes`` is the most that its memory has been:
    the share of this rank, gradients that wait for the rest of their bucket, and buckets on their
    way.
    """

    def __init__(
        self,
        shards: ShardedParameters,
        meeting: Callable[[], AbstractContextManager[Any]] = nullcontext,
        agree: Callable[[int], int] = int,
    ) -> None:
        self._shards, self._meeting, self._agree = shards, meeting, agree
        self._order: list[int] = []  # of the buckets, once the first pass has ended
        self._places = {
            parameter: (at, place)
            for at, bucket in enumerate(shards.buckets)
            for place, parameter in enumerate(bucket.parameters)
        }
        for parameter in self._places:
            parameter.register_post_accumulate_grad_hook(self._take)
        own = (bucket.own for bucket in shards.buckets)
        self._own_bytes = sum(t.numel() * t.element_size() for t in own)
        self.peak_bytes = self._own_bytes
        self.forget()

    def forget(self) -> None:
        """Begin a step anew: nothing of an unfinished one is left."""
        self._seen: set[Tensor] = set()
        self._is_first = True
        self._sent = deque[_Sent]()
        self._begin_pass()

    def _begin_pass(self) -> None:
        self._here: set[Tensor] = set()  # with a gradient in this pass
        self._missing = [len(bucket.parameters) for bucket in self._shards.buckets]
        self._rooms: dict[int, Room] = {}
        self._unsent = list(range(len(self._missing)))

    @property
    def has_gradients(self) -> list[bool]:
        """Tell of each parameter whether it has had a gradient in this step."""
        return [parameter in self._seen for parameter in self._shards.parameters]

    def backward(self, loss: Tensor) -> AbstractContextManager[None]:
        """Take gradients from compiled graphs in here, where the backward pass of ``loss`` is."""
        alone = leaves_of_one_graph(loss)
        told = [parameter for parameter in self._places if parameter in alone]
        return listening(told, self, num_own_hooks=1)

    def home(self, parameter: Tensor, look: Look) -> Tensor | None:
        """Return the place of a gradient in its bucket."""
        at, place = self._places[parameter]
        return home_at(self._room(at).views[place], look)

    def take(self, parameter: Tensor, gradient: Tensor) -> bool:
        """Keep a gradient that a compiled graph has computed."""
        self._put(parameter, gradient)
        return True

    def _take(self, parameter: Tensor) -> None:
        """Keep a gradient that torch has put together. Its hooks are also called where a compiled
        graph has handed on none, as it was kept."""
        gradient, parameter.grad = parameter.grad, None
        if gradient is not None:
            self._put(parameter, gradient)

    @torch.no_grad()
    def _put(self, parameter: Tensor, gradient: Tensor) -> None:
        """Put a gradient that is complete into its bucket."""
        at, place = self._places[parameter]
        if parameter in self._here:
            raise TrainingError(
                "a weight has had two gradients in one backward pass, as from checkpoints with "
                "use_reentrant=True: keep gradients whole, without --shard_gradients"
            )
        copy_into([self._room(at).views[place]], [gradient])
        self._here.add(parameter)
        self._missing[at] -= 1
        if not self._missing[at]:
            self._send_complete()

    def _send_complete(self) -> None:
        """Send buckets that are complete, as far as it is their turn."""
        while self._unsent:
            if self._turn == len(self._order):
                complete = [at for at in self._unsent if not self._missing[at]]
                if not complete:
                    return
                self._order.append(self._agree(complete[0]))
            if self._missing[self._order[self._turn]]:
                return
            self._send()

    @property
    def _turn(self) -> int:
        return len(self._missing) - len(self._unsent)

    def _room(self, at: int) -> Room:
        room = self._rooms.get(at)
        if room is None:
            room = self._rooms[at] = self._shards.buckets[at].room()
            self._note()
        return room

    def _note(self) -> None:
        """Count what is held."""
        rooms = sum(room.num_bytes for room in self._rooms.values())
        sent = sum(
            s.room.num_bytes + (not self._is_first) * s.received.numel() * s.received.element_size()
            for s in self._sent
        )
        self.peak_bytes = max(self.peak_bytes, self._own_bytes + rooms + sent)

    def _send(self) -> None:
        """Send the next bucket, after one before it has come where too many are on their way."""
        if len(self._sent) == IN_FLIGHT:
            self._arrive()
        at = self._order[self._turn]
        bucket, room = self._shards.buckets[at], self._room(at)
        received = bucket.own if self._is_first else torch.empty_like(bucket.own)
        del self._rooms[at]
        self._unsent.remove(at)
        self._sent.append(_Sent(bucket, room, received, reduce_scatter(received, room.memory)))
        self._note()

    def _arrive(self) -> None:
        sent = self._sent.popleft()
        with self._meeting():
            sent.work.wait()
        if not self._is_first:
            sent.bucket.own.add_(sent.received)

    @torch.no_grad()
    def end_pass(self) -> None:
        """Send what is left after a backward pass, in which parameters may have had no gradient,
        and wait until the sums of this rank are there."""
        while self._unsent:
            if self._turn == len(self._order):
                self._order.append(self._agree(self._unsent[0]))
            self._send()
        while self._sent:
            self._arrive()
        self._is_first = False
        self._seen |= self._here
        self._begin_pass()

    @torch.no_grad()
    def finish(self) -> None:
        """Give each parameter of this rank the mean over ranks of its gradients in this step, and
        have no gradient of the others. A NaN or inf of one rank is one on the rank that steps."""
        for bucket in self._shards.buckets:
            bucket.own.div_(self._shards.count)
            bucket.give_gradients(self._shards.rank, self._seen.__contains__)
        self.forget()
