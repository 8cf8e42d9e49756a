"""Find which step of a program each kernel of a profiler's trace belongs to.

Every step runs inside a named range on the host. A kernel belongs to the range in which the host
launched it: the launch has the kernel's correlation id, or the kernel names the operator of torch
that launched it. Where the trace has neither, as of launches that torch does not make, the order on
the stream tells, which is that of the steps: a kernel between two of one step is of that step, and
generated kernels are told by their names. What fits nowhere is left over and shown.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any, Literal

import torch
from torch.profiler import ProfilerActivity, profile, record_function

LABEL = "strop step "
_LAUNCH = re.compile(r"cu(da)?[A-Z]")  # calls of the runtime and of the driver
Place = tuple[int, int]  # run and step


@dataclass(frozen=True, slots=True)
class Traced:
    """Describe one event. ``correlation``: a launch and its kernel have the same, and operators of
    torch have numbers of their own, which is what ``linked`` means, or 0."""

    what: Literal["step", "operator", "launch", "kernel"]
    name: str
    start_ns: int
    end_ns: int
    correlation: int = 0
    linked: int = 0


@dataclass(frozen=True, slots=True)
class Attribution:
    """Hold microseconds of a call and kernels, by step; and by name what belongs to no step."""

    steps: Mapping[int, tuple[float, int]]
    rest: tuple[tuple[str, float], ...]


def attribute(events: Sequence[Traced], names: Mapping[int, str]) -> Attribution:
    """Attribute events to steps; ``names`` are those of the generated kernels that each step
    launches. The times are medians over the runs."""
    kernels = sorted((e for e in events if e.what == "kernel"), key=lambda e: e.start_ns)
    places = _by_host(events, kernels)
    _by_neighbours(places)
    _by_name(events, kernels, places, names)
    spent: dict[Place, list[int]] = defaultdict(list)
    rest: Counter[str] = Counter()
    for number, own_ns in enumerate(own_times(kernels)):
        if number in places:
            spent[places[number]].append(own_ns)
        else:
            rest[kernels[number].name] += own_ns
    steps: dict[int, list[list[int]]] = defaultdict(list)
    for (_, step), times in spent.items():
        steps[step].append(times)
    found = {
        step: (median(map(sum, runs)) / 1e3, round(median(map(len, runs))))
        for step, runs in steps.items()
    }
    num_runs = len({place[0] for place, _ in _ranges(events)}) or 1
    return Attribution(found, tuple((name, ns / num_runs / 1e3) for name, ns in rest.most_common()))


def own_times(kernels: Iterable[Traced]) -> list[int]:
    """Return the nanoseconds that each event adds behind all before it: one that was launched early
    waits for the one before, and that time is counted once."""
    found, until = [], 0
    for kernel in kernels:
        found.append(max(0, kernel.end_ns - max(kernel.start_ns, until)))
        until = max(until, kernel.end_ns)
    return found


def _ranges(events: Sequence[Traced]) -> list[tuple[Place, Traced]]:
    """Return what the host did of which step of which run, in order."""
    ranges = sorted((e for e in events if e.what == "step"), key=lambda e: e.start_ns)
    return [(place_of(e.name), e) for e in ranges]


def _by_host(events: Sequence[Traced], kernels: Sequence[Traced]) -> dict[int, Place]:
    """Return places of kernels, by number, that have a launch or an operator inside a range."""
    ranges = _ranges(events)
    starts = [event.start_ns for _, event in ranges]
    numbered = [e for e in events if e.correlation]  # 0 is no number
    launches = {e.correlation: e for e in numbered if e.what == "launch"}
    operators = {e.correlation: e for e in numbered if e.what in ("operator", "step")}
    found = {}
    for number, kernel in enumerate(kernels):
        for cause in (launches.get(kernel.correlation), operators.get(kernel.linked)):
            index = bisect_right(starts, cause.start_ns) - 1 if cause else -1
            if cause and index >= 0 and cause.start_ns <= ranges[index][1].end_ns:
                found[number] = ranges[index][0]
                break
    return found


def _by_neighbours(places: dict[int, Place]) -> None:
    """Add those that lie between two kernels of one step."""
    for first, second in pairwise(sorted(places)):
        if places[first] == places[second]:
            places.update(dict.fromkeys(range(first + 1, second), places[first]))


def _by_name(
    events: Sequence[Traced],
    kernels: Sequence[Traced],
    places: dict[int, Place],
    names: Mapping[int, str],
) -> None:
    """Add those whose name is that of a step's generated kernel: in order, and only if there are as
    many as are missing."""
    taken = set(places.values())
    missing: dict[str, list[Place]] = defaultdict(list)
    for place, _ in _ranges(events):
        if place[1] in names and place not in taken:
            missing[names[place[1]]].append(place)
    left: dict[str, list[int]] = defaultdict(list)
    for number, kernel in enumerate(kernels):
        if number not in places:
            left[kernel.name].append(number)
    for name, wanted in missing.items():
        if len(left[name]) == len(wanted):
            places.update(zip(left[name], wanted, strict=True))


def label(run: int, step: int) -> str:
    return f"{LABEL}{run}/{step}"


def place_of(name: str) -> Place:
    run, step = name.removeprefix(LABEL).split("/")
    return int(run), int(step)


def trace(
    run: Callable[[Callable[[int, Callable[[], None]], None]], Any],
    num_runs: int,
    activities: Sequence[ProfilerActivity] = (ProfilerActivity.CUDA, ProfilerActivity.CPU),
) -> list[Traced]:
    """Trace the events of so many runs. ``run`` makes a call with what it is given around each
    step."""
    with profile(activities=activities, acc_events=True) as profiler:
        for number in range(num_runs):
            run(_labelled(number))
        if ProfilerActivity.CUDA in activities:
            torch.cuda.synchronize()
    assert profiler.profiler is not None
    events: Any = profiler.profiler.kineto_results
    return [found for event in events.events() if (found := traced(event)) is not None]


def _labelled(run: int) -> Callable[[int, Callable[[], None]], None]:
    def around(step: int, launch: Callable[[], None]) -> None:
        with record_function(label(run, step)):
            launch()

    return around


def traced(event: Any) -> Traced | None:
    """Convert an event of Kineto's; None stands for a range as the device saw it, which is no
    kernel."""
    name, is_on_host = event.name(), "CPU" in str(event.device_type())
    what: Literal["step", "operator", "launch", "kernel"] = "operator" if is_on_host else "kernel"
    if name.startswith(LABEL):
        if not is_on_host:
            return None
        what = "step"
    elif is_on_host and _LAUNCH.match(name):
        what = "launch"
    start = event.start_ns()
    return Traced(
        what,
        name,
        start,
        start + event.duration_ns(),
        event.correlation_id(),
        event.linked_correlation_id(),
    )
