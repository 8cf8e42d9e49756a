"""Turn ATen view calls into the five views of the graph IR; clones and aliases are the value
itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch._prims_common import is_non_overlapping_and_dense_or_false
from torch.fx import Node as FxNode

import strop.frontend.whole  # noqa: F401  (defines torch.ops.strop)
from strop.errors import UnsupportedError
from strop.frontend.shape_rules import TracedSizes, env_of
from strop.ir.dims import Expr, const
from strop.ir.graph import Builder, Node, Ref, memory_order

if TYPE_CHECKING:
    from strop.frontend.importer import Importer

aten = torch.ops.aten
Rule = Callable[..., Any]

MAX_WINDOW = 8  # elements of an overlapping window: its kernel selects among as many loads


def _same(im: Importer, fx: FxNode, x: Any, *_: Any, **__: Any) -> Node:
    return im.node(x)


def _reshape(im: Importer, fx: FxNode, x: Any, *_: Any, **__: Any) -> Node:
    return im.builder.reshape(im.node(x), im.shape(fx))


def _permute(im: Importer, fx: FxNode, x: Any, dims: Sequence[int]) -> Node:
    return im.builder.permute(im.node(x), dims)


def _transpose(im: Importer, fx: FxNode, x: Any, a: int, b: int) -> Node:
    node = im.node(x)
    if not node.shape:  # torch takes a number for a tensor of one dim
        return node
    dims = list(range(len(node.shape)))
    dims[a], dims[b] = dims[b], dims[a]
    return im.builder.permute(node, dims)


def _t(im: Importer, fx: FxNode, x: Any) -> Node:
    node = im.node(x)
    return im.builder.permute(node, (1, 0)) if len(node.shape) == 2 else node


def _expand(im: Importer, fx: FxNode, x: Any, *_: Any, **__: Any) -> Node:
    node, shape = im.node(x), im.shape(fx)
    return im.builder.expand(im.builder.view_as_rank(node, len(shape)), shape)


def slice_start(im: Importer, x: FxNode, dim: int, start: Any) -> Expr:
    """Return where a slice begins, as torch clamps it. Symbolic sizes are asked, which plants
    guards."""
    size = x.meta["val"].shape[dim]
    begin = 0 if start is None else start.meta["val"] if isinstance(start, FxNode) else start
    if begin < 0:
        return im.size(torch.sym_max(begin + size, 0))
    return im.size(torch.sym_min(begin, size))


def _slice(
    im: Importer,
    fx: FxNode,
    x: FxNode,
    dim: int = 0,
    start: Any = None,
    end: Any = None,
    step: int = 1,
) -> Node:
    node = im.node(x)
    dim %= len(node.shape)
    return im.builder.slice(node, dim, slice_start(im, x, dim, start), im.shape(fx)[dim], step)


def _select(im: Importer, fx: FxNode, x: Any, dim: int, index: Any) -> Node:
    node = im.node(x)
    dim %= len(node.shape)
    return im.builder.reshape(_one(im, node, dim, index), im.shape(fx))


def _one(im: Importer, node: Node, dim: int, index: Any) -> Node:
    place = im.size(index)
    if place.is_const and place.value < 0:
        place = place + node.shape[dim]
    im.needs_place(place, node.shape[dim])
    return im.builder.slice(node, dim, place, 1)


def _pieces(im: Importer, fx: FxNode, x: Any, _: Any, dim: int = 0) -> tuple[Node, ...]:
    """split and split_with_sizes: the traced outputs tell the lengths."""
    node = im.node(x)
    dim %= len(node.shape)
    pieces, start = [], const(0)
    for piece in fx.meta["val"]:
        length = im.size(piece.shape[dim])
        pieces.append(im.builder.slice(node, dim, start, length))
        start = start + length
    return tuple(pieces)


def _unbind(im: Importer, fx: FxNode, x: Any, dim: int = 0) -> tuple[Node, ...]:
    node, shape = im.node(x), im.symbols.shape(fx.meta["val"][0].shape)
    return tuple(
        im.builder.reshape(im.builder.slice(node, dim % len(node.shape), i, 1), shape)
        for i in range(len(fx.meta["val"]))
    )


def _diagonal(
    im: Importer, fx: FxNode, x: Any, offset: int = 0, dim1: int = 0, dim2: int = 1
) -> Node:
    node = im.node(x)
    rank = len(node.shape)
    starts = (max(-offset, 0), max(offset, 0))
    return im.builder.diagonal(node, (dim1 % rank, dim2 % rank), starts, im.shape(fx)[-1])


def _reversed(b: Builder, x: Node, dim: int) -> Node:
    size = x.shape[dim]
    return x if size == const(1) else b.slice(x, dim, size - 1, size, -1)


def _flip(im: Importer, fx: FxNode, x: Any, dims: Sequence[int]) -> Node:
    node = im.node(x)
    for dim in dims if node.shape else ():
        node = _reversed(im.builder, node, dim % len(node.shape))
    return node


def _rot90(im: Importer, fx: FxNode, x: Any, k: int = 1, dims: Sequence[int] = (0, 1)) -> Node:
    node, b = im.node(x), im.builder
    first, second = (d % len(node.shape) for d in dims)
    if k % 4 in (2, 3):
        node = _reversed(b, node, first)
    if k % 4 in (1, 2):
        node = _reversed(b, node, second)
    order = list(range(len(node.shape)))
    if k % 2:
        order[first], order[second] = second, first
    return b.permute(node, order)


def _repeat(im: Importer, fx: FxNode, x: Any, repeats: Sequence[Any]) -> Node:
    """Put a new dim before each one: nothing is stored twice until somebody writes it."""
    b, counts = im.builder, [im.size(r) for r in repeats]
    node = b.view_as_rank(im.node(x), len(counts))
    ones = [s for size in node.shape for s in (const(1), size)]
    spread = [s for pair in zip(counts, node.shape, strict=True) for s in pair]
    return b.reshape(b.expand(b.reshape(node, ones), spread), im.shape(fx))


def _unfold(im: Importer, fx: FxNode, x: Any, dim: int, size: int, step: int) -> Node | None:
    """Reshape windows that do not overlap; a few that do are slices side by side."""
    node, b = im.node(x), im.builder
    if not node.shape:  # a number has one window
        return b.reshape(node, im.shape(fx)) if size == 1 else None
    dim %= len(node.shape)
    count, last = im.shape(fx)[dim], len(node.shape)
    if size == step:
        whole = b.slice(node, dim, 0, count * size)
        split = b.reshape(whole, (*node.shape[:dim], count, size, *node.shape[dim + 1 :]))
        return b.permute(split, [d for d in range(last + 1) if d != dim + 1] + [dim + 1])
    if not 1 < size <= MAX_WINDOW:
        return None
    pieces = [b.slice(node, dim, start, count, step) for start in range(size)]
    pieces = [b.reshape(piece, (*piece.shape, 1)) for piece in pieces]
    return b.make("cat", pieces, im.shape(fx), node.dtype, dim=last)


def _split_channels(
    im: Importer, fx: FxNode, x: Any, parts: Sequence[Any], order: Sequence[int], rank: int
) -> Node:
    """Reshape the last ``rank`` dims to ``parts``, permute those, and reshape to the result."""
    node, b = im.node(x), im.builder
    lead = node.shape[: len(node.shape) - rank]
    split = b.reshape(node, (*lead, *parts))
    dims = [*range(len(lead)), *(len(lead) + d for d in order)]
    return b.reshape(b.permute(split, dims), im.shape(fx))


def _pixel_shuffle(im: Importer, fx: FxNode, x: Any, factor: int) -> Node:
    c, h, w = im.shape(fx)[-3], *im.node(x).shape[-2:]
    return _split_channels(im, fx, x, (c, factor, factor, h, w), (0, 3, 1, 4, 2), 3)


def _pixel_unshuffle(im: Importer, fx: FxNode, x: Any, factor: int) -> Node:
    c, h, w = im.node(x).shape[-3], *im.shape(fx)[-2:]
    return _split_channels(im, fx, x, (c, h, factor, w, factor), (0, 2, 4, 1, 3), 3)


def _channel_shuffle(im: Importer, fx: FxNode, x: Any, groups: int) -> Node:
    _, channels, *rest = im.node(x).shape
    parts = (groups, channels // groups, *rest)
    order = (1, 0, *range(2, len(parts)))
    return _split_channels(im, fx, x, parts, order, len(parts) - 1)


def _as_strided(
    im: Importer, fx: FxNode, x: FxNode, size: Any, stride: Any, offset: Any = None
) -> Node:
    """Leave as_strided to torch, which looks at memory itself: it has to lie as it did in eager."""
    node, shape = im.node(x), im.shape(x)
    strides = im.symbols.shape(x.meta["val"].stride())
    order = memory_order(strides, shape) or tuple(range(len(shape)))  # an error if there are gaps
    dense = im.builder.make("copy", (node,), node.shape, node.dtype, order=order)
    arguments = (Ref(0), *map(im.literal, (size, stride, offset)))
    result = (im.shape(fx), node.dtype)
    return im.builder.make(
        "aten",
        (dense,),
        *result,
        target="aten.as_strided.default",
        args=arguments,
        kwargs=(),
        outputs=(result,),
        single=True,
        tag="",
    )


def refuse_shared_memory(im: Importer, x: FxNode) -> None:
    """Raise UnsupportedError unless the traced value is all that lies in its memory."""
    traced: torch.Tensor = x.meta["val"]
    with _unasked(traced):  # strides that are dense for larger sizes are so for one, too
        is_dense = is_non_overlapping_and_dense_or_false(traced)
    is_whole = is_dense and im.size(traced.storage_offset()) == const(0)
    if traced._base is not None or not is_whole:
        raise UnsupportedError("as_strided of what is itself a view")


def _unasked(x: torch.Tensor) -> AbstractContextManager[None]:
    """Return a context in which questions about the sizes of a tensor leave no guards in a trace of
    ours, which notes that its forward asks about memory. Dynamo's have nothing else to go by."""
    env = env_of([x])
    return env.suppress_guards() if isinstance(env, TracedSizes) else nullcontext()


OF_MEMORY = {  # they read the memory of their first operand, of whatever type
    aten.as_strided.default,
    aten.as_strided_copy.default,
    aten.as_strided_scatter.default,
}
VIEWS: dict[Any, Rule] = {
    aten.alias.default: _same,
    aten.detach.default: _same,
    aten.clone.default: _same,
    aten.lift_fresh_copy.default: _same,
    aten.view.default: _reshape,
    aten._unsafe_view.default: _reshape,
    aten.reshape.default: _reshape,
    aten.unsqueeze.default: _reshape,
    aten.squeeze.dim: _reshape,
    aten.squeeze.dims: _reshape,
    aten.squeeze.default: _reshape,
    aten.permute.default: _permute,
    aten.transpose.int: _transpose,
    aten.t.default: _t,
    aten.expand.default: _expand,
    aten.slice.Tensor: _slice,
    aten.select.int: _select,
    aten.split.Tensor: _pieces,
    aten.split_with_sizes.default: _pieces,
    aten.unsafe_split.Tensor: _pieces,
    aten.unsafe_split_with_sizes.default: _pieces,
    aten.unbind.int: _unbind,
    aten.diagonal.default: _diagonal,
    aten.unfold.default: _unfold,
    aten.as_strided.default: _as_strided,
    aten.as_strided_copy.default: _as_strided,
    # copies in eager; here another way to read, until something is stored
    aten.flip.default: _flip,
    aten.rot90.default: _rot90,
    aten.repeat.default: _repeat,
    aten.pixel_shuffle.default: _pixel_shuffle,
    aten.pixel_unshuffle.default: _pixel_unshuffle,
    aten.channel_shuffle.default: _channel_shuffle,
    aten.native_channel_shuffle.default: _channel_shuffle,
    torch.ops.strop.channel_shuffle.default: _channel_shuffle,
    torch.ops.strop.native_channel_shuffle.default: _channel_shuffle,
}

# Views that cannot be expressed run in torch, where memory may lie in another order than traced.
COPYING: dict[Any, Any] = {
    aten.view.default: aten.reshape.default,
    aten._unsafe_view.default: aten.reshape.default,
}
