"""Operators that are taken apart at import, each with the reason why it is not one node.

Normalisations become reductions and pointwise nodes, so that the planner can fuse what stands
before and after them; intermediate values are fp32 and only the result has the user's dtype.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Node as FxNode

import strop.frontend.operators  # noqa: F401  (defines torch.ops.strop)
from strop.errors import ShapeError
from strop.ir.dims import const, product
from strop.ir.graph import Builder, Node
from strop.ir.ops import compute_dtype

if TYPE_CHECKING:
    from strop.frontend.importer import Importer

aten = torch.ops.aten
Rule = Callable[..., Any]


def _binary(b: Builder, op: str, x: Node, y: Node, dtype: torch.dtype) -> Node:
    attrs = {"alpha": 1} if op in ("add", "sub") else {}
    return b.pointwise(op, x, y, dtype=dtype, **attrs)


def _moments(b: Builder, x: Node, dims: tuple[int, ...], eps: float) -> tuple[Node, Node]:
    """(mean, 1/sqrt(variance + eps)) over ``dims``, in the compute type of x."""
    wide = compute_dtype(x.dtype)
    mean = b.reduce("mean", x, dims, wide)
    var = b.reduce("var", x, dims, wide, correction=0)
    return mean, b.pointwise(
        "rsqrt", _binary(b, "add", var, b.constant(eps, wide), wide), dtype=wide
    )


def _normalized(b: Builder, x: Node, mean: Node, rstd: Node, weight: Node | None,
                bias: Node | None) -> Node:  # fmt: skip
    """(x - mean) * (rstd * weight) + bias: the last two steps are one fused multiply-add.

    Centred first, so that a mean far from zero costs no digits; the result counts as x's dtype.
    """
    wide = compute_dtype(x.dtype)
    scale = rstd if weight is None else _binary(b, "mul", rstd, weight, wide)
    y = _binary(b, "mul", _binary(b, "sub", x, mean, wide), scale, wide)
    if bias is not None:
        return _binary(b, "add", y, bias, x.dtype)
    return b.make("copy", (y,), y.shape, x.dtype) if y.dtype != x.dtype else y


def _native_group_norm(im: Importer, fx: FxNode, x: Any, weight: Any, bias: Any, n: Any, c: Any,
                       hw: Any, groups: int, eps: float) -> tuple[Node, Node, Node]:  # fmt: skip
    return _group_norm(im, fx, x, groups, weight, bias, eps)


def _strop_group_norm(im: Importer, fx: FxNode, *args: Any) -> Node:
    return _group_norm(im, fx, *args)[0]


def _group_norm(im: Importer, fx: FxNode, x: Any, groups: int, weight: Any, bias: Any, eps: float
                ) -> tuple[Node, Node, Node]:  # fmt: skip
    b, x = im.builder, im.node(x)
    batch, channels, *rest = x.shape
    width = channels.exact_div(const(groups))
    if width is None:
        raise ShapeError(f"group_norm: {channels} channels do not divide into {groups} groups")
    grouped = b.reshape(x, (batch, groups, width, product(rest)))
    mean, rstd = _moments(b, grouped, (2, 3), eps)
    per_channel = [1, channels, *[const(1)] * len(rest)]

    def of_channels(statistic: Node) -> Node:
        spread = b.expand(statistic, (batch, groups, width, 1))
        return b.reshape(spread, (batch, *per_channel[1:]))

    affine = [None if p is None else b.reshape(im.node(p), per_channel) for p in (weight, bias)]
    y = _normalized(b, x, of_channels(mean), of_channels(rstd), *affine)
    return y, b.reshape(mean, (batch, groups)), b.reshape(rstd, (batch, groups))


def _layer_norm(im: Importer, fx: FxNode, x: Any, normalized: Sequence[Any], weight: Any,
                bias: Any, eps: float) -> tuple[Node, Node, Node]:  # fmt: skip
    b, x = im.builder, im.node(x)
    rank = len(x.shape)
    dims = tuple(range(rank - len(normalized), rank))
    mean, rstd = _moments(b, x, dims, eps)
    shape = [x.shape[d] for d in dims]
    affine = [None if p is None else b.reshape(im.node(p), shape) for p in (weight, bias)]
    return _normalized(b, x, mean, rstd, *affine), mean, rstd


def _softmax(im: Importer, fx: FxNode, x: Any, dim: int, half_to_float: bool) -> Node:
    b, x, dtype = im.builder, im.node(x), fx.meta["val"].dtype
    wide, dims = compute_dtype(x.dtype), (dim % len(x.shape),)
    shifted = _binary(b, "sub", x, b.reduce("amax", x, dims, wide), wide)
    powers = b.pointwise("exp", shifted, dtype=wide)
    return _binary(b, "div", powers, b.reduce("sum", powers, dims, wide), dtype)


def _linear(im: Importer, fx: FxNode, x: Any, weight: Any, bias: Any = None) -> Node:
    inputs = [im.node(t) for t in (x, weight, bias) if t is not None]
    return im.builder.make("linear", inputs, im.shape(fx), inputs[0].dtype)


def _addmm(im: Importer, fx: FxNode, bias: Any, x: Any, w: Any, *, beta: float = 1,
           alpha: float = 1) -> Node | None:  # fmt: skip
    nodes = im.node(x), im.builder.permute(im.node(w), (1, 0)), im.node(bias)
    if beta != 1 or alpha != 1 or len(nodes[2].shape) != 1:
        return None
    return im.builder.make("linear", nodes, im.shape(fx), nodes[0].dtype)


def _mm(im: Importer, fx: FxNode, x: Any, w: Any) -> Node:
    weight = im.builder.permute(im.node(w), (1, 0))
    return im.builder.make("linear", (im.node(x), weight), im.shape(fx), weight.dtype)


def _bmm(im: Importer, fx: FxNode, x: Any, y: Any) -> Node:
    return im.builder.make("matmul", (im.node(x), im.node(y)), im.shape(fx), im.node(x).dtype)


def _conv2d(im: Importer, fx: FxNode, x: Any, weight: Any, bias: Any, stride: Sequence[int],
            padding: Sequence[int], dilation: Sequence[int], groups: int) -> Node:  # fmt: skip
    inputs = [im.node(t) for t in (x, weight, bias) if t is not None]
    return im.builder.make(
        "conv2d", inputs, im.shape(fx), inputs[0].dtype, stride=tuple(stride),
        padding=tuple(padding), dilation=tuple(dilation), groups=groups,
    )  # fmt: skip


def _convolution(im: Importer, fx: FxNode, x: Any, weight: Any, bias: Any, stride: Any,
                 padding: Any, dilation: Any, transposed: bool, output_padding: Any,
                 groups: int) -> Node | None:  # fmt: skip
    if transposed or len(stride) != 2:
        return None
    return _conv2d(im, fx, x, weight, bias, stride, padding, dilation, groups)


def _attention(im: Importer, fx: FxNode, q: Any, k: Any, v: Any, mask: Any, causal: bool,
               scale: float | None) -> Node:  # fmt: skip
    nodes = [im.node(t) for t in (q, k, v, mask) if t is not None]
    scale = 1 / math.sqrt(nodes[0].shape[-1].value) if scale is None else scale
    shape = (*nodes[0].shape[:-1], nodes[2].shape[-1])
    return im.builder.make("attention", nodes, shape, nodes[0].dtype, causal=causal, scale=scale)


def _fused_attention(im: Importer, fx: FxNode, q: Any, k: Any, v: Any, dropout: float = 0.0,
                     causal: bool = False, *args: Any, attn_mask: Any = None,
                     scale: float | None = None) -> tuple[Any, ...] | None:  # fmt: skip
    """torch's inference kernels. With more outputs in use (training) the call stays opaque."""
    used = {user.args[1] for user in fx.users}
    if dropout or used - {0}:
        return None
    return (_attention(im, fx, q, k, v, attn_mask, causal, scale),)


def _copy_(im: Importer, fx: FxNode, destination: Any, value: Any) -> Node:
    target = im.node(destination)
    source = im.builder.cast(im.node(value), target.dtype)
    return im.builder.make("write", (target, source), target.shape, target.dtype)


DECOMPOSITIONS: dict[Any, Rule] = {
    # fused with their neighbours
    torch.ops.strop.group_norm.default: _strop_group_norm,
    aten.native_group_norm.default: _native_group_norm,
    aten.native_layer_norm.default: _layer_norm,
    aten._softmax.default: _softmax,
    # several spellings of one thing
    aten.copy_.default: _copy_,
    # library anchors
    torch.ops.strop.linear.default: _linear,
    aten.linear.default: _linear,
    aten.addmm.default: _addmm,
    aten.mm.default: _mm,
    aten.bmm.default: _bmm,
    torch.ops.strop.conv2d.default: _conv2d,
    aten.convolution.default: _convolution,
    torch.ops.strop.attention.default: _attention,
    aten._scaled_dot_product_flash_attention_for_cpu.default: _fused_attention,
}
