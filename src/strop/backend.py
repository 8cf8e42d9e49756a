"""The whole compiler: one function a path, every stage one line."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from strop import passes
from strop.codegen import cpp, triton
from strop.codegen.assemble import Signature, Target, assemble
from strop.errors import UnsupportedError
from strop.fusion.plan import FusionPlan, Group
from strop.fusion.planner import computed_by, plan
from strop.ir.graph import Graph, Node
from strop.ir.program import Program
from strop.lowering.lower import Lowered, lower
from strop.options import Options

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


def compile_graph(graph: Graph, signature: Signature, device: str, options: Options) -> Compiled:
    """One functional graph -> one program for every shape. Builds no kernel yet."""
    clock = _Clock()
    graph, records = passes.run(graph, options)  # rewrite to canonical form, lay out memory
    clock.lap("passes")
    fusion, kernels = _planned(graph)  # which nodes share a kernel, and what each one does
    lowered = {group: (low.kernel, low.buffers, low.offsets) for group, low in kernels.items()}
    clock.lap("fusion")
    program = assemble(graph, fusion, lowered, signature, TARGETS[device])
    clock.lap("codegen")
    return Compiled(program, graph, fusion, records, clock.seconds)


def _planned(graph: Graph) -> tuple[FusionPlan, dict[Group, Lowered]]:
    """A plan whose kernels can all be written down: where indices do not divide, each node of
    the group becomes a kernel of its own, which reads its operands from memory."""
    apart: frozenset[Node] = frozenset()
    while True:
        fusion = plan(graph, apart)
        stored = {node for group in fusion.groups for node in group.stores}
        kernels: dict[Group, Lowered] = {}
        for group in fusion.groups:
            try:
                kernels[group] = lower(group, stored, graph.hints)
            except UnsupportedError:
                members = computed_by(group, stored)
                if members <= apart:
                    raise
                apart |= members
        if len(kernels) == len(fusion.groups):
            return fusion, kernels


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
