"""``strop explain --profile``: each step of a compiled call timed, beside bytes, FLOPs and bound.

What is timed are calls that were really made, with their arguments, once more. Steps are timed
one by one through the debugger's place between them (``Bound.around``), so on a GPU without a
CUDA graph; the whole call as it is made anyway, from its graph where it has one.
"""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from strop.api import dispatchers_of, optimize, restore
from strop.bench import timer
from strop.debug import ceilings, trace
from strop.debug.costs import machine
from strop.debug.explain import explain
from strop.debug.report import Report
from strop.debug.roofline import (
    EVENTS,
    HOST,
    KINDS,
    OTHER,
    PROFILER,
    Cost,
    ProfileRow,
    Times,
    profile_row,
)
from strop.debug.steps import step_rows
from strop.errors import OptionError, UnsupportedError
from strop.ir.program import KernelStep, Program, Step
from strop.options import Options
from strop.runtime.dispatch import Dispatcher, Entry
from strop.runtime.executor import Around, Bound
from strop.runtime.signature import Skeleton, flatten, is_looked_into, rebuild

GPU_RUNS = 10
CPU_S, CPU_RUNS = 3.0, (5, 200)  # seconds of all runs on a CPU, and how many at least and at most
Steps = Mapping[int, tuple[float, int]]


@dataclass(frozen=True, slots=True)
class Given:
    """The arguments of a call, as they were before it."""

    skeleton: Skeleton
    tensors: tuple[Tensor, ...]

    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        args, kwargs = rebuild(self.skeleton, self.tensors)
        return args, kwargs


Calls = dict[str, Given]  # the latest of each module, by the name of the component


@contextlib.contextmanager
def watched(obj: Any) -> Iterator[Calls]:
    """Keeps the arguments with which the optimised modules of ``obj`` are called."""
    calls: Calls = {}
    with contextlib.ExitStack() as hooks:
        for name, dispatcher in dispatchers_of(obj).items():
            hook = dispatcher.module.register_forward_pre_hook(
                _keeping(calls, name), with_kwargs=True
            )
            hooks.callback(hook.remove)
        yield calls


def _keeping(calls: Calls, name: str) -> Callable[..., None]:
    def hook(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if is_looked_into():
            return
        tensors: list[Tensor] = []
        calls.pop(name, None)
        with contextlib.suppress(UnsupportedError):  # such a call runs in eager
            calls[name] = Given(flatten((args, kwargs), tensors), tuple(tensors))

    return hook


def profiled(obj: Any, *args: Any, **kwargs: Any) -> Report:
    """``strop.explain(obj, *args, **kwargs)`` of a module or pipeline, with times."""
    if not isinstance(obj, nn.Module) and not hasattr(obj, "components"):
        raise OptionError(f"a profile is of a module or a pipeline, not of a {type(obj).__name__}")
    was_optimised = bool(dispatchers_of(obj))
    try:
        if not was_optimised:
            optimize(obj, options=Options.from_environment(record=True))
        with watched(obj) as calls, torch.no_grad():
            obj(*args, **kwargs)
        return measured(explain(obj), obj, calls)
    finally:
        if not was_optimised:
            restore(obj)


def measured(report: Report, obj: Any, calls: Calls) -> Report:
    """``report`` with a profile of each module that was called, and a note for every other one."""
    subjects, notes = {}, list(report.notes)
    with torch.no_grad():
        for name, dispatcher in dispatchers_of(obj).items():
            found = _subject(dispatcher, calls.get(name))
            if isinstance(found, str):
                notes.append(f"{name} has no times: {found}")
            else:
                subjects[name] = found
        limits = _ceilings(list(subjects.values()))
        # before anything is traced: the profiler leaves its traces
        wholes = {n: _whole(s) for n, s in subjects.items() if s.device.type == "cuda"}
        rows = {
            name: _row(s, _gpu_times(s, *wholes[name]) if name in wholes else _cpu_times(s),
                       limits[s.device])
            for name, s in subjects.items()
        }  # fmt: skip
    components = (replace(c, profile=rows.get(c.name)) for c in report.components)
    return replace(report, components=tuple(components), notes=tuple(notes))


@dataclass(frozen=True, slots=True)
class _Subject:
    """A call that can be made again and again, and the program that serves it."""

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
        """The steps that have something to do at these sizes."""
        program, env = self.program, self.entry.env
        steps = enumerate(program.at(env))
        return {n: step for n, step in steps if step is not None and _has_work(program, step, env)}


def _has_work(program: Program, step: Step, env: Mapping[str, int]) -> bool:
    """Whether there is an element to write."""
    if not isinstance(step, KernelStep):
        return True
    shapes = (program.buffers[number].shape for number in step.writes)
    return any(all(size.eval(env) for size in shape) for shape in shapes)


def _subject(dispatcher: Dispatcher, given: Given | None) -> _Subject | str:
    """The call, or why it cannot be timed."""
    if given is None:
        return "it was not called, or not with arguments that are compiled"
    counters, module = dispatcher.counters, dispatcher.module
    arguments, has_objects = given.arguments(), _has_objects(given.skeleton)

    def call() -> Any:
        args, kwargs = given.arguments() if has_objects else arguments
        return module(*args, **kwargs)

    before = counters.eager_calls + getattr(dispatcher, "trained_calls", 0)
    call()
    is_eager = counters.eager_calls + getattr(dispatcher, "trained_calls", 0) > before
    if is_eager or dispatcher.latest is None:
        return "no inference program serves its call"
    return _Subject(dispatcher, dispatcher.latest, call)


def _has_objects(skeleton: Skeleton) -> bool:
    """Whether a call writes to its arguments, so that each needs its own (caches)."""
    if not isinstance(skeleton, tuple):
        return False
    return skeleton[:1] == ("object",) or any(map(_has_objects, skeleton))


def _ceilings(subjects: list[_Subject]) -> dict[torch.device, ceilings.Ceilings]:
    units = defaultdict(set)
    for subject in subjects:
        for step in subject.running().values():
            units[subject.device].add(ceilings.unit_of(subject.program, step))
    return {device: ceilings.measure(device, found) for device, found in units.items()}


def _row(subject: _Subject, times: Times, limits: ceilings.Ceilings) -> ProfileRow:
    costs = _costs(subject)
    num_not_run = len(subject.program.steps) - len(costs)
    return profile_row(subject.entry.env, costs, times, limits, num_not_run)


def _costs(subject: _Subject) -> tuple[Cost, ...]:
    program, env, compiled = subject.program, subject.entry.env, subject.entry.variant.compiled
    hoisted = {n for bound in subject.entry.bounds.values() for n in bound.hoisted.steps}
    rows = step_rows(program, compiled, env, machine("CPU"))  # for bytes and FLOPs alone
    costs = []
    for number, step in subject.running().items():
        row = rows[number]
        if isinstance(step, KernelStep):
            title = program.sources[step.kernel].name  # of the form that runs at these sizes
            kind = f"{title.partition('_')[0]} kernel"  # lowering puts the schedule first
        else:
            title, kind = row.title, KINDS.get(step.op, OTHER)
        unit = ceilings.unit_of(program, step)
        costs.append(Cost(number, title, kind, row.origin, row.bytes_moved, row.flops, unit,
                          number in hoisted))  # fmt: skip
    return tuple(costs)


# on a CPU


def _cpu_times(subject: _Subject) -> Times:
    """Whole calls and calls step by step in turns, as the load of a machine changes. The fastest
    of each: another process that takes a core away makes all threads of a step wait."""
    clock = time.perf_counter_ns
    wholes: list[int] = []
    steps: dict[int, list[int]] = defaultdict(list)

    def around(position: int, run: Callable[[], None]) -> None:
        start = clock()
        run()
        steps[position].append(clock() - start)

    subject.call()
    (bound,) = subject.entry.bounds.values()
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


def _whole(subject: _Subject) -> tuple[float, bool]:
    """Microseconds of a call as it is made anyway, and whether a CUDA graph is replayed."""
    counters = subject.dispatcher.counters
    subject.call()  # the second use of a shape captures its graph
    replays = counters.replays
    found = timer.time_calls({"": subject.call}, subject.device, samples=GPU_RUNS)[""]
    return found.p50_ms * 1e3, counters.replays > replays


def _gpu_times(subject: _Subject, call_us: float, is_replayed: bool) -> Times:
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


def _kernel_names(subject: _Subject) -> dict[int, str]:
    sources = subject.program.sources
    return {number: sources[step.kernel].name for number, step in subject.running().items()
            if isinstance(step, KernelStep)}  # fmt: skip


def _event_times(run: Callable[[Around], None]) -> dict[int, tuple[float, int]]:
    """Between two CUDA events around each step, for want of a profiler; how many kernels it was is
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
    return {position: (median(a.elapsed_time(b) for a, b in found) * 1e3, 0)
            for position, found in pairs.items()}  # fmt: skip
