"""Keep pictures that wait, and choose which are drawn together."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Generic, Protocol, TypeVar


class Waiting(Protocol):
    """Name what a line asks of those who wait."""

    @property
    def key(self) -> Hashable:
        """Return what pictures of one batch have in common."""

    @property
    def is_wanted(self) -> bool:
        """Tell whether anybody still waits for it."""


W = TypeVar("W", bound=Waiting)


class WaitingLine(Generic[W]):
    """Hold who waits, in the order of arrival.

    Whoever has waited longest is served next, so nobody is passed over for ever; all who wait and
    fit beside it go with it, up to a full batch. Those who are not wanted any more are dropped.
    """

    def __init__(self, most_batch: int) -> None:
        self.most_batch = most_batch
        self._waiting: list[W] = []

    def __len__(self) -> int:
        return sum(one.is_wanted for one in self._waiting)

    def add(self, those: Iterable[W]) -> None:
        self._waiting = [one for one in (*self._waiting, *those) if one.is_wanted]

    def take(self) -> list[W]:
        """Take out the next batch; empty if nobody waits."""
        wanted = [one for one in self._waiting if one.is_wanted]
        batch = [one for one in wanted if one.key == wanted[0].key][: self.most_batch]
        taken = set(map(id, batch))
        self._waiting = [one for one in wanted if id(one) not in taken]
        return batch

    def place_of(self, those: Iterable[W]) -> int:
        """Return how many wait before the first of those."""
        wanted = [one for one in self._waiting if one.is_wanted]
        ids = set(map(id, those))
        return next((n for n, one in enumerate(wanted) if id(one) in ids), 0)
