"""Put tensors together out of parts: at known places, as cats of slices, and under masks.

``lookups`` has the places that are in another tensor; scatter and sort run in torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Node as FxNode

from strop.frontend.creation import filled
from strop.frontend.part_writes import PART_WRITES, joined
from strop.ir.dims import Expr, const
from strop.ir.graph import Builder, Node

if TYPE_CHECKING:
    from strop.frontend.importer import Importer

aten = torch.ops.aten
Rule = Callable[..., Any]
ZERO = const(0)


def _cat(im: Importer, fx: FxNode, tensors: Sequence[Any], dim: int = 0) -> Node:
    nodes = [im.node(t) for t in tensors]
    rank, dtype = len(im.shape(fx)), fx.meta["val"].dtype
    nodes = [n for n in nodes if len(n.shape) == rank]  # torch skips the legacy empty tensor
    return joined(im.builder, [im.builder.cast(n, dtype) for n in nodes], dim % rank)


def _stack(im: Importer, fx: FxNode, tensors: Sequence[Any], dim: int = 0) -> Node:
    b, shape, dtype = im.builder, list(im.shape(fx)), fx.meta["val"].dtype
    dim %= len(shape)
    shape[dim] = const(1)
    return joined(b, [b.reshape(b.cast(im.node(t), dtype), shape) for t in tensors], dim)


def _pad(im: Importer, fx: FxNode, x: Any, pad: Sequence[Any], value: float = 0) -> Node:
    """Pad with a constant as a cat of constants around the value; less than none crops it."""
    node, b = im.node(x), im.builder
    for position in range(len(pad) // 2):
        dim = len(node.shape) - 1 - position
        before, after = (
            p.meta["val"] if isinstance(p, FxNode) else p
            for p in pad[2 * position : 2 * position + 2]
        )
        cropped = [im.size(-p) if p < 0 else ZERO for p in (before, after)]
        length = node.shape[dim] - cropped[0] - cropped[1]
        node = b.slice(node, dim, cropped[0], length)
        sides = [
            _block(b, value, node, dim, im.size(p)) if p > 0 else None for p in (before, after)
        ]
        node = joined(b, [p for p in (sides[0], node, sides[1]) if p is not None], dim)
    return node


def _block(b: Builder, value: float, like: Node, dim: int, width: Expr) -> Node:
    sizes = [width if d == dim else s for d, s in enumerate(like.shape)]
    return filled(b, value, sizes, like.dtype)


def _roll(
    im: Importer, fx: FxNode, x: FxNode, shifts: Sequence[Any], dims: Sequence[int] = ()
) -> Node | None:
    node, b = im.node(x), im.builder
    sizes = x.meta["val"].shape if dims else (x.meta["val"].numel(),)
    if not dims:
        node = b.reshape(node, (node.numel,))
    for shift, dim in zip(shifts, dims or (0,), strict=True):
        if not isinstance(shift, int):
            return None
        size = node.shape[dim]
        if size.is_const:
            back = const(shift % max(size.value, 1))
        elif abs(shift) <= sizes[dim]:
            back = const(shift) if shift >= 0 else size + shift
        else:
            return None
        dim %= len(node.shape)
        node = joined(
            b, [b.slice(node, dim, size - back, back), b.slice(node, dim, 0, size - back)], dim
        )
    return b.reshape(node, im.shape(fx))


def _masked_put(
    im: Importer, fx: FxNode, x: Any, indices: Sequence[Any], value: Any, accumulate: bool = False
) -> Node | None:
    """Compute ``x[mask] = number`` without looking for the places, whose count depends on the
    mask."""
    node, b, fill = im.node(x), im.builder, im.node(value)
    if accumulate or len(indices) != 1 or fill.numel != const(1):
        return None
    mask = im.node(indices[0])
    if mask.dtype != torch.bool:
        return None
    shape = (*mask.shape, *[const(1)] * (len(node.shape) - len(mask.shape)))
    fill = b.cast(b.reshape(fill, ()), node.dtype)
    return b.pointwise("where", b.reshape(mask, shape), fill, node, dtype=node.dtype)


INDEXING: dict[Any, Rule] = {
    aten.cat.default: _cat,
    aten.stack.default: _stack,
    aten.constant_pad_nd.default: _pad,
    aten.roll.default: _roll,
    torch.ops.strop.roll.default: _roll,
    **PART_WRITES,
    aten.index_put.default: _masked_put,
    aten._unsafe_index_put.default: _masked_put,
}
