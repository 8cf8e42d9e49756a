"""Time a compiled call and each of its steps, on a CPU and on a GPU.

Steps are timed one by one through the debugger's place between them (``Bound.around``), so on a
GPU without a CUDA graph; the whole call as it is made anyway, from its graph where it has one.
"""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median

import torch

from strop.bench import timer
from strop.debug import trace
from strop.debug.roofline import EVENTS, HOST, PROFILER, Times
from strop.dispatch.dispatcher import Dispatcher
from strop.dispatch.entry import Entry
from strop.ir.program import KernelStep, Program, Step
from strop.runtime.run.executor import Around, Bound
from strop.runtime.run.sizes import Sizes

GPU_RUNS = 10
CPU_S, CPU_RUNS = 3.0, (5, 200)  # seconds of all runs on a CPU, and how many at least and at most


@dataclass(frozen=True, slots=True)
class Subject:
    """Hold a call that can be made again and again, and the program that serves it."""

    dispatcher: Dispatcher
    entry: Entry
    call: timer.Call

    @property
    def device(self) -> torch.device:
        return self.entry.device

    @property
    def program(self) -> Program:
        return self.entry.variant.program

    def running(self) -> dict[int, Step]:
        """Return the steps that have something to do at these sizes."""
        program, env = self.program, self.entry.env
        steps, sizes = enumerate(program.at(env)), Sizes(program, env)
        return {n: step for n, step in steps if step is not None and _has_work(step, sizes)}


def _has_work(step: Step, sizes: Sizes) -> bool:
    """Tell whether there is an element to write."""
    return not isinstance(step, KernelStep) or sizes.writes_any(step)


# on a CPU


def cpu_times(subject: Subject) -> Times:
    """Time whole calls and calls step by step in turns, as the load of a machine changes, and take
    the fastest of each: another process that takes a core away makes all threads of a step wait."""
    clock = time.perf_counter_ns
    wholes: list[int] = []
    steps: dict[int, list[int]] = defaultdict(list)

    def around(position: int, run: Callable[[], None]) -> None:
        start = clock()
        run()
        steps[position].append(clock() - start)

    subject.call()
    bound = subject.entry.bounds[0]  # that of a caller who is alone
    num_runs = _num_runs(subject.call)
    for _ in range(num_runs):
        start = clock()
        subject.call()
        wholes.append(clock() - start)
        with _observed(bound, around):
            subject.call()
    found = {n: (min(steps[n]) / 1e3, 1) for n in subject.running() if n in steps}
    return Times(HOST, num_runs, min(wholes) / 1e3, found)


def _num_runs(call: timer.Call) -> int:
    start = time.perf_counter()
    call()
    least, most = CPU_RUNS
    return max(least, min(most, int(CPU_S / (time.perf_counter() - start))))


@contextlib.contextmanager
def _observed(bound: Bound, around: Around) -> Iterator[None]:
    bound.around = around
    try:
        yield
    finally:
        bound.around = None


# on a GPU


def whole_us(subject: Subject) -> tuple[float, bool]:
    """Return the microseconds of a call as it is made anyway, and whether a CUDA graph is
    replayed."""
    counters = subject.dispatcher.counters
    subject.call()  # the second use of a shape captures its graph
    replays = counters.replays
    found = timer.time_calls({"": subject.call}, subject.device, samples=GPU_RUNS)[""]
    return found.p50_ms * 1e3, counters.replays > replays


def gpu_times(subject: Subject, call_us: float, is_replayed: bool) -> Times:
    device = subject.device
    with torch.cuda.device(device), _without_graph(subject.entry):
        subject.call()
        bound = subject.entry.bounds[torch.cuda.current_stream(device).cuda_stream]

        def run(around: Around) -> None:
            with _observed(bound, around):
                subject.call()

        events = trace.trace(run, GPU_RUNS)
        found = trace.attribute(events, _kernel_names(subject))
        if found.steps:
            return Times(PROFILER, GPU_RUNS, call_us, found.steps, found.rest, is_replayed)
        steps = {n: t for n, t in _event_times(run).items() if n in subject.running()}
        return Times(EVENTS, GPU_RUNS, call_us, steps, (), is_replayed)


@contextlib.contextmanager
def _without_graph(entry: Entry) -> Iterator[None]:
    had_graph, entry.has_graph = entry.has_graph, False
    try:
        yield
    finally:
        entry.has_graph = had_graph


def _kernel_names(subject: Subject) -> dict[int, str]:
    sources = subject.program.sources
    return {
        number: sources[step.kernel].name
        for number, step in subject.running().items()
        if isinstance(step, KernelStep)
    }


def _event_times(run: Callable[[Around], None]) -> dict[int, tuple[float, int]]:
    """Time each step between two CUDA events, for want of a profiler; how many kernels it was is
    not known."""
    pairs: dict[int, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = defaultdict(list)

    def around(position: int, launch: Callable[[], None]) -> None:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        launch()
        end.record()
        pairs[position].append((begin, end))

    for _ in range(GPU_RUNS):
        run(around)
    torch.cuda.synchronize()
    return {
        position: (median(a.elapsed_time(b) for a, b in found) * 1e3, 0)
        for position, found in pairs.items()
    }
