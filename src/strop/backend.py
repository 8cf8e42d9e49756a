"""This is the whole compiler: each path is one function, and each stage one line of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from strop import passes
from strop.codegen.assemble import Signature, assemble
from strop.codegen.order import in_order, lean
from strop.errors import OptionError, UnsupportedError
from strop.fusion.plan import FusionPlan
from strop.fusion.planner import plan
from strop.ir.affine import forget_nodes
from strop.ir.graph import Graph, Node
from strop.ir.ops import KERNEL_DTYPES, Kind
from strop.ir.program import Program
from strop.lowering.alike import lower_once
from strop.options import Options
from strop.patterns import apply as patterns
from strop.stages.clock import Clock
from strop.stages.code_panels import sums_of_weights
from strop.stages.first_kernels import FirstKernels, KernelBuilder
from strop.stages.lowered_plan import LoweredPlan
from strop.stages.targets import target_for

if TYPE_CHECKING:
    from torch.fx import GraphModule


@dataclass(frozen=True, slots=True)
class Compiled:
    """This is a program with how it came about, for ``explain``."""

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
    builder: KernelBuilder | None = None,
) -> Compiled:
    """Compile ``graph``, which came from ``gm``, as ``compile_graph`` does, and leave its files in
    ``options.dump`` where that is set. Raises OptionError where they cannot be written."""
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
    builder: KernelBuilder | None = None,
) -> Compiled:
    """Make one program for every shape from one functional graph. No kernel is built here, but
    ``builder`` begins the ones that the traced sizes need, as soon as they are printed."""
    target = target_for(device, options, generic=signature.generic)
    clock, imported = Clock(), graph if options.wants_graphs else None
    graph, own = patterns.apply(graph, options, device)  # calls of the user's own kernels
    graph, records = passes.run(graph, options, device)  # rewrite to canonical form, lay out memory
    _refuse_types(graph)
    clock.lap("passes")
    first = FirstKernels(builder, target, graph.hints)
    first.calls(graph)
    # the plan says which nodes share a kernel, and what its loops are
    fusion, kernels = _planned(graph, signature.generic, device, first, clock)
    lowered = {g: (low.kernel, low.buffers, low.offsets) for g, low in kernels.lowered.items()}
    program = assemble(
        graph,
        fusion,
        lowered,
        signature,
        target,
        kernels.stitches,
        kernels.products,
        kernels.panels,
    )
    order = lean(program)
    program = replace(in_order(program, order), exact=_left_exact(records))
    clock.lap("codegen")
    records = (*own.records, *records)
    forget_nodes()
    return Compiled(program, order, graph, fusion, records, clock.seconds, imported, patterns=own)


def _left_exact(records: Sequence[passes.PassRecord]) -> tuple[tuple[str, str], ...]:
    return tuple(note for record in records for note in record.notes)


def _refuse_types(graph: Graph) -> None:
    """Raise UnsupportedError where a kernel would have a type that none can be written for. What
    torch computes may be complex; a kernel that is to copy it cannot be written."""
    for node in graph.nodes:
        if node.kind not in (Kind.OPAQUE, Kind.VIEW) and node.dtype not in KERNEL_DTYPES:
            raise UnsupportedError(f"a kernel for {node.op} of {node.dtype} ({node.origin})")


def _planned(
    graph: Graph, generic: bool, device: str, first: FirstKernels, clock: Clock
) -> tuple[FusionPlan, LoweredPlan]:
    """Return a plan whose kernels can all be written down, and these kernels. Where indices do not
    divide, each node of the group becomes a kernel of its own, which reads its operands from
    memory."""
    apart = sums_of_weights(graph) if device == "cpu" else frozenset[Node]()
    lower = lower_once(graph.hints, generic=generic)
    while True:
        fusion = plan(graph, apart, device)
        clock.lap("fusion")
        has_panels = device == "cpu"
        kernels = LoweredPlan(graph, fusion, apart, lower, first, has_panels=has_panels)
        if device == "cuda" and not generic:
            kernels.stitch()
            kernels.multiply_codes()
        kernels.lower_all()
        clock.lap("lowering")
        if not kernels.failed:
            return fusion, kernels
        apart |= kernels.failed


def __getattr__(name: str) -> Any:
    """Return the entry point for ``torch.compile(model, backend="strop")``. To listen to Dynamo
    from its first trace on, its module is loaded when torch asks for the backend by its name."""
    if name != "dynamo_backend":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from strop.dispatch.torch_compile import serve_dynamo

    return serve_dynamo
