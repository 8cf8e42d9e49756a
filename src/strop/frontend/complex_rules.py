"""Say how operators on complex numbers are made of operators on their parts.

A rule gives the two parts of a complex result, a node for a real one, or None where it does not
apply. Formulas are those of torch's own kernels (``c10/util/complex.h``), in the same precision.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch.fx import Node

from strop.frontend.views import OF_MEMORY, VIEWS

if TYPE_CHECKING:
    from strop.frontend.complex_numbers import Apart, Parts

aten = torch.ops.aten
Rule = Callable[["Apart", Node], Any]
Formula = Callable[["Apart", "Parts", "Parts"], "Parts | None"]
REAL_OF = {torch.complex64: torch.float32, torch.complex128: torch.float64}

# Arguments of which each part of the result has one part; others both parts share.
_OF_PARTS = frozenset(
    ("self", "other", "tensors", "input", "src", "value", "values", "fill_value", "grad_output")
)
_SHARED = frozenset(("alpha",))


def _dtype(node: Node) -> torch.dtype:
    """Return the type of the parts of what a node gives, or of what it reads."""
    values = (made.meta.get("val") for made in (node, *node.all_input_nodes))
    leaves = (leaf for leaf in pytree.tree_leaves(tuple(values)) if isinstance(leaf, Tensor))
    return next(REAL_OF[leaf.dtype] for leaf in leaves if leaf.dtype in REAL_OF)


def _arguments(node: Node) -> dict[str, Any]:
    schema = node.target._schema.arguments  # type: ignore[union-attr]
    named = dict(zip((a.name for a in schema), node.args, strict=False))
    return named | dict(node.kwargs)


def _partwise(apart: Apart, node: Node, imaginary: Any = None) -> Any:
    """Do to each part what is done to the whole; ``imaginary`` is another operator for the second
    part."""
    named, dtype = _arguments(node), _dtype(node)
    if any(isinstance(named.get(name), complex) for name in _SHARED):
        return None
    schema = node.target._schema.arguments  # type: ignore[union-attr]
    made = []
    for place, target in enumerate((node.target, imaginary or node.target)):
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        for argument in schema:
            if argument.name not in named:
                continue
            value = named[argument.name]
            if argument.name in _OF_PARTS:
                value = apart.mapped(value, place, dtype)
            else:
                value = REAL_OF.get(value, value) if _is_type(value) else apart.copied(value)
            if argument.kwarg_only:
                kwargs[argument.name] = value
            else:
                args.append(value)
        made.append(apart.call(target, *args, **kwargs))
    return tuple(made)


def _is_type(value: Any) -> bool:
    return isinstance(value, torch.dtype)


def _ones(zeros: Any) -> Rule:
    return lambda apart, node: _partwise(apart, node, zeros)


def _binary(formula: Formula) -> Rule:
    def rule(apart: Apart, node: Node) -> Any:
        dtype = _dtype(node)
        if len(node.args) != 2 or node.kwargs:
            return None
        x, y = (apart.parts(argument, dtype) for argument in node.args)
        return formula(apart, x, y)

    return rule


def _unary(formula: Callable[[Apart, Parts], Any]) -> Rule:
    return lambda apart, node: formula(apart, apart.parts(node.args[0], _dtype(node)))


def _times(apart: Apart, x: Any, y: Any) -> Any:
    """Multiply a part by another one, or by a number."""
    if not isinstance(x, Node) and not isinstance(y, Node):
        return x * y
    return apart.call(aten.mul.Tensor, *((x, y) if isinstance(x, Node) else (y, x)))


def _sum(apart: Apart, x: Any, y: Any, sign: int = 1) -> Any:
    if not isinstance(x, Node) and not isinstance(y, Node):
        return x + sign * y
    return apart.call(aten.add.Tensor if sign > 0 else aten.sub.Tensor, x, y)


def _product(apart: Apart, x: Parts, y: Parts) -> Parts:
    (a, b), (c, d) = x, y
    return (
        _sum(apart, _times(apart, a, c), _times(apart, b, d), -1),
        _sum(apart, _times(apart, a, d), _times(apart, b, c)),
    )


def _quotient(apart: Apart, x: Parts, y: Parts) -> Parts | None:
    """Divide by a number of which the larger part has been scaled to 1: squares do not overflow."""
    if isinstance(y[0], Node):
        one, other = (apart.call_like(part, aten.abs.default, part) for part in y)
        largest = apart.call_like(one, aten.maximum.default, one, other)
        scale: Any = apart.call_like(one, aten.reciprocal.default, largest)
    elif any(y):
        scale = 1 / max(map(abs, y))
    else:
        return None
    (a, b), (c, d) = ([_times(apart, part, scale) for part in value] for value in (x, y))
    square = _sum(apart, _times(apart, c, c), _times(apart, d, d))
    whole = (
        _sum(apart, _times(apart, a, c), _times(apart, b, d)),
        _sum(apart, _times(apart, b, c), _times(apart, a, d), -1),
    )
    real, imaginary = (apart.call(aten.div.Tensor, part, square) for part in whole)
    return real, imaginary


def _square(apart: Apart, x: Parts) -> Parts:
    return _product(apart, x, x)


def _conjugate(apart: Apart, x: Parts) -> Parts:
    return x[0], apart.call(aten.neg.default, x[1])


def _as_it_is(apart: Apart, x: Parts) -> Parts:
    return x


def _absolute(apart: Apart, x: Parts) -> Node:
    return apart.call(aten.hypot.default, *x)


def _angle(apart: Apart, x: Parts) -> Node:
    return apart.call(aten.atan2.default, x[1], x[0])


def _sign(apart: Apart, x: Parts) -> Parts:
    """Divide by the length; 0 stays 0."""
    length = _absolute(apart, x)
    is_zero = apart.call(aten.eq.Scalar, length, 0.0)
    real, imaginary = (
        apart.call(aten.masked_fill.Scalar, apart.call(aten.div.Tensor, part, length), is_zero, 0.0)
        for part in x
    )
    return real, imaginary


def _view_as_real(apart: Apart, x: Parts) -> Node:
    return apart.call(aten.stack.default, list(x), -1)


def _view_as_complex(apart: Apart, node: Node) -> Parts:
    pair = apart.whole(node.args[0])  # type: ignore[arg-type]
    one, other = (apart.call(aten.select.int, pair, -1, place) for place in (0, 1))
    return one, other


def _complex(apart: Apart, node: Node) -> Parts:
    """Take two tensors as they are; where they broadcast, each times ones in the other's sizes."""
    real, imaginary = (apart.whole(argument) for argument in node.args)  # type: ignore[arg-type]
    shapes = [[str(size) for size in part.meta["val"].shape] for part in (real, imaginary)]
    if shapes[0] == shapes[1]:
        return real, imaginary
    ones = [apart.call_like(x, aten.ones_like.default, x) for x in (imaginary, real)]
    return _times(apart, real, ones[0]), _times(apart, imaginary, ones[1])


def _polar(apart: Apart, node: Node) -> Parts:
    length, angle = (apart.whole(argument) for argument in node.args)  # type: ignore[arg-type]
    turns = (apart.call_like(angle, f, angle) for f in (aten.cos.default, aten.sin.default))
    real, imaginary = (apart.call(aten.mul.Tensor, length, turn) for turn in turns)
    return real, imaginary


def _power(apart: Apart, node: Node) -> Parts | None:
    x, exponent = node.args
    return _square(apart, apart.parts(x, _dtype(node))) if exponent == 2 else None


def _negated(apart: Apart, node: Node) -> Node:
    """Negate what eager marks as negated: imaginary parts of conjugated numbers."""
    return apart.call(aten.neg.default, apart.whole(node.args[0]))  # type: ignore[arg-type]


def _reciprocal(apart: Apart, x: Parts) -> Parts | None:
    return _quotient(apart, (1.0, 0.0), x)


def _converted(apart: Apart, node: Node) -> Any:
    """Convert to another type. Parts that are computed move to another device one by one; what lies
    in memory as a whole stays a call."""
    given, made = node.args[0].meta["val"], node.meta["val"]  # type: ignore[union-attr]
    if given.device != made.device:
        is_movable = made.dtype in REAL_OF and apart.is_apart(node.args[0])
        return _partwise(apart, node) if is_movable else None
    if made.dtype in REAL_OF:
        return apart.parts(node.args[0], REAL_OF[made.dtype])
    if made.dtype == torch.bool or not made.dtype.is_floating_point:
        return None
    real, _ = apart.parts(node.args[0], _dtype(node))
    return apart.cast(real, made.dtype)


def _equal(both: Any, target: Any) -> Rule:
    def rule(apart: Apart, node: Node) -> Node:
        x, y = (apart.parts(argument, _dtype(node)) for argument in node.args)
        tests = (_test(apart, target, *pair) for pair in zip(x, y, strict=True))
        return apart.call(both, *tests)

    return rule


def _test(apart: Apart, target: Any, x: Any, y: Any) -> Node:
    """Compare parts, or a part with a number."""
    x, y = (x, y) if isinstance(x, Node) else (y, x)
    overload = target.Tensor if isinstance(y, Node) else target.Scalar
    return apart.call(overload, x, y)


_VIEWS = {target: _partwise for target in VIEWS if target not in OF_MEMORY}
# Operators that do the same to both parts, and know no more of numbers than sums.
_LINEAR = (
    aten.add.Tensor,
    aten.add.Scalar,
    aten.sub.Tensor,
    aten.sub.Scalar,
    aten.rsub.Tensor,
    aten.rsub.Scalar,
    aten.neg.default,
    aten.sum.default,
    aten.sum.dim_IntList,
    aten.mean.default,
    aten.mean.dim,
    aten.cat.default,
    aten.stack.default,
    aten.index.Tensor,
    aten.index_select.default,
    aten.gather.default,
    aten.where.self,
    aten.masked_fill.Scalar,
    aten.masked_fill.Tensor,
    aten.slice_scatter.default,
    aten.select_scatter.default,
    aten.slice_backward.default,
    aten.select_backward.default,
    aten.constant_pad_nd.default,
    aten.roll.default,
    torch.ops.strop.roll.default,
    aten.copy.default,
    aten.fill.Scalar,
    aten.fill.Tensor,
    aten.full.default,
    aten.full_like.default,
    aten.new_full.default,
    aten.zeros.default,
    aten.zeros_like.default,
    aten.new_zeros.default,
    aten.empty.memory_format,
    aten.empty_like.default,
    aten.new_empty.default,
)

RULES: dict[Any, Rule] = {
    **_VIEWS,
    **dict.fromkeys(_LINEAR, _partwise),
    aten.ones.default: _ones(aten.zeros.default),
    aten.ones_like.default: _ones(aten.zeros_like.default),
    aten.new_ones.default: _ones(aten.new_zeros.default),
    aten._to_copy.default: _converted,
    aten.view_as_complex.default: _view_as_complex,
    aten.view_as_real.default: _unary(_view_as_real),
    aten.complex.default: _complex,
    aten.polar.default: _polar,
    aten._conj.default: _unary(_conjugate),
    aten._conj_physical.default: _unary(_conjugate),
    aten.resolve_conj.default: _unary(_as_it_is),
    aten.resolve_neg.default: _unary(_as_it_is),
    aten.mul.Tensor: _binary(_product),
    aten.mul.Scalar: _binary(_product),
    aten.div.Tensor: _binary(_quotient),
    aten.div.Scalar: _binary(_quotient),
    aten.square.default: _unary(_square),
    aten.pow.Tensor_Scalar: _power,
    aten.reciprocal.default: _unary(_reciprocal),
    aten.abs.default: _unary(_absolute),
    aten.sgn.default: _unary(_sign),
    aten.angle.default: _unary(_angle),
    aten.eq.Tensor: _equal(aten.logical_and.default, aten.eq),
    aten.eq.Scalar: _equal(aten.logical_and.default, aten.eq),
    aten.ne.Tensor: _equal(aten.logical_or.default, aten.ne),
    aten.ne.Scalar: _equal(aten.logical_or.default, aten.ne),
    aten._neg_view.default: _negated,
}
OF_REAL = (aten._neg_view.default,)  # of real numbers, which only complex ones bring
