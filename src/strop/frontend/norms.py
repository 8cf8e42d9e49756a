"""Write normalisations and softmax as reductions and pointwise nodes.

So the planner can fuse what stands before and after them. Intermediate values are in the compute
type and only the result has the user's dtype.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Node as FxNode

import strop.frontend.operators  # noqa: F401  (defines torch.ops.strop)
from strop.errors import ShapeError
from strop.frontend.creation import filled
from strop.frontend.reductions import Rule, binary, log_of_sum, rounded, unary
from strop.ir.dims import const, product
from strop.ir.graph import Builder, Node, Shape
from strop.ir.ops import compute_dtype

if TYPE_CHECKING:
    from strop.frontend.importer import Importer

aten = torch.ops.aten
SUMS = (aten.add.Tensor, aten.sub.Tensor)  # in place too: a trace has no other


def rstd_of(b: Builder, var: Node, eps: float, wide: torch.dtype) -> Node:
    return unary(b, "rsqrt", binary(b, "add", var, b.constant(eps, wide), wide), wide)


def _moments(b: Builder, x: Node, dims: tuple[int, ...], eps: float) -> tuple[Node, Node]:
    """Compute (mean, 1/sqrt(variance + eps)) over ``dims``, in the compute type of x."""
    wide = compute_dtype(x.dtype)
    mean = b.reduce("mean", x, dims, wide)
    return mean, rstd_of(b, b.reduce("var", x, dims, wide, correction=0), eps, wide)


def _normalized(
    b: Builder, x: Node, mean: Node, rstd: Node, weight: Node | None, bias: Node | None
) -> Node:
    """Compute (x - mean) * (rstd * weight) + bias: the last two steps are one fused multiply-add.

    Centred first, so that a mean far from zero costs no digits; the result counts as x's dtype.
    """
    wide = compute_dtype(x.dtype)
    scale = rstd if weight is None else binary(b, "mul", rstd, weight, wide)
    y = binary(b, "mul", binary(b, "sub", x, mean, wide), scale, wide)
    return _as(b, y, x.dtype) if bias is None else binary(b, "add", y, bias, x.dtype)


def _as(b: Builder, x: Node, dtype: torch.dtype) -> Node:
    """Count x as ``dtype``: it is rounded where it is stored, and nowhere else."""
    return x if x.dtype == dtype else b.make("copy", (x,), x.shape, dtype)


def _shaped(im: Importer, parameter: Any, shape: Shape) -> Node | None:
    return None if parameter is None else im.builder.reshape(im.node(parameter), shape)


def _native_group_norm(
    im: Importer,
    fx: FxNode,
    x: Any,
    weight: Any,
    bias: Any,
    n: Any,
    c: Any,
    hw: Any,
    groups: int,
    eps: float,
) -> tuple[Node, Node, Node]:
    y, mean, rstd = _group_norm(im, fx, x, groups, weight, bias, eps)
    return y, *_as_eager_keeps(im, fx, mean, rstd)


def _as_eager_keeps(im: Importer, fx: FxNode, mean: Node, rstd: Node) -> tuple[Node, Node]:
    """Cast a norm's statistics: on a CPU, eager rounds them to the type of half operands."""
    kept = fx.meta["val"][1:3]
    return im.builder.cast(mean, kept[0].dtype), im.builder.cast(rstd, kept[1].dtype)


def _strop_group_norm(im: Importer, fx: FxNode, *args: Any) -> Node:
    return _group_norm(im, fx, *args)[0]


def _group_norm(
    im: Importer, fx: FxNode, x: Any, groups: int, weight: Any, bias: Any, eps: float
) -> tuple[Node, Node, Node]:
    b, x = im.builder, im.node(x)
    batch, channels, *rest = x.shape
    mean, rstd = _group_moments(b, x, groups, eps)
    width = channels.exact_div(const(groups))
    per_channel = (const(1), channels, *[const(1)] * len(rest))

    def of_channels(statistic: Node) -> Node:
        spread = b.expand(statistic, (batch, groups, width or 1, 1))
        return b.reshape(spread, (batch, *per_channel[1:]))

    affine = (_shaped(im, p, per_channel) for p in (weight, bias))
    y = _normalized(b, x, of_channels(mean), of_channels(rstd), *affine)
    return y, b.reshape(mean, (batch, groups)), b.reshape(rstd, (batch, groups))


def _group_moments(b: Builder, x: Node, groups: int, eps: float) -> tuple[Node, Node]:
    """Compute (mean, 1/sqrt(variance + eps)) of shape (batch, groups, 1, 1)."""
    batch, channels, *rest = x.shape
    width = channels.exact_div(const(groups))
    if width is None:
        raise ShapeError(
            f"group_norm: the channels, {channels}, do not divide into {groups} groups"
        )
    return _moments(b, b.reshape(x, (batch, groups, width, product(rest))), (2, 3), eps)


def group_statistics(im: Importer, fx: FxNode, x: Any, groups: int, eps: float) -> tuple[Node, ...]:
    """Compute what a group norm whose backward compiles keeps of its input."""
    b, x = im.builder, im.node(x)
    return tuple(b.reshape(s, (x.shape[0], groups)) for s in _group_moments(b, x, groups, eps))


def batch_statistics(im: Importer, fx: FxNode, x: Any) -> tuple[Node, ...]:
    """Compute the mean and the variance of each channel, which is divided by the count."""
    b, x = im.builder, im.node(x)
    wide, dims = compute_dtype(x.dtype), tuple(d for d in range(len(x.shape)) if d != 1)
    mean, var = b.reduce("mean", x, dims, wide), b.reduce("var", x, dims, wide, correction=0)
    return b.reshape(mean, (x.shape[1],)), b.reshape(var, (x.shape[1],))


def layer_statistics(im: Importer, fx: FxNode, x: Any, dims: int, eps: float) -> tuple[Node, ...]:
    x = im.node(x)
    return _moments(im.builder, x, _last_dims(x, dims), eps)


def _last_dims(x: Node, count: int) -> tuple[int, ...]:
    return tuple(range(len(x.shape) - count, len(x.shape)))


def _layer_norm(
    im: Importer, fx: FxNode, x: Any, normalized: Sequence[Any], weight: Any, bias: Any, eps: float
) -> tuple[Node, Node, Node]:
    b, x = im.builder, im.node(x)
    dims = _last_dims(x, len(normalized))
    mean, rstd = _moments(b, x, dims, eps)
    shape = tuple(x.shape[d] for d in dims)
    affine = (_shaped(im, p, shape) for p in (weight, bias))
    return _normalized(b, x, mean, rstd, *affine), *_as_eager_keeps(im, fx, mean, rstd)


def _fused_rms_norm(
    im: Importer,
    fx: FxNode,
    x: Any,
    normalized: Sequence[Any],
    weight: Any = None,
    eps: float | None = None,
) -> tuple[Node, Node]:
    b, x = im.builder, im.node(x)
    wide, dims = compute_dtype(x.dtype), _last_dims(x, len(normalized))
    squares = b.reduce("mean", binary(b, "mul", x, x, wide), dims, wide)
    rstd = rstd_of(b, squares, torch.finfo(wide).eps if eps is None else eps, wide)
    y = binary(b, "mul", x, rstd, wide)
    scale = _shaped(im, weight, tuple(x.shape[d] for d in dims))
    return _as(b, y, x.dtype) if scale is None else binary(b, "mul", y, scale, x.dtype), rstd


def _rms_norm(im: Importer, fx: FxNode, *args: Any, **kwargs: Any) -> Node:
    return _fused_rms_norm(im, fx, *args, **kwargs)[0]


def _batch_norm(
    im: Importer,
    fx: FxNode,
    x: Any,
    weight: Any,
    bias: Any,
    running_mean: Any,
    running_var: Any,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[Node | None, ...] | None:
    """Normalise pointwise with running statistics, and by two reductions with those of the batch
    (instance_norm).

    Running statistics that would have to be updated are torch's business.
    """
    if training and running_mean is not None:
        return None
    b, x = im.builder, im.node(x)
    wide = compute_dtype(x.dtype)
    shape = (const(1), x.shape[1], *[const(1)] * (len(x.shape) - 2))
    if training:
        mean, rstd = _moments(b, x, tuple(d for d in range(len(x.shape)) if d != 1), eps)
        flat = (b.reshape(statistic, (x.shape[1],)) for statistic in (mean, rstd))
        saved = _as_eager_keeps(im, fx, *flat)
    else:
        mean, var = (b.reshape(im.node(p), shape) for p in (running_mean, running_var))
        rstd = rstd_of(b, var, eps, wide)
        empty = fx.meta["val"][1]  # torch's own backward takes them, and does not look inside
        saved = (filled(b, 0.0, im.symbols.shape(empty.shape), empty.dtype),) * 2
    affine = (_shaped(im, p, shape) for p in (weight, bias))
    result = _normalized(b, x, mean, rstd, *affine)
    return result if training or not _is_summed(fx) else rounded(b, result), *saved, None


def _is_summed(norm: FxNode) -> bool:
    """Tell whether something is added to the result of a norm, which is rounded first then.

    A norm by running statistics of 0 and 1 multiplies by 1 - 5e-6: nothing in half precision, but
    a sum that lies between two numbers is no longer in the middle. Added in fp32 it is rounded
    to the same side each time, layer after layer; eager rounds to even.
    """
    stack = [user for user in norm.users if user.args[1:] == (0,)]  # of results, the first
    while stack:
        for reader in stack.pop().users:
            if reader.target in SUMS:
                return True
            if getattr(reader.target, "is_view", False):
                stack.append(reader)
    return False


def _batch_norm_without_training(
    im: Importer,
    fx: FxNode,
    x: Any,
    weight: Any,
    bias: Any,
    mean: Any,
    var: Any,
    momentum: float,
    eps: float,
) -> Any:
    return _batch_norm(im, fx, x, weight, bias, mean, var, False, momentum, eps)


def _batch_norm_without_statistics(
    im: Importer,
    fx: FxNode,
    x: Any,
    weight: Any,
    bias: Any,
    training: bool,
    momentum: float,
    eps: float,
) -> Any:
    return _batch_norm(im, fx, x, weight, bias, None, None, training, momentum, eps)


def _softmax(im: Importer, fx: FxNode, x: Any, dim: int, half_to_float: bool) -> Node:
    b, x, dtype = im.builder, im.node(x), fx.meta["val"].dtype
    wide, dims = compute_dtype(dtype), _softmax_dims(x, dim)
    shifted = binary(b, "sub", x, b.reduce("amax", x, dims, wide), wide)
    powers = unary(b, "exp", shifted, wide)
    return binary(b, "div", powers, b.reduce("sum", powers, dims, wide), dtype)


def _log_softmax(im: Importer, fx: FxNode, x: Any, dim: int, half_to_float: bool) -> Node:
    b, x, dtype = im.builder, im.node(x), fx.meta["val"].dtype
    wide, dims = compute_dtype(dtype), _softmax_dims(x, dim)
    top = b.reduce("amax", x, dims, wide)
    shifted = binary(b, "sub", x, top, wide)
    return binary(b, "sub", shifted, log_of_sum(b, x, top, dims, wide), dtype)


def _softmax_dims(x: Node, dim: int) -> tuple[int, ...]:
    return (dim % len(x.shape),) if x.shape else ()


NORM_RULES: dict[Any, Rule] = {
    torch.ops.strop.group_norm.default: _strop_group_norm,
    aten.native_group_norm.default: _native_group_norm,
    aten.native_layer_norm.default: _layer_norm,
    aten.rms_norm.default: _rms_norm,
    torch.ops.strop.rms_norm.default: _rms_norm,
    aten._fused_rms_norm.default: _fused_rms_norm,
    aten.native_batch_norm.default: _batch_norm,
    aten.cudnn_batch_norm.default: _batch_norm,
    aten._native_batch_norm_legit.no_stats: _batch_norm_without_statistics,
    aten._native_batch_norm_legit_no_training.default: _batch_norm_without_training,
    aten._softmax.default: _softmax,
    aten._log_softmax.default: _log_softmax,
}
