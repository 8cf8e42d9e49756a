"""Take operators apart at import, each with the reason why it is not one node.

Normalisations are in ``norms.py``, reductions in ``reductions.py``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Node as FxNode

import strop.frontend.operators  # noqa: F401  (defines torch.ops.strop)
from strop.frontend.given_orders import KEEPS_ORDER
from strop.frontend.gradients import GRADIENT_RULES
from strop.frontend.library_operators import MIXED_PRODUCT
from strop.frontend.linear_scans import SCANS
from strop.frontend.norms import NORM_RULES
from strop.frontend.pooling import POOLING
from strop.frontend.ragged_tables import BAGS
from strop.frontend.random import RANDOM_RULES
from strop.frontend.recurrences import RECURRENCES
from strop.frontend.reductions import REDUCTION_RULES, Rule, binary, unary
from strop.ir.contractions import NHWC
from strop.ir.dims import const, product
from strop.ir.graph import Builder, Node
from strop.ir.ops import compute_dtype

if TYPE_CHECKING:
    from strop.frontend.importer import Importer

aten = torch.ops.aten


def _linear(im: Importer, fx: FxNode, x: Any, weight: Any, bias: Any = None) -> Node:
    inputs = [im.node(t) for t in (x, weight, bias) if t is not None]
    return im.builder.make("linear", inputs, im.shape(fx), inputs[0].dtype)


def _mixed_product(im: Importer, fx: FxNode, *given: Any) -> Node:
    inputs = [im.node(t) for t in given if t is not None]
    return im.builder.make("mixed_product", inputs, im.shape(fx), fx.meta["val"].dtype)


def _addmm(
    im: Importer, fx: FxNode, bias: Any, x: Any, w: Any, *, beta: float = 1, alpha: float = 1
) -> Node | None:
    nodes = im.node(x), im.builder.permute(im.node(w), (1, 0)), im.node(bias)
    if beta != 1 or alpha != 1 or nodes[2].shape != im.shape(fx)[1:]:
        return _added(im, fx, bias, _mm(im, fx, x, w), beta, alpha)
    return im.builder.make("linear", nodes, im.shape(fx), nodes[0].dtype)


def _added(
    im: Importer, fx: FxNode, added: Any, total: Node, beta: float, alpha: float
) -> Node | None:
    """Compute beta * added + alpha * total; an added tensor counts for nothing at 0, NaN or not. It
    has no more rows than the total, which torch says when it runs, and not when it is traced."""
    if im.has_other_sizes(fx, total):
        return None
    b, dtype = im.builder, fx.meta["val"].dtype
    wide = compute_dtype(dtype)
    total = _scaled(b, total, alpha, wide)
    if beta:
        added = _scaled(b, im.node(added), beta, wide)
        total = b.pointwise("add", added, total, dtype=wide, alpha=1)
    return b.cast(total, dtype)


def _mm(im: Importer, fx: FxNode, x: Any, w: Any) -> Node:
    x, weight = im.node(x), im.builder.permute(im.node(w), (1, 0))
    shape = (*x.shape[:-1], weight.shape[0])
    return im.builder.make("linear", (x, weight), shape, weight.dtype)


def _mv(im: Importer, fx: FxNode, matrix: Any, vector: Any) -> Node | None:
    if not fx.meta["val"].dtype.is_floating_point:
        return None
    weight, row = im.node(matrix), im.builder.view_as_rank(im.node(vector), 2)
    made = im.builder.make("linear", (row, weight), (const(1), *im.shape(fx)), weight.dtype)
    return im.builder.reshape(made, im.shape(fx))


def _dot(im: Importer, fx: FxNode, x: Any, y: Any) -> Node | None:
    b, dtype = im.builder, fx.meta["val"].dtype
    if not dtype.is_floating_point:
        return None
    terms = binary(b, "mul", im.node(x), im.node(y), compute_dtype(dtype))
    return b.reshape(b.reduce("sum", terms, (0,), dtype), ())


def _bmm(im: Importer, fx: FxNode, x: Any, y: Any) -> Node:
    x, y = im.node(x), im.node(y)
    return im.builder.make("matmul", (x, y), (*x.shape[:-1], y.shape[-1]), x.dtype)


def _matmul(im: Importer, fx: FxNode, x: Any, y: Any) -> Node:
    """Multiply as one batch of matrices: whatever has to be copied for it is copied by our
    kernels."""
    b, shape = im.builder, im.shape(fx)
    lead, sides = product(shape[:-2]), []
    for node in map(im.node, (x, y)):
        own = node.shape[-2:]
        whole = b.expand(b.view_as_rank(node, len(shape)), (*shape[:-2], *own))
        sides.append(b.reshape(whole, (lead, *own)))
    return b.reshape(b.make("matmul", sides, (lead, *shape[-2:]), sides[0].dtype), shape)


def _baddbmm(
    im: Importer, fx: FxNode, added: Any, x: Any, y: Any, *, beta: float = 1, alpha: float = 1
) -> Node | None:
    return _added(im, fx, added, _bmm(im, fx, x, y), beta, alpha)


def _scaled(b: Builder, x: Node, factor: float, dtype: torch.dtype) -> Node:
    return x if factor == 1 else b.pointwise("mul", x, b.constant(factor, dtype), dtype=dtype)


def _conv2d(
    im: Importer,
    fx: FxNode,
    x: Any,
    weight: Any,
    bias: Any,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> Node:
    inputs = [im.node(t) for t in (x, weight, bias) if t is not None]
    if fx.meta.get(KEEPS_ORDER):
        kept = inputs[1]
        inputs[1] = im.builder.make("copy", (kept,), kept.shape, kept.dtype, order=NHWC)
    return im.builder.make(
        "conv2d",
        inputs,
        im.shape(fx),
        inputs[0].dtype,
        stride=_both(stride),
        padding=_both(padding),
        dilation=_both(dilation),
        groups=groups,
    )


def _both(value: Sequence[int]) -> tuple[int, ...]:
    """Return one number for both dims as two: torch takes it so, and padding="valid" arrives as
    [0]."""
    return tuple(value) * 2 if len(value) == 1 else tuple(value)


def _convolution(
    im: Importer,
    fx: FxNode,
    x: Any,
    weight: Any,
    bias: Any,
    stride: Any,
    padding: Any,
    dilation: Any,
    transposed: bool,
    output_padding: Any,
    groups: int,
) -> Node | None:
    sides = [im.size(side) for side in padding]  # of a kernel whose size is a symbol
    if transposed or len(stride) != 2 or not all(side.is_const for side in sides):
        rest = (stride, padding, dilation, transposed, output_padding, groups)
        return None if bias is None else _bias_apart(im, fx, (x, weight, None, *rest), bias)
    known = [side.value for side in sides]
    return _conv2d(im, fx, x, weight, bias, stride, known, dilation, groups)


def _bias_apart(im: Importer, fx: FxNode, given: Sequence[Any], bias: Any) -> Node | None:
    """Leave a convolution to torch without its bias, which torch adds by a launch of its own on a
    GPU and a kernel of ours adds beside what follows. Elsewhere the library adds it."""
    from strop.frontend.importer import opaque_call  # whose tables have this rule in them

    if fx.meta["val"].device.type != "cuda":
        return None
    convolved = opaque_call(im, fx, given)
    assert isinstance(convolved, Node)
    places = (len(convolved.shape) - 2) * (const(1),)
    spread = im.builder.reshape(im.node(bias), (*im.node(bias).shape, *places))
    return im.builder.pointwise("add", convolved, spread, dtype=convolved.dtype, alpha=1)


def _attention(
    im: Importer, fx: FxNode, q: Any, k: Any, v: Any, mask: Any, causal: bool, scale: float | None
) -> Node:
    nodes = [im.node(t) for t in (q, k, v, mask) if t is not None]
    scale = 1 / math.sqrt(nodes[0].shape[-1].value) if scale is None else scale
    shape = (*nodes[0].shape[:-1], nodes[2].shape[-1])
    return im.builder.make("attention", nodes, shape, nodes[0].dtype, causal=causal, scale=scale)


def _fused_attention(
    im: Importer,
    fx: FxNode,
    q: Any,
    k: Any,
    v: Any,
    dropout: float = 0.0,
    causal: bool = False,
    *args: Any,
    attn_mask: Any = None,
    scale: float | None = None,
) -> tuple[Any, ...] | None:
    """Import torch's inference kernels. With more outputs in use (training) the call stays
    opaque. A trace takes out all of them, used or not."""
    used = {user.args[1] for user in fx.users if user.users}
    if dropout or used - {0}:
        return None
    unread = [None] * (len(fx.meta["val"]) - 1)
    return (_attention(im, fx, q, k, v, attn_mask, causal, scale), *unread)


def _copy_(im: Importer, fx: FxNode, destination: Any, value: Any) -> Node:
    target = im.node(destination)
    source = im.builder.cast(im.node(value), target.dtype)
    return im.builder.make("write", (target, source), target.shape, target.dtype)


def _copy(im: Importer, fx: FxNode, destination: Any, value: Any, *_: Any) -> Node:
    b, shape = im.builder, im.shape(fx)
    source = b.cast(im.node(value), fx.meta["val"].dtype)
    return b.expand(b.view_as_rank(source, len(shape)), shape)


def _weight_norm(im: Importer, fx: FxNode, v: Any, g: Any, dim: int = 0) -> tuple[Node, Node]:
    """Compute the weight and, for training, the norm of v over all dims but one."""
    b, direction, length = im.builder, im.node(v), im.node(g)
    wide = compute_dtype(direction.dtype)
    dims = tuple(d for d in range(len(direction.shape)) if d != dim % len(direction.shape))
    squares = b.reduce("sum", binary(b, "mul", direction, direction, wide), dims, wide)
    norm = unary(b, "sqrt", squares, wide)
    scale = binary(b, "div", length, norm, wide)
    return binary(b, "mul", direction, scale, direction.dtype), norm


def _euclidean_dist(im: Importer, fx: FxNode, x: Any, y: Any) -> Node:
    """Compute |x|^2 + |y|^2 - 2 x.y as one product, as torch does, and its root where it is
    positive."""
    b, wide = im.builder, compute_dtype(fx.meta["val"].dtype)
    x, y = im.node(x), im.node(y)

    def extended(node: Node, factor: float, swap: bool) -> Node:
        squares = b.reduce(
            "sum", binary(b, "mul", node, node, wide), (len(node.shape) - 1,), node.dtype
        )
        one = b.constant(1.0, node.dtype)
        ones = b.expand(b.view_as_rank(one, len(node.shape)), squares.shape)
        pieces = [
            _scaled(b, node, factor, node.dtype),
            *((ones, squares) if swap else (squares, ones)),
        ]
        shape = (*node.shape[:-1], node.shape[-1] + 2)
        return b.make("cat", pieces, shape, node.dtype, dim=len(shape) - 1)

    sides = extended(x, -2.0, False), extended(y, 1.0, True)
    order = (*range(len(y.shape) - 2), len(y.shape) - 1, len(y.shape) - 2)
    product = b.make("matmul", (sides[0], b.permute(sides[1], order)), im.shape(fx), wide)
    positive = b.pointwise("maximum", product, b.constant(0.0, wide), dtype=wide)
    return unary(b, "sqrt", positive, fx.meta["val"].dtype)


DECOMPOSITIONS: dict[Any, Rule] = {
    # fused with their neighbours
    **NORM_RULES,
    **REDUCTION_RULES,
    **POOLING,
    **RANDOM_RULES,
    **GRADIENT_RULES,
    # several spellings of one thing
    aten.copy_.default: _copy_,
    aten.copy.default: _copy,
    # library anchors and what goes with them
    aten._weight_norm_interface.default: _weight_norm,
    aten._euclidean_dist.default: _euclidean_dist,
    torch.ops.strop.linear.default: _linear,
    aten.linear.default: _linear,
    aten.addmm.default: _addmm,
    aten.mm.default: _mm,
    aten.mv.default: _mv,
    aten.dot.default: _dot,
    aten.vdot.default: _dot,
    aten.bmm.default: _bmm,
    torch.ops.strop.matmul.default: _matmul,
    aten.baddbmm.default: _baddbmm,
    torch.ops.strop.conv2d.default: _conv2d,
    MIXED_PRODUCT: _mixed_product,
    **SCANS,
    **RECURRENCES,
    **BAGS,
    aten.convolution.default: _convolution,
    torch.ops.strop.convolution.default: _convolution,
    torch.ops.strop.attention.default: _attention,
    aten._scaled_dot_product_flash_attention_for_cpu.default: _fused_attention,
}
