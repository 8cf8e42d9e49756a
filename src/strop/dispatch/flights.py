"""A call on a CPU runs apart from the lock of its dispatcher, so that others can be looked at, and
run on other cores, meanwhile.

Whoever is about to write what runs read (weights with adapters in them) has to wait for those that
are under way. It holds the lock, so that no other begins.

A lone call has all threads that torch gives it. Where others call as well, each has its share of
the cores, as far as that gives the same bits: several calls beside each other, each on its own
core, finish sooner than one after the other with threads that wait for each other at each operator.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from strop.runtime.run.fair_turns import LANES, FairLock, cores_of
from strop.runtime.run.lane_threads import thread_for
from strop.runtime.run.operator_threads import with_threads

# Of the numbers of threads below all, those with which a run gives the same bits.
Shares = Callable[[int], Sequence[int]]


class RunsInFlight:
    """Count the runs of one module that are under way without the lock."""

    def __init__(self) -> None:
        self.count = 0
        self._change = threading.Condition(threading.Lock())

    def begin(self) -> None:
        with self._change:
            self.count += 1

    def end(self) -> None:
        with self._change:
            self.count -= 1
            if not self.count:
                self._change.notify_all()

    def wait(self) -> None:
        """Wait until none is under way."""
        with self._change:
            while self.count:
                self._change.wait()


class Flight:
    """The part of one call that needs no lock. ``run`` gives its result; where it is None, the call
    has been served under the lock."""

    __slots__ = ("_is_crowded", "_lane", "_lock", "_num_threads", "_runs", "run")

    def __init__(self, runs: RunsInFlight, lock: FairLock) -> None:
        """``lock`` is the dispatcher's, under which this begins."""
        self._runs, self._lock = runs, lock
        self._lane: int | None = None
        self._is_crowded, self._num_threads = False, 1
        self.run: Callable[[], Any] | None = None

    def begin(self, shares: Shares) -> int:
        """Take a lane, and cores, which this has until it ends."""
        full, cores = torch.get_num_threads(), LANES.most
        fewer = shares(full) if full > 1 and LANES.are_used else ()
        turn = LANES.take(lambda callers: cores_of(full, fewer, cores, callers))
        self._lane, self._num_threads = turn.number, turn.weight
        self._is_crowded = turn.has_waited or self._lock.is_wanted
        self._runs.begin()
        return turn.number

    def result(self, within: Callable[[Callable[[], Any]], Any]) -> Any:
        """Return what ``within`` makes of the run: here, or where other
        callers wait as well in the lane's own thread, which ends the flight."""
        lane, run, count = self._lane, self.run, self._num_threads
        assert lane is not None
        assert run is not None
        thread = thread_for(lane) if self._is_crowded and count == 1 else None
        if thread is None:
            return with_threads(count, partial(within, run))
        self._lane, self.run = None, None
        return thread.result_of(partial(self._land, lane, partial(within, run)))

    def _land(self, lane: int, run: Callable[[], Any]) -> Any:
        try:
            return run()
        finally:
            self._give_back(lane)

    def end(self) -> None:
        """Give the lane back, unless the lane's own thread does."""
        if self._lane is not None:
            lane, self._lane, self.run = self._lane, None, None
            self._give_back(lane)

    def _give_back(self, lane: int) -> None:
        self._runs.end()
        LANES.give(lane)
