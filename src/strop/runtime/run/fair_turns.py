"""Callers take turns, and whoever has waited longest is next.

A lock of Python's goes to whoever asks at the right moment, which is most often the thread that has
just given it back: of 200 threads a few then do all the work, while the others wait for seconds.
"""

from __future__ import annotations

import heapq
import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import NamedTuple

Weigh = Callable[[int], int]  # how much of all a caller takes, by how many callers there are


class Turn(NamedTuple):
    """A caller holds this number, and so much of what there is. ``has_waited`` for it says whether
    others were there."""

    number: int
    weight: int
    has_waited: bool


class Ticket:
    """A caller waits with this until it is given a turn."""

    __slots__ = ("called", "turn", "weigh")

    def __init__(self, weigh: Weigh) -> None:
        self.called = threading.Lock()
        self.called.acquire()
        self.weigh = weigh
        self.turn: Turn | None = None


def _one(callers: int = 1) -> int:
    return 1


class FairTurns:
    """Numbers from 0 on have one holder each at a time; the lowest that is free is taken first.
    Each holder has a share of ``most``, which may change; one always has a turn, however much it
    takes."""

    def __init__(self, most: Callable[[], int]) -> None:
        self._most = most
        self._guard = threading.Lock()
        self._free: list[int] = []  # a heap of numbers
        self._held: dict[int, int] = {}  # weights, by number
        self._waiting = deque[Ticket]()

    @property
    def most(self) -> int:
        return max(1, self._most())

    @property
    def are_used(self) -> bool:
        """Say whether anybody has a number, or waits for one."""
        return bool(self._held or self._waiting)

    def take(self, weigh: Weigh = _one) -> Turn:
        """Return a turn, which is the caller's until it gives its number back."""
        with self._guard:
            weight = weigh(len(self._held) + 1)
            if not self._waiting and self._has_room(weight):
                return self._begun(weight, has_waited=False)
            ticket = Ticket(weigh)
            self._waiting.append(ticket)
            self._hand_over()  # should somebody have been interrupted who was about to
        try:
            ticket.called.acquire()
        except BaseException:  # an interrupt: whoever is behind must not wait for this caller
            self._withdraw(ticket)
            raise
        assert ticket.turn is not None
        return ticket.turn

    def take_alone(self, weight: int) -> int | None:
        """Return the lowest number as ``take`` gives it, if nobody has one or waits, else None."""
        if self._held or self._waiting:  # most often said without the guard
            return None
        with self._guard:
            if self._held or self._waiting:
                return None
            return self._begun(weight, has_waited=False).number

    def give(self, number: int) -> None:
        """Give a number back; whoever has waited longest has a turn by then, if there is room."""
        with self._guard:
            del self._held[number]
            heapq.heappush(self._free, number)
            self._hand_over()

    def _hand_over(self) -> None:
        while self._waiting:
            # whoever has just had a turn is counted, too, as it most often comes again at once
            weight = self._waiting[0].weigh(len(self._held) + len(self._waiting) + 1)
            if not self._has_room(weight):
                return
            ticket = self._waiting.popleft()
            ticket.turn = self._begun(weight, has_waited=True)
            ticket.called.release()

    def _withdraw(self, ticket: Ticket) -> None:
        with self._guard:
            if ticket in self._waiting:
                self._waiting.remove(ticket)
                self._hand_over()  # those behind it may need less room
                return
        assert ticket.turn is not None
        self.give(ticket.turn.number)

    def _has_room(self, weight: int) -> bool:
        return not self._held or sum(self._held.values()) + weight <= self.most

    def _begun(self, weight: int, *, has_waited: bool) -> Turn:
        number = heapq.heappop(self._free) if self._free else len(self._held)
        self._held[number] = weight
        return Turn(number, weight, has_waited)


class FairLock:
    """This is a lock that its owner may take again, as ``threading.RLock``, and that goes to
    whoever has waited longest."""

    def __init__(self) -> None:
        self._turns = FairTurns(_one)
        self._owner, self._depth = 0, 0

    def __enter__(self) -> None:
        own = threading.get_ident()
        if self._owner == own:
            self._depth += 1
            return
        self._turns.take()
        self._owner, self._depth = own, 1

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._depth -= 1
        if not self._depth:
            self._owner = 0
            self._turns.give(0)

    @property
    def is_wanted(self) -> bool:
        """Say whether anybody waits for it."""
        return bool(self._turns._waiting)

    @property
    def is_held(self) -> bool:
        """Say whether anybody has it."""
        return self._owner != 0


def _num_cores() -> int:
    return len(os.sched_getaffinity(0))


# A program that runs on a CPU has one of these numbers meanwhile, and a share of the cores. The
# number stands for working memory, of which there is so much however many threads call.
LANES = FairTurns(_num_cores)


def cores_of(full: int, fewer: Sequence[int], cores: int, callers: int) -> int:
    """Return how many threads a call gets: all that torch gives it, ``full``, if nobody else calls;
    else its share of the cores. It may have one of ``fewer`` instead."""
    if callers == 1:
        return full
    fitting = [count for count in (full, *fewer) if count * callers <= cores]
    return max(fitting, default=min((full, *fewer)))
