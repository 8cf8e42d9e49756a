"""Measure how many processor cores other programs leave free.

A kernel of many threads waits for its slowest one. Where another program holds a core, threads
that spin for each other make small kernels slower by an order of magnitude; fewer threads do not.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

_STAT = Path("/proc/stat")


@dataclass(frozen=True)
class CoreUse:
    """Hold seconds since some start: by the clock, idle over all cores, and of this process."""

    clock: float
    idle: float
    own: float

    @staticmethod
    def now() -> CoreUse | None:
        """Return the use of cores so far; None where the system does not tell."""
        if not _STAT.is_file():
            return None
        fields = _STAT.read_text().split("\n", 1)[0].split()
        ticks = int(fields[4]) + int(fields[5])  # idle, and waiting for a disk
        return CoreUse(time.monotonic(), ticks / os.sysconf("SC_CLK_TCK"), time.process_time())

    def free_since(self) -> float | None:
        """Return how many cores were idle or ours since this was taken; None if that was just
        now."""
        now = CoreUse.now()
        if now is None or now.clock - self.clock < 0.5:
            return None
        return (now.idle - self.idle + now.own - self.own) / (now.clock - self.clock)


def threads_for(free: float | None, most: int) -> int:
    """Return at most ``most`` threads, and fewer where not all of these are free."""
    return most if free is None else max(1, min(most, round(free)))


def use_free_cores(before: CoreUse | None) -> int:
    """Let torch and the kernels have as many threads as cores were free; how many fewer."""
    import torch

    most = torch.get_num_threads()
    threads = threads_for(before.free_since() if before else None, most)
    torch.set_num_threads(threads)
    return most - threads
