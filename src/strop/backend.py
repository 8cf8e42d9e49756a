"""The whole compiler: one function a path, every stage one line."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

from strop import passes
from strop.codegen import cpp, triton
from strop.codegen.assemble import Signature, Target, assemble, in_turn, once
from strop.codegen.order import in_order, lean
from strop.errors import OptionError, UnsupportedError
from strop.fusion.plan import FusionPlan, Group, Stitch
from strop.fusion.planner import computed_by, plan
from strop.fusion.stitch import stitches
from strop.ir.device import Device
from strop.ir.graph import Graph, Node
from strop.ir.loops import Kernel, Schedule
from strop.ir.ops import KERNEL_DTYPES, Kind, planned_on
from strop.ir.program import Program
from strop.ir.source import KernelSource
from strop.kernels import library
from strop.lowering.alike import Lower, lower_once
from strop.lowering.generic import without_sizes
from strop.lowering.lower import Lowered, OutOfPlaceError
from strop.options import Options, check_names
from strop.patterns import apply as patterns

if TYPE_CHECKING:
    from torch.fx import GraphModule


class Builder(Protocol):
    """Builds the kernels of one device. What a compilation will need is begun as it is printed."""

    device: Device

    def begin(self, sources: Sequence[KernelSource]) -> None: ...


TARGETS = {
    "cpu": Target("cpu", cpp.emit, planned_on("cpu")),
    "cuda": Target(
        "cuda",
        triton.emit,
        planned_on("cuda"),
        triton.stitched,
        triton.emit_at,
        triton.stitched_at,
        in_place=True,
    ),
}


@dataclass(frozen=True, slots=True)
class Compiled:
    """A program and how it came about, for ``explain``."""

    program: Program
    order: tuple[int, ...]  # of the program's steps, each by its place among the plan's
    graph: Graph
    plan: FusionPlan
    passes: tuple[passes.PassRecord, ...]
    seconds: Mapping[str, float]
    imported: Graph | None = None  # before all passes, where ``options.wants_graphs``
    folder: str = ""  # where ``options.dump`` left its files
    patterns: patterns.Found = field(default_factory=patterns.Found)


def compile_captured(
    gm: GraphModule,
    graph: Graph,
    signature: Signature,
    device: str,
    options: Options,
    name: str,
    builder: Builder | None = None,
) -> Compiled:
    """``compile_graph``, leaving its files in ``options.dump``. ``graph`` came from ``gm``."""
    if not options.dump:
        return compile_graph(graph, signature, device, options, builder)
    from strop.debug.dump import compile_and_dump

    try:
        return compile_and_dump(gm, graph, signature, device, options, name)
    except OSError as error:
        raise OptionError(f"dump={options.dump!r} cannot be written: {error.strerror}") from error


def compile_graph(
    graph: Graph,
    signature: Signature,
    device: str,
    options: Options,
    builder: Builder | None = None,
) -> Compiled:
    """One functional graph -> one program for every shape. Builds no kernel, but has ``builder``
    begin the ones that the traced sizes need, as soon as they are printed."""
    check_names(options.kernels_off, library.OURS, "kernel to switch off:")
    target, generic = TARGETS[device], signature.generic
    if not options.early_launch:
        target = in_turn(target)
    if not options.in_place:
        target = replace(target, in_place=False)
    emit = once(target.emit)  # a model has many equal kernels
    target = replace(
        target,
        emit=without_sizes(emit) if generic else emit,
        emit_at=None if generic else target.emit_at,
        stitched=once(target.stitched),
        kernels_off=options.kernels_off,
    )
    clock, imported = _Clock(), graph if options.wants_graphs else None
    graph, own = patterns.apply(graph, options, device)  # calls of the user's own kernels
    graph, records = passes.run(graph, options, device)  # rewrite to canonical form, lay out memory
    _refuse_types(graph)
    clock.lap("passes")
    first = _First(builder, target, graph.hints)
    first.calls(graph)
    # which nodes share a kernel, and its loops
    fusion, kernels, found = _planned(graph, generic, device == "cuda", first, clock)
    lowered = {group: (low.kernel, low.buffers, low.offsets) for group, low in kernels.items()}
    program = assemble(graph, fusion, lowered, signature, target, found)
    order = lean(program)
    program = in_order(program, order)
    clock.lap("codegen")
    return Compiled(
        program,
        order,
        graph,
        fusion,
        (*own.records, *records),
        clock.seconds,
        imported,
        patterns=own,
    )


def _refuse_types(graph: Graph) -> None:
    """What torch computes may be complex; a kernel that is to copy it cannot be written."""
    for node in graph.nodes:
        if node.kind not in (Kind.OPAQUE, Kind.VIEW) and node.dtype not in KERNEL_DTYPES:
            raise UnsupportedError(f"a kernel for {node.op} of {node.dtype} ({node.origin})")


def _planned(
    graph: Graph, generic: bool, on_gpu: bool, first: _First, clock: _Clock
) -> tuple[FusionPlan, dict[Group, Lowered], tuple[Stitch, ...]]:
    """A plan whose kernels can all be written down: where indices do not divide, each node of
    the group becomes a kernel of its own, which reads its operands from memory."""
    apart: frozenset[Node] = frozenset()
    lower = lower_once(graph.hints, generic=generic)
    while True:
        fusion = plan(graph, apart)
        clock.lap("fusion")
        kernels = _Kernels(graph, fusion, apart, lower, first)
        if on_gpu and not generic:
            kernels.stitch()
        kernels.lower_all()
        clock.lap("lowering")
        if not kernels.failed:
            return fusion, kernels.lowered, tuple(kernels.stitches)
        apart |= kernels.failed


class _Kernels:
    """The kernels of a plan. Those that take longest to compile are lowered, and begun, first."""

    def __init__(
        self, graph: Graph, fusion: FusionPlan, apart: Set[Node], lower: Lower, first: _First
    ) -> None:
        self.graph, self.fusion, self.first = graph, fusion, first
        self._apart, self._lower = apart, lower
        self.lowered: dict[Group, Lowered] = {}
        self.stitches: list[Stitch] = []
        self.failed: frozenset[Node] = frozenset()  # computed by kernels that cannot be written
        self._stored = {node for group in fusion.groups for node in group.stores}

    def stitch(self) -> None:
        """Adds the kernels of pairs that are one where a row fits on chip, and of the column
        reductions that stay alone."""
        for stitch in stitches(self.graph, self.fusion):
            inside = set(stitch.whole.nodes) - set(stitch.whole.stores)
            try:
                whole = self._lower(stitch.whole, self._stored - inside)
            except UnsupportedError:
                continue  # its indices do not divide: it stays two kernels
            self.lowered[stitch.whole] = whole
            self.stitches.append(stitch)
            if not self.first.is_one(stitch, whole.kernel):
                self._add(stitch.statistics)

    def lower_all(self) -> None:
        for group in sorted(self.fusion.groups, key=lambda g: g.schedule is not Schedule.COLUMN):
            if group not in self.lowered:
                self._add(group)

    def _add(self, group: Group) -> None:
        try:
            self.lowered[group] = self._lower(group, self._stored)
        except UnsupportedError as error:
            members = computed_by(group, self._stored)
            if isinstance(error, OutOfPlaceError) and error.values - self._apart:
                members = error.values
            if members <= self._apart:
                raise
            self.failed |= members
        else:
            self.first.needs(group, self.lowered[group].kernel)


class _First:
    """Has the kernels that run at the traced sizes begun while others are still lowered."""

    def __init__(self, builder: Builder | None, target: Target, hints: Mapping[str, int]) -> None:
        self.builder, self.target, self.hints = builder, target, hints
        self._done = set[Group]()

    def is_one(self, stitch: Stitch, whole: Kernel) -> bool:
        """Whether the traced sizes run the kernel of the whole, which then is begun."""
        source = self.target.stitched_at(whole, self.hints)
        if source is not None:
            self._done |= {stitch.statistics, stitch.reader}
            self._begin(source)
        return source is not None

    def needs(self, group: Group, kernel: Kernel) -> None:
        if self.builder is not None and group not in self._done:
            self._begin(self.target.source_at(kernel, self.hints))

    def calls(self, graph: Graph) -> None:
        """Kernels for what else is left to a library; none waits for a plan."""
        if self.builder is None:
            return
        off = self.target.kernels_off
        for node in graph.nodes:
            for source in library.sources_of(node, self.hints, self.builder.device, off):
                self._begin(source)

    def _begin(self, source: KernelSource) -> None:
        if self.builder is not None:
            self.builder.begin([source])


class _Clock:
    """Seconds between laps, by name."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.seconds[name] = self.seconds.get(name, 0.0) + now - self._last
        self._last = now


def dynamo_backend(gm: Any, example_inputs: Any, **options: Any) -> Any:
    """Entry point for ``torch.compile(model, backend="strop")``."""
    from strop.dispatch.dynamo import compile_dynamo

    return compile_dynamo(gm, example_inputs, **options)
