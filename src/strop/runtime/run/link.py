"""A plan, memory, state and kernels become closures: one for each step, and one for each result.

Sizes say what kind a step is; ``KINDS`` is the table of what each kind becomes. A closure reads
tensors whose memory stands still as ready-made views, and others from ``slots``.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from strop.ir.contractions import FACTORS
from strop.ir.ops import OF_ROWS
from strop.ir.program import CallStep, KernelStep, TensorRef
from strop.kernels.kernel import RESULT, Launches
from strop.kernels.packed.rows import NAME as PACKED
from strop.kernels.packed.rows import WEIGHT
from strop.runtime.build.loader import BoundKernel, KernelLoader
from strop.runtime.build.native import BoundNativeKernel
from strop.runtime.derived.packed_weights import (
    PackedMemory,
    PackedWeight,
    PackedWeights,
    has_no_gaps,
)
from strop.runtime.run.bounds_checks import BoundsChecks
from strop.runtime.run.fewer_threads import (
    SMALL_FLOPS,
    LibraryCall,
    flops_of,
    in_one_thread,
    is_counted,
)
from strop.runtime.run.free_sizes import Told, ToldSizes
from strop.runtime.run.launched_calls import CallSite, Launched
from strop.runtime.run.launches import GeneratedLaunch
from strop.runtime.run.layouts import laid_out, read_as, reshaped
from strop.runtime.run.library_calls import (
    CUDA_PLANNED_OUT,
    PLANNED_OUT,
    allocating_on,
    copying,
    planned_on,
)
from strop.runtime.run.memory import aligned
from strop.runtime.run.native_calls import (
    KnownScalars,
    NativeCall,
    OperandPlace,
    fetch_ahead,
)
from strop.runtime.run.operator_calls import Getter, in_own_memory
from strop.runtime.run.packed_calls import PRODUCTS, allocating, packed_call, way_of
from strop.runtime.run.placed_rows import by_rows, has_rows
from strop.runtime.run.shape_plan import ShapePlan
from strop.runtime.run.sizes import Look
from strop.runtime.run.zeroed_scratch import ZeroedScratch

Run = Callable[[], None]
Slots = list[Tensor | None]
Patch = tuple[BoundKernel, int, int]  # a kernel, which of its pointers, and by how much it is moved
Table = Mapping[str, Callable[[Mapping[str, Any]], Callable[..., Any]]]


@dataclass(frozen=True, slots=True)
class Resources:
    """A program is linked to these, wherever its memory is. ``state`` holds weights by argument,
    and ``packed`` what is packed of them, or None where they do not stay; ``lent`` holds the
    tensors that buffers of a part lie in. ``faults``, ``zeroed``, scratch by step and place, and
    ``held``, packed weights by step, are its own and outlive a link, and so is ``memories``, in
    which kernels pack weights."""

    state: Sequence[Tensor | None]
    kernels: KernelLoader
    stream: int
    lent: Mapping[int, Tensor]
    faults: BoundsChecks
    zeroed: dict[tuple[int, int], Tensor]
    packed: PackedWeights | None = None
    held: dict[int, PackedWeight] = field(default_factory=dict)
    memories: dict[tuple[int, int], PackedMemory] = field(default_factory=dict)
    zeros: ZeroedScratch = field(default_factory=ZeroedScratch)


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Linked:
    """This is a program that can run in this memory. ``slots`` say what each buffer holds, None
    where it is yet to come; ``patches`` say, by buffer, which kernels want to know where it then
    lies. ``calls`` are those of a CPU's libraries that use several threads, None for one that is
    not known."""

    memory: Tensor
    slots: Slots
    patches: Mapping[int, list[Patch]]
    steps: Sequence[Run]
    returned: Sequence[Callable[[], Any]]
    calls: Sequence[LibraryCall | None]
    told: ToldSizes

    def put(self, number: int, tensor: Tensor) -> None:
        self.slots[number] = tensor
        pointer = tensor.data_ptr()
        for kernel, place, move in self.patches[number]:
            kernel.set_pointer(place, pointer + move)


@dataclass(frozen=True, slots=True)
class Linking:
    """This is what a step is linked to, and the patches and calls that come of it. ``steady`` are
    weights that no step writes."""

    plan: ShapePlan
    resources: Resources
    memory: Tensor
    slots: Slots
    patches: dict[int, list[Patch]]
    steady: frozenset[int]
    calls: list[LibraryCall | None] = field(default_factory=list)
    told: list[Told] = field(default_factory=list)
    native: dict[int, NativeCall] = field(default_factory=dict)  # by step
    scalars: KnownScalars = field(default_factory=KnownScalars)

    def scratch(self, position: int, place: int) -> Tensor:
        """Return the bytes of the arena from where this scratch begins."""
        return self.memory[self.plan.memory.scratch[position, place] :]


def link(plan: ShapePlan, resources: Resources, memory: Tensor, kept: Tensor) -> Linked:
    """Link a plan to memory. ``memory`` is the arena; in ``kept`` lie results that outlive a run.
    Both are bytes."""
    slots = _slots(plan, resources, memory, kept)
    at = Linking(plan, resources, memory, slots, defaultdict(list), plan.outline.steady)
    steps = [_step(at, position) for position in range(len(plan.order.steps))]
    fetch_ahead(at.native[n] for part in plan.order.parts for n in part if n in at.native)
    returned = [_returned(at, place) for place in range(len(plan.program.returned))]
    # where nothing lies in it, it is not to be kept alive either
    used = memory if plan.memory.arena_bytes else memory.new_empty(0)
    told = ToldSizes(plan.free, plan.sizes.env, at.told)
    return Linked(used, slots, at.patches, steps, returned, at.calls, told)


def _slots(plan: ShapePlan, resources: Resources, memory: Tensor, kept: Tensor) -> Slots:
    """Return what each buffer holds at the beginning of a run."""
    slots: Slots = [None] * len(plan.program.buffers)
    for number, buffer in enumerate(plan.program.buffers):
        if buffer.kind == "input" and plan.program.inputs[buffer.index].is_state:
            weight = resources.state[buffer.index]
            slots[number] = weight if weight is None else read_as(weight, buffer.dtype)
    for offsets, flat in ((plan.memory.buffers, memory), (plan.memory.kept, kept)):
        _put_views(plan, slots, offsets, flat)
    for number, tensor in resources.lent.items():
        slots[number] = tensor
    return slots


def _put_views(plan: ShapePlan, slots: Slots, offsets: Mapping[int, int], flat: Tensor) -> None:
    """Put buffers at their offsets, in bytes, among these bytes."""
    seen = dict[torch.dtype, Tensor]()  # one view of it all by type: each buffer is a piece of one
    for number, offset in offsets.items():
        shape, strides, dtype = plan.sizes.look(number)
        if (whole := seen.get(dtype)) is None:
            whole_bytes = flat.numel() // dtype.itemsize * dtype.itemsize
            whole = seen[dtype] = flat[:whole_bytes].view(dtype)
        begin = whole.storage_offset() + offset // dtype.itemsize
        slots[number] = whole.as_strided(shape, strides, begin)


# steps


def _step(at: Linking, position: int) -> Run:
    step = at.plan.order.steps[position]
    run = KINDS[kind_of(at.plan, position)](at, position, step)
    dead = at.plan.memory.dead.get(position)
    return _freeing(run, at.slots, dead) if dead else run


def kind_of(plan: ShapePlan, position: int) -> str:
    step = plan.order.steps[position]
    if isinstance(step, CallStep):
        if step.place is not None:
            return "placed call"
        planned = CUDA_PLANNED_OUT if plan.program.device == "cuda" else PLANNED_OUT
        is_planned = step.op in planned or plan.takes_in(step)
        return "planned call" if is_planned else "allocating call"
    # grids are not empty, and kernels divide by sizes
    return "kernel" if step and plan.sizes.writes_any(step) else "nothing"


def nothing() -> None:
    """Do nothing: the kernel has no element to write, or another one does its work."""


def _nothing(at: Linking, position: int, step: object) -> Run:
    return nothing


def _kernel(at: Linking, position: int, step: KernelStep) -> Run:
    launch, slots = at.plan.launches[position], at.slots
    pointers, yet_to_come = list[int](), list[tuple[int, int, int]]()
    for place, (number, move) in enumerate(zip(step.buffers, launch.moves, strict=True)):
        if (tensor := slots[number]) is None:
            yet_to_come.append((place, number, move))
        pointers.append(move if tensor is None else tensor.data_ptr() + move)
    pointers += _scratch_pointers(at, position, launch)
    kernels, stream = at.resources.kernels, at.resources.stream
    is_early = position in at.plan.early
    kernel = kernels.bind(launch.source, pointers, launch.scalars, stream, early=is_early)
    if isinstance(kernel, BoundNativeKernel) and at.plan.free:
        at.told.extend((kernel, place, size) for place, size in at.plan.free.scalars(step))
    for place, number, move in yet_to_come:
        at.patches[number].append((kernel, place, move))
    return kernel


def _planned_call(at: Linking, position: int, step: CallStep) -> Run:
    """Bind a library call, or a kernel that does one, which writes where it is told."""
    (number,), slots = step.outputs, at.slots
    if number not in at.plan.handed_on and (native := _native_call(at, position, step)):
        return native
    getters = _getters(at, step)
    packed = _packed_call(at, position, step, getters)
    shape = at.plan.sizes.shapes[number]
    if step.op in OF_ROWS:
        shape = (math.prod(shape[:-1]), shape[-1])
    table = _writing_table(at, position, step)
    call = _call(at, position, step, table) if packed is None else copying(packed)
    if number in at.plan.handed_on:
        return _handing_on(at, number, getters, packed or allocating(call, shape))
    fixed = slots[number]
    if fixed is not None:
        out = reshaped(fixed, shape)
        return lambda: call([get() for get in getters], out)
    return lambda: call([get() for get in getters], reshaped(slots[number], shape))


def _placed_call(at: Linking, position: int, step: CallStep) -> Run:
    """Bind a call whose result is a piece of a larger buffer, where a library's goes by a copy."""
    assert step.place is not None
    if native := _native_call(at, position, step):
        return native
    table, getters = _writing_table(at, position, step), _getters(at, step)
    call, out = _call(at, position, step, table), _getter(at, step.place)
    call = call if has_rows(step) else by_rows(call, table[step.op](dict(step.attrs)))
    return lambda: call([get() for get in getters], out())


def _writing_table(at: Linking, position: int, step: CallStep) -> Table:
    """Return the calls that write where they are told, for a step, too, of which the library
    allocates."""
    device, choice = at.resources.kernels.device, at.plan.choices.get(position)
    table = planned_on(device)
    if step.op in table:
        return table
    makers = allocating_on(device, choice.kernel if choice else "")
    return {**table, step.op: lambda attrs: copying(makers[step.op](attrs))}


def _handing_on(
    at: Linking, number: int, getters: Sequence[Getter], call: Callable[[Sequence[Tensor]], Tensor]
) -> Run:
    """Bind a call whose result is left where it is."""
    (shape, strides, _), slots, patches = at.plan.sizes.look(number), at.slots, at.patches[number]

    def run() -> None:
        slots[number] = laid = laid_out(call([get() for get in getters]).view(shape), strides)
        pointer = laid.data_ptr()
        for kernel, place, move in patches:
            kernel.set_pointer(place, pointer + move)

    return run


def _packed_call(
    at: Linking, position: int, step: CallStep, getters: Sequence[Getter]
) -> Callable[[Sequence[Tensor]], Tensor] | None:
    """Return the call of a step for which the library has chosen to pack the weight; None where it
    has not, or the weight does not stay or has gaps in memory."""
    choice, weights = at.plan.choices.get(position), at.resources.packed
    if choice is None or choice.kernel != PACKED or weights is None:
        return None
    weight = getters[WEIGHT]()
    if not has_no_gaps(weight):
        return None
    attrs = {name: at.plan.sizes.concrete(value) for name, value in step.attrs}
    looks = tuple(_look(at, ref) for ref in step.inputs)
    (shape, _, _), look = looks[0], (tuple(weight.shape), weight.stride(), weight.dtype)
    product = PRODUCTS[step.op](attrs, shape)
    way = way_of(step.op, tuple(attrs.items()), shape, look)
    held = at.resources.held[position] = weights.get(weight, way, product.pack)
    call = packed_call(product, held, weight, at.resources.kernels)
    if flops_of(step.op, attrs, [shape for shape, _, _ in looks]) <= SMALL_FLOPS:
        return in_one_thread(call)
    known = tuple(attrs.items())
    at.calls.append(LibraryCall(step.op, known, looks, None, product.once, PACKED))
    return call


def _native_call(
    at: Linking, position: int, step: CallStep, *, allocates: bool = False
) -> BoundNativeKernel | None:
    """Bind a call that is one kernel on a CPU; None for other calls, and where operands lie
    otherwise. Where it ``allocates``, its result is yet to come."""
    choice, kernels = at.plan.choices.get(position), at.resources.kernels
    if choice is None or choice.launches is None or kernels.device.arch or not has_rows(step):
        return None
    if (launch := choice.launches.only) is None:
        return None
    memory = at.scratch(position, 0).data_ptr() if choice.launches.working else 0
    working, begin, kept = [], memory, iter(_kept(at, position, step, choice.launches))
    for each in choice.launches.scratch:
        if each.packs >= 0:
            working.append(OperandPlace(each.shape, (1,), next(kept).data_ptr()))
            continue
        working.append(OperandPlace(each.shape, (1,) * len(each.shape), begin))
        begin += aligned(each.size_bytes)
    places = [
        _result_place(at, step, allocates=allocates)
        if operand.number == RESULT
        else _place(at, step.inputs[operand.number])
        if operand.number > RESULT
        else working[RESULT - 1 - operand.number]
        for operand in launch.operands
    ]
    if (scalars := at.scalars.at(launch, places)) is None:
        return None
    pointers = [place.pointer for place in places]
    kernel = kernels.bind(launch.source, pointers, scalars, at.resources.stream)
    if not isinstance(kernel, BoundNativeKernel):
        return None
    at.native[position] = NativeCall(kernel, launch, places)
    for number, place in enumerate(places):
        if place.number is not None and not place.pointer:
            at.patches[place.number].append((kernel, number, place.move))
    return kernel


def _place(at: Linking, ref: TensorRef) -> OperandPlace:
    """Return where a piece of a buffer lies."""
    ((shape, strides, dtype), offset), fixed = _look_and_offset(at, ref), at.slots[ref.buffer]
    move = offset * dtype.itemsize
    pointer = 0 if fixed is None else fixed.data_ptr() + move
    return OperandPlace(shape, strides, pointer, ref.buffer, move)


def _result_place(at: Linking, step: CallStep, *, allocates: bool) -> OperandPlace:
    """Return where a call's result lies: of a call of rows, as dense rows."""
    if step.place is not None:
        return _place(at, step.place)
    (number,), (shape, strides, _) = step.outputs, _row_look(at, step)
    pointer = 0 if allocates else _pointer(at.slots[number])
    return OperandPlace(shape, strides, pointer, number)


def _making_result(at: Linking, step: CallStep, kernel: BoundNativeKernel) -> Run:
    """Bind a kernel whose result is made when it runs. It is told where, as readers are."""
    (number,), slots, device = step.outputs, at.slots, at.memory.device
    (shape, strides, dtype), patches = at.plan.sizes.look(number), at.patches[number]

    def run() -> None:
        slots[number] = made = torch.empty_strided(shape, strides, dtype=dtype, device=device)
        pointer = made.data_ptr()
        for reader, where, move in patches:
            reader.set_pointer(where, pointer + move)
        kernel()

    return run


def _allocating_call(at: Linking, position: int, step: CallStep) -> Run:
    """Bind a call that allocates its results, which kernels then get to know."""
    if native := _native_call(at, position, step, allocates=True):
        return _making_result(at, step, native)
    device = at.resources.kernels.device
    choice = at.plan.choices.get(position)
    table = allocating_on(device, choice.kernel if choice else "")
    getters = _getters(at, step)
    packed = _packed_call(at, position, step, getters)
    call = packed or _call(at, position, step, table)
    is_single, slots = dict(step.attrs).get("single", True), at.slots
    targets = [(n, at.plan.sizes.strides[n], at.patches[n]) for n in step.outputs]

    def run() -> None:
        made = call([get() for get in getters])
        for (number, strides, patches), value in zip(
            targets, (made,) if is_single else made, strict=False
        ):
            if number >= 0:
                slots[number] = laid = laid_out(value, strides)
                pointer = laid.data_ptr()
                for kernel, place, move in patches:
                    kernel.set_pointer(place, pointer + move)

    return run


KINDS: dict[str, Callable[[Linking, int, Any], Run]] = {
    "nothing": _nothing,
    "kernel": _kernel,
    "planned call": _planned_call,
    "placed call": _placed_call,
    "allocating call": _allocating_call,
}


def _freeing(run: Run, slots: Slots, dead: Sequence[int]) -> Run:
    """Let a step free what libraries have allocated and nobody reads behind it, so that later steps
    have it."""

    def run_and_free() -> None:
        run()
        for number in dead:
            slots[number] = None

    return run_and_free


# arguments of kernels and calls


def _pointer(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _scratch_pointers(at: Linking, position: int, launch: GeneratedLaunch) -> list[int]:
    return [_scratch_pointer(at, position, n, launch) for n in range(len(launch.scratch_numels))]


def _scratch_pointer(at: Linking, position: int, place: int, launch: GeneratedLaunch) -> int:
    scratch = launch.source.scratch[place]
    if scratch.faults:
        return at.resources.faults.pointer(position)
    if not scratch.zeroed:
        return at.memory.data_ptr() + at.plan.memory.scratch[position, place]
    if scratch.packs >= 0 and (held := _packed_memory(at, position, place, launch)) is not None:
        return held.memory.data_ptr()
    numel = launch.scratch_numels[place]
    return _zeros(at, (position, place), numel, scratch.dtype).data_ptr()


def _zeros(at: Linking, key: tuple[int, int], numel: int, dtype: torch.dtype) -> Tensor:
    """Return the scratch of a step and place, which is zero before the first run."""
    zeroed = at.resources.zeroed
    if key not in zeroed:
        zeroed[key] = at.resources.zeros.take(numel, dtype, at.memory.device)
    return zeroed[key]


def _packed_memory(
    at: Linking, position: int, place: int, launch: GeneratedLaunch
) -> PackedMemory | None:
    """Return where a kernel packs a weight of the module; None for what is no weight, or does not
    stay where it is."""
    step = at.plan.order.steps[position]
    assert isinstance(step, KernelStep)
    param = launch.source.scratch[place].packs
    number = step.buffers[param]
    numel, move = launch.scratch_numels[place], launch.moves[param]
    return _memory_of(at, (position, place), number, move, numel)


def _memory_of(
    at: Linking, key: tuple[int, int], number: int, move: int, numel: int
) -> PackedMemory | None:
    weights, weight = at.resources.packed, at.slots[number]
    if weights is None or weight is None or number not in at.steady:
        return None
    held = at.resources.memories[key] = weights.memory_for(weight, move, numel)
    return held


def _kept(at: Linking, position: int, step: CallStep, launches: Launches) -> list[Tensor]:
    """Return the memory into which the kernel of a call packs weights, in the order of its
    scratch."""
    found = []
    for place, each in enumerate(launches.scratch):
        if each.packs < 0:
            continue
        key, ref, numel = (position, place), step.inputs[each.packs], math.prod(each.shape)
        move = at.plan.sizes.of(ref.offset) * each.dtype.itemsize
        held = _memory_of(at, key, ref.buffer, move, numel)
        found.append(_zeros(at, key, numel, each.dtype) if held is None else held.memory)
    return found


def _call(at: Linking, position: int, step: CallStep, table: Table) -> Callable[..., Any]:
    """Return what does the call: a library, or the launches that were chosen."""
    attrs = {name: at.plan.sizes.concrete(value) for name, value in step.attrs}
    library = table[step.op](attrs)
    choice = at.plan.choices.get(position)
    if choice is None or choice.launches is None:
        return library if at.resources.kernels.device.arch else _on_cpu(at, step, attrs, library)
    site = CallSite(
        at.resources.kernels,
        at.resources.stream,
        is_early=position in at.plan.early,
        is_steady=len(step.inputs) > 1 and at.steady.issuperset(early_weights(step)),
    )
    memory = at.scratch(position, 0) if choice.launches.working else None
    kept = _kept(at, position, step, choice.launches)
    launched = Launched(choice.launches, site, memory, kept)
    is_placed = step.place is not None or at.plan.takes_in(step)
    allocates = choice.launches.result and not is_placed
    return launched.allocating(library) if allocates else launched.writing(library)


def _on_cpu(
    at: Linking, step: CallStep, attrs: Mapping[str, Any], library: Callable[..., Any]
) -> Callable[..., Any]:
    """Return a library's call that gives the same bits with whatever number of threads, or note it
    as one of which that has to be found out."""
    if not is_counted(step.op):
        at.calls.append(None)
        return library
    looks = tuple(_look(at, ref) for ref in step.inputs)
    if flops_of(step.op, attrs, [shape for shape, _, _ in looks]) <= SMALL_FLOPS:
        return in_one_thread(library)
    out = _row_look(at, step) if step.op in PLANNED_OUT or step.place else None
    at.calls.append(LibraryCall(step.op, tuple(attrs.items()), looks, out, library))
    return library


def _look(at: Linking, ref: TensorRef) -> Look:
    """Return how a library call sees a piece of a buffer. A weight may lie in memory in another
    order than it was traced."""
    return _look_and_offset(at, ref)[0]


def _look_and_offset(at: Linking, ref: TensorRef) -> tuple[Look, int]:
    """Return how a piece of a buffer looks, and where it begins, in elements."""
    sizes, fixed = at.plan.sizes, at.slots[ref.buffer]
    shape, strides, offset, is_whole = sizes.piece(ref)
    if fixed is not None and is_whole:
        shape, strides = tuple(fixed.shape), fixed.stride()
    return (shape, strides, sizes.dtypes[ref.buffer]), offset


def _row_look(at: Linking, step: CallStep) -> Look:
    """Return how the result looks that a planned call writes, in dense rows if it is one of
    rows."""
    if step.place is not None:
        return _look(at, step.place)
    (number,) = step.outputs
    shape, strides, dtype = at.plan.sizes.look(number)
    if step.op in OF_ROWS:
        shape = (math.prod(shape[:-1]), shape[-1])
        strides = (shape[-1], 1)
    return shape, strides, dtype


def early_weights(step: CallStep) -> list[int]:
    """Return the buffers that a kernel reads before the one before it has ended, unless that may
    write them."""
    return [ref.buffer for ref in step.inputs[1 : FACTORS.get(step.op, 2) : 2]]


def _getters(at: Linking, step: CallStep) -> list[Getter]:
    getters = [_getter(at, ref) for ref in step.inputs]
    if step.op != "aten":
        return getters
    is_given = [ref.buffer in at.plan.arguments for ref in step.inputs]
    return in_own_memory(dict(step.attrs)["target"], getters, is_given)


def _getter(at: Linking, ref: TensorRef) -> Getter:
    """Return how a library call gets at a piece of a buffer: ready-made where memory stands
    still."""
    slots, number = at.slots, ref.buffer
    shape, strides, offset, is_whole = at.plan.sizes.piece(ref)
    fixed = slots[number]
    if fixed is not None:
        view = fixed  # a weight may lie in memory in another order than it was traced
        if not is_whole or at.plan.program.buffers[number].kind != "input":
            view = fixed.as_strided(shape, strides, fixed.storage_offset() + offset)
        return lambda: view
    if is_whole:
        return lambda: slots[number]  # type: ignore[return-value]

    def get() -> Tensor:
        tensor = slots[number]
        assert tensor is not None
        return tensor.as_strided(shape, strides, tensor.storage_offset() + offset)

    return get


def _returned(at: Linking, place: int) -> Callable[[], Any]:
    item = at.plan.program.returned[place]
    if item.tensor is not None:
        get = _getter(at, item.tensor)
        return (lambda: get().detach()) if at.plan.program.is_shared(place) else get
    value = item.value if item.size is None else at.plan.sizes.of(item.size)
    return lambda: value
