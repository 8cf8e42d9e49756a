"""Runs a fusion plan with interpreted kernels in fp64: no code generator, no rounding.

Or with another way to run a kernel, on memory of the real dtypes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from strop.codegen.mutation import joins_of
from strop.fusion.plan import FusionPlan, Group
from strop.ir.affine import strided
from strop.ir.dims import Env, Expr
from strop.ir.graph import Graph, Node
from strop.ir.interpret import run
from strop.ir.loops import Index, Load, LoopKernel, Store
from strop.lowering.lower import lower
from strop.runtime.run.library_calls import ALLOCATING

Memory = dict[Node, Tensor]


Execute = Callable[[LoopKernel, Sequence[Tensor], Env], None]


def run_plan(
    graph: Graph,
    plan: FusionPlan,
    inputs: Sequence[Tensor],
    env: Env,
    execute: Execute = run,
    *,
    exact: bool = True,
) -> list[Tensor]:
    """The outputs of ``graph``, each kernel lowered and interpreted."""
    memory: Memory = {
        node: _empty(node, env, exact=exact).copy_(value)
        for node, value in zip(graph.inputs, inputs, strict=True)
    }
    stored, joins = {node for group in plan.groups for node in group.stores}, joins_of(graph)
    for step in plan.steps:
        if isinstance(step, Group):
            low = lower(step, stored, graph.hints)
            for node in step.stores:
                place = joins.get(node, node)
                if place not in memory:
                    memory[place] = _empty(place, env, exact=exact)
                memory[node] = memory[place]
            # what travels with the launch goes back into the indices, which may start below zero
            execute(with_offsets(low.kernel, low.offsets), [memory[n] for n in low.buffers], env)
        elif step.op != "join":
            value = _call(step, [read(i, memory, env) for i in step.inputs], env)
            memory[step] = _empty(step, env, exact=exact).copy_(value)
    return [read(node, memory, env) for node in graph.outputs]


def read(node: Node, memory: Mapping[Node, Tensor], env: Env) -> Tensor:
    """The elements of a value or of a view of one."""
    view = strided(node)
    assert view is not None, node
    assert view.strides is not None, node
    sizes, strides = ([s.eval(env) for s in group] for group in (node.shape, view.strides))
    return memory[view.base].as_strided(sizes, strides, view.offset.eval(env))


def _empty(node: Node, env: Env, *, exact: bool) -> Tensor:
    sizes, strides = ([s.eval(env) for s in group] for group in (node.shape, node.strides))
    dtype = torch.float64 if exact and node.dtype.is_floating_point else node.dtype
    filler = math.nan if dtype.is_floating_point else 1
    flat = torch.full((math.prod(sizes),), filler, dtype=dtype)
    return flat.as_strided(sizes, strides)


def with_offsets(kernel: LoopKernel, offsets: Sequence[Any]) -> LoopKernel:
    def moved(stmt: Any) -> Any:
        if not isinstance(stmt, Load | Store):
            return stmt
        index = stmt.index
        return replace(stmt, index=Index(index.offset + offsets[stmt.param], index.strides))

    return replace(kernel, body=tuple(map(moved, kernel.body)), tail=tuple(map(moved, kernel.tail)))


def _call(node: Node, inputs: list[Tensor], env: Env) -> Tensor:
    if node.op == "linear":
        return torch.nn.functional.linear(*inputs)
    if node.op == "matmul":
        return torch.matmul(*inputs)
    if node.op == "conv2d":
        x, weight, *bias = inputs
        return torch.conv2d(x, weight, *(bias or (None,)), **node.attrs)
    if node.op == "attention":
        q, k, v, *mask = inputs
        return torch.nn.functional.scaled_dot_product_attention(
            q, k, v, *mask, is_causal=node.attrs["causal"], scale=node.attrs["scale"]
        )
    if node.op == "aten":
        attrs = {name: _concrete(value, env) for name, value in node.attrs.items()}
        return ALLOCATING["aten"](attrs)(inputs)
    raise AssertionError(f"{node}: no reference")


def _concrete(value: Any, env: Env) -> Any:
    if isinstance(value, Expr):
        return value.eval(env)
    return tuple(_concrete(v, env) for v in value) if isinstance(value, tuple) else value
