"""Turn a fusion plan and kernels into a Program: number the buffers and list the steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, TypeVar

from strop.codegen.by_rows import made_by_rows
from strop.codegen.copies import copies_for_calls
from strop.codegen.mutation import (
    IN_PLACE,
    Lowered,
    changed_in_place,
    joins_of,
    reads_before_it_writes,
    redirected_stores,
)
from strop.errors import ShapeError
from strop.fusion.plan import CodedProduct, CodePanels, FusionPlan, Group, Stitch
from strop.ir.affine import base_of, strided
from strop.ir.dims import Expr, const, product
from strop.ir.graph import Builder, Graph, Node, Ref
from strop.ir.loops import CheckIndex, Load, LoopKernel, Schedule, has_places, spaces
from strop.ir.ops import OF_ROWS
from strop.ir.parts import as_rows, places_of_calls
from strop.ir.program import (
    Buffer,
    CallStep,
    Copied,
    Guard,
    HostDraw,
    InputSpec,
    KernelStep,
    Program,
    Returned,
    StepForm,
    TensorRef,
)
from strop.ir.source import Emitted, KernelForm, KernelSource

T = TypeVar("T")
Sizes = Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Target:
    """Hold a code generator, and the library calls that write into memory of ours on its device."""

    device: str
    emit: Callable[[LoopKernel], Emitted]
    planned: frozenset[str]
    stitched: Callable[[LoopKernel], tuple[KernelForm, ...]] = (
        lambda kernel: ()
    )  # forms that fit on chip
    # the one form of each that runs at some sizes, where it can be printed alone
    emit_at: Callable[[LoopKernel, Sizes], KernelSource] | None = None
    stitched_at: Callable[[LoopKernel, Sizes], KernelSource | None] = lambda kernel, sizes: None
    in_place: bool = False  # a program writes an element after its last look at it
    kernels_off: tuple[str, ...] = ()  # rows of the kernel library that may not run

    def source_at(self, kernel: LoopKernel, sizes: Sizes) -> KernelSource:
        return self.emit_at(kernel, sizes) if self.emit_at else self.emit(kernel).at(sizes)


def in_turn(target: Target) -> Target:
    """Return the same target without early launches: each kernel begins when the one before it has
    ended."""

    def emit(kernel: LoopKernel) -> Emitted:
        found = target.emit(kernel)
        source = found.source.with_constants(EARLY=0)
        return replace(found, source=source, variants=tuple(map(_late, found.variants)))

    def stitched_at(kernel: LoopKernel, sizes: Sizes) -> KernelSource | None:
        found = target.stitched_at(kernel, sizes)
        return found and found.with_constants(EARLY=0)

    return replace(
        target,
        emit=emit,
        stitched=lambda kernel: tuple(map(_late, target.stitched(kernel))),
        emit_at=lambda kernel, sizes: target.source_at(kernel, sizes).with_constants(EARLY=0),
        stitched_at=stitched_at,
    )


def _late(variant: KernelForm) -> KernelForm:
    return replace(variant, source=variant.source.with_constants(EARLY=0))


def once(emit: Callable[[LoopKernel], T]) -> Callable[[LoopKernel], T]:
    """Print equal kernels, of which a model has many, only once. Most are one object, which is
    known sooner than kernels are compared."""
    known: dict[int, tuple[LoopKernel, T]] = {}

    @lru_cache(maxsize=1024)
    def emit_equal(kernel: LoopKernel, numbers: tuple[str, ...]) -> T:
        return emit(kernel)

    def emit_once(kernel: LoopKernel) -> T:
        if id(kernel) not in known:
            known[id(kernel)] = kernel, emit_equal(kernel, kernel.numbers)
        return known[id(kernel)][1]

    return emit_once


@dataclass(frozen=True, slots=True)
class Signature:
    """Hold what the frontend knows and the graph does not.

    ``generic``: graphs of other shapes will follow. Outer sizes then are arguments of kernels even
    where this graph has them as constants, so that all the graphs have the same kernels.
    """

    returned: Sequence[Any]  # Ref into graph.outputs, Expr, or a literal
    guards: tuple[Guard, ...]
    generic: bool = False
    host_draws: tuple[HostDraw, ...] = ()


@dataclass
class _Assembly:
    graph: Graph
    target: Target
    redirected: Mapping[Node, Node]
    places: Mapping[Node, Node]  # of calls that write into joins
    buffers: list[Buffer] = field(default_factory=list)
    number: dict[Node, int] = field(default_factory=dict)
    sources: dict[KernelSource, int] = field(default_factory=dict)
    known: dict[int, tuple[KernelSource, int]] = field(default_factory=dict)  # by identity

    def place_of(self, source: KernelSource) -> int:
        """Return the number of a source among the program's. Most are one object, which is known
        sooner than sources are compared."""
        if id(source) not in self.known:
            number = self.sources.setdefault(source, len(self.sources))
            self.known[id(source)] = source, number
        return self.known[id(source)][1]

    def add(
        self, node: Node, kind: str, strides: tuple[Expr, ...] | None = None, index: int = -1
    ) -> int:
        self.number[node] = len(self.buffers)
        self.buffers.append(Buffer(kind, node.shape, strides or node.strides, node.dtype, index))
        return self.number[node]

    def ref(self, node: Node) -> TensorRef:
        view = strided(node)
        if view is None or view.strides is None:
            raise ShapeError(f"{node}: a library call needs one stride a dim")
        return TensorRef(self.number[view.base], view.offset, node.shape, view.strides)


def assemble(
    graph: Graph,
    plan: FusionPlan,
    lowered: Lowered,
    signature: Signature,
    target: Target,
    stitches: Sequence[Stitch] = (),
    products: Sequence[CodedProduct] = (),
    panels: Sequence[CodePanels] = (),
) -> Program:
    """Assemble the program. ``lowered`` holds each group's kernel, the values behind its params,
    and their offsets; and the same for the whole of each stitch and product."""
    a = _Assembly(
        graph, target, _redirected(graph, plan, lowered, stitches), places_of_calls(graph)
    )
    for position, node in enumerate(graph.inputs):
        a.add(node, "input", index=position)
    results = {base_of(o) for o in graph.outputs}
    kernels: dict[Group, KernelStep] = {}
    calls: dict[Node, CallStep] = {}
    steps: list[Group | Node] = []
    for step in plan.steps:
        if isinstance(step, Group):
            kernels[step] = _kernel_step(a, step, *lowered[step], results)
            steps.append(step)
        elif _is_redirected(a, step):
            a.number[step] = a.number[step.inputs[0]]
        elif step.op not in ("item", "join"):
            calls[step] = _call_step(a, step, results)
            steps.append(step)
    for stitch in stitches:
        _stitch(a, stitch, lowered[stitch.whole], kernels)
    for found in products:
        _join_product(a, found, lowered[found.whole], kernels, calls)
    for copied_by, copied in copies_for_calls(graph, plan.groups, a.number, a.buffers):
        _note_copy(copied_by, copied, kernels, calls)
    for made in panels:
        _join_panels(a, made, kernels, calls)
    finished = tuple(kernels[s] if isinstance(s, Group) else calls[s] for s in steps)
    num_compiled = sum(len(group.nodes) for group in plan.groups)
    num_calls = sum(1 for s in plan.steps if isinstance(s, Node) and s.op != "join")
    inputs = tuple(_input_spec(n) for n in graph.inputs)
    return Program(
        target.device,
        inputs,
        tuple(a.buffers),
        tuple(a.sources),
        finished,
        tuple(
            _returned(a, item, item in signature.returned[:place])
            for place, item in enumerate(signature.returned)
        ),
        signature.guards,
        tuple(sorted(graph.hints.items())),
        num_compiled + num_calls,
        num_compiled,
        target.kernels_off,
        _by_rows(a),
        host_draws=signature.host_draws,
    )


def _redirected(
    graph: Graph, plan: FusionPlan, lowered: Lowered, stitches: Sequence[Stitch]
) -> dict[Node, Node]:
    """Map each value that lies in another one's memory to that."""
    moves = [(s.statistics, s.reader) for s in stitches if s.host is s.reader]
    redirected = redirected_stores(graph, plan, lowered, moves) | joins_of(graph)
    return redirected | changed_in_place(graph, plan, lowered, moves)


def _by_rows(a: _Assembly) -> tuple[int, ...]:
    found = made_by_rows(a.graph.nodes, a.number)
    return tuple(
        number
        for node, number in a.number.items()
        if a.buffers[number].kind == "arena"
        and node.order is None
        and node in found
        and node.op != "part"
    )


def _input_spec(node: Node) -> InputSpec:
    attrs = node.attrs
    return InputSpec(
        node.shape,
        node.strides,
        node.dtype,
        attrs["state"],
        attrs["merged"],
        attrs.get("corners", ()),
        attrs.get("made", ""),
    )


def _is_redirected(a: _Assembly, step: Node) -> bool:
    return step.op == "write" and a.redirected.get(step.inputs[1]) is step.inputs[0]


def _kernel_step(
    a: _Assembly,
    group: Group,
    kernel: LoopKernel,
    buffers: tuple[Node, ...],
    offsets: tuple[Expr, ...],
    results: set[Node],
) -> KernelStep:
    for node in group.stores:
        place = a.redirected.get(node, node)
        if place not in a.number:
            a.add(place, "result" if place in results else "arena")
        a.number[node] = a.number[place]
    emitted = a.target.emit(kernel)
    index = a.place_of(emitted.source)
    ops = tuple(dict.fromkeys(n.op for n in group.nodes))
    writes = tuple(a.number[n] for n in group.stores)
    numbers = tuple(a.number[n] for n in buffers)
    in_place = _in_place(a, kernel, buffers, offsets)
    variants = _variants(a, emitted.variants, numbers, offsets, writes, in_place)
    checked = (s.size for s in kernel.body + kernel.tail if isinstance(s, CheckIndex))
    dims = tuple(dict.fromkeys((*checked, *_known_dims(group))))
    return KernelStep(
        index,
        numbers,
        offsets,
        writes,
        emitted.scalars,
        group.origin,
        ops,
        variants,
        (),
        _lookups(a, group),
        dims,
        _lookup_sizes(kernel),
        in_place,
        tuple((a.number[n], n.numel) for n in group.stores if n.op == "part"),
    )


def _variants(
    a: _Assembly,
    found: Sequence[KernelForm],
    buffers: tuple[int, ...],
    offsets: tuple[Expr, ...],
    writes: tuple[int, ...],
    in_place: tuple[tuple[int, int], ...],
) -> tuple[StepForm, ...]:
    return tuple(
        StepForm(
            a.place_of(v.source),
            buffers,
            offsets,
            writes,
            v.scalars,
            v.size,
            v.most,
            v.multiple,
            in_place,
        )
        for v in found
    )


def _in_place(
    a: _Assembly, kernel: LoopKernel, nodes: Sequence[Node], offsets: tuple[Expr, ...]
) -> tuple[tuple[int, int], ...]:
    """Return the pairs (written, read) of planned buffers of which the kernel reads each element
    where and before it writes it. Where they have one size and the operand ends there, they get one
    memory."""
    if not a.target.in_place or kernel.schedule is Schedule.COLUMN:
        return ()
    buffers = [a.number[node] for node in nodes]
    whole = [
        n
        for n, number in enumerate(buffers)
        if a.buffers[number].kind == "arena"
        and nodes[n].op != "part"
        and offsets[n] == const(0)
        and buffers.count(number) == 1
    ]
    written = [n for n in whole if kernel.params[n].is_output]
    return tuple(
        (buffers[new], buffers[old])
        for new in written
        for old in whole
        if old not in written
        and kernel.params[new].dtype == kernel.params[old].dtype
        and reads_before_it_writes(kernel, offsets, old, new)
    )


def _stitch(
    a: _Assembly,
    stitch: Stitch,
    low: tuple[LoopKernel, tuple[Node, ...], tuple[Expr, ...]],
    steps: dict[Group, KernelStep],
) -> None:
    """Let the host's step do the work of both where a variant of the whole fits."""
    if any(node in a.redirected for node in stitch.whole.stores):
        return
    kernel, nodes, offsets = low
    if has_places(kernel):
        return  # whose faults belong to one step
    buffers, writes = ([a.number[n] for n in of] for of in (nodes, stitch.whole.stores))
    forms, in_place = a.target.stitched(kernel), _in_place(a, kernel, nodes, offsets)
    variants = _variants(a, forms, tuple(buffers), offsets, tuple(writes), in_place)
    guest = stitch.reader if stitch.host is stitch.statistics else stitch.statistics
    host = steps[stitch.host]
    steps[stitch.host] = replace(host, variants=variants + host.variants)
    steps[guest] = replace(steps[guest], absorbed=variants)


def _join_product(
    a: _Assembly,
    found: CodedProduct,
    low: tuple[LoopKernel, tuple[Node, ...], tuple[Expr, ...]],
    steps: dict[Group, KernelStep],
    calls: dict[Node, CallStep],
) -> None:
    """Let the step that decodes a weight do the work of the call too where there are few rows."""
    (total,), (kernel, nodes, offsets) = found.whole.stores, low
    a.number[total] = a.number[found.call]
    emitted = a.target.emit(kernel)
    form = StepForm(
        a.place_of(emitted.source),
        tuple(a.number[node] for node in nodes),
        offsets,
        (a.number[total],),
        emitted.scalars,
        found.rows,
        found.most,
        1,
    )
    host, call = steps[found.decoding], calls[found.call]
    steps[found.decoding] = replace(host, variants=(form, *host.variants))
    calls[found.call] = replace(call, absorbed=(form,))


def _note_copy(
    group: Group, copied: Copied, kernels: dict[Group, KernelStep], calls: dict[Node, CallStep]
) -> None:
    """Let products read what they have a copy of, where it lies as the copy would."""
    own = kernels[group]
    others = [s for s in kernels.values() if s is not own and copied.buffer in s.touched]
    readers = {n: s for n, s in calls.items() if copied.buffer in s.touched}
    written = {number for step in readers.values() for pair in step.in_place for number in pair}
    if others or copied.buffer in written or not all(s.op in OF_ROWS for s in readers.values()):
        return
    kernels[group] = replace(own, copied=copied)
    for node, step in readers.items():
        calls[node] = replace(step, copies=(*step.copies, copied))


def _join_panels(
    a: _Assembly,
    made: CodePanels,
    steps: dict[Group, KernelStep],
    calls: dict[Node, CallStep],
) -> None:
    """Let the step that reads sums of products of codes do the work of the calls, but for a few
    rows: minus so many are at most minus the fewest."""
    emitted, step = a.target.emit(made.kernel), steps[made.group]
    form = StepForm(
        a.place_of(emitted.source),
        tuple(a.number[node] for node in made.buffers),
        made.offsets,
        step.writes,
        emitted.scalars,
        const(0) - made.rows,
        -made.fewest,
        1,
    )
    steps[made.group] = replace(step, variants=(form,))
    for call in made.calls:
        calls[call] = replace(calls[call], absorbed=(form,))


def _lookup_sizes(kernel: LoopKernel) -> tuple[Expr | None, ...]:
    """Return for each param that is only looked into how often that is; no more of it is read."""
    sizes = {axis.name: axis.size for axis in kernel.rows + kernel.cols}
    space, found = spaces(kernel), dict[int, Expr]()
    loads = [stmt for stmt in kernel.body + kernel.tail if isinstance(stmt, Load)]
    walked = {stmt.param for stmt in loads if not stmt.lookups}
    for stmt in loads:
        if stmt.param not in walked:
            count = product(sizes[axis] for axis in space[stmt.out])
            if stmt.bag is not None:
                count = stmt.bag.count * product(sizes[axis] for axis in stmt.index.axes)
            found[stmt.param] = found.get(stmt.param, const(0)) + count
    return tuple(found.get(number) for number in range(len(kernel.params)))


def _lookups(a: _Assembly, group: Group) -> tuple[str, ...]:
    """Return modules whose indices the kernel checks, whatever group their nodes were planned
    in."""
    seen, stack = set(group.stores), list(group.stores)
    while stack:
        for base in map(base_of, stack.pop().inputs):
            if base not in a.number and base not in seen:
                seen.add(base)
                stack.append(base)
    takes = (n for n in seen if n.op == "bag" or n.attrs.get("bounds", "known") != "known")
    return tuple(dict.fromkeys(n.origin for n in sorted(takes, key=lambda n: n.serial)))


def _known_dims(group: Group) -> Iterator[Expr]:
    """Yield the sizes of dims that are products of sizes and looked into without a check."""
    for node in group.nodes:
        if node.op == "take" and node.attrs["bounds"] == "known":
            source, walks = node.inputs[0], node.attrs["walks"]
            sizes = (size for size, walk in zip(source.shape, walks, strict=True) if walk is None)
            yield from (size for size in sizes if any(len(m) > 1 for m, _ in size.terms))


def _call_step(a: _Assembly, node: Node, results: set[Node]) -> CallStep:
    matrices = OF_ROWS.get(node.op, 0)
    rows = Builder()
    refs = tuple(a.ref(as_rows(rows, x) if i < matrices else x) for i, x in enumerate(node.inputs))
    if node.op == "write":
        a.number[node] = a.number[base_of(node.inputs[0])]
        return CallStep("write", refs, (), (), node.origin)
    if node.op == "aten" and node in a.redirected:
        a.number[node] = a.number[a.redirected[node]]
        changed = {**node.attrs, "target": IN_PLACE[node.attrs["target"]]}
        return CallStep("write", refs, tuple(sorted(changed.items())), (), node.origin)
    if node.op in ("aten", "pattern"):
        return CallStep(
            node.op, refs, tuple(sorted(node.attrs.items())), _opaque_outputs(a, node), node.origin
        )
    attrs = tuple(sorted(node.attrs.items()))
    if node in a.places:
        place = a.ref(_within(a, a.places[node], results))
        return CallStep(node.op, refs, attrs, (place.buffer,), node.origin, place=place)
    planned = "result" if node in results else "arena"
    out = a.add(node, planned if node.op in a.target.planned else "call")
    return CallStep(node.op, refs, attrs, (out,), node.origin)


def _within(a: _Assembly, place: Node, results: set[Node]) -> Node:
    """Return a piece of a join, which has a buffer then."""
    whole = base_of(place)
    if whole not in a.number:
        a.add(whole, "result" if whole in results else "arena")
    return place


def _opaque_outputs(a: _Assembly, call: Node) -> tuple[int, ...]:
    """Make one buffer for each tensor that the call returns; items of it refer to these."""
    if call.attrs["single"]:
        return (a.add(call, "call"),)
    items = {n.attrs["index"]: n for n in a.graph.nodes if n.op == "item" and n.inputs[0] is call}
    outputs = []
    for index, _ in enumerate(call.attrs["outputs"]):
        outputs.append(a.add(items[index], "call") if index in items else -1)
    return tuple(outputs)


def _returned(a: _Assembly, item: Any, again: bool) -> Returned:
    if isinstance(item, Ref):
        return Returned(tensor=a.ref(a.graph.outputs[item.index]), again=again)
    if isinstance(item, Expr):
        return Returned(size=item)
    return Returned(value=item)
