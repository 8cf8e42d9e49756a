"""Time each step of a compiled call, beside bytes, FLOPs and bound (``strop explain --profile``).

What is timed are calls that were really made, with their arguments, once more.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from strop.api import dispatchers_of, optimize, restore
from strop.debug import ceilings
from strop.debug.costs import machine, working_us
from strop.debug.explain import explain
from strop.debug.report import Report
from strop.debug.roofline import ProfileRow, StepCost, Times, profile_row
from strop.debug.step_times import Subject, cpu_times, gpu_times, whole_us
from strop.debug.steps import step_rows
from strop.dispatch.dispatcher import Dispatcher
from strop.dispatch.signature import Skeleton, flatten, is_looked_into, rebuild
from strop.errors import OptionError, UnsupportedError
from strop.ir.device import Device
from strop.ir.ops import OPS
from strop.ir.program import KernelStep
from strop.options import Options
from strop.runtime.build.devices import gpu
from strop.runtime.build.processors import processor


@dataclass(frozen=True, slots=True)
class CallArguments:
    """Hold the arguments of a call, as they were before it."""

    skeleton: Skeleton
    tensors: tuple[Tensor, ...]

    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        args, kwargs = rebuild(self.skeleton, self.tensors)
        return args, kwargs


Calls = dict[str, CallArguments]  # the latest of each module, by the name of the component


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
            calls[name] = CallArguments(flatten((args, kwargs), tensors), tuple(tensors))

    return hook


def profiled(obj: Any, *args: Any, **kwargs: Any) -> Report:
    """Return ``strop.explain(obj, *args, **kwargs)`` of a module or pipeline, with times."""
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
    """Return ``report`` with a profile of each module that was called, and a note for every other
    one."""
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
        wholes = {n: whole_us(s) for n, s in subjects.items() if s.device.type == "cuda"}
        rows = {
            name: _row(
                s, gpu_times(s, *wholes[name]) if name in wholes else cpu_times(s), limits[s.device]
            )
            for name, s in subjects.items()
        }
    components = (replace(c, profile=rows.get(c.name)) for c in report.components)
    return replace(report, components=tuple(components), notes=tuple(notes))


def _subject(dispatcher: Dispatcher, given: CallArguments | None) -> Subject | str:
    """Return the call, or why it cannot be timed."""
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
    return Subject(dispatcher, dispatcher.latest, call)


def _has_objects(skeleton: Skeleton) -> bool:
    """Tell whether a call writes to its arguments, so that each needs its own (caches)."""
    if not isinstance(skeleton, tuple):
        return False
    return skeleton[:1] == ("object",) or any(map(_has_objects, skeleton))


def _ceilings(subjects: list[Subject]) -> dict[torch.device, ceilings.Ceilings]:
    units: dict[torch.device, set[str]] = defaultdict(set)
    for subject in subjects:
        steps = subject.running().values()
        units[subject.device] |= {ceilings.unit_of(subject.program, step) for step in steps}
    return {device: ceilings.measure(device, found) for device, found in units.items()}


def _row(subject: Subject, times: Times, limits: ceilings.Ceilings) -> ProfileRow:
    costs = _costs(subject)
    num_not_run = len(subject.program.steps) - len(costs)
    return profile_row(subject.entry.env, costs, times, limits, num_not_run)


def _described(device: torch.device) -> Device:
    return gpu(device.index or 0) if device.type == "cuda" else processor()


def _costs(subject: Subject) -> tuple[StepCost, ...]:
    program, env, compiled = subject.program, subject.entry.env, subject.entry.variant.compiled
    hoisted = {
        n
        for bound in subject.entry.bounds.values()
        for n in (*bound.hoisted.steps, *bound.timetable.steps)
    }
    able = machine(_described(subject.device))
    rows = step_rows(program, compiled, env, able)
    costs = []
    for number, step in subject.running().items():
        row = rows[number]
        if isinstance(step, KernelStep):
            title = program.sources[step.kernel].name  # of the form that runs at these sizes
            kind = f"{title.partition('_')[0]} kernel"  # lowering puts the schedule first
        else:
            title, kind = row.title, OPS[step.op].anchor.category
        unit = ceilings.unit_of(program, step)
        costs.append(
            StepCost(
                number,
                title,
                kind,
                row.origin,
                row.bytes_moved,
                row.flops,
                unit,
                number in hoisted,
                row.num_programs,
                able.occupied(row.num_programs),
                working_us(program, step, env, able.device),
            )
        )
    return tuple(costs)
