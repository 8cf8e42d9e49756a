"""Fuse dropout: kernels draw its numbers themselves, by position, from a seed of the call.

The seeds of a graph are one small tensor that torch's generator fills in each run, so that
``torch.manual_seed`` decides and a CUDA graph replays with new numbers. They are other numbers than
eager's. Operators whose result is the random tensor itself stay in torch, with its numbers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Node as FxNode

import strop.frontend.joint  # noqa: F401  (defines torch.ops.strop)
from strop.frontend.creation import Rule, filled
from strop.ir.graph import Builder, Node

if TYPE_CHECKING:
    from strop.frontend.importer import Importer

aten = torch.ops.aten
F32, I64 = torch.float32, torch.int64
_LANES = 2  # seeds lie 16 bytes apart, as kernels want of a pointer


def _seed(im: Importer, fx: FxNode) -> Node:
    """Return one of the seeds that the graph draws together, equal nodes being one."""
    mine = [n for n in fx.graph.nodes if n.target is fx.target]
    seeds = _drawn(im, (len(mine), _LANES), fx.meta["val"][0].device, "seeds of dropout")
    row = im.builder.slice(seeds, 0, mine.index(fx), 1)
    return im.builder.slice(row, 1, 0, 1)


def _drawn(im: Importer, shape: tuple[int, ...], device: torch.device, tag: str) -> Node:
    """Draw seeds by torch's generator."""
    return im.builder.make(
        "aten",
        (),
        shape,
        I64,
        target=str(aten.randint.low),
        args=(0, 2**63 - 1, shape),
        kwargs=(("device", device), ("dtype", I64)),
        outputs=((shape, I64),),
        single=True,
        tag=tag,
    )


def _dropout(
    im: Importer, fx: FxNode, x: Any, p: float, train: bool | None = True
) -> tuple[Node, Node]:
    """Scale the kept elements by 1 / (1 - p), and return also which they are."""
    b, node = im.builder, im.node(x)
    if train is False:
        return node, filled(b, True, node.shape, torch.bool)
    kept = _kept(b, node, _seed(im, fx), p)
    return _scaled(im, node, kept, 0.0 if p == 1 else 1 / (1 - p)), kept


def _kept(b: Builder, x: Node, seed: Node, p: float) -> Node:
    """Compute the mask from the seed and each element's logical place."""
    iota = b.make("iota", (), (x.numel,), I64, start=0, step=1)
    seed = b.expand(b.reshape(seed, [1] * len(x.shape)), x.shape)
    drawn = b.pointwise("uniform", seed, b.reshape(iota, x.shape), dtype=F32)
    return b.pointwise("ge", drawn, b.constant(p, F32), dtype=torch.bool)


def _own_seed(im: Importer, fx: FxNode, like: Any, number: int) -> Node:
    """Give a seed memory of its own, as a backward reads it too."""
    return _drawn(im, (), fx.meta["val"].device, f"seed {number}")


def _seeded_dropout(im: Importer, fx: FxNode, x: Any, seed: Any, p: float) -> Node:
    """Drop out such that the backward is the operator itself (``joint``)."""
    node = im.node(x)
    return _scaled(
        im, node, _kept(im.builder, node, im.node(seed), p), 0.0 if p == 1 else 1 / (1 - p)
    )


def _scaled(im: Importer, x: Node, kept: Node, scale: float) -> Node:
    """Compute x * kept * scale, in this order: what is dropped stays NaN if it was."""
    b = im.builder
    masked = b.pointwise("mul", x, b.cast(kept, x.dtype), dtype=x.dtype)
    return b.pointwise("mul", masked, b.constant(scale, x.dtype), dtype=x.dtype)


def _dropout_backward(im: Importer, fx: FxNode, grad: Any, mask: Any, scale: float) -> Node | None:
    if not im.node(grad).dtype.is_floating_point:
        return None
    return _scaled(im, im.node(grad), im.node(mask), scale)


RANDOM_RULES: dict[Any, Rule] = {
    aten.native_dropout.default: _dropout,
    aten.native_dropout_backward.default: _dropout_backward,
    torch.ops.strop.seed.default: _own_seed,
    torch.ops.strop.dropout.default: _seeded_dropout,
}
