"""Time calls in turns, by the time of the processor: others may be at work beside them."""

from __future__ import annotations

import contextlib
import gc
import os
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from strop.errors import OptionError

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
    with without_collections():
        for _ in range(samples):
            for name, call in calls.items():
                times[name].append(1e3 * seconds(call, counts[name]))
    return times


def over_inputs(
    ways: Mapping[str, Callable[..., Any]], rounds: Iterable[Sequence[Sequence[Any]]]
) -> Times:
    """Return the milliseconds of CPU time a call, of each round.

    A round is a list of calls, each the arguments of one. All ways get the same calls, and each
    round begins with another way. The first round warms up and is not counted.
    """
    names = list(ways)
    times: dict[str, list[float]] = {name: [] for name in names}
    with without_collections():
        for number, calls in enumerate(rounds):
            start = number % max(len(names), 1)
            for name in (*names[start:], *names[:start]):
                way = ways[name]
                begin = time.process_time()
                for given in calls:
                    way(*given)
                if number:
                    times[name].append(1e3 * (time.process_time() - begin) / len(calls))
    return times


def seconds(call: Callable[[], object], count: int) -> float:
    """Return the seconds of CPU time of one of so many calls."""
    begin = time.process_time()
    for _ in range(count):
        call()
    return (time.process_time() - begin) / count


def ratio(base: Sequence[float], found: Sequence[float], digits: int = 3) -> float:
    """Return how many times as long the first takes, by the median over the turns."""
    return round(statistics.median(a / b for a, b in zip(base, found, strict=True)), digits)


@contextlib.contextmanager
def without_collections() -> Iterator[None]:
    """Collect no garbage, which would count for whoever is being timed."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@contextlib.contextmanager
def on_one_core(core: int | None) -> Iterator[int]:
    """Keep this thread, and threads and processes that it starts, on one core, with one thread of
    torch; then let them go. Without ``core`` it is the last one that this process may use. Raises
    OptionError for one that it may not use, or where the system cannot pin."""
    if not hasattr(os, "sched_setaffinity"):
        raise OptionError("this system cannot keep a process on one core: measure on Linux")
    allowed, threads = os.sched_getaffinity(0), torch.get_num_threads()
    chosen = max(allowed) if core is None else core
    if chosen not in allowed:
        text = ", ".join(map(str, sorted(allowed)))
        raise OptionError(f"core {chosen} is not one that this process may use; these are {text}")
    os.sched_setaffinity(0, {chosen})
    torch.set_num_threads(1)
    try:
        yield chosen
    finally:
        torch.set_num_threads(threads)
        os.sched_setaffinity(0, allowed)
