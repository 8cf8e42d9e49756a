"""Fusion plan + kernels -> Program: numbers the buffers and lists the steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from strop.codegen.mutation import Lowered, redirected_stores
from strop.errors import ShapeError
from strop.fusion.plan import FusionPlan, Group
from strop.ir.affine import base_of, strided
from strop.ir.dims import Expr
from strop.ir.graph import Builder, Graph, Node, Ref
from strop.ir.loops import Apply, Kernel, Literal
from strop.ir.program import (
    Buffer,
    CallStep,
    Guard,
    InputSpec,
    KernelStep,
    Program,
    Returned,
    Step,
    TensorRef,
)
from strop.ir.source import Emitted, KernelSource


@dataclass(frozen=True, slots=True)
class Target:
    """A code generator, and the library calls that write into memory of ours on its device."""

    device: str
    emit: Callable[[Kernel], Emitted]
    planned: frozenset[str]


def once(emit: Callable[[Kernel], Emitted]) -> Callable[[Kernel], Emitted]:
    """Equal kernels, of which a model has many, are printed once."""

    @lru_cache(maxsize=1024)
    def emit_once(kernel: Kernel, numbers: tuple[str, ...]) -> Emitted:
        return emit(kernel)

    return lambda kernel: emit_once(kernel, tuple(_numbers(kernel)))


def _numbers(kernel: Kernel) -> Iterator[str]:
    """As text, what may be equal and yet another number: 0.0 and -0.0, 1 and True."""
    for stmt in kernel.body + kernel.tail:
        if isinstance(stmt, Literal):
            yield repr(stmt.value)
        elif isinstance(stmt, Apply) and stmt.attrs:
            yield repr(stmt.attrs)


@dataclass(frozen=True, slots=True)
class Signature:
    """What the frontend knows and the graph does not.

    ``generic``: graphs of other shapes will follow. Outer sizes then are arguments of kernels even
    where this graph has them as constants, so that all the graphs have the same kernels.
    """

    returned: Sequence[Any]  # Ref into graph.outputs, Expr, or a literal
    guards: tuple[Guard, ...]
    generic: bool = False


@dataclass
class _Assembly:
    graph: Graph
    target: Target
    redirected: Mapping[Node, Node]
    buffers: list[Buffer] = field(default_factory=list)
    number: dict[Node, int] = field(default_factory=dict)
    sources: dict[KernelSource, int] = field(default_factory=dict)

    def add(self, node: Node, kind: str, strides: tuple[Expr, ...] | None = None,
            index: int = -1) -> int:  # fmt: skip
        self.number[node] = len(self.buffers)
        self.buffers.append(Buffer(kind, node.shape, strides or node.strides, node.dtype, index))
        return self.number[node]

    def ref(self, node: Node) -> TensorRef:
        view = strided(node)
        if view is None or view.strides is None:
            raise ShapeError(f"{node}: a library call needs one stride a dim")
        return TensorRef(self.number[view.base], view.offset, node.shape, view.strides)


def assemble(
    graph: Graph, plan: FusionPlan, lowered: Lowered,
    signature: Signature, target: Target,
) -> Program:  # fmt: skip
    """``lowered`` holds each group's kernel, the values behind its params, and their offsets."""
    a = _Assembly(graph, target, redirected_stores(graph, plan, lowered))
    for position, node in enumerate(graph.inputs):
        a.add(node, "input", index=position)
    results = {base_of(o) for o in graph.outputs}
    steps: list[Step] = []
    for step in plan.steps:
        if isinstance(step, Group):
            steps.append(_kernel_step(a, step, *lowered[step], results))
        elif _is_redirected(a, step):
            a.number[step] = a.number[step.inputs[0]]
        elif step.op != "item":
            steps.append(_call_step(a, step, results))
    num_compiled = sum(len(group.nodes) for group in plan.groups)
    calls = sum(1 for s in plan.steps if isinstance(s, Node))
    inputs = tuple(_input_spec(n) for n in graph.inputs)
    return Program(
        target.device, inputs, tuple(a.buffers), tuple(a.sources), tuple(steps),
        tuple(_returned(a, item) for item in signature.returned), signature.guards,
        tuple(sorted(graph.hints.items())), num_compiled + calls, num_compiled,
    )  # fmt: skip


def _input_spec(node: Node) -> InputSpec:
    return InputSpec(node.shape, node.strides, node.dtype, node.attrs["state"],
                     node.attrs["merged"])  # fmt: skip


def _is_redirected(a: _Assembly, step: Node) -> bool:
    return step.op == "write" and a.redirected.get(step.inputs[1]) is step.inputs[0]


def _kernel_step(
    a: _Assembly, group: Group, kernel: Kernel, buffers: tuple[Node, ...],
    offsets: tuple[Expr, ...], results: set[Node],
) -> KernelStep:  # fmt: skip
    for node in group.stores:
        if node in a.redirected:
            a.number[node] = a.number[a.redirected[node]]
        else:
            a.add(node, "result" if node in results else "arena")
    emitted = a.target.emit(kernel)
    index = a.sources.setdefault(emitted.source, len(a.sources))
    ops = tuple(dict.fromkeys(n.op for n in group.nodes))
    writes = tuple(a.number[n] for n in group.stores)
    return KernelStep(index, tuple(a.number[n] for n in buffers), offsets, writes, emitted.scalars,
                      group.origin, ops)  # fmt: skip


def _call_step(a: _Assembly, node: Node, results: set[Node]) -> CallStep:
    matrices = 2 if node.op == "linear" else 0
    refs = tuple(a.ref(_matrix(x) if i < matrices else x) for i, x in enumerate(node.inputs))
    if node.op == "write":
        a.number[node] = a.number[base_of(node.inputs[0])]
        return CallStep("write", refs, (), (), node.origin)
    if node.op == "aten":
        return CallStep("aten", refs, tuple(sorted(node.attrs.items())), _opaque_outputs(a, node),
                        node.origin)  # fmt: skip
    planned = "result" if node in results else "arena"
    out = a.add(node, planned if node.op in a.target.planned else "call")
    return CallStep(node.op, refs, tuple(sorted(node.attrs.items())), (out,), node.origin)


def _matrix(x: Node) -> Node:
    """(..., K) as (rows, K): the layout pass made sure that this is a view."""
    rows = x.numel.exact_div(x.shape[-1])
    assert rows is not None, x
    return Builder().reshape(x, (rows, x.shape[-1]))


def _opaque_outputs(a: _Assembly, call: Node) -> tuple[int, ...]:
    """One buffer for each tensor that the call returns; items of it refer to these."""
    if call.attrs["single"]:
        return (a.add(call, "call"),)
    items = {n.attrs["index"]: n for n in a.graph.nodes if n.op == "item" and n.inputs[0] is call}
    outputs = []
    for index, _ in enumerate(call.attrs["outputs"]):
        outputs.append(a.add(items[index], "call") if index in items else -1)
    return tuple(outputs)


def _returned(a: _Assembly, item: Any) -> Returned:
    if isinstance(item, Ref):
        return Returned(tensor=a.ref(a.graph.outputs[item.index]))
    if isinstance(item, Expr):
        return Returned(size=item)
    return Returned(value=item)
