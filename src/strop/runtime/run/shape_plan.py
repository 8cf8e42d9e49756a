"""A plan has everything about a program at one shape that is known before it has memory, as
data."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Collection, Hashable, Mapping
from dataclasses import dataclass

from strop.ir.program import CallStep, KernelStep, Program
from strop.ir.source import KernelSource
from strop.kernels.library import Choice
from strop.kernels.packed.rows import NAME as PACKED
from strop.runtime.build.loader import KernelLoader
from strop.runtime.loop.hoisting import Hoist, written
from strop.runtime.loop.timetable import TimetablePart
from strop.runtime.run.choices import answers
from strop.runtime.run.free_sizes import NONE, FreeSizes
from strop.runtime.run.launched_calls import scratch_bytes
from strop.runtime.run.launches import GeneratedLaunch, launches_of
from strop.runtime.run.library_calls import CUDA_PLANNED_OUT, PLANNED_OUT
from strop.runtime.run.memory_plan import MemoryPlan, plan_memory
from strop.runtime.run.outline import Outline
from strop.runtime.run.run_order import RunOrder, run_order
from strop.runtime.run.sizes import Look, Sizes

MOST_PLANS = 16  # of one program; SDXL's have some 2 MB each


@dataclass(frozen=True, slots=True)
class ShapePlan:
    """A plan has, by step, the ``launches`` of generated kernels and the library's ``choices`` for
    calls. ``early`` are the steps whose kernel may start before the launch before it has ended.
    Buffers are named by number: the ``arguments`` of a run, its ``results`` with their looks, those
    that hold nothing between runs, ``released``, and those that have no place in the arena although
    they could, ``handed_on``. It holds for all ``free`` sizes."""

    program: Program
    sizes: Sizes
    order: RunOrder
    launches: Mapping[int, GeneratedLaunch]
    choices: Mapping[int, Choice]
    early: frozenset[int]
    memory: MemoryPlan
    arguments: tuple[int, ...]
    results: tuple[tuple[int, Look], ...]
    released: tuple[int, ...]
    handed_on: frozenset[int]
    taken_in: frozenset[int]
    outline: Outline
    free: FreeSizes = NONE

    def takes_in(self, step: CallStep) -> bool:
        """Tell whether a call writes to the arena although its operator allocates."""
        return not self.taken_in.isdisjoint(step.outputs)

    @property
    def sources(self) -> list[KernelSource]:
        """Return the kernels that run at this shape, each once."""
        generated = [launch.source for launch in self.launches.values()]
        chosen = [source for choice in self.choices.values() for source in choice.sources]
        each = {id(source): source for source in (*generated, *chosen)}  # few are not one object
        return list(dict.fromkeys(each.values()))


def plan_shape(
    program: Program,
    env: Mapping[str, int],
    kernels: KernelLoader,
    hoist: Hoist | None,
    part: TimetablePart | None,
    *,
    shares: bool,
    has_free: bool = False,
    outline: Outline | None = None,
) -> ShapePlan:
    """Plan a program at one shape, without building a kernel. ``env`` holds the sizes; ``hoist``
    gives leave to run steps once for several runs; ``part`` has the steps that run, if not all;
    ``shares`` is as in ``plan_memory``. With ``has_free`` the plan is for all free sizes, which a
    run reads off its arguments. ``outline`` is the program's, where it is known."""
    outline = Outline(program) if outline is None else outline
    planned = CUDA_PLANNED_OUT if program.device == "cuda" else PLANNED_OUT
    sizes = Sizes(program, env, outline.looks)
    order = run_order(program, env, planned, hoist, part)
    choices = answers(outline.asked_at(order.steps), sizes.all, kernels.device)
    launches = launches_of(program, order.steps, sizes, kernels.splits)
    scratch = {position: each.scratch_bytes for position, each in launches.items()}
    for position, choice in choices.items():
        if choice.launches and choice.launches.working:
            scratch[position] = [scratch_bytes(choice.launches)]
    free = outline.free if has_free and not (hoist or part) else NONE
    lent = part.tensors if part else [number for number, _ in free.buffers]
    handed_on = handed_on_by(outline, order, choices, lent)
    taken_in = frozenset() if free else taken_in_by(outline, order, choices, lent)
    memory = plan_memory(program, sizes, order, scratch, lent, handed_on, taken_in, shares=shares)
    kinds = outline.by_kind
    results = tuple((number, sizes.look(number)) for number in kinds["result"])
    # arguments too: a backward's are what its forward has kept, half of the device's memory
    arguments = () if part else outline.arguments
    long = [number for number, _ in free.buffers]
    called = {*kinds["call"]} - taken_in
    released = (*arguments, *sorted({*called, *kinds["result"], *handed_on, *long}))
    early = _early(order, choices)
    return ShapePlan(
        program,
        sizes,
        order,
        launches,
        choices,
        early,
        memory,
        arguments,
        results,
        released,
        handed_on,
        taken_in,
        outline,
        free,
    )


class ShapePlans:
    """Keep the latest plans of one program. A shape is bound several times: for each stream, for
    CUDA graphs, and again where weights lie elsewhere. Its plan is the same each time, and takes
    the host longer than all else."""

    def __init__(self) -> None:
        self._plans: OrderedDict[Hashable, ShapePlan] = OrderedDict()
        self._outline: Outline | None = None

    def outline(self, program: Program) -> Outline:
        """Return what the plans of the program have in common."""
        if self._outline is None or self._outline.program is not program:
            self._outline = Outline(program)
        return self._outline

    def plan(
        self,
        program: Program,
        env: Mapping[str, int],
        kernels: KernelLoader,
        hoist: Hoist | None,
        part: TimetablePart | None,
        *,
        shares: bool,
        has_free: bool,
    ) -> ShapePlan:
        """Return what ``plan_shape`` does."""
        hoisted = (hoist.steady, hoist.timestep) if hoist else None
        parted = (part.steps, tuple(part.tensors)) if part else None
        key = tuple(env.items()), id(kernels), hoisted, parted, shares, has_free
        found = self._plans.pop(key, None)
        if found is None:
            found = plan_shape(
                program,
                env,
                kernels,
                hoist,
                part,
                shares=shares,
                has_free=has_free,
                outline=self.outline(program),
            )
        self._plans[key] = found
        if len(self._plans) > MOST_PLANS:
            self._plans.popitem(last=False)
        return found


def handed_on_by(
    outline: Outline,
    order: RunOrder,
    choices: Mapping[int, Choice],
    lent: Collection[int],
) -> frozenset[int]:
    """Return the results that are left where products of packed weights put them: a copy would take
    as long as packing saves. A result that outlives the run or is ``lent``, or of which several
    steps write a part, is copied to its place."""
    found = {
        number
        for position in order.late
        if position in choices and choices[position].kernel == PACKED
        for number in written(order.steps[position])
    }
    if not found:
        return frozenset()
    writers = Counter(number for step in order.steps for number in written(step))
    buffers = outline.program.buffers
    return frozenset(
        number
        for number in found.difference(outline.returned, lent)
        if writers[number] == 1 and buffers[number].kind == "arena"
    )


def taken_in_by(
    outline: Outline,
    order: RunOrder,
    choices: Mapping[int, Choice],
    lent: Collection[int],
) -> frozenset[int]:
    """Return the results that lie in the arena on a CPU although a library would allocate them: one
    kernel of ours makes each, and writes where it is told. One that outlives the run, or is
    ``lent``, is none of them."""
    if outline.program.device != "cpu":
        return frozenset()
    found = {
        step.outputs[0]
        for position in order.late
        if isinstance(step := order.steps[position], CallStep)
        and step.place is None
        and len(step.outputs) == 1
        and (choice := choices.get(position)) is not None
        and choice.launches is not None
        and choice.launches.only is not None
    }
    buffers = outline.program.buffers
    kept = found.difference(outline.returned, lent)
    return frozenset(number for number in kept if buffers[number].kind == "call")


def _early(order: RunOrder, choices: Mapping[int, Choice]) -> frozenset[int]:
    """Return the steps behind a launch of ours. A library's kernel lets nobody start before it has
    ended; the caller's may write weights, which a product fetches before it waits."""
    found = set[int]()
    for part in order.parts:
        is_ours = False
        for position in part:
            if is_ours:
                found.add(position)
            if (step := order.steps[position]) is not None:
                chosen = choices[position].launches if position in choices else None
                is_ours = isinstance(step, KernelStep) or bool(chosen and chosen.ends_ours)
    return frozenset(found)
