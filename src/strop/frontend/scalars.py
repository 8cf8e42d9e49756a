"""Import numbers in kernels that are not known before the call: what Python code has computed from
sizes, such as 1 / n or sqrt(width), and from floats that are inputs (``numbers``)."""

from __future__ import annotations

import operator
from functools import reduce
from typing import TYPE_CHECKING, Any

import sympy
import torch
from torch import SymFloat
from torch.fx import Node as FxNode
from torch.utils._sympy.functions import (
    FloatPow,
    FloatTrueDiv,
    IntTrueDiv,
    OpaqueUnaryFn_sqrt,
    ToFloat,
)

from strop.frontend.numbers import is_number
from strop.frontend.reductions import binary, unary
from strop.frontend.symbols import OutsideLanguage, Symbols
from strop.ir.graph import Builder, Node

if TYPE_CHECKING:
    from strop.frontend.importer import Importer

F64 = torch.float64
_FOLDED = {sympy.Mul: "mul", sympy.Add: "add"}
_QUOTIENTS = (FloatTrueDiv, IntTrueDiv)
aten = torch.ops.aten
# Those whose operand may be a number that is not known before the call.
ARITHMETIC = frozenset(
    {
        aten.add.Tensor,
        aten.add.Scalar,
        aten.sub.Tensor,
        aten.sub.Scalar,
        aten.rsub.Scalar,
        aten.mul.Tensor,
        aten.mul.Scalar,
        aten.div.Tensor,
        aten.div.Scalar,
    }
)


def is_operand(number: FxNode, of: FxNode) -> bool:
    """Tell whether ``of`` takes the number as nodes: sizes and inputs that it is made of stay
    free."""
    if is_number(number.meta["val"]):
        return is_operand_of(number, of)
    is_there = any(arg is number for arg in of.args) and number not in of.kwargs.values()
    return of.target in ARITHMETIC and is_there and _is_made(number.meta["val"].node.expr)


def _operator(e: Any) -> str | None:
    """Return the row of the operator table that makes ``e`` of its parts, if there is one."""
    if isinstance(e, _QUOTIENTS):
        return "div"
    if isinstance(e, OpaqueUnaryFn_sqrt) or (isinstance(e, FloatPow) and e.args[1] == 0.5):
        return "sqrt"
    return _FOLDED.get(type(e))


def _is_size(e: Any) -> bool:
    return isinstance(e, ToFloat) or bool(e.is_integer)


def _is_made(e: Any) -> bool:
    """Tell whether ``of_sizes`` has nodes for all parts of the expression."""
    if not e.free_symbols or _is_size(e):
        return True
    return _operator(e) is not None and all(map(_is_made, e.args))


def of_sizes(b: Builder, symbols: Symbols, e: Any, dtype: torch.dtype) -> Node:
    """Express a sympy expression over sizes as nodes without dims."""
    if not e.free_symbols:
        return b.constant(float(e), dtype)
    if _is_size(e):
        return b.constant(symbols.size(e.args[0] if isinstance(e, ToFloat) else e), dtype)
    parts = [of_sizes(b, symbols, part, dtype) for part in e.args]
    operator = _operator(e)
    if operator is None:
        raise OutsideLanguage(e)
    if operator == "sqrt":
        return unary(b, operator, parts[0], dtype)
    return reduce(lambda x, y: binary(b, operator, x, y, dtype), parts)


# These compute as Python does. A power or a quotient with a number below may raise in Python.
_BINARY: dict[Any, str] = {
    operator.mul: "mul",
    operator.add: "add",
    operator.sub: "sub",
    operator.truediv: "div",
}
_UNARY: dict[Any, str] = {operator.neg: "neg", operator.abs: "abs", abs: "abs"}
# Operators whose operand may be a number that is not known before the call, by its argument's place
_OPERANDS: dict[Any, tuple[int, ...]] = {
    **dict.fromkeys(
        (
            aten.add.Tensor,
            aten.add.Scalar,
            aten.sub.Tensor,
            aten.sub.Scalar,
            aten.rsub.Scalar,
            aten.mul.Tensor,
            aten.mul.Scalar,
            aten.div.Tensor,
            aten.div.Scalar,
        ),
        (0, 1),
    ),
    **dict.fromkeys(
        (
            aten.lt.Scalar,
            aten.le.Scalar,
            aten.gt.Scalar,
            aten.ge.Scalar,
            aten.eq.Scalar,
            aten.ne.Scalar,
            aten.fill.Scalar,
            aten.full.default,
            aten.full_like.default,
        ),
        (1,),
    ),
    aten.masked_fill.Scalar: (2,),
    aten.new_full.default: (2,),
    aten.lerp.Scalar: (2,),
    aten.clamp.default: (1, 2),
    aten.scalar_tensor.default: (0,),
}


def is_operand_of(number: FxNode, of: FxNode) -> bool:
    """Tell whether the importer makes a node of ``number`` where ``of`` takes it."""
    places = [place for place, arg in enumerate(of.args) if arg is number]
    is_taken = set(places) <= set(_OPERANDS.get(of.target, ())) and bool(places)
    return is_taken and number not in of.kwargs.values() and is_made(number)


def is_made(number: Any) -> bool:
    """Tell whether ``node_of`` has nodes for a number and all that it is made of."""
    if isinstance(number, int | float):
        return True
    if not isinstance(number, FxNode) or not isinstance(number.meta.get("val"), SymFloat):
        return False
    if number.op == "placeholder":
        return True
    if number.target is operator.truediv and not isinstance(number.args[1], float | int):
        return False
    is_known = number.target in _BINARY or number.target in _UNARY
    return is_known and not number.kwargs and all(map(is_made, number.args))


def node_of(im: Importer, number: Any) -> Node:
    """Return a number, or what Python computes of some, as a node without dims, in 64 bits."""
    b: Builder = im.builder
    if not isinstance(number, FxNode):
        return b.constant(float(number), F64)
    if number.op == "placeholder":
        return im.values[number]  # type: ignore[no-any-return]
    parts = [node_of(im, part) for part in number.args]
    if number.target in _UNARY:
        return unary(b, _UNARY[number.target], parts[0], F64)
    return binary(b, _BINARY[number.target], parts[0], parts[1], F64)
