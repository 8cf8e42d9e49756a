"""Operators that are taken apart at import, each with the reason why it is not one node.

Normalisations are in ``norms.py``, reductions in ``reductions.py``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Node as FxNode

import strop.frontend.operators  # noqa: F401  (defines torch.ops.strop)
from strop.frontend.norms import NORM_RULES
from strop.frontend.random import RANDOM_RULES
from strop.frontend.reductions import REDUCTION_RULES, Rule
from strop.ir.graph import Node

if TYPE_CHECKING:
    from strop.frontend.importer import Importer

aten = torch.ops.aten


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
        "conv2d", inputs, im.shape(fx), inputs[0].dtype, stride=_both(stride),
        padding=_both(padding), dilation=_both(dilation), groups=groups,
    )  # fmt: skip


def _both(value: Sequence[int]) -> tuple[int, ...]:
    """torch takes one number for both dims: padding="valid" arrives as [0]."""
    return tuple(value) * 2 if len(value) == 1 else tuple(value)


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
    **NORM_RULES,
    **REDUCTION_RULES,
    **RANDOM_RULES,
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
