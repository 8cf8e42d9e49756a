"""Time calls in turns, by the time of the processor: others may be at work beside them."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping

SAMPLE_S, MOST_CALLS = 0.02, 500  # of one sample
Times = Mapping[str, list[float]]


def in_turns(calls: Mapping[str, Callable[[], object]], samples: int, warm_ups: int = 1) -> Times:
    """Return the milliseconds of CPU time a call, by name."""
    counts = {}
    for name, call in calls.items():
        for _ in range(warm_ups):
            call()
        counts[name] = max(1, min(MOST_CALLS, int(SAMPLE_S / max(seconds(call, 1), 1e-7))))
    times: dict[str, list[float]] = {name: [] for name in calls}
    gc.disable()
    for _ in range(samples):
        for name, call in calls.items():
            times[name].append(1e3 * seconds(call, counts[name]))
    gc.enable()
    return times


def seconds(call: Callable[[], object], count: int) -> float:
    """Return the seconds of CPU time of one of so many calls."""
    begin = time.process_time()
    for _ in range(count):
        call()
    return (time.process_time() - begin) / count
