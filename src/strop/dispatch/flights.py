"""A call on a CPU runs apart from the lock of its dispatcher, so that others can be looked at, and
run on other cores, meanwhile.

Whoever is about to write what runs read (weights with adapters in them) has to wait for those that
are under way. It holds the lock, so that no other begins.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from strop.runtime.run.fair_turns import LANES


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

    __slots__ = ("_lane", "_runs", "run")

    def __init__(self, runs: RunsInFlight) -> None:
        self._runs = runs
        self._lane: int | None = None
        self.run: Callable[[], Any] | None = None

    def begin(self) -> int:
        """Take a lane, in which this runs until it ends."""
        self._lane = lane = LANES.take()
        self._runs.begin()
        return lane

    def end(self) -> None:
        if self._lane is not None:
            lane, self._lane, self.run = self._lane, None, None
            self._runs.end()
            LANES.give(lane)
