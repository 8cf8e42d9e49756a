"""Copies into the memory of a captured graph, and out of it.

A copy of many tensors in one launch (``torch._foreach_copy_``) gives each block of threads 65,536
elements, however few blocks that makes: 150,528 elements took 14 us on an H200, where a copy of its
own takes 2. Each launch takes the host some 4 us. So a few large tensors are copied one by one, and
many or small ones in one launch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

LARGE = 8192  # elements that a block of the common launch copies in some 2 us
MOST_ALONE = 4  # copies of their own in a call


@dataclass(frozen=True, slots=True)
class SharedResults:
    """The results at these ``places`` lie in one memory, all of which is ``flat``."""

    flat: Tensor
    places: tuple[int, ...]


def copy_all(places: Sequence[Tensor], given: Sequence[Tensor]) -> None:
    """Copy tensors to their places. torch copies tensors of one type in one launch, of several
    types one by one, so each type goes apart: tokens beside a cache of keys and values, and
    numbers, of which an adapter has one for each layer."""
    large = [n for n, tensor in enumerate(given) if tensor.numel() > LARGE]
    alone = {*large} if len(large) <= MOST_ALONE else set()
    for n in sorted(alone):
        places[n].copy_(given[n])
    alike: dict[tuple[torch.dtype, torch.dtype, torch.device], list[int]] = {}
    for n, (place, tensor) in enumerate(zip(places, given, strict=True)):
        if n not in alone:
            alike.setdefault((place.dtype, tensor.dtype, tensor.device), []).append(n)
    for some in alike.values():
        _copy_together([places[n] for n in some], [given[n] for n in some])


def _copy_together(places: list[Tensor], given: list[Tensor]) -> None:
    if len(given) == 1:
        places[0].copy_(given[0])
    elif given:
        torch._foreach_copy_(places, given)


def copies_of(results: Sequence[Any], shared: Sequence[SharedResults] = ()) -> list[Any]:
    """Copy the results to tensors of the caller's own. Those in ``shared`` memory share the copy.
    A text encoder that is asked for all its states has 34."""
    found = [*results]
    for memory in shared:
        flat = memory.flat.clone()
        for place in memory.places:
            r = results[place]
            found[place] = flat.as_strided(r.shape, r.stride(), r.storage_offset())
    done = {place for memory in shared for place in memory.places}
    left = [n for n, r in enumerate(results) if isinstance(r, Tensor) and n not in done]
    tensors = [results[place] for place in left]
    own = list(map(torch.empty_like, tensors))
    copy_all(own, tensors)
    for place, copy in zip(left, own, strict=True):
        found[place] = copy
    return found


def shared_by(results: Sequence[Any]) -> tuple[SharedResults, ...]:
    """Return the memory that several of these results lie in."""
    places: dict[int, list[int]] = {}
    for place, result in enumerate(results):
        if isinstance(result, Tensor):
            places.setdefault(result.untyped_storage()._cdata, []).append(place)
    several = [tuple(found) for found in places.values() if len(found) > 1]
    return tuple(SharedResults(_flat(results[found[0]]), found) for found in several)


def _flat(tensor: Tensor) -> Tensor:
    """Return all of a tensor's memory."""
    storage = tensor.untyped_storage()
    return torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(storage)
