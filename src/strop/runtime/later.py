"""Kernels that the first shape does not need, built once its call has been served.

A few processes of low priority build them. A shape that needs one earlier builds it itself, or
waits for the one in work: which kernel runs is a matter of sizes alone. When the process ends,
what is not built is left.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from strop.errors import StropError
from strop.ir.source import KernelSource
from strop.runtime import builds

log = logging.getLogger("strop")
SHARE, MOST_WORKERS = 4, 4  # one process for each four that build while somebody waits


class Later:
    """The other kernels of one program."""

    def __init__(self, sources: Sequence[KernelSource], arch: int = 0,
                 cache: builds.Cache | None = None, workers: int = 1) -> None:  # fmt: skip
        self.total = len(sources)
        self.num_built = 0  # compiled, not found in the cache
        self.num_done = 0
        self.seconds = 0.0  # from the beginning to the latest kernel
        self._sources, self._arch, self._cache = tuple(sources), arch, cache
        self._workers = max(1, min(workers // SHARE, MOST_WORKERS))
        self._began = 0.0
        self._lock = threading.Lock()
        self._done = threading.Event()

    def start(self) -> None:
        """Begin, at the first call of this; return at once."""
        if self._began:
            return
        self._began = time.perf_counter()
        if self._sources:
            QUEUE.add(self, self._sources, self._workers)
        else:
            self._done.set()

    def wait(self) -> None:
        """Until all are built."""
        self.start()
        self._done.wait()

    def build(self, source: KernelSource) -> None:
        assert self._cache is not None
        built = False
        try:
            built = builds.build_for_later(source, self._arch, self._cache)
        except (StropError, OSError) as error:  # raised where a shape needs this kernel
            log.warning("a kernel for other sizes could not be built ahead: %s", error)
        with self._lock:
            self.num_built += built
            self.num_done += 1
            self.seconds = time.perf_counter() - self._began
        if self.num_done == self.total:
            self._done.set()

    @property
    def is_done(self) -> bool:
        """Or given up, because the process ends."""
        return self._done.is_set()

    def abandon(self) -> None:
        self._done.set()


@dataclass
class Queue:
    """Kernels of all programs, first come, first served."""

    _waiting: deque[tuple[Later, KernelSource]] = field(default_factory=deque)
    _open: list[Later] = field(default_factory=list)
    _threads: list[threading.Thread] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, later: Later, sources: Sequence[KernelSource], workers: int) -> None:
        with self._lock:
            self._open = [*(other for other in self._open if not other.is_done), later]
            self._waiting += [(later, source) for source in sources]
            for _ in range(workers - len(self._threads)):
                work = threading.Thread(target=self._work, name="strop-kernels-later", daemon=True)
                self._threads.append(work)
                work.start()

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    self._threads.remove(threading.current_thread())
                    break
                later, source = self._waiting.popleft()
            later.build(source)
        builds.stop_workers(builds.LOW_PRIORITY)

    def close(self) -> None:
        """The process ends."""
        with self._lock:
            threads = list(self._threads)
            self._abandon()
        builds.BUILDS.close()
        for thread in threads:
            thread.join()

    def forget(self) -> None:
        """In a fork, which has none of the threads."""
        self._lock = threading.Lock()
        self._threads = []
        self._abandon()

    def _abandon(self) -> None:
        for later in self._open:
            later.abandon()
        self._waiting.clear()


QUEUE = Queue()
atexit.register(QUEUE.close)
os.register_at_fork(after_in_child=QUEUE.forget)
