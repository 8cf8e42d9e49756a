"""Dropout, fused: kernels draw its numbers themselves, by position, from a seed of the call.

The seeds of a graph are one small tensor that torch's generator fills in each run, so that
``torch.manual_seed`` decides and a CUDA graph replays with new numbers. They are other numbers than
eager's. Operators whose result is the random tensor itself stay in torch, with its numbers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Node as FxNode

from strop.frontend.creation import Rule, filled
from strop.ir.graph import Node

if TYPE_CHECKING:
    from strop.frontend.importer import Importer

aten = torch.ops.aten
F32, I64 = torch.float32, torch.int64
_LANES = 2  # seeds lie 16 bytes apart, as kernels want of a pointer


def _seed(im: Importer, fx: FxNode) -> Node:
    """One of the seeds that the graph draws together, equal nodes being one."""
    mine = [n for n in fx.graph.nodes if n.target is fx.target]
    shape = (len(mine), _LANES)
    seeds = im.builder.make(
        "aten", (), shape, I64, target=str(aten.randint.low), args=(0, 2**63 - 1, shape),
        kwargs=(("device", fx.meta["val"][0].device), ("dtype", I64)), outputs=((shape, I64),),
        single=True, tag="seeds of dropout",
    )  # fmt: skip
    row = im.builder.slice(seeds, 0, mine.index(fx), 1)
    return im.builder.slice(row, 1, 0, 1)


def _dropout(im: Importer, fx: FxNode, x: Any, p: float, train: bool | None = True
             ) -> tuple[Node, Node]:  # fmt: skip
    """The kept elements scaled by 1 / (1 - p), and which they are."""
    b, node = im.builder, im.node(x)
    if train is False:
        return node, filled(b, True, node.shape, torch.bool)
    iota = b.make("iota", (), (node.numel,), I64, start=0, step=1)
    seed = b.expand(b.reshape(_seed(im, fx), [1] * len(node.shape)), node.shape)
    drawn = b.pointwise("uniform", seed, b.reshape(iota, node.shape), dtype=F32)
    kept = b.pointwise("ge", drawn, b.constant(p, F32), dtype=torch.bool)
    return _scaled(im, node, kept, 0.0 if p == 1 else 1 / (1 - p)), kept


def _scaled(im: Importer, x: Node, kept: Node, scale: float) -> Node:
    """x * kept * scale, in this order: what is dropped stays NaN if it was."""
    b = im.builder
    masked = b.pointwise("mul", x, b.cast(kept, x.dtype), dtype=x.dtype)
    return b.pointwise("mul", masked, b.constant(scale, x.dtype), dtype=x.dtype)


def _dropout_backward(im: Importer, fx: FxNode, grad: Any, mask: Any, scale: float) -> Node:
    return _scaled(im, im.node(grad), im.node(mask), scale)


RANDOM_RULES: dict[Any, Rule] = {
    aten.native_dropout.default: _dropout,
    aten.native_dropout_backward.default: _dropout_backward,
}
