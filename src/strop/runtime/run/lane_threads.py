"""One thread does the runs of a lane for which callers wait, whoever has called.

A thread that runs a program for the first time takes memory for what libraries keep by thread, and
is woken on the core of whoever has waked it, where it shares that core with another lane. So 200
threads, each with one call after a long wait, are slower than one thread with all of these calls.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from typing import Any

import torch

from strop.runtime.run.operator_threads import set_here

Work = Callable[[], Any]
_LEAST_NORMAL = 2.0**-1022


def flushes() -> bool:
    """Say whether this thread takes numbers below the least normal one for zero
    (``torch.set_flush_denormal``). That decides bits, and a new thread does as its maker does."""
    return not _LEAST_NORMAL * 0.5


class Errand:
    """This is one run that a caller waits for, and what came of it."""

    __slots__ = ("done", "error", "result", "work")

    def __init__(self, work: Work) -> None:
        self.work: Work | None = work
        self.result: Any = None
        self.error: BaseException | None = None
        self.done = threading.Lock()
        self.done.acquire()

    def do(self) -> None:
        work, self.work = self.work, None
        assert work is not None
        try:
            self.result = work()
        except BaseException as error:  # of whatever kind: it is the caller's
            self.error = error
        self.done.release()


class LaneThread:
    """This is a thread that does one errand after the other. Operators have one thread in it."""

    def __init__(self, lane: int) -> None:
        self._errands = SimpleQueue[Errand]()
        threading.Thread(target=self._serve, name=f"strop-lane-{lane}", daemon=True).start()
        self.result_of(partial(set_here, 1))
        self.flushes: bool = self.result_of(flushes)

    def result_of(self, work: Work) -> Any:
        """Have the thread do some work, and return or raise what comes of it."""
        errand = Errand(work)
        self._errands.put(errand)
        errand.done.acquire()
        error, errand.error = errand.error, None
        if error is None:
            return errand.result
        try:
            raise error
        finally:
            del error  # whose traceback holds this frame, and with it the run's tensors

    def _serve(self) -> None:
        while True:
            # nothing of an errand is kept alive while this waits for the next one
            self._errands.get().do()


_THREADS: dict[tuple[int, bool], LaneThread] = {}


def thread_for(lane: int) -> LaneThread | None:
    """Return the thread that may run for this caller, who holds the lane, with one thread in an
    operator; None where the caller has to run by itself.

    That is so where the thread would lack something of the caller's, and in the main thread, in
    which alone an interrupt can end a run.
    """
    if threading.current_thread() is threading.main_thread() or _is_watched():
        return None
    mine = flushes()
    found = _THREADS.get((lane, mine))
    if found is None:
        found = _THREADS[lane, mine] = LaneThread(lane)
    return found if found.flushes == mine else None


def _is_watched() -> bool:
    """Say whether modes, transforms or a profiler of this thread want to see what runs."""
    return bool(
        torch._C._len_torch_dispatch_stack()
        or torch._C._len_torch_function_stack()
        or torch._C._functorch.maybe_current_level() is not None
        or torch._C._autograd._profiler_enabled()
    )


# a child process has none of these threads
os.register_at_fork(after_in_child=_THREADS.clear)
