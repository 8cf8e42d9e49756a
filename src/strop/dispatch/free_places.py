"""Know which arguments one entry serves at any length (``runtime.run.free_sizes``)."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from strop.dispatch.signature import memory_order
from strop.dispatch.varying_numbers import GivenCall
from strop.runtime.run.free_sizes import FreeSizes
from strop.runtime.run.limits import INDEX_LIMIT

_FREE = "of any length"  # stands for a shape in the key of a call
NOWHERE: frozenset[int] = frozenset()
Looks = tuple[tuple[Any, ...], ...]


class FreePlaces:
    """This has, for each kind of call, the places of the most arguments whose length a program
    does not ask for, and the keys without these lengths that such a program has an entry for."""

    def __init__(self) -> None:
        self._most: dict[Hashable, frozenset[int]] = {}
        self._served: dict[Hashable, set[Hashable]] = {}  # by skeleton

    def looks(self, call: GivenCall) -> Hashable:
        """Return how the tensors of a call look, but for lengths that its entry serves all."""
        looks = _looks(call)
        if self._most and (places := self._most.get(_kind(looks))):
            fewer = _without(looks, places)
            if fewer in self._served.get(call.skeleton, ()):
                return fewer
        return looks

    def note(self, call: GivenCall, sizes: FreeSizes, *, is_kept: bool) -> frozenset[int]:
        """Learn from the free ``sizes`` of the program that an entry for a call runs, and return
        the places of arguments that it serves at any length. ``is_kept``: what comes of it outlives
        a run."""
        free = NOWHERE if is_kept else frozenset(sizes.roots.values())
        looks = _looks(call)
        kind = _kind(looks)
        most = self._most.get(kind, NOWHERE)
        if free > most:
            most = self._most[kind] = free
        if most:
            served = self._served.setdefault(call.skeleton, set())
            change = served.add if free >= most else served.discard
            change(_without(looks, most))
        return free


def _looks(call: GivenCall) -> Looks:
    return tuple((t.shape, t.dtype, t.device, memory_order(t)) for t in call.tensors)


def _without(looks: Looks, places: frozenset[int]) -> Looks:
    return tuple((_FREE, *look[1:]) if n in places else look for n, look in enumerate(looks))


def _kind(looks: Looks) -> Hashable:
    """Return what is equal for calls that differ in sizes which are not 0, and may be counted in 32
    bits."""
    return tuple(
        (len(shape), dtype, len(shape) == 1 and 0 < shape[0] < INDEX_LIMIT - 1)
        for shape, dtype, *_ in looks
    )
