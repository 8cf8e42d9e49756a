"""Let attention read heads of keys and values that serve several heads of queries where they lie.

Models repeat them (``repeat_kv``, ``enable_gqa``): a view that has no strides, so that attention
would get a copy of many times the size. The libraries and ``short_attention`` take fewer heads,
in half precision: torch has no fused kernel for them in fp32, and would do with twenty others.
"""

from __future__ import annotations

import torch

from strop.ir.affine import strided
from strop.ir.dims import Expr, const
from strop.ir.graph import Builder, Graph, Node, rewrite
from strop.options import Options

HALF = (torch.float16, torch.bfloat16)


def grouped_heads(graph: Graph, options: Options) -> Graph:
    return rewrite(graph, _over_fewer_heads, _has_repeated)


def _has_repeated(node: Node) -> bool:
    """Tell whether it is attention whose heads of keys and values are repeated alike."""
    if node.op != "attention" or node.dtype not in HALF:
        return False
    q, k, v = node.inputs[:3]
    if any(len(x.shape) != 4 for x in (q, k, v)) or q.shape[1] != k.shape[1]:
        return False
    times = _times(k)
    return times is not None and _times(v) == times


def _over_fewer_heads(b: Builder, node: Node, inputs: tuple[Node, ...]) -> Node:
    q, k, v, *mask = inputs
    times = _times(k)
    assert times is not None
    fewer = (_once(b, x, times) for x in (k, v))
    return b.make(
        node.op, (q, *fewer, *mask), node.shape, node.dtype, order=node.order, **node.attrs
    )


def _times(x: Node) -> Expr | None:
    """Return how often each head of (B, H, S, D) is repeated, one behind the other."""
    view = strided(x)
    atoms = [atom for atom in view.dims[1] if atom[0] != const(1)] if view else []
    return atoms[-1][0] if atoms and atoms[-1][1] == const(0) and len(atoms) > 1 else None


def _once(b: Builder, x: Node, times: Expr) -> Node:
    """Take the first of the copies of each head."""
    batch, heads, length, width = x.shape
    few = heads.exact_div(times)
    assert few is not None
    apart = b.slice(b.reshape(x, (batch, few, times, length, width)), 2, 0, 1)
    return b.reshape(apart, (batch, few, length, width))
