"""A bound program on a CPU can run without finding out at each call what is the same at all.

One that is nothing but kernels needs no walk over its steps: small calls take a few microseconds.
One in which libraries do a part walks as ever, for callers that come one after another.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from time import perf_counter
from typing import Any, Protocol
from weakref import ref

import torch
from torch import Tensor
from torch._C._dynamo.guards import _empty_strided_cpu  # type: ignore[attr-defined]

from strop.runtime.build.native import BoundNativeKernel
from strop.runtime.run.bounds_checks import BoundsChecks
from strop.runtime.run.fair_turns import LANES
from strop.runtime.run.layouts import read_as
from strop.runtime.run.link import Linked, Resources, nothing
from strop.runtime.run.shape_plan import ShapePlan
from strop.runtime.run.sizes import Look
from strop.runtime.run.workspace import Workspace

Run = Callable[[Sequence[Tensor]], Any]
FIRST = itemgetter(0)  # what is made of the results where there is one, in no container
MANY_KERNELS = 8  # of which a run may be long
LONG_S = 2e-4  # a run of more leaves calls to the lanes: they begin in half of that
NOT_NOW = object()  # a run gives this instead of a result where this call is to go the long way
Patch = tuple[
    int, BoundNativeKernel, int, int
]  # tensor, and where its address goes, moved by so much


class Debuggable(Protocol):
    """``around`` is a debugger's place between the steps, who would miss them here."""

    around: Any


class Walking(Debuggable, Protocol):
    """A program is linked to memory, and knows what to do about a step that fails."""

    def is_linked(self, linked: Linked) -> bool: ...

    def walk_late(self, linked: Linked) -> None: ...

    def note_failure(self, error: BaseException) -> None: ...


def straight(
    watched: Debuggable,
    plan: ShapePlan,
    linked: Linked,
    resources: Resources,
    workspace: Workspace,
    structured: Callable[[list[Any]], Any],
) -> Run | None:
    """Return a run that gives what ``structured`` makes of the results, or None for a program that
    has more to do than to launch kernels, or gives back another thing than what they write."""
    numbers = _results(plan)
    if numbers is None or any(plan.order.parts[:2]):
        return None
    steps = [step for step in linked.steps if step is not nothing]
    kernels = [step for step in steps if isinstance(step, BoundNativeKernel)]
    if len(kernels) < len(steps):
        return None
    known = dict(plan.results)
    looks = [known[number] for number in numbers]
    long = [(name, plan.sizes.dtypes[number]) for number, name in plan.free.buffers]
    patches = [
        (which, kernel, place, move)
        for which, number in enumerate(
            [*plan.arguments, *numbers, *(number for number, _ in plan.free.buffers)]
        )
        for kernel, place, move in linked.patches[number]
        if isinstance(kernel, BoundNativeKernel)
    ]
    uses_memory = plan.memory.arena_bytes or resources.zeroed or resources.faults or plan.free
    is_from_one_to_one = [(which, move) for which, _, _, move in patches] == [(0, 0), (1, 0)]
    if len(kernels) == 1 and is_from_one_to_one and not uses_memory and structured is FIRST:
        return of_one(watched, kernels[0], looks[0], *(place for _, _, place, _ in patches))
    memory = linked.memory if plan.memory.arena_bytes else None
    count, faults = len(plan.arguments), resources.faults
    told = linked.told.tell if plan.free else None
    run = of_many(
        watched, kernels, looks, patches, count, structured, workspace, memory, faults, told, long
    )
    return run if len(kernels) < MANY_KERNELS else among_others(run, workspace)


def _results(plan: ShapePlan) -> list[int] | None:
    """Return the buffers that are given back, if they are all results, each of them once and
    whole."""
    refs = [item.tensor for item in plan.program.returned]
    whole = [ref.buffer for ref in refs if ref is not None and plan.sizes.is_whole(ref)]
    is_all = len(whole) == len(refs) and sorted(whole) == [number for number, _ in plan.results]
    return whole if is_all else None


def of_many(
    watched: Debuggable,
    kernels: Sequence[BoundNativeKernel],
    looks: Sequence[Look],
    patches: Sequence[Patch],
    count: int,
    structured: Callable[[list[Any]], Any],
    workspace: Workspace,
    memory: Tensor | None,
    faults: BoundsChecks,
    told: Callable[[Sequence[Tensor]], Mapping[str, int]] | None,
    long: Sequence[tuple[str, torch.dtype]],
) -> Run:
    """Return a run from ``count`` arguments to results that look so. ``memory`` is what the kernels
    work in, if they do; a call where it has moved gives None. ``told`` tells them free sizes, of
    which values are as ``long``, each with its type."""
    calls = [kernel.call for kernel in kernels]
    known = None if memory is None else ref(memory)  # whoever grows it has the old one be free
    places = [(which, kernel.pointers, place, move) for which, kernel, place, move in patches]
    lock, address, end = workspace.lock, Tensor.data_ptr, count + len(looks)

    def run(inputs: Sequence[Tensor]) -> Any:
        with lock:
            has_moved = known is not None and workspace.memory is not known()
            if has_moved or watched.around is not None:
                return None
            tensors = [*inputs]
            for shape, strides, dtype in looks:
                tensors.append(_empty_strided_cpu(shape, strides, dtype))
            if told is not None:  # other calls of the kernels may have had other sizes
                now = told(inputs)
                for name, dtype in long:
                    tensors.append(_empty_strided_cpu((now[name],), (1,), dtype))
            for which, array, place, move in places:
                array[place] = address(tensors[which]) + move
            for call in calls:
                call()
            faults.check()
            return structured(tensors[count:end])

    return run


def among_others(run: Run, workspace: Workspace) -> Run:
    """Return a run that gives NOT_NOW, where the latest one was long and others are under way. A
    short one waits for its memory: the long way would take longer."""
    latest_s = 0.0

    def timed(inputs: Sequence[Tensor]) -> Any:
        nonlocal latest_s
        began = perf_counter()
        result = run(inputs)
        latest_s = perf_counter() - began
        return result

    in_lane = alone(timed, workspace)
    return lambda inputs: in_lane(inputs) if latest_s > LONG_S else timed(inputs)


def alone(run: Run, workspace: Workspace) -> Run:
    """Return a run that has the first lane, whose memory it works in, or gives NOT_NOW where others
    are under way: they have lanes beside each other, and fair turns, by the long way."""
    lock, lanes, num_threads = workspace.lock, LANES, torch.get_num_threads

    def run_or_leave(inputs: Sequence[Tensor]) -> Any:
        lane = lanes.take_alone(num_threads())
        if lane is None:
            return NOT_NOW
        try:
            if not lock.acquire(blocking=False):
                return NOT_NOW
            try:
                return run(inputs)
            finally:
                lock.release()
        finally:
            lanes.give(lane)

    return run_or_leave


def of_one(
    watched: Debuggable, kernel: BoundNativeKernel, look: Look, argument: int, place: int
) -> Run:
    """Do as ``of_many`` for one kernel from one argument to one result, which uses no working
    memory: without loops, and with a set of arguments for each thread instead of a lock."""
    shape, strides, dtype = look
    spare = [kernel.again()]

    def run(inputs: Sequence[Tensor]) -> Any:
        if watched.around is not None:
            return None
        try:
            own = spare.pop()
        except IndexError:  # other threads are in the middle of a call
            own = kernel.again()
        result = _empty_strided_cpu(shape, strides, dtype)
        pointers = own.pointers
        pointers[argument] = inputs[0].data_ptr()
        pointers[place] = result.data_ptr()
        own.call()
        spare.append(own)
        return result

    return run


def of_steps(
    bound: Walking,
    plan: ShapePlan,
    linked: Linked,
    faults: BoundsChecks,
    workspace: Workspace,
    structured: Callable[[list[Any]], Any],
) -> Run | None:
    """Return a run over all steps, for a program whose steps libraries do, too; None for one that
    keeps what it computes for a loop, or serves arguments of any length."""
    if any(plan.order.parts[:2]) or plan.free:
        return None
    known, has_arena, place_all = ref(linked), plan.memory.arena_bytes > 0, _placing(plan)
    repeated, released = plan.program.repeated, plan.released

    def run(inputs: Sequence[Tensor]) -> Any:
        linked = known()  # whoever lets go of it has its memory be free
        if linked is None or not bound.is_linked(linked) or bound.around is not None:
            return None
        if has_arena and workspace.memory is not linked.memory:
            return None
        try:
            place_all(linked, inputs)
            bound.walk_late(linked)
            faults.check()
            results = [make() for make in linked.returned]
        except BaseException as error:
            bound.note_failure(error)
            raise
        for place, first in repeated:
            results[place] = results[first]
        for number in released:
            linked.slots[number] = None
        return structured(results)

    return alone(run, workspace)


def _placing(plan: ShapePlan) -> Callable[[Linked, Sequence[Tensor]], None]:
    """Return what tells all steps where arguments, and results yet to be computed, lie."""
    arguments = [(number, plan.program.buffers[number].dtype) for number in plan.arguments]
    looks = plan.results

    def place_all(linked: Linked, inputs: Sequence[Tensor]) -> None:
        put = linked.put
        for (number, dtype), tensor in zip(arguments, inputs, strict=True):
            put(number, read_as(tensor, dtype))
        for number, (shape, strides, dtype) in looks:
            put(number, _empty_strided_cpu(shape, strides, dtype))

    return place_all
