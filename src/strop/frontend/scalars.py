"""Numbers that Python code has computed from sizes, such as 1 / n or sqrt(width), in kernels."""

from __future__ import annotations

from functools import reduce
from typing import Any

import sympy
import torch
from torch.fx import Node as FxNode
from torch.utils._sympy.functions import (
    FloatPow,
    FloatTrueDiv,
    IntTrueDiv,
    OpaqueUnaryFn_sqrt,
    ToFloat,
)

from strop.frontend.reductions import binary, unary
from strop.frontend.symbols import OutsideLanguage, Symbols
from strop.ir.graph import Builder, Node

_FOLDED = {sympy.Mul: "mul", sympy.Add: "add"}
_QUOTIENTS = (FloatTrueDiv, IntTrueDiv)
aten = torch.ops.aten
# Those whose operand may be a number that is not known before the call.
ARITHMETIC = frozenset({
    aten.add.Tensor, aten.add.Scalar, aten.sub.Tensor, aten.sub.Scalar, aten.rsub.Scalar,
    aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar,
})  # fmt: skip


def is_operand(number: FxNode, of: FxNode) -> bool:
    """Whether ``of`` takes the number as nodes: sizes, of which it is made, stay free."""
    is_there = any(arg is number for arg in of.args) and number not in of.kwargs.values()
    return of.target in ARITHMETIC and is_there and _is_made(number.meta["val"].node.expr)


def _operator(e: Any) -> str | None:
    """The row of the operator table that makes ``e`` of its parts, if there is one."""
    if isinstance(e, _QUOTIENTS):
        return "div"
    if isinstance(e, OpaqueUnaryFn_sqrt) or (isinstance(e, FloatPow) and e.args[1] == 0.5):
        return "sqrt"
    return _FOLDED.get(type(e))


def _is_size(e: Any) -> bool:
    return isinstance(e, ToFloat) or bool(e.is_integer)


def _is_made(e: Any) -> bool:
    """Whether ``of_sizes`` has nodes for all parts of the expression."""
    if not e.free_symbols or _is_size(e):
        return True
    return _operator(e) is not None and all(map(_is_made, e.args))


def of_sizes(b: Builder, symbols: Symbols, e: Any, dtype: torch.dtype) -> Node:
    """A sympy expression over sizes as nodes without dims."""
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
