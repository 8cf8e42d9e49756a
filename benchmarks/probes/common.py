"""Shared pieces of the probes: the run context, timing, profiling and the SD1.5 configuration."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

Fn = Callable[[], object]
PEAK_GBS = 3000.0

SD15: dict[str, Any] = {
    "sample_size": 64,
    "in_channels": 4,
    "out_channels": 4,
    "cross_attention_dim": 768,
    "block_out_channels": (320, 640, 1280, 1280),
    "layers_per_block": 2,
    "attention_head_dim": 8,
    "down_block_types": ("CrossAttnDownBlock2D",) * 3 + ("DownBlock2D",),
    "up_block_types": ("UpBlock2D",) + ("CrossAttnUpBlock2D",) * 3,
}


@dataclass
class Ctx:
    """Deadlines, the result rows and the models that several probes share."""

    end: float
    probe_end: float = 0.0
    rows: list[str] = field(default_factory=list)
    cache: dict[str, Any] = field(default_factory=dict)

    def left(self) -> float:
        """Seconds left to the running probe."""
        return min(self.end, self.probe_end) - time.monotonic()

    def row(self, text: str) -> None:
        self.rows.append(text)
        print(text, flush=True)

    def unet(self) -> torch.nn.Module:
        """The SD1.5 UNet with random weights, fp16, channels_last, on the GPU."""
        if "unet" not in self.cache:
            from diffusers import UNet2DConditionModel

            torch.manual_seed(0)
            torch.set_default_dtype(torch.float16)
            try:
                with torch.device("cuda"):
                    model = UNet2DConditionModel(**SD15)
            finally:
                torch.set_default_dtype(torch.float32)
            self.cache["unet"] = model.eval().to(memory_format=torch.channels_last)
        return self.cache["unet"]  # type: ignore[no-any-return]


def meta_unet(dtype: torch.dtype = torch.float16) -> torch.nn.Module:
    from diffusers import UNet2DConditionModel

    with torch.device("meta"):
        return UNet2DConditionModel(**SD15).to(dtype).eval()


def attempt(call: Callable[[], Any]) -> Any:
    """The call's result, or the first line of its error as text."""
    try:
        return call()
    except Exception as error:
        return f"{type(error).__name__}: {str(error).strip().splitlines()[0:1]}"[:130]


def cpu_us(fn: Fn, calls: int = 200, repeats: int = 7) -> float:
    """Median host microseconds per call, the device idle before each repeat."""
    fn()
    times = []
    for _ in range(repeats):
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            fn()
        times.append((time.perf_counter() - start) / calls * 1e6)
    return round(statistics.median(times), 3)


def sets_for(nbytes: int, target: int = 120 << 20, most: int = 12) -> int:
    """How many input sets of nbytes to rotate among so that a replay overflows the L2 cache."""
    return max(2, min(most, -(-target // max(nbytes, 1))))


def capture(fns: Sequence[Fn], calls: int, mode: str = "global") -> torch.cuda.CUDAGraph:
    """A graph of `calls` calls that cycle through fns, captured after a warm-up."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for fn in fns:
            fn()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        graph.capture_begin(capture_error_mode=mode)
        try:
            for i in range(calls):
                fns[i % len(fns)]()
        finally:
            graph.capture_end()
    return graph


def replay_us(graph: torch.cuda.CUDAGraph, replays: int = 15) -> float:
    """Median device microseconds per replay."""
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    times = []
    for _ in range(replays):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3)
    return statistics.median(times)


def graph_us(fns: Sequence[Fn], calls: int = 24, replays: int = 15) -> float:
    """Median device microseconds per call inside a CUDA graph."""
    calls = -(-calls // len(fns)) * len(fns)
    graph = capture(fns, calls)
    value = replay_us(graph, replays) / calls
    graph.reset()
    return round(value, 3)


def try_us(fns: Sequence[Fn], **kw: int) -> Any:
    return attempt(lambda: graph_us(fns, **kw))


def device_kernels(fns: Sequence[Fn]) -> list[list[tuple[str, float]]]:
    """Per fn, the kernels and copies one call puts on the device: (name, us).

    One profiler session for all of them; a spin kernel marks where each call begins.
    """
    from torch.profiler import ProfilerActivity, profile

    runs = [isinstance(attempt(fn), str) for fn in fns]
    fns = [(lambda: None) if failed else fn for fn, failed in zip(fns, runs, strict=True)]
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as prof:
        for fn in fns:
            torch.cuda._sleep(100)
            fn()
        torch.cuda.synchronize()
    events = [e for e in prof.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    events.sort(key=lambda e: e.time_range.start)
    groups: list[list[tuple[str, float]]] = []
    for event in events:
        if "spin_kernel" in event.name:
            groups.append([])
        elif groups:
            span = event.time_range.end - event.time_range.start
            groups[-1].append((event.name[:120], round(span, 2)))
    groups += [[] for _ in range(len(fns) - len(groups))]
    return groups


def short(name: str) -> str:
    """A kernel's name without template arguments."""
    base = name.replace("void ", "").split("<")[0].split("(")[0]
    return base.split("::")[-1][:44]
