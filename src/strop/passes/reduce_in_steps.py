"""Sum over dims on both sides of a kept one in two steps: inside first, then across.

A kernel that does both at once has kept and reduced elements side by side in its lanes, and all of
them must fit in one tile. Where they need not, the inner dims are reduced alone: a value for each
kept element and each outer one, which is little to read again.
"""

from __future__ import annotations

import torch

from strop.ir.affine import lanes_fit, runs_of
from strop.ir.dims import Expr, product
from strop.ir.graph import Builder, Graph, Node, rewrite
from strop.ir.ops import Kind, compute_dtype
from strop.options import Options


def reduce_in_steps(graph: Graph, options: Options) -> Graph:
    def rule(b: Builder, node: Node, inputs: tuple[Node, ...]) -> Node | None:
        if node.kind is not Kind.REDUCTION:
            return None
        inner = _inner_dims(inputs[0], node.attrs["dims"], graph)
        return None if inner is None else _in_steps(b, node, inputs[0], inner)

    found = (node for node in graph.nodes if node.kind is Kind.REDUCTION)
    if not any(_inner_dims(node.inputs[0], node.attrs["dims"], graph) for node in found):
        return graph  # as in most models: rebuilding it takes time
    return rewrite(graph, rule)


def _inner_dims(x: Node, dims: tuple[int, ...], graph: Graph) -> tuple[int, ...] | None:
    """Return the dims to reduce first; None where one kernel can do all."""
    runs = runs_of(x, dims, graph.hints) or []
    flags = [run.is_reduced for run in runs]
    if not flags[:-1] or not flags[-1] or sum(flags) < 2:
        return None
    outside = frozenset[int]().union(*(run.dims for run in runs[:-1]))
    if lanes_fit(runs) or runs[-1].dims & outside:  # one dim may lie in several runs
        return None
    return tuple(sorted(runs[-1].dims))


def _in_steps(b: Builder, node: Node, x: Node, inner: tuple[int, ...]) -> Node:
    outer = tuple(d for d in node.attrs["dims"] if d not in inner)
    wide = compute_dtype(node.dtype)
    if node.op != "var":
        first = b.reduce(node.op, x, inner, wide)
        return b.reduce(node.op, first, outer, node.dtype)
    mean = b.reduce("mean", x, inner, wide)
    spread = b.reduce("var", x, inner, wide, correction=0)
    within = b.reduce("mean", spread, outer, wide)
    between = b.reduce("var", mean, outer, wide, correction=0)
    count, correction = product(x.shape[d] for d in node.attrs["dims"]), node.attrs["correction"]
    if not correction:
        return b.pointwise("add", within, between, dtype=node.dtype, alpha=1)
    total = b.pointwise("add", within, between, dtype=wide, alpha=1)
    return _corrected(b, total, count, correction, node.dtype)


def _corrected(b: Builder, var: Node, count: Expr, correction: float, dtype: torch.dtype) -> Node:
    """Compute var * count / max(0, count - correction)."""
    wide = var.dtype
    size = b.constant(float(count.value) if count.is_const else count, wide)
    rest = b.pointwise("sub", size, b.constant(float(correction), wide), dtype=wide, alpha=1)
    rest = b.pointwise("maximum", rest, b.constant(0.0, wide), dtype=wide)
    scaled = b.pointwise("mul", var, size, dtype=wide)
    return b.pointwise("div", scaled, rest, dtype=dtype)
