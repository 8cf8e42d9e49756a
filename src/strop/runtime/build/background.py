"""Kernels are built here before anybody asks for them, in threads of their own.

SOON builds those that the first call is going to need, as they are printed. LATER builds those that
only other sizes need, once the first call has its own, by the processes that built these, at low
priority. A shape that needs one of them earlier builds it itself, for which it borrows these
processes, or waits for the one in work: which kernel runs is a matter of sizes alone. When the
process ends, what is not built is left.
"""

from __future__ import annotations

import atexit
import heapq
import itertools
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from strop.errors import StropError
from strop.ir.device import GpuTarget
from strop.ir.source import KernelSource
from strop.runtime.build import compilers

log = logging.getLogger("strop")
# Which share of likely sizes needs each kernel, the most wanted first
BuildOrder = Callable[[Sequence[KernelSource]], Mapping[KernelSource, float]]
ORDER = None  # among kernels: the order of some has to be found
Work = KernelSource | None
LOW_PRIORITY = 19  # niceness of processes for which nobody waits
SHARE, MOST_LATER = 3 / 4, 12  # how many of those: this share of all workers, and at most


class BackgroundBuild:
    """This is a number of kernels, and how far they are. ``order`` says how wanted each of them is,
    and is asked before the first is built."""

    def __init__(
        self,
        sources: Sequence[KernelSource],
        target: GpuTarget | None = None,
        cache: compilers.Cache | None = None,
        workers: int = 1,
        niceness: int = LOW_PRIORITY,
        order: BuildOrder | None = None,
    ) -> None:
        self.total = len(sources)
        self.num_built = 0  # compiled, not found in the cache
        self.num_done = 0
        self.seconds = 0.0  # from the beginning to the latest kernel
        self._sources, self._target, self._cache = tuple(sources), target, cache
        self._niceness, self._order = niceness, order
        self._workers = max(1, min(int(workers * SHARE), MOST_LATER)) if niceness else workers
        self._began = 0.0
        self._lock = threading.Lock()
        self._done = threading.Event()

    def keep_processes(self) -> None:
        """Keep processes that are idle, as many as this will use, so that it has none to start."""
        compilers.hand_over(min(self._workers, self.total), self._niceness)

    def start(self) -> None:
        """Begin, at the first call of this; return at once."""
        if self._began:
            return
        self._began = time.perf_counter()
        if self._sources:
            queue = LATER if self._niceness else SOON
            queue.add(self, (ORDER,) if self._order else self._sources, self._workers)
        else:
            self._done.set()

    def wait(self, most_s: float | None = None) -> bool:
        """Wait until all are built, or for so long, and say whether they are."""
        self.start()
        return self._done.wait(most_s)

    def begin(self, queue: Queue) -> None:
        """Queue all, in their order."""
        assert self._order is not None
        shares = self._order(self._sources)
        queue.add(self, tuple(shares), self._workers, shares)

    def build(self, source: KernelSource) -> None:
        assert self._target is not None
        assert self._cache is not None
        built = False
        try:
            built = compilers.build_one(
                source, self._target, self._cache, self._niceness, self._workers
            )
        except (StropError, OSError) as error:  # those who need this kernel meet it again
            if self._niceness:
                log.warning("a kernel for other sizes could not be built ahead: %s", error)
        with self._lock:
            self.num_built += built
            self.num_done += 1
            self.seconds = time.perf_counter() - self._began
        if self.num_done == self.total:
            self._done.set()

    @property
    def is_done(self) -> bool:
        """Say whether all are built, or given up because the process ends."""
        return self._done.is_set()

    def give_up(self) -> None:
        self._done.set()


@dataclass
class Queue:
    """This holds the kernels of all programs that are to be built. Where somebody waits for them,
    the longest text comes first, so that no process is left alone with a large kernel at the end.
    Else the most wanted comes first, whichever program it is of: a ControlNet's kernels for rare
    sizes would else come before those that its UNet needs at the second size."""

    niceness: int
    _waiting: list[tuple[float, int, BackgroundBuild, Work]] = field(default_factory=list)  # heap
    _numbers: Iterator[int] = field(default_factory=itertools.count)
    _open: list[BackgroundBuild] = field(default_factory=list)
    _threads: list[threading.Thread] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(
        self,
        ahead: BackgroundBuild,
        sources: Sequence[Work],
        workers: int,
        shares: Mapping[KernelSource, float] = MappingProxyType({}),
    ) -> None:
        with self._lock:
            self._open = [*(other for other in self._open if not other.is_done), ahead]
            for number, source in zip(self._numbers, sources, strict=False):
                rank = self._rank(source, shares)
                heapq.heappush(self._waiting, (rank, number, ahead, source))
            wanted = min(workers, len(self._threads) + len(sources))
            for _ in range(wanted - len(self._threads)):
                # a daemon: the end of the process waits for no other
                work = threading.Thread(target=self._work, name="strop-ahead", daemon=True)
                self._threads.append(work)
                work.start()

    def _rank(self, source: Work, shares: Mapping[KernelSource, float]) -> float:
        """Return the place of a kernel: lower ones come first, and equal ones as they came."""
        if source is ORDER:
            return -math.inf
        return -shares.get(source, 0.0) if self.niceness else -len(source.text)

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    self._threads.remove(threading.current_thread())
                    is_last = not self._threads  # others may wait for a process that is lent
                    break
                *_, ahead, source = heapq.heappop(self._waiting)
            if source is ORDER:
                ahead.begin(self)
            else:
                ahead.build(source)
        if self.niceness and is_last:
            compilers.stop_workers(self.niceness)

    def close(self) -> list[threading.Thread]:
        """Give up what waits, as the process ends, and return the threads that are still at
        work."""
        with self._lock:
            self._give_up()
            return list(self._threads)

    def forget(self) -> None:
        """Forget the threads in a fork, which has none of them."""
        self._lock = threading.Lock()
        self._threads = []
        self._give_up()

    def _give_up(self) -> None:
        for ahead in self._open:
            ahead.give_up()
        self._waiting.clear()


SOON, LATER = Queue(0), Queue(LOW_PRIORITY)


def _close() -> None:
    threads = [*SOON.close(), *LATER.close()]
    compilers.BUILDS.close()
    for thread in threads:
        thread.join()


def _forget() -> None:
    for queue in (SOON, LATER):
        queue.forget()


atexit.register(_close)
os.register_at_fork(after_in_child=_forget)
