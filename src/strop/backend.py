"""The whole compiler: one function a path, every stage one line."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

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

TARGETS = {
    "cpu": Target("cpu", once(cpp.emit), frozenset({"linear", "matmul"})),
    "cuda": Target("cuda", once(triton.emit), frozenset({"linear", "matmul", "conv2d"})),
}


@dataclass(frozen=True, slots=True)
class Compiled:
    """A program and how it came about, for ``explain``."""

    program: Program
    graph: Graph
    plan: FusionPlan
    passes: tuple[passes.PassRecord, ...]
    seconds: Mapping[str, float]


def compile_graph(
    graph: Graph, signature: Signature, device: str, options: Options, *, generic: bool = False
) -> Compiled:
    """One functional graph -> one program for every shape. Builds no kernel yet.

    ``generic``: outer sizes are arguments of kernels even where the graph has them as constants,
    so that graphs of other shapes have the same kernels.
    """
    target = TARGETS[device]
    if generic:
        target = replace(target, emit=without_sizes(target.emit))
    clock = _Clock()
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
    return Compiled(program, graph, fusion, records, clock.seconds)


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
