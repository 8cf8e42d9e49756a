"""Profile one call: measured times beside what bytes and FLOPs allow, as plain data and text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace

from strop.debug.ceilings import Ceilings
from strop.debug.costs import TOO_SLOW, is_too_slow
from strop.wording import counted

TOP = 20  # steps in the text
HOST, PROFILER, EVENTS = "host clock", "profiler", "events"
METHODS = {
    HOST: "the host's clock around each step, the fastest of {} each",
    PROFILER: "torch.profiler, medians of {}: what the device spent on a step's kernels; one"
    " that is launched early counts from the end of the one before; caches are as in a real call",
    EVENTS: "CUDA events around each step, medians of {}, as the profiler attributed no kernel"
    " to any: what the device waits for the host is in these times",
}
ABOVE = (
    "a share above 100 % beats a ceiling: operands that lie in a cache do not come from memory, and"
    " a call of a library may do with fewer operations than are counted"
)


@dataclass(frozen=True, slots=True)
class StepCost:
    """Say what a step is and moves; ``unit``: what it multiplies with (``Ceilings``)."""

    number: int
    title: str
    kind: str
    origin: str
    bytes_moved: int
    flops: int
    unit: str
    is_hoisted: bool  # in a denoise loop it runs once
    num_programs: int  # 0 where unknown
    occupied: float  # share of the multiprocessors that have one
    working_us: float = 0.0  # what its programs wait and compute, whatever they move


@dataclass(frozen=True, slots=True)
class Times:
    """Hold the microseconds of one call: of all of it, of each step with the number of its kernels,
    and by name of what belongs to no step."""

    method: str
    num_runs: int
    call_us: float
    steps: Mapping[int, tuple[float, int]]
    rest: tuple[tuple[str, float], ...] = ()
    is_replayed: bool = False  # the call, from a CUDA graph


@dataclass(frozen=True, slots=True)
class TimedStep(StepCost):
    """Describe a step and its time. What depends on that is None where no kernel could be
    attributed."""

    bound_us: float = 0.0
    bound_by: str = ""  # "memory" or "arithmetic"
    estimated_us: float = 0.0  # by the multiprocessors that have a program, and what these do
    num_kernels: int = 0
    us: float | None = None
    gb_per_s: float | None = None
    tflop_per_s: float | None = None
    share: float | None = None  # of the bound: 1.0 is as fast as can be
    lost_us: float | None = None  # time beyond the bound

    @property
    def is_too_slow(self) -> bool:
        """Tell whether it takes far longer than the device needs, by few programs or otherwise."""
        return self.us is not None and is_too_slow(self.us, self.bound_us)


@dataclass(frozen=True, slots=True)
class KindRow:
    """Sum up all steps of a kind that have times."""

    kind: str
    num_steps: int
    us: float
    bytes_moved: int
    flops: int
    bound_us: float
    share: float


@dataclass(frozen=True, slots=True)
class ProfileRow:
    """Describe one call of one module. ``gaps_us``: of the call, what is neither a step's nor
    ``rest``."""

    sizes: Mapping[str, int]
    method: str
    num_runs: int
    is_replayed: bool
    call_us: float
    steps_us: float
    rest_us: float
    gaps_us: float
    bound_us: float
    ceilings: Ceilings
    num_not_run: int  # steps whose work another one does at these sizes, or that have none
    steps: tuple[TimedStep, ...]
    kinds: tuple[KindRow, ...]
    rest: tuple[tuple[str, float], ...]

    @property
    def by_loss(self) -> tuple[TimedStep, ...]:
        """Return steps with times, those that lose most first."""
        timed = [s for s in self.steps if s.us is not None]
        return tuple(sorted(timed, key=lambda s: -(s.lost_us or 0.0)))

    @property
    def unseen(self) -> tuple[TimedStep, ...]:
        """Return steps that ran and have no time."""
        return tuple(s for s in self.steps if s.us is None)


def profile_row(
    sizes: Mapping[str, int],
    costs: Sequence[StepCost],
    times: Times,
    ceilings: Ceilings,
    num_not_run: int,
) -> ProfileRow:
    """Make the row; ``costs`` are those of the steps that run at these sizes."""
    steps = tuple(_timed(cost, times.steps.get(cost.number), ceilings) for cost in costs)
    steps_us = sum(us for us, _ in times.steps.values())
    rest_us = sum(us for _, us in times.rest)
    return ProfileRow(
        dict(sizes),
        times.method,
        times.num_runs,
        times.is_replayed,
        round(times.call_us, 3),
        round(steps_us, 3),
        round(rest_us, 3),
        round(times.call_us - steps_us - rest_us, 3),
        round(sum(step.bound_us for step in steps), 3),
        ceilings,
        num_not_run,
        steps,
        tuple(_kind_row(kind, steps) for kind in dict.fromkeys(s.kind for s in steps)),
        tuple((name, round(us, 3)) for name, us in times.rest),
    )


def _timed(cost: StepCost, found: tuple[float, int] | None, ceilings: Ceilings) -> TimedStep:
    bound, by = ceilings.bound_us(cost.bytes_moved, cost.flops, cost.unit)
    step = TimedStep(
        **asdict(cost),
        bound_us=round(bound, 3),
        bound_by=by,
        estimated_us=round(max(bound / cost.occupied, cost.working_us), 3),
    )
    if found is None:
        return step
    us, num_kernels = found
    seconds = max(us, 1e-3) / 1e6  # clocks count nanoseconds
    return replace(
        step,
        num_kernels=num_kernels,
        us=round(us, 3),
        gb_per_s=round(cost.bytes_moved / seconds / 1e9, 3),
        tflop_per_s=round(cost.flops / seconds / 1e12, 6),
        share=round(bound / 1e6 / seconds, 4),
        lost_us=round(us - bound, 3),
    )


def _kind_row(kind: str, steps: Sequence[TimedStep]) -> KindRow:
    own = [s for s in steps if s.kind == kind and s.us is not None]
    us, bound = sum(s.us or 0.0 for s in own), sum(s.bound_us for s in own)
    return KindRow(
        kind,
        len(own),
        round(us, 3),
        sum(s.bytes_moved for s in own),
        sum(s.flops for s in own),
        round(bound, 3),
        round(bound / us, 4) if us else 0.0,
    )


def profile_lines(p: ProfileRow) -> Iterator[str]:
    """Yield the lines of the text: the whole, by kind, and the steps that lose most."""
    yield summary(p)
    yield f"  ceilings measured here: {p.ceilings}"
    yield f"  measured by {METHODS[p.method].format(counted(p.num_runs, 'run'))}"
    for kind in sorted(p.kinds, key=lambda k: -k.us):
        yield (
            f"  {kind.us:10.1f} us {kind.us / p.call_us:6.1%}  {kind.num_steps:4d}x {kind.kind}:"
            f" bound {kind.bound_us:.1f} us, {kind.share:.0%} of it reached"
        )
    losing = [s for s in p.by_loss if (s.lost_us or 0.0) > 0][:TOP]
    yield f"  most time lost ({len(losing)} of {counted(len(p.by_loss), 'step')}):"
    for s in losing:
        yield (
            f"  {s.lost_us:10.1f} us  step {s.number:3d} {s.title}: {s.us:.1f} us, bound"
            f" {s.bound_us:.1f} ({s.bound_by}), {s.share:.0%}; {s.gb_per_s:.1f} GB/s,"
            f" {s.tflop_per_s:.3g} TFLOP/s  <- {s.origin or 'the module itself'}"
        )
    yield from _slow_lines(p)
    for name, us in p.rest:
        yield f"  {us:10.1f} us  not attributed to a step: {name}"
    if any((s.share or 0.0) > 1.0 for s in p.steps):
        yield f"  {ABOVE}"
    if p.unseen:
        numbers = ", ".join(f"{s.number} {s.title}" for s in p.unseen)
        yield f"  no kernel was attributed to {counted(len(p.unseen), 'step')}: {numbers}"


def _slow_lines(p: ProfileRow) -> Iterator[str]:
    """Yield a line for each kernel that is far above its bound, however little it takes in all."""
    found: dict[str, list[TimedStep]] = {}
    for step in p.by_loss:
        if step.is_too_slow:
            found.setdefault(step.title, []).append(step)
    for title, steps in found.items():
        worst = max(steps, key=lambda s: s.us or 0.0)
        by = f" by {counted(worst.num_programs, 'program')}" if worst.num_programs else ""
        yield (
            f"  more than {TOO_SLOW} x its bound: {len(steps)}x {title}, up to {worst.us:.1f} us:"
            f" bound {worst.bound_us:.1f}, estimated {worst.estimated_us:.1f}{by},"
            f" {worst.bytes_moved / 1e6:.2f} MB"
        )


def summary(p: ProfileRow) -> str:
    """Return a line such as "one call 6120.0 us, ..."."""
    how = " (replayed from a CUDA graph)" if p.is_replayed else ""
    share = p.gaps_us / p.call_us if p.call_us else 0.0
    rest = f", {p.rest_us:.1f} us not attributed" if p.rest else ""
    hoisted = sum(s.is_hoisted for s in p.steps)
    once = f"; {counted(hoisted, 'step')} of these only once a denoise loop" if hoisted else ""
    idle = counted(p.num_not_run, "step")
    left = f"; {idle} more with nothing to do at this size" if p.num_not_run else ""
    return (
        f"one call {p.call_us:.1f} us{how}: {counted(len(p.steps), 'step')} {p.steps_us:.1f} us"
        f" (bound {p.bound_us:.1f}){rest}, gaps {p.gaps_us:.1f} us ({share:.1%}){once}{left}"
    )
