"""ATen view calls as the five views of the graph IR; clones and aliases are the value itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Node as FxNode

from strop.ir.dims import Expr, const
from strop.ir.graph import Node

if TYPE_CHECKING:
    from strop.frontend.importer import Importer

aten = torch.ops.aten
Rule = Callable[..., Any]


def _same(im: Importer, fx: FxNode, x: Any, *_: Any, **__: Any) -> Node:
    return im.node(x)


def _reshape(im: Importer, fx: FxNode, x: Any, *_: Any, **__: Any) -> Node:
    return im.builder.reshape(im.node(x), im.shape(fx))


def _permute(im: Importer, fx: FxNode, x: Any, dims: Sequence[int]) -> Node:
    return im.builder.permute(im.node(x), dims)


def _transpose(im: Importer, fx: FxNode, x: Any, a: int, b: int) -> Node:
    node = im.node(x)
    dims = list(range(len(node.shape)))
    dims[a], dims[b] = dims[b], dims[a]
    return im.builder.permute(node, dims)


def _t(im: Importer, fx: FxNode, x: Any) -> Node:
    node = im.node(x)
    return im.builder.permute(node, (1, 0)) if len(node.shape) == 2 else node


def _expand(im: Importer, fx: FxNode, x: Any, *_: Any, **__: Any) -> Node:
    node, shape = im.node(x), im.shape(fx)
    return im.builder.expand(im.builder.view_as_rank(node, len(shape)), shape)


def _start(im: Importer, start: Any, size: Expr) -> Expr:
    if start is None:
        return const(0)
    begin = im.size(start)
    return begin + size if begin.is_const and begin.value < 0 else begin


def _slice(im: Importer, fx: FxNode, x: Any, dim: int = 0, start: Any = None, end: Any = None,
           step: int = 1) -> Node | None:  # fmt: skip
    if step != 1:
        return None
    node = im.node(x)
    dim %= len(node.shape)
    begin = _start(im, start, node.shape[dim])
    return im.builder.slice(node, dim, begin, im.shape(fx)[dim])


def _select(im: Importer, fx: FxNode, x: Any, dim: int, index: Any) -> Node:
    node = im.node(x)
    dim %= len(node.shape)
    one = im.builder.slice(node, dim, _start(im, index, node.shape[dim]), 1)
    return im.builder.reshape(one, im.shape(fx))


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
    aten.unbind.int: _unbind,
}
