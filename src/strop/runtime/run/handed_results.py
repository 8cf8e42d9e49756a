"""Hand results of a captured graph to the caller where they are, without a copy.

A graph writes to the same addresses in each replay, and the caller may keep a result for as long as
he likes. So large results lie in a pool of torch's allocator from which nothing else comes. They
are the caller's: the graph keeps their addresses alone. Before the next replay the allocator is
asked for the same memory. Where it gives out the same addresses, nobody has the results of the call
before any more, and nothing on another stream reads them (``Tensor.record_stream``): that is the
allocator's own promise. Where it doesn't, the graph must not be replayed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from strop.runtime.run.ready_results import places_of
from strop.runtime.run.shape_plan import ShapePlan
from strop.runtime.run.sizes import Look

# Of all such results of a program: to copy these takes 8 us and more. A caller who keeps the result
# of a call over the next one costs a second capture, and samplers do so with what a denoiser gives,
# which is smaller: 15 MB are the latents of 129 frames of 720p.
LEAST_SUM_BYTES = 16 << 20
# Of each: the host takes some 10 us for one before the replay, and smaller ones share one copy.
LEAST_BYTES = 1 << 20


def handed_of(plan: ShapePlan) -> dict[int, Look]:
    """Return the results that are worth it, by place: those that have a buffer for themselves."""
    looks = dict(plan.results)
    made = {place: looks[number] for number, place in places_of(plan).items()}
    found = {place: look for place, look in made.items() if _bytes_of(look) >= LEAST_BYTES}
    return found if sum(map(_bytes_of, found.values())) >= LEAST_SUM_BYTES else {}


def _bytes_of(look: Look) -> int:
    shape, _, dtype = look
    return math.prod(shape) * dtype.itemsize


class ResultPool:
    """Memory of one device that torch's allocator gives out for these results alone."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        with torch.cuda.device(device):  # a pool is one of the device that is current
            self._pool = torch.cuda.MemPool()

    def empty(self, looks: Mapping[int, Look]) -> dict[int, Tensor]:
        with torch.cuda.use_mem_pool(self._pool, self._device):
            return {
                place: torch.empty_strided(shape, strides, dtype=dtype, device=self._device)
                for place, (shape, strides, dtype) in looks.items()
            }


class HandedResults:
    """Holds the memory of results from one look whether it is back to the next replay. All calls
    must come on one stream: the allocator gives memory back to the stream that had it."""

    def __init__(self, pool: ResultPool, looks: Mapping[int, Look]) -> None:
        self._pool, self._looks = pool, looks
        pool.empty(looks)  # what was made in any order is given back by addresses
        self._given: dict[int, Tensor] | None = pool.empty(looks)
        self._addresses = _addresses(self._given)
        self._views: dict[int, tuple[Any, ...]] = {}

    @property
    def size_bytes(self) -> int:
        return sum(map(_bytes_of, self._looks.values()))

    def are_back(self) -> bool:
        """Take the memory again; False where somebody has some of it."""
        if self._given is None:
            made = self._pool.empty(self._looks)
            if _addresses(made) != self._addresses:
                return False
            self._given = made
        return True

    # ``ready_results.Told``, of the run that is captured

    def home(self, place: int, look: Look) -> Tensor | None:
        assert self._given is not None
        return self._given.get(place)

    def ready(self, place: int, result: Tensor) -> bool:
        return False

    def let_go(self, results: tuple[Any, ...]) -> tuple[Any, ...]:
        """Note how results lie in their memory, and return the others in their places."""
        for place, (shape, strides, _) in self._looks.items():
            found = results[place]
            view = found.shape, found.stride(), found.storage_offset()
            if view != (shape, strides, 0):
                self._views[place] = view
        return tuple(None if n in self._looks else r for n, r in enumerate(results))

    def hand_over(self, results: list[Any]) -> list[Any]:
        """Put results in their places, and keep none."""
        given, self._given = self._given, None
        assert given is not None
        for place, tensor in given.items():
            view = self._views.get(place)
            results[place] = tensor if view is None else tensor.as_strided(*view)
        return results


def _addresses(tensors: Mapping[int, Tensor]) -> dict[int, int]:
    return {place: tensor.data_ptr() for place, tensor in tensors.items()}
