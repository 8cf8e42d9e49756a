"""Import pointwise overloads that are other rows of the operator table, or a few of them.

``aten.masked_fill`` is ``where`` with its arguments in another order; ``aten.nan_to_num`` is three
of them. Each rule returns None where it does not apply, and the call then looks for a row.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Node as FxNode

from strop.ir.graph import Node
from strop.ir.ops import OPS, compute_dtype

if TYPE_CHECKING:
    from strop.frontend.importer import Importer

aten = torch.ops.aten
Rule = Callable[..., Any]


def _dtype(fx: FxNode) -> torch.dtype:
    dtype: torch.dtype = fx.meta["val"].dtype
    return dtype


def apply(im: Importer, op: str, *args: Any, dtype: torch.dtype) -> Node:
    """Apply one row to nodes, FX nodes and numbers."""
    nodes = [a if isinstance(a, Node) else im.operand(a, compute_dtype(dtype)) for a in args]
    return im.builder.pointwise(op, *nodes, dtype=dtype, **OPS[op].attrs)


def _masked_fill(im: Importer, fx: FxNode, x: Any, mask: Any, value: Any) -> Node:
    return apply(im, "where", mask, value, x, dtype=_dtype(fx))


def _whole(im: Importer, fx: FxNode, x: Any) -> Node | None:
    """Round an integer, which is the integer itself."""
    return None if _dtype(fx).is_floating_point else im.node(x)


def _whole_is(value: bool) -> Rule:
    """Return a rule for a test on floats that integers always pass or fail."""

    def rule(im: Importer, fx: FxNode, x: Any) -> Node | None:
        node = im.node(x)
        if node.dtype.is_floating_point:
            return None
        constant = im.builder.constant(value, torch.bool)
        return im.builder.expand(im.builder.view_as_rank(constant, len(node.shape)), node.shape)

    return rule


def _floor_divide(im: Importer, fx: FxNode, x: Any, y: Any) -> Node:
    op = "div_floor" if _dtype(fx).is_floating_point else "div_floor_int"
    return apply(im, op, x, y, dtype=_dtype(fx))


# x ** exponent, as ATen computes it too
_POWERS = {0.5: "sqrt", -0.5: "rsqrt", 2: "square", -1: "reciprocal"}


def _pow_scalar(im: Importer, fx: FxNode, x: Any, exponent: Any) -> Node | None:
    dtype = _dtype(fx)
    if not isinstance(exponent, int | float):
        return None
    if exponent == 1:
        return im.builder.cast(im.node(x), dtype)
    if exponent in _POWERS and (dtype.is_floating_point or exponent == 2):
        return apply(im, _POWERS[exponent], im.node(x), dtype=dtype)
    if exponent == 3 or not dtype.is_floating_point:
        return _product(im, im.node(x), int(exponent), dtype)
    return None


def _product(im: Importer, x: Node, count: int, dtype: torch.dtype) -> Node | None:
    """Compute x ** count from squares: exact for integers, which wrap."""
    if count < 1:
        return None
    wide, factors, power = compute_dtype(dtype), [], x
    while count:
        if count & 1:
            factors.append(power)
        count >>= 1
        if count:
            power = apply(im, "square", power, dtype=wide)
    for factor in factors[1:-1]:
        factors[0] = apply(im, "mul", factors[0], factor, dtype=wide)
    if len(factors) == 1:
        return im.builder.make("copy", (power,), power.shape, dtype)
    return apply(im, "mul", factors[0], factors[-1], dtype=dtype)


def _ldexp(im: Importer, fx: FxNode, x: Any, exponent: Any) -> Node:
    dtype = _dtype(fx)
    factor = apply(im, "exp2", exponent, dtype=compute_dtype(dtype))
    return apply(im, "mul", x, factor, dtype=dtype)


def _logit(im: Importer, fx: FxNode, x: Any, eps: float | None = None) -> Node | None:
    if eps is None or eps < 0:
        return None
    dtype = _dtype(fx)
    kept = apply(im, "clamp", x, eps, 1.0 - eps, dtype=compute_dtype(dtype))
    return apply(im, "logit", kept, dtype=dtype)


def _log_sigmoid(im: Importer, fx: FxNode, x: Any) -> tuple[Node, Node] | None:
    """Compute log-sigmoid and its buffer, which is what the backward of CPUs keeps; on GPUs it is
    empty."""
    dtype = fx.meta["val"][0].dtype
    if fx.meta["val"][0].device.type != "cpu" and {u.args[1] for u in fx.users} - {0}:
        return None
    away = apply(im, "neg", apply(im, "abs", x, dtype=dtype), dtype=dtype)
    return apply(im, "logsigmoid", x, dtype=dtype), apply(im, "exp", away, dtype=dtype)


def _hardtanh(
    im: Importer, fx: FxNode, x: Any, min_val: float = -1.0, max_val: float = 1.0
) -> Node | None:
    """Clamp; integers get bounds that are cut to integers, as torch does."""
    dtype = _dtype(fx)
    if dtype.is_floating_point:
        return None
    return apply(im, "clamp", x, int(min_val), int(max_val), dtype=dtype)


def _nan_to_num(
    im: Importer,
    fx: FxNode,
    x: Any,
    nan: float | None = None,
    posinf: float | None = None,
    neginf: float | None = None,
) -> Node:
    dtype, node = _dtype(fx), im.node(x)
    if not dtype.is_floating_point:
        return node
    info, b = torch.finfo(dtype), im.builder
    found = node
    for infinity, given, default in (
        (math.inf, posinf, info.max),
        (-math.inf, neginf, info.min),
    ):
        limit = b.constant(infinity, compute_dtype(dtype))
        hit = b.pointwise("eq", node, limit, dtype=torch.bool)
        found = apply(im, "where", hit, default if given is None else given, found, dtype=dtype)
    hit = b.pointwise("isnan", node, dtype=torch.bool)
    return apply(im, "where", hit, 0.0 if nan is None else nan, found, dtype=dtype)


def _glu(im: Importer, fx: FxNode, x: Any, dim: int = -1) -> Node | None:
    node, b = im.node(x), im.builder
    dim %= len(node.shape)
    half = im.shape(fx)[dim]
    value, gate = b.slice(node, dim, 0, half), b.slice(node, dim, half, half)
    open_ = apply(im, "sigmoid", gate, dtype=compute_dtype(node.dtype))
    return apply(im, "mul", value, open_, dtype=node.dtype)


def _loss(op: str) -> Rule:
    """Return a rule for the loss of each element, or their mean or sum."""

    def rule(im: Importer, fx: FxNode, x: Any, y: Any, reduction: int = 1, *_: Any) -> Node:
        b, dtype = im.builder, _dtype(fx)
        wide = compute_dtype(dtype)
        less = apply(im, "sub", x, y, dtype=wide)
        loss = apply(im, op, less, dtype=wide if reduction else dtype)
        if not reduction:
            return loss
        every = tuple(range(len(loss.shape)))
        return b.reshape(b.reduce(("mean", "sum")[reduction - 1], loss, every, dtype), ())

    return rule


def _dropout_backward(im: Importer, fx: FxNode, grad: Any, mask: Any, scale: float) -> Node:
    dtype = _dtype(fx)
    kept = apply(im, "mul", grad, scale, dtype=compute_dtype(dtype))
    return apply(im, "where", mask, kept, 0.0, dtype=dtype)


def _prelu_backward(im: Importer, fx: FxNode, grad: Any, x: Any, weight: Any) -> tuple[Node, Node]:
    """Compute the gradients of the input and, not yet reduced, of the weight."""
    dtype = fx.meta["val"][0].dtype
    zero = im.operand(0.0, compute_dtype(dtype))
    is_positive = im.builder.pointwise("gt", im.node(x), zero, dtype=torch.bool)
    scaled, of_weight = (
        apply(im, "mul", factor, grad, dtype=compute_dtype(dtype)) for factor in (weight, x)
    )
    return (
        apply(im, "where", is_positive, grad, scaled, dtype=dtype),
        apply(im, "where", is_positive, 0.0, of_weight, dtype=dtype),
    )


COMPOSITES: dict[Any, Rule] = {
    # another order of arguments
    aten.masked_fill.Scalar: _masked_fill,
    aten.masked_fill.Tensor: _masked_fill,
    aten.floor_divide.default: _floor_divide,
    aten.floor_divide.Scalar: _floor_divide,
    # nothing to do for integers
    aten.floor.default: _whole,
    aten.ceil.default: _whole,
    aten.trunc.default: _whole,
    aten.round.default: _whole,
    aten.isinf.default: _whole_is(False),
    aten.isposinf.default: _whole_is(False),
    aten.isneginf.default: _whole_is(False),
    # cheaper ways for particular numbers
    aten.pow.Tensor_Scalar: _pow_scalar,
    # several rows
    aten.ldexp.Tensor: _ldexp,
    aten.logit.default: _logit,
    aten.log_sigmoid_forward.default: _log_sigmoid,
    aten.hardtanh.default: _hardtanh,
    aten.nan_to_num.default: _nan_to_num,
    aten.glu.default: _glu,
    aten.mse_loss.default: _loss("square"),
    # gradients
    aten.native_dropout_backward.default: _dropout_backward,
    aten._prelu_kernel_backward.default: _prelu_backward,
}
