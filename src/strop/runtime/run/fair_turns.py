"""Callers take turns, and whoever has waited longest is next.

A lock of Python's goes to whoever asks at the right moment, which is most often the thread that has
just given it back: of 200 threads a few then do all the work, while the others wait for seconds.
"""

from __future__ import annotations

import heapq
import os
import threading
from collections import deque
from collections.abc import Callable
from types import TracebackType

import torch


class Ticket:
    """A caller waits with this until it is given a number."""

    __slots__ = ("called", "number")

    def __init__(self) -> None:
        self.called = threading.Lock()
        self.called.acquire()
        self.number = -1


class FairTurns:
    """Numbers from 0 on have one holder each at a time; the lowest that is free is taken first.
    ``most`` says how many there are, which may change."""

    def __init__(self, most: Callable[[], int]) -> None:
        self._most = most
        self._guard = threading.Lock()
        self._free: list[int] = []  # a heap
        self._num_made = 0
        self._waiting = deque[Ticket]()

    @property
    def are_wanted(self) -> bool:
        """Say whether anybody waits for a number, or would have to."""
        return bool(self._waiting) or not self._is_one_free()

    def take(self) -> int:
        """Return a number, which is the caller's until it gives it back."""
        with self._guard:
            if not self._waiting and self._is_one_free():
                return self._lowest()
            ticket = Ticket()
            self._waiting.append(ticket)
            self._hand_over()  # should somebody have been interrupted who was about to
        try:
            ticket.called.acquire()
        except BaseException:  # an interrupt: whoever is behind must not wait for this caller
            self._withdraw(ticket)
            raise
        return ticket.number

    def give(self, number: int) -> None:
        """Give a number back; whoever has waited longest has it by then."""
        with self._guard:
            heapq.heappush(self._free, number)
            self._hand_over()

    def _hand_over(self) -> None:
        while self._waiting and self._is_one_free():
            ticket = self._waiting.popleft()
            ticket.number = self._lowest()
            ticket.called.release()

    def _withdraw(self, ticket: Ticket) -> None:
        with self._guard:
            if ticket in self._waiting:
                self._waiting.remove(ticket)
                return
        self.give(ticket.number)

    def _is_one_free(self) -> bool:
        return self._num_made - len(self._free) < max(1, self._most())

    def _lowest(self) -> int:
        if self._free:
            return heapq.heappop(self._free)
        self._num_made += 1
        return self._num_made - 1


def _one() -> int:
    return 1


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


def _num_lanes() -> int:
    """Return how many calls may run side by side on a CPU: each has as many threads as torch
    gives it, and more of them than there are cores would wait for each other."""
    return len(os.sched_getaffinity(0)) // torch.get_num_threads()


# A program that runs on a CPU has one of these numbers meanwhile. It stands for working memory, of
# which there is so much however many threads call.
LANES = FairTurns(_num_lanes)
