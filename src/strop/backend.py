"""The whole compiler: one function a path, every stage one line."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from strop import passes
from strop.codegen import cpp, triton
from strop.codegen.assemble import Signature, Target, assemble, once
from strop.fusion.plan import FusionPlan
from strop.fusion.planner import plan
from strop.ir.graph import Graph
from strop.ir.program import Program
from strop.lowering.generic import without_sizes
from strop.lowering.lower import lower
from strop.options import Options

if TYPE_CHECKING:
    from torch.fx import GraphModule

TARGETS = {
    "cpu": Target("cpu", cpp.emit, frozenset({"linear", "matmul"})),
    "cuda": Target("cuda", triton.emit, frozenset({"linear", "matmul", "conv2d"})),
}


@dataclass(frozen=True, slots=True)
class Compiled:
    """A program and how it came about, for ``explain``."""

    program: Program
    graph: Graph
    plan: FusionPlan
    passes: tuple[passes.PassRecord, ...]
    seconds: Mapping[str, float]
    imported: Graph | None = None  # before all passes, where ``options.wants_graphs``
    folder: str = ""  # where ``options.dump`` left its files


def compile_captured(gm: GraphModule, graph: Graph, signature: Signature, device: str,
                     options: Options, name: str) -> Compiled:  # fmt: skip
    """``compile_graph``, leaving its files in ``options.dump``. ``graph`` came from ``gm``."""
    if not options.dump:
        return compile_graph(graph, signature, device, options)
    from strop.debug.dump import compile_and_dump

    return compile_and_dump(gm, graph, signature, device, options, name)


def compile_graph(graph: Graph, signature: Signature, device: str, options: Options) -> Compiled:
    """One functional graph -> one program for every shape. Builds no kernel yet."""
    target, generic = TARGETS[device], signature.generic
    emit = once(target.emit)  # a model has many equal kernels
    target = replace(target, emit=without_sizes(emit) if generic else emit)
    clock, imported = _Clock(), graph if options.wants_graphs else None
    graph, records = passes.run(graph, options)  # rewrite to canonical form, lay out memory
    clock.lap("passes")
    fusion = plan(graph)  # which nodes share a kernel
    clock.lap("fusion")
    stored = {node for group in fusion.groups for node in group.stores}
    kernels = {group: lower(group, stored, graph.hints, generic=generic) for group in fusion.groups}
    lowered = {group: (low.kernel, low.buffers, low.offsets) for group, low in kernels.items()}
    clock.lap("lowering")
    program = assemble(graph, fusion, lowered, signature, target)
    clock.lap("codegen")
    return Compiled(program, graph, fusion, records, clock.seconds, imported)


class _Clock:
    """Seconds between laps, by name."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.seconds[name] = now - self._last
        self._last = now


def dynamo_backend(gm: Any, example_inputs: Any, **options: Any) -> Any:
    """Entry point for ``torch.compile(model, backend="strop")``."""
    from strop.runtime.aot import compile_dynamo

    return compile_dynamo(gm, example_inputs, **options)
