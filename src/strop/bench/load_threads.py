"""Call a model from many threads at once, and time and check each call."""

from __future__ import annotations

import ctypes
import gc
import itertools
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from strop.bench import timer
from strop.errors import StropError

MEMORY_EVERY = 1000  # calls
_STATM = Path("/proc/self/statm")


@dataclass(slots=True)
class LoadWindow:
    """Hold what was measured while so many threads called, without a pause. ``memory_bytes`` are
    those of the process, or of the GPU, by how many calls were done; ``held_bytes`` is what is
    allocated and not freed when all threads have ended."""

    threads: int
    calls: int
    seconds: float = 0.0
    latencies_ms: list[float] = field(default_factory=list)
    wrong: list[int] = field(default_factory=list)  # cases whose result was not the serial one
    memory_bytes: list[tuple[int, int]] = field(default_factory=list)
    held_bytes: int = 0

    @property
    def calls_a_second(self) -> float:
        return self.calls / self.seconds

    @property
    def settled_bytes(self) -> list[int]:
        """Return the memory while all threads were there and had what they need: a new one takes
        memory for its stack, and libraries for its calls, which goes when it ends."""
        most = self.calls - self.threads
        noted = sorted(self.memory_bytes)  # threads note theirs in any order
        return [size for count, size in noted if self.threads <= count <= most]


def used_bytes(device: torch.device) -> int:
    """Return the memory of the GPU that tensors and working memory hold, or on a CPU all that this
    process has in memory."""
    if device.type == "cuda":
        return timer.allocated(device)
    if not _STATM.is_file():
        return 0
    return int(_STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class _Mallinfo2(ctypes.Structure):
    """This is glibc's ``struct mallinfo2`` (https://man7.org/linux/man-pages/man3/mallinfo.3.html)."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    )


def held_bytes(device: torch.device) -> int:
    """Return what has been allocated and not freed. A process keeps more than this: memory that was
    freed lies in the lists of the many threads' heaps until an allocation of its size comes. It is
    0 on a CPU whose C library does not count it, as glibc does from 2.33 on."""
    if device.type == "cuda":
        return timer.allocated(device)
    count = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if count is None:
        return 0
    count.restype = _Mallinfo2
    found = count()
    return int(found.uordblks + found.hblkhd)


def called(
    call: Callable[[int], Tensor],
    expected: Sequence[Tensor],
    order: Sequence[int],
    threads: int,
    device: torch.device,
) -> LoadWindow:
    """Make the calls whose cases are listed in ``order`` from so many threads, each of which takes
    the next one when it has done its own. Raises StropError where a call raises."""
    window = LoadWindow(threads, len(order))
    waiting, done = iter(order), itertools.count(1)  # both are safe in threads
    start, errors = threading.Barrier(threads + 1), list[Exception]()

    def work() -> None:
        start.wait()
        try:
            with torch.no_grad():
                for number in waiting:
                    _note(window, call, expected, number, done, device)
        except Exception as error:  # of whatever kind: the caller raises it
            errors.append(error)

    workers = [threading.Thread(target=work, name=f"load-{n}") for n in range(threads)]
    gc.collect()
    for worker in workers:
        worker.start()
    start.wait()
    began = time.perf_counter()
    for worker in workers:
        worker.join()
    timer.synchronise(device)
    window.seconds = time.perf_counter() - began
    gc.collect()
    window.held_bytes = held_bytes(device)
    if errors:
        raise StropError(f"a call of {threads} threads failed: {errors[0]}") from errors[0]
    return window


def _note(
    window: LoadWindow,
    call: Callable[[int], Tensor],
    expected: Sequence[Tensor],
    number: int,
    done: Any,
    device: torch.device,
) -> None:
    began = time.perf_counter()
    result = call(number)
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
    window.latencies_ms.append((time.perf_counter() - began) * 1e3)
    if not torch.equal(result, expected[number]):
        window.wrong.append(number)
    count = next(done)
    if count in (1, window.threads, window.calls) or count % MEMORY_EVERY == 0:
        window.memory_bytes.append((count, used_bytes(device)))
