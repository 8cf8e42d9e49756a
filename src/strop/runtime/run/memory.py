"""Values lie in working memory at offsets that are planned from live ranges.

They are placed greedily by size, which meets the liveness bound in practice: on SD1.5, SDXL and the
VAE the measured result equals the largest sum of values alive at once (compiler_feasibility study,
section 2). The heuristic is "greedy by size" of Pisarchyk and Lee, "Efficient Memory Management for
Deep Neural Net Inference", arXiv:2001.03288.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

ALIGNMENT_BYTES = 256


class Interval(NamedTuple):
    """A value is alive from step ``first`` to step ``last``, both included."""

    first: int
    last: int
    size_bytes: int


def plan_arena(intervals: Sequence[Interval]) -> tuple[list[int], int]:
    """Return byte offsets for the intervals, and the size of the arena that holds them. Equal sizes
    are placed in the order in which they begin, or where that leaves gaps those that live longest
    first."""
    numbers, beside = range(len(intervals)), alive_beside(intervals)
    largest_first = [-value.size_bytes for value in intervals]
    by_size = sorted(numbers, key=largest_first.__getitem__)
    found = placed(intervals, beside, by_size)
    if found[1] <= most_alive(intervals):
        return found
    life = [value.last - value.first for value in intervals]
    by_life = sorted(numbers, key=lambda i: (largest_first[i], -life[i]))
    return min(found, placed(intervals, beside, by_life), key=lambda plan: plan[1])


def most_alive(intervals: Sequence[Interval]) -> int:
    """Return how many bytes of values are alive at once at most: no arena is smaller."""
    changes = defaultdict[int, int](int)
    for value in intervals:
        size = aligned(value.size_bytes)
        changes[value.first] += size
        changes[value.last + 1] -= size
    return max(itertools.accumulate(changes[step] for step in sorted(changes)), default=0)


def alive_beside(intervals: Sequence[Interval]) -> list[list[int]]:
    """Return for each value those that are alive at a time with it: of a model's few are."""
    found: list[list[int]] = [[] for _ in intervals]
    alive: list[int] = []
    for index in sorted(range(len(intervals)), key=lambda i: intervals[i].first):
        first = intervals[index].first
        alive = [other for other in alive if intervals[other].last >= first]
        found[index] += alive
        for other in alive:
            found[other].append(index)
        alive.append(index)
    return found


def placed(
    intervals: Sequence[Interval], beside: Sequence[Sequence[int]], order: Sequence[int]
) -> tuple[list[int], int]:
    """Put each in turn at the lowest place that is free while it lives."""
    offsets, spans = [0] * len(intervals), list[tuple[int, int] | None]([None]) * len(intervals)
    total = 0
    for index in order:
        size, offset = aligned(intervals[index].size_bytes), 0
        taken = [span for other in beside[index] if (span := spans[other])]
        for begin, end in sorted(taken):
            if offset + size <= begin:
                break
            if end > offset:
                offset = end
        offsets[index], spans[index] = offset, (offset, offset + size)
        total = max(total, offset + size)
    return offsets, total


def shared(
    alive: Mapping[int, Interval], pairs: Iterable[tuple[int, int]]
) -> tuple[dict[int, Interval], dict[int, int]]:
    """Give one memory to the buffers (new, old) of a pair, where the step that makes the new one is
    the last to read the old one. ``pairs`` come in the order of steps. Return the intervals of what
    is left to place, and for each other buffer the one in whose memory it lies."""
    found, host = dict(alive), dict[int, int]()
    taken: set[int] = set()
    for new, old in pairs:
        if new not in found or old not in alive or old in taken:
            continue
        root = host.get(old, old)
        value, place = found[new], found[root]
        if alive[old].last == value.first and place.size_bytes == value.size_bytes:
            host[new], found[root] = root, place._replace(last=value.last)
            del found[new]
            taken.add(old)
    return found, host


def aligned(size_bytes: int) -> int:
    """Round up to where the next value may begin."""
    return -(-max(size_bytes, 1) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
