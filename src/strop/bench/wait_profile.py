"""Profile what the host does in a wait."""

from __future__ import annotations

import cProfile
import gc
import pstats
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from strop.wording import counted

SHOWN = 60  # functions of a table


@dataclass
class CollectionTime:
    """Count garbage collections, whose time a profile puts on whatever function they fall on."""

    count: int = 0
    seconds: float = 0.0
    begun: float = 0.0

    def note(self, phase: str, info: dict[str, Any]) -> None:
        if phase == "start":
            self.begun = time.perf_counter()
        else:
            self.count += 1
            self.seconds += time.perf_counter() - self.begun


@contextmanager
def profiled(file: Path) -> Iterator[None]:
    """Write two tables of the functions that run meanwhile: by the time of all that they call, and
    by their own."""
    collections, profile = CollectionTime(), cProfile.Profile()
    gc.callbacks.append(collections.note)
    profile.enable()
    try:
        yield
    finally:
        profile.disable()
        gc.callbacks.remove(collections.note)
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("w") as out:
            count = counted(collections.count, "garbage collection")
            out.write(f"{count} took {collections.seconds:.3f} s\n\n")
            stats = pstats.Stats(profile, stream=out)
            for order in ("cumulative", "tottime"):
                stats.sort_stats(order).print_stats(SHOWN)
