"""Times of calls: percentiles over interleaved samples."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

import torch

Call = Callable[[], Any]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Timing:
    """Milliseconds of one call."""

    p20_ms: float
    p50_ms: float
    p80_ms: float
    samples: int

    def to_dict(self) -> dict[str, float]:
        return asdict(self)


def timing_of(times_ms: Sequence[float]) -> Timing:
    """Percentiles by nearest rank."""
    ordered = sorted(times_ms)

    def rank(share: float) -> float:
        return round(ordered[round(share * (len(ordered) - 1))], 4)

    return Timing(rank(0.2), rank(0.5), rank(0.8), len(ordered))


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def elapsed_ms(call: Call, device: torch.device, inner: int = 1) -> float:
    """Milliseconds a call, over ``inner`` calls back to back.

    CUDA events on a GPU: host gaps between launches count, as they do in a denoise loop.
    """
    synchronise(device)
    if device.type == "cuda":
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(inner):
            call()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / inner
    start = time.perf_counter()
    for _ in range(inner):
        call()
    return (time.perf_counter() - start) / inner * 1e3


def time_calls(
    calls: Mapping[str, Call], device: torch.device, *, samples: int = 20, inner: int = 5,
    warmup: int = 3,
) -> dict[str, Timing]:  # fmt: skip
    """All calls in turns, so that a clock or a neighbour that changes meets every one of them."""
    for call in calls.values():
        for _ in range(warmup):
            call()
    times: dict[str, list[float]] = {name: [] for name in calls}
    names = list(calls)
    for turn in range(samples):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            times[name].append(elapsed_ms(calls[name], device, inner))
    return {name: timing_of(values) for name, values in times.items()}


def with_peak(call: Callable[[], T], device: torch.device) -> tuple[T, int | None]:
    """The result, and the most device memory allocated beside what was there before.

    None on a CPU.
    """
    if device.type != "cuda":
        return call(), None
    synchronise(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    result = call()
    synchronise(device)
    return result, torch.cuda.max_memory_allocated(device) - before


def captured(call: Call, warmup: int = 3) -> Call:
    """``call`` as a hand-made CUDA graph over its own static arguments; the new call replays it."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(warmup):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        result = call()

    def replay() -> Any:
        graph.replay()
        return result

    return replay
