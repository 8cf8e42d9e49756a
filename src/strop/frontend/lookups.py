"""Look up elements of one tensor where another one says: embedding, gather, index.

Each of them is one ``take``, which fuses like any pointwise node. The index of a mask depends on
the values in it, so masks stay with torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Node as FxNode

from strop.ir.dims import Expr, const
from strop.ir.graph import Builder, Node, broadcast

if TYPE_CHECKING:
    from strop.frontend.importer import Importer

aten = torch.ops.aten
Rule = Callable[..., Any]
ZERO = const(0)
PLACE = torch.int32  # where we compute it: processors have vectors of these beside those of fp32


def take(
    b: Builder,
    source: Node,
    indices: Sequence[Node],
    walks: Sequence[int | None],
    shape: Sequence[Expr],
    bounds: str,
) -> Node | None:
    """Look up elements; None where there is nothing to read: torch raises then."""
    looked_up = (size for size, walk in zip(source.shape, walks, strict=True) if walk is None)
    if ZERO in looked_up:
        return None
    return b.make(
        "take", (source, *indices), shape, source.dtype, walks=tuple(walks), bounds=bounds
    )


def _rows(
    b: Builder, source: Node, dim: int, index: Node, shape: Sequence[Expr], bounds: str
) -> Node | None:
    """Replace ``dim`` of ``source`` by the dims of ``index``."""
    after = len(source.shape) - dim - 1
    spread = b.reshape(index, (*index.shape, *[const(1)] * after))
    walks = [*range(dim), None, *range(dim + len(index.shape), dim + len(index.shape) + after)]
    return take(b, source, (spread,), walks, shape, bounds)


def _embedding(im: Importer, fx: FxNode, weight: Any, indices: Any, *_: Any) -> Node | None:
    return _rows(im.builder, im.node(weight), 0, im.node(indices), im.shape(fx), "checked")


def _index_select(im: Importer, fx: FxNode, x: Any, dim: int, index: Any) -> Node | None:
    node, b = im.node(x), im.builder
    if not node.shape:
        return None
    flat = b.reshape(im.node(index), (im.node(index).numel,))
    return _rows(b, node, dim % len(node.shape), flat, im.shape(fx), "checked")


def _gather(
    im: Importer, fx: FxNode, x: Any, dim: int, index: Any, *_: Any, **__: Any
) -> Node | None:
    node, b, shape = im.node(x), im.builder, im.shape(fx)
    if not shape or len(shape) != len(node.shape):  # a number, or an empty index of another rank
        return None
    dim %= len(shape)
    for d, size in enumerate(shape):
        if d != dim:  # the index may be shorter
            node = b.slice(node, d, 0, size)
    walks = [None if d == dim else d for d in range(len(shape))]
    return take(b, node, (im.node(index),), walks, shape, "checked")


def _take(im: Importer, fx: FxNode, x: Any, index: Any) -> Node | None:
    node = im.node(x)
    flat = im.builder.reshape(node, (node.numel,))
    return take(im.builder, flat, (im.node(index),), (None,), im.shape(fx), "wrapped")


def _index(im: Importer, fx: FxNode, x: Any, indices: Sequence[Any]) -> Node | None:
    """Index with tensors: where indices stand side by side their dims take that place, else they
    come first."""
    b, node = im.builder, im.node(x)
    found = {d: im.node(i) for d, i in enumerate(indices) if i is not None}
    if not found or any(i.dtype not in (torch.int32, torch.int64) for i in found.values()):
        return None
    dims = list(found)
    shape = broadcast("index", *(i.shape for i in found.values()))
    is_adjacent = dims == list(range(dims[0], dims[0] + len(dims)))
    first = dims[0] if is_adjacent else 0
    kept = [d for d in range(len(node.shape)) if d not in found]
    place = {d: p if p < first else p + len(shape) for p, d in enumerate(kept)}
    after = len(kept) - first
    spread = [b.reshape(i, (*i.shape, *[const(1)] * after)) for i in found.values()]
    walks = [place.get(d) for d in range(len(node.shape))]
    return take(b, node, spread, walks, im.shape(fx), "wrapped")


def _embedding_bag(
    im: Importer,
    fx: FxNode,
    table: Any,
    ids: Any,
    offsets: Any,
    scale_grad_by_freq: bool = False,
    mode: int = 0,
    sparse: bool = False,
    weights: Any = None,
    include_last_offset: bool = False,
    padding_idx: int = -1,
) -> tuple[Node | None, ...] | None:
    """Add up rows on a CPU, where nobody asks for what a gradient needs. Where offsets have the end
    of the last bag, eager's means and extremes go on to the last id all the same, and so do its
    sums in fp64."""
    is_read = any(user.args[1] != 0 and user.users for user in fx.users)
    if im.devices != {"cpu"} or is_read or not fx.users:
        return None
    if include_last_offset and (mode != _SUM or _slow_in_eager(table.meta["val"])):
        return None
    if mode == _MEAN and padding_idx >= 0:
        return None
    b, node = im.builder, im.node(offsets)
    inputs = [im.node(table), im.node(ids), node, *([im.node(weights)] if weights else [])]
    if len(inputs[1].shape) != 1 or ZERO in (inputs[0].shape[0], inputs[1].shape[0]):
        return None
    count = node.shape[0] - const(1) if include_last_offset else node.shape[0]
    kind = "amax" if mode == _MAX else "sum"
    padding = padding_idx if padding_idx >= 0 else None
    shape = (count, inputs[0].shape[1])
    total = b.make(
        "bag",
        inputs,
        shape,
        inputs[0].dtype,
        kind=kind,
        ends=include_last_offset,
        padding=padding,
    )
    return (_mean(b, total, node, inputs[1]) if mode == _MEAN else total, None, None, None)


_SUM, _MEAN, _MAX = range(3)  # as torch numbers the modes of a bag


def _slow_in_eager(table: torch.Tensor) -> bool:
    """Tell whether eager has no kernel of fbgemm's for a table."""
    return table.dtype is torch.float64 or not table.is_contiguous()


def _mean(b: Builder, total: Node, offsets: Node, ids: Node) -> Node:
    """Divide sums by how many ids each bag has; of none they are 0."""
    end = b.reshape(b.constant(ids.numel, torch.int64), (1,))
    shape = (offsets.shape[0],)
    after = end
    if shape != (const(1),):  # a cat has no piece without elements
        ends = b.cast(b.slice(offsets, 0, const(1), shape[0] - const(1)), torch.int64)
        after = b.make("cat", [ends, end], shape, torch.int64, dim=0)
    counts = b.pointwise("sub", after, b.cast(offsets, torch.int64), dtype=torch.int64, alpha=1)
    counts = b.pointwise("maximum", counts, b.constant(1, torch.int64), dtype=torch.int64)
    divisor = b.reshape(b.cast(counts, total.dtype), (*shape, const(1)))
    return b.pointwise("div", total, divisor, dtype=total.dtype)


LOOKUPS: dict[Any, Rule] = {
    aten.embedding.default: _embedding,
    aten._embedding_bag.default: _embedding_bag,
    aten._embedding_bag_forward_only.default: _embedding_bag,
    aten.index_select.default: _index_select,
    aten.gather.default: _gather,
    aten.take.default: _take,
    aten.index.Tensor: _index,
    aten._unsafe_index.Tensor: _index,
}
