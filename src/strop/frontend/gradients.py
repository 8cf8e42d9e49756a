"""Write backward operators as reductions and pointwise nodes, so that they fuse with their
neighbours.

Gradients of norm weights and biases are reductions over the other dims: column kernels, whose sums
have one order whatever the device. Everything is in the compute type until it is a result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Node as FxNode

import strop.frontend.joint  # noqa: F401  (defines torch.ops.strop)
from strop.frontend.lookups import take
from strop.frontend.norms import batch_statistics, group_statistics, layer_statistics, rstd_of
from strop.frontend.reductions import Rule, binary, unary
from strop.ir.contractions import NHWC
from strop.ir.dims import Expr, const, product
from strop.ir.graph import Builder, Node, Shape
from strop.ir.ops import compute_dtype

if TYPE_CHECKING:
    from strop.frontend.importer import Importer

aten = torch.ops.aten
Mask = Sequence[bool]
MEAN = 1  # of the numbers that ATen has for the reductions of a loss


@dataclass(frozen=True, slots=True)
class MemoryOrder:
    """Hold the memory order that a call into torch reads and writes, of its tensors with four dims.
    Weights stay as they are."""

    order: tuple[int, ...]
    num_operands: int  # that are no weights
    num_results: int

    def operands(self, inputs: Sequence[Node]) -> tuple[tuple[int, ...] | None, ...]:
        return tuple(
            self.order if n < self.num_operands and len(x.shape) == 4 else None
            for n, x in enumerate(inputs)
        )

    def result(self, number: int, shape: Shape) -> tuple[int, ...] | None:
        return self.order if number < self.num_results and len(shape) == 4 else None


_BSHD = (0, 2, 1, 3)  # (B, H, S, D) as (B, S, H, D): what projections give and take
_FORWARD, _BACKWARD = MemoryOrder(_BSHD, 3, 1), MemoryOrder(_BSHD, 5, 3)
# Attention as a library lays out its own results. cuDNN's backward wants it so: torch keeps its
# plan by the strides of query, key and value alone, and uses it for results that lie otherwise too.
# Pools and resizes give back pictures that lie as the ones that they get, which convolutions make.
KEPT_LAYOUTS: dict[Any, MemoryOrder] = {
    aten.max_pool2d_with_indices.default: MemoryOrder(NHWC, 1, 2),
    aten.max_pool2d_with_indices_backward.default: MemoryOrder(NHWC, 3, 1),
    aten.avg_pool2d_backward.default: MemoryOrder(NHWC, 2, 1),
    aten._adaptive_avg_pool2d_backward.default: MemoryOrder(NHWC, 2, 1),
    aten.upsample_nearest2d_backward.default: MemoryOrder(NHWC, 1, 1),
    # a weight's gradient comes as the pictures lie; what becomes of it is laid out as the weight
    aten.convolution_backward.default: MemoryOrder(NHWC, 2, 2),
    aten._scaled_dot_product_cudnn_attention.default: _FORWARD,
    aten._scaled_dot_product_cudnn_attention_backward.default: _BACKWARD,
    aten._scaled_dot_product_flash_attention.default: _FORWARD,
    aten._scaled_dot_product_flash_attention_backward.default: _BACKWARD,
    aten._scaled_dot_product_flash_attention_for_cpu.default: _FORWARD,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: _BACKWARD,
    aten._scaled_dot_product_efficient_attention.default: _FORWARD,
    # the fifth operand may be a mask
    aten._scaled_dot_product_efficient_attention_backward.default: MemoryOrder(_BSHD, 4, 3),
}


def _convolution(im: Importer, fx: FxNode, grad: Any, *args: Any) -> tuple[Node | None, ...]:
    """Call the library's gradient, without the bias, which is a sum of ours."""
    from strop.frontend.importer import opaque_call  # whose tables have this rule in them

    *rest, mask = args
    of_x, of_weight = (None, None)
    if any(mask[:2]):
        of_x, of_weight, _ = opaque_call(im, fx, (grad, *rest, [*mask[:2], False]))
    if not mask[2]:
        return of_x, of_weight, None
    b, node, value = im.builder, im.node(grad), fx.meta["val"][2]
    dims = tuple(d for d in range(len(node.shape)) if d != 1)
    return of_x, of_weight, _total(b, node, dims, value.dtype, im.symbols.shape(value.shape))


def _number(b: Builder, value: Expr, dtype: torch.dtype) -> Node:
    """Make a count a constant."""
    return b.constant(float(value.value) if value.is_const else value, dtype)


def _total(b: Builder, x: Node, dims: tuple[int, ...], dtype: torch.dtype, shape: Shape) -> Node:
    """Sum over ``dims``, in ``shape``: the gradient of something that was broadcast."""
    summed = b.reduce("sum", x, dims, dtype) if dims else b.cast(x, dtype)
    return b.reshape(summed, shape)


def _layer_norm(
    im: Importer,
    fx: FxNode,
    grad: Any,
    x: Any,
    normalized: Sequence[Any],
    mean: Any,
    rstd: Any,
    weight: Any,
    bias: Any,
    mask: Mask,
) -> tuple[Node | None, ...]:
    """Compute, with h = (x - mean) * rstd and g = grad * weight, dx = rstd * (g - mean(g) - h *
    mean(g * h)), of the weight sum(grad * h), of the bias sum(grad)."""
    b, (grad, x, mean, rstd) = im.builder, (im.node(t) for t in (grad, x, mean, rstd))
    wide, first = compute_dtype(x.dtype), len(x.shape) - len(normalized)
    inner, outer = tuple(range(first, len(x.shape))), tuple(range(first))
    h = binary(b, "mul", binary(b, "sub", x, mean, wide), rstd, wide)
    shape = x.shape[first:]
    g = grad if weight is None else binary(b, "mul", grad, im.node(weight), wide)
    found = _centred(b, g, h, rstd, inner, x.dtype) if mask[0] else None
    product_ = binary(b, "mul", grad, h, wide)
    types = [None if value is None else value.dtype for value in fx.meta["val"]]
    of_weight = _total(b, product_, outer, types[1], shape) if mask[1] and types[1] else None
    of_bias = _total(b, grad, outer, types[2], shape) if mask[2] and types[2] else None
    return found, of_weight, of_bias


def _centred(
    b: Builder, g: Node, h: Node, rstd: Node, dims: tuple[int, ...], dtype: torch.dtype
) -> Node:
    wide = h.dtype
    along = b.reduce("mean", binary(b, "mul", g, h, wide), dims, wide)
    rest = binary(b, "sub", g, b.reduce("mean", g, dims, wide), wide)
    rest = binary(b, "sub", rest, binary(b, "mul", h, along, wide), wide)
    return binary(b, "mul", rest, rstd, dtype)


def _rms_norm(
    im: Importer,
    fx: FxNode,
    grad: Any,
    x: Any,
    normalized: Sequence[Any],
    rstd: Any,
    weight: Any,
    mask: Mask,
) -> tuple[Node | None, Node | None]:
    """Compute a layer norm's gradients without a mean."""
    b, (grad, x, rstd) = im.builder, (im.node(t) for t in (grad, x, rstd))
    wide, first = compute_dtype(x.dtype), len(x.shape) - len(normalized)
    inner, outer = tuple(range(first, len(x.shape))), tuple(range(first))
    h = binary(b, "mul", x, rstd, wide)
    g = grad if weight is None else binary(b, "mul", grad, im.node(weight), wide)
    along = b.reduce("mean", binary(b, "mul", g, h, wide), inner, wide)
    rest = binary(b, "sub", g, binary(b, "mul", h, along, wide), wide)
    found = binary(b, "mul", rest, rstd, x.dtype)
    if weight is None or not mask[1]:
        return found, None
    product_ = binary(b, "mul", grad, h, wide)
    return found, _total(b, product_, outer, fx.meta["val"][1].dtype, x.shape[first:])


def _group_norm(
    im: Importer,
    fx: FxNode,
    grad: Any,
    x: Any,
    mean: Any,
    rstd: Any,
    weight: Any,
    n: Any,
    c: Any,
    hw: Any,
    groups: int,
    mask: Mask,
) -> tuple[Node | None, ...]:
    """Compute a layer norm's gradients from two sums for each image and channel, which one kernel
    makes in a single sweep and in either layout; what is left of every reduction is small."""
    b, (grad, x, mean, rstd) = im.builder, (im.node(t) for t in (grad, x, mean, rstd))
    wide, pixels = compute_dtype(x.dtype), tuple(range(2, len(x.shape)))
    batch, channels = x.shape[:2]
    width, ones = channels.exact_div(const(groups)), [const(1)] * len(pixels)
    if width is None:
        return (None,) * 3
    grouped, per_channel = (batch, const(groups), width), (batch, channels, *ones)

    def spread(statistic: Node) -> Node:
        whole = b.expand(b.reshape(statistic, (batch, groups, 1)), grouped)
        return b.reshape(whole, per_channel)

    def summed(value: Node) -> Node:
        return b.reduce("sum", value, pixels, wide) if pixels else b.cast(value, wide)

    h = binary(b, "mul", binary(b, "sub", x, spread(mean), wide), spread(rstd), wide)
    sums = summed(grad), summed(binary(b, "mul", grad, h, wide))
    scale = None if weight is None else b.reshape(im.node(weight), (1, channels, *ones))
    count = _number(b, width * product(x.shape[2:]), wide)

    def averaged(value: Node) -> Node:
        scaled = value if scale is None else binary(b, "mul", value, scale, wide)
        total = b.reduce("sum", b.reshape(scaled, grouped), (2,), wide)
        return spread(binary(b, "div", total, count, wide))

    g = grad if scale is None else binary(b, "mul", grad, scale, wide)
    rest = binary(b, "sub", g, averaged(sums[0]), wide)
    rest = binary(b, "sub", rest, binary(b, "mul", h, averaged(sums[1]), wide), wide)
    found = binary(b, "mul", rest, spread(rstd), x.dtype) if mask[0] else None
    types = [None if value is None else value.dtype for value in fx.meta["val"]]
    of_weight = _total(b, sums[1], (0,), types[1], (channels,)) if mask[1] and types[1] else None
    of_bias = _total(b, sums[0], (0,), types[2], (channels,)) if mask[2] and types[2] else None
    return found, of_weight, of_bias


def _batch_norm(
    im: Importer,
    fx: FxNode,
    grad: Any,
    x: Any,
    weight: Any,
    running_mean: Any,
    running_var: Any,
    mean: Any,
    rstd: Any,
    train: bool,
    eps: float,
    mask: Mask,
) -> tuple[Node | None, ...] | None:
    """Compute the gradients of a norm with running statistics: a product, and two sums for weights
    that are not frozen. With the statistics of its batch, h = (x - mean) * rstd, dx is rstd *
    weight * (grad - mean(grad) - h * mean(grad * h))."""
    if train and (mean is None or rstd is None):
        return None
    b, (grad, x) = im.builder, (im.node(t) for t in (grad, x))
    wide, channels = compute_dtype(x.dtype), x.shape[1]
    dims = tuple(d for d in range(len(x.shape)) if d != 1)

    def of_channels(value: Any) -> Node:
        return b.reshape(im.node(value), (const(1), channels, *[const(1)] * (len(dims) - 1)))

    centre = of_channels(mean if train else running_mean)
    inverse = of_channels(rstd) if train else rstd_of(b, of_channels(running_var), eps, wide)
    scale = inverse
    if weight is not None:
        scale = binary(b, "mul", inverse, of_channels(weight), wide)
    types = [None if value is None else value.dtype for value in fx.meta["val"]]
    h = binary(b, "mul", binary(b, "sub", x, centre, wide), inverse, wide)
    along = binary(b, "mul", grad, h, wide)
    rest = grad
    if train:
        count = _number(b, product(x.shape[d] for d in dims), wide)
        sums = (b.reduce("sum", value, dims, wide) for value in (grad, along))
        own, of_h = (binary(b, "div", total, count, wide) for total in sums)
        rest = binary(
            b, "sub", binary(b, "sub", grad, own, wide), binary(b, "mul", h, of_h, wide), wide
        )
    found = binary(b, "mul", rest, scale, x.dtype) if mask[0] else None
    of_weight = of_bias = None
    if mask[1] and types[1]:
        of_weight = _total(b, along, dims, types[1], (channels,))
    if mask[2] and types[2]:
        of_bias = _total(b, grad, dims, types[2], (channels,))
    return found, of_weight, of_bias


def _softmax(im: Importer, fx: FxNode, grad: Any, y: Any, dim: int, dtype: torch.dtype) -> Node:
    """Compute y * (grad - sum(grad * y))."""
    b, grad, y = im.builder, im.node(grad), im.node(y)
    wide, dims = compute_dtype(y.dtype), (dim % len(y.shape),) if y.shape else ()
    total = b.reduce("sum", binary(b, "mul", grad, y, wide), dims, wide)
    return binary(b, "mul", y, binary(b, "sub", grad, total, wide), fx.meta["val"].dtype)


def _log_softmax(im: Importer, fx: FxNode, grad: Any, y: Any, dim: int, dtype: torch.dtype) -> Node:
    """Compute grad - exp(y) * sum(grad)."""
    b, grad, y = im.builder, im.node(grad), im.node(y)
    wide, dims = compute_dtype(y.dtype), (dim % len(y.shape),) if y.shape else ()
    total = b.reduce("sum", grad, dims, wide)
    share = binary(b, "mul", unary(b, "exp", y, wide), total, wide)
    return binary(b, "sub", grad, share, fx.meta["val"].dtype)


def _mse(im: Importer, fx: FxNode, grad: Any, x: Any, y: Any, reduction: int) -> Node:
    """Compute 2 * (x - y) * grad, over the count for a mean."""
    b, grad, x, y = im.builder, im.node(grad), im.node(x), im.node(y)
    wide = compute_dtype(x.dtype)
    factor = binary(b, "mul", grad, b.constant(2.0, wide), wide)
    if reduction == MEAN:
        factor = binary(b, "div", factor, _number(b, product(im.shape(fx)), wide), wide)
    return binary(b, "mul", binary(b, "sub", x, y, wide), factor, fx.meta["val"].dtype)


def _labels(im: Importer, x: Node, target: Any, ignored: int) -> tuple[int, Node, Node]:
    """Return the dim of the classes, the labels with a dim of size 1 in its place, and which
    count."""
    b, place = im.builder, min(1, len(x.shape) - 1)
    shape = (*x.shape[:place], const(1), *x.shape[place + 1 :])
    labels = b.reshape(im.node(target), shape)
    counts = binary(b, "ne", labels, b.constant(ignored, labels.dtype), torch.bool)
    return place, labels, counts


def _nll(
    im: Importer, fx: FxNode, x: Any, target: Any, weight: Any, reduction: int, ignored: int
) -> tuple[Node, Node] | None:
    b, x = im.builder, im.node(x)
    wide = compute_dtype(x.dtype)
    place, labels, counts = _labels(im, x, target, ignored)
    zero = b.constant(0, labels.dtype)
    looked_up = b.pointwise("where", counts, labels, zero, dtype=labels.dtype)
    walks = [None if d == place else d for d in range(len(x.shape))]
    chosen = take(b, x, (looked_up,), walks, labels.shape, "checked")
    if chosen is None:
        return None
    factor = b.cast(counts, wide)
    if weight is not None:
        found = take(b, im.node(weight), (looked_up,), (None,), labels.shape, "checked")
        if found is None:
            return None
        factor = binary(b, "mul", factor, found, wide)
    loss = binary(b, "mul", unary(b, "neg", chosen, wide), factor, wide)
    none = b.constant(0.0, wide)
    loss = b.pointwise("where", counts, loss, none, dtype=wide)  # inf * 0
    value, total = fx.meta["val"]
    every = tuple(range(len(x.shape)))
    weights = b.reshape(b.reduce("sum", factor, every, wide), ())
    if not reduction:
        shape = im.symbols.shape(value.shape)
        return b.reshape(b.cast(loss, value.dtype), shape), b.cast(none, total.dtype)
    summed = b.reshape(b.reduce("sum", loss, every, wide), ())
    if reduction == MEAN:
        summed = binary(b, "div", summed, weights, wide)
    return b.cast(summed, value.dtype), b.cast(weights, total.dtype)


def _nll_backward(
    im: Importer,
    fx: FxNode,
    grad: Any,
    x: Any,
    target: Any,
    weight: Any,
    reduction: int,
    ignored: int,
    total: Any,
) -> Node:
    """Compute -grad * weight where the class is the label, over the total weight for a mean."""
    b, grad, x = im.builder, im.node(grad), im.node(x)
    wide = compute_dtype(x.dtype)
    place, labels, counts = _labels(im, x, target, ignored)
    along = [x.shape[place] if d == place else const(1) for d in range(len(x.shape))]
    classes = b.make("iota", (), (x.shape[place],), labels.dtype, start=0, step=1)
    hit = binary(b, "eq", b.reshape(classes, along), labels, torch.bool)
    hit = binary(b, "logical_and", hit, counts, torch.bool)
    slope = unary(b, "neg", grad if not grad.shape else b.reshape(grad, labels.shape), wide)
    if weight is not None:
        slope = binary(b, "mul", slope, b.reshape(im.node(weight), along), wide)
    if reduction == MEAN:
        slope = binary(b, "div", slope, im.node(total), wide)
    return b.pointwise("where", hit, slope, b.constant(0.0, wide), dtype=fx.meta["val"].dtype)


def _converted(im: Importer, fx: FxNode, x: Any, dtype: torch.dtype) -> Node:
    return im.builder.cast(im.node(x), dtype)


def _divided(im: Importer, fx: FxNode, x: Any, y: Any) -> Node:
    dtype = fx.meta["val"].dtype
    wide = compute_dtype(dtype)
    return binary(im.builder, "div", im.operand(x, wide), im.operand(y, wide), dtype)


GRADIENT_RULES: dict[Any, Rule] = {
    # statistics that the forward keeps (``dispatch.training`` has norms traced as these)
    torch.ops.strop.batch_statistics.default: batch_statistics,
    torch.ops.strop.group_statistics.default: group_statistics,
    torch.ops.strop.layer_statistics.default: layer_statistics,
    aten.convolution_backward.default: _convolution,
    aten.native_layer_norm_backward.default: _layer_norm,
    aten.native_group_norm_backward.default: _group_norm,
    aten._fused_rms_norm_backward.default: _rms_norm,
    aten.native_batch_norm_backward.default: _batch_norm,
    aten._softmax_backward_data.default: _softmax,
    aten._log_softmax_backward_data.default: _log_softmax,
    # losses
    aten.mse_loss_backward.default: _mse,
    aten.nll_loss_forward.default: _nll,
    aten.nll_loss2d_forward.default: _nll,
    aten.nll_loss_backward.default: _nll_backward,
    aten.nll_loss2d_backward.default: _nll_backward,
    # with numbers that Dynamo made arguments, in the type of what they meet
    aten.true_divide.Tensor: _divided,
    torch.ops.prims.convert_element_type.default: _converted,
}
