"""Time calls: percentiles over interleaved samples."""

from __future__ import annotations

import gc
import math
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, TypeVar

import torch

from strop.runtime.run import growing_memory
from strop.runtime.run.library_workspaces import library_workspaces

Call = Callable[[], Any]
T = TypeVar("T")
# By device: the most bytes since ``forget_peak`` that tensors had, and with what torch keeps for
# later, up to the latest change of working memory.
_PEAKS: dict[torch.device, tuple[int, int]] = {}


@dataclass(frozen=True, slots=True)
class Timing:
    """Hold the milliseconds of one call."""

    p20_ms: float
    p50_ms: float
    p80_ms: float
    samples: int

    def to_dict(self) -> dict[str, float]:
        return asdict(self)


def timing_of(times_ms: Sequence[float]) -> Timing:
    """Return percentiles by nearest rank."""
    ordered = sorted(times_ms)

    def rank(share: float) -> float:
        return round(ordered[round(share * (len(ordered) - 1))], 4)

    return Timing(rank(0.2), rank(0.5), rank(0.8), len(ordered))


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def elapsed_ms(call: Call, device: torch.device, inner: int = 1) -> float:
    """Return the milliseconds per call, over ``inner`` calls back to back.

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


def wall_ms(call: Call, device: torch.device, inner: int = 1) -> float:
    """Return the same by the host's clock, with all that the host does before and after the
    kernels."""
    synchronise(device)
    start = time.perf_counter()
    for _ in range(inner):
        call()
    synchronise(device)
    return (time.perf_counter() - start) / inner * 1e3


def time_calls(
    calls: Mapping[str, Call],
    device: torch.device,
    *,
    samples: int = 20,
    inner: int | Mapping[str, int] = 5,
    warmup: int = 3,
    measure: Callable[[Call, torch.device, int], float] = elapsed_ms,
) -> dict[str, Timing]:
    """Time all calls in turns, so that a clock or a neighbour that changes meets every one of them.

    Every other turn goes backwards, so that what a call leaves behind, heat or a cache, meets all
    others alike.

    ``inner``: calls a sample, of all or by name.
    """
    for call in calls.values():
        for _ in range(warmup):
            call()
    times: dict[str, list[float]] = {name: [] for name in calls}
    if not calls:
        return {}
    names = list(calls)
    for turn in range(samples):
        for name in _order(names, turn):
            number = inner if isinstance(inner, int) else inner[name]
            times[name].append(measure(calls[name], device, number))
    return {name: timing_of(values) for name, values in times.items()}


def _order(names: Sequence[str], turn: int) -> list[str]:
    """Return names as a turn takes them: over two rounds of turns, each comes behind both of its
    neighbours equally often."""
    first = turn // 2 % len(names)
    order = [*names[first:], *names[:first]]
    return order[::-1] if turn % 2 else order


def with_peak(call: Callable[[], T], device: torch.device) -> tuple[T, int | None]:
    """Return the result, and the most device memory allocated beside what was there before.

    None on a CPU.
    """
    if device.type != "cuda":
        return call(), None
    synchronise(device)
    before = allocated(device)
    forget_peak(device)
    result = call()
    synchronise(device)
    return result, peak(device) - before


def allocated(device: torch.device) -> int:
    """Return bytes that tensors and Strop's working memory hold on a GPU; 0 on a CPU, where nobody
    counts."""
    if device.type != "cuda":
        return 0
    return torch.cuda.memory_allocated(device) + growing_memory.held_bytes(device)


def peak(device: torch.device) -> int:
    """Return the most of these at one moment since ``forget_peak``."""
    return _peaks(device)[0]


def peak_reserved(device: torch.device) -> int:
    """Return the same with what torch keeps for later."""
    return _peaks(device)[1]


def _peaks(device: torch.device) -> tuple[int, int]:
    if device.type != "cuda":
        return 0, 0
    held, before = growing_memory.held_bytes(device), _PEAKS.get(device, (0, 0))
    allocated = torch.cuda.max_memory_allocated(device) + held
    reserved = torch.cuda.max_memory_reserved(device) + held
    return max(before[0], allocated), max(before[1], reserved)


def _note_peak(device: torch.device) -> None:
    """Note the most so far: working memory is about to be more, or less."""
    _PEAKS[device] = _peaks(device)
    torch.cuda.reset_peak_memory_stats(device)


def forget_workspaces(device: torch.device) -> None:
    """Free what cuBLAS works in, so that whoever runs next is seen to have his own, as in a process
    of his own. Graphs are not touched: theirs stay where they are (``library_workspaces.py``)."""
    if device.type == "cuda":
        synchronise(device)
        torch._C._cuda_clearCublasWorkspaces()


def forget_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        _PEAKS[device] = 0, 0
        growing_memory.watch(device, partial(_note_peak, device))


def give_back(device: torch.device) -> None:
    """Give memory that nobody refers to any more back to the device."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """Return how much intervals cover together: a kernel that begins early waits beside the one
    before."""
    total, end = 0.0, -math.inf
    for first, last in sorted(spans):
        total += max(last - max(first, end), 0.0)
        end = max(end, last)
    return total


def profiled(call: Call, generated: Collection[str], repeats: int = 3) -> dict[str, Any]:
    """Profile the device kernels of one call: counts and microseconds, copies apart. Needs a GPU.

    ``generated``: names of our kernels. A kernel that begins early has its wait for the one before
    among its own microseconds; ``busy_us`` is what all cover together. Time nothing after it: the
    profiler leaves its traces.
    """
    from torch.autograd import DeviceType  # type: ignore[attr-defined]
    from torch.profiler import ProfilerActivity, profile

    call()
    torch.cuda.synchronize()
    activities = [ProfilerActivity.CUDA, ProfilerActivity.CPU]
    with profile(activities=activities, acc_events=True) as trace:
        for _ in range(repeats):
            call()
        torch.cuda.synchronize()
    counts: Counter[str] = Counter()
    spent: defaultdict[str, float] = defaultdict(float)
    spans = list[tuple[float, float]]()
    for event in trace.events():
        if event.device_type == DeviceType.CUDA:
            counts[event.name] += 1
            spent[event.name] += event.time_range.end - event.time_range.start
            spans.append((event.time_range.start, event.time_range.end))
    rows: list[dict[str, Any]] = [
        {
            "name": name,
            "count": counts[name] / repeats,
            "us": round(us / repeats, 2),
            "is_generated": name in generated,
        }
        for name, us in sorted(spent.items(), key=lambda item: -item[1])
    ]
    real = [r for r in rows if not r["name"].startswith(("Memcpy", "Memset"))]
    own = [r for r in real if r["is_generated"]]
    return {
        "launches": sum(r["count"] for r in real),
        "generated": sum(r["count"] for r in own),
        "us": round(sum(r["us"] for r in real), 1),
        "generated_us": round(sum(r["us"] for r in own), 1),
        "busy_us": round(covered(spans) / repeats, 1),
        "copies": [r for r in rows if r not in real],
        "top": real,
    }


@dataclass(frozen=True, slots=True)
class Replay:
    """This replays a CUDA graph, which reads what ``call`` holds: that lives as long."""

    graph: torch.cuda.CUDAGraph
    result: Any
    call: Call

    def __call__(self) -> Any:
        self.graph.replay()
        return self.result


def captured(call: Call, warmup: int = 3) -> Call:
    """Capture ``call`` as a hand-made CUDA graph over its own static arguments; the new call
    replays it."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        library_workspaces(stream.device).hold()
        for _ in range(warmup):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        result = call()
    return Replay(graph, result, call)
