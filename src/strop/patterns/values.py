"""Define what ``when`` of a pattern sees: the tensors of a match, whose sizes may be any."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from strop.ir.dims import Expr, to_expr
from strop.ir.graph import Node


class AnySizeError(Exception):
    """A question about a symbolic size has not the same answer for all its values."""


class Size:
    """Stand for a symbolic size, as ``8*h``. Questions with one answer for every value get it;
    others end the match: a program serves all sizes."""

    def __init__(self, expr: Expr) -> None:
        self.expr = expr

    def __repr__(self) -> str:
        return str(self.expr)

    def __hash__(self) -> int:
        return hash(self.expr)

    def __add__(self, other: Any) -> Size | int:
        return size_of(self.expr + _expr(other))

    def __sub__(self, other: Any) -> Size | int:
        return size_of(self.expr - _expr(other))

    def __rsub__(self, other: Any) -> Size | int:
        return size_of(_expr(other) - self.expr)

    def __mul__(self, other: Any) -> Size | int:
        return size_of(self.expr * _expr(other))

    def __floordiv__(self, other: int) -> Size | int:
        return size_of(self.expr // other)

    def __mod__(self, other: int) -> int:
        rest = self.expr - self.expr // other * other
        if not rest.is_const:
            raise AnySizeError(f"the rest of {self} by {other}")
        return rest.value

    __radd__, __rmul__ = __add__, __mul__

    def __eq__(self, other: object) -> bool:
        return _holds(self, "==", other)

    def __ne__(self, other: object) -> bool:
        return not _holds(self, "==", other)

    def __lt__(self, other: Any) -> bool:
        return _holds(self, "<", other)

    def __le__(self, other: Any) -> bool:
        return _holds(self, "<=", other)

    def __gt__(self, other: Any) -> bool:
        return _holds(self, ">", other)

    def __ge__(self, other: Any) -> bool:
        return _holds(self, ">=", other)

    def __bool__(self) -> bool:
        return self > 0

    def __index__(self) -> int:
        raise AnySizeError(f"the value of {self}")


_SIGNS = {"==": {0}, "<": {-1}, "<=": {-1, 0}, ">": {1}, ">=": {0, 1}}


def _holds(left: Size, relation: str, right: object) -> bool:
    """Tell whether it holds for all values of the roots, which are positive."""
    possible = _signs(left.expr - _expr(right))
    if possible <= _SIGNS[relation]:
        return True
    if possible.isdisjoint(_SIGNS[relation]):
        return False
    raise AnySizeError(f"{left} {relation} {right}")


def _signs(difference: Expr) -> set[int]:
    if difference.is_const:
        return {(difference.value > 0) - (difference.value < 0)}
    for sign in (1, -1):
        least = (difference * sign).least
        if least is not None and least >= 0:
            return {sign} if least > 0 else {sign, 0}
    return {-1, 0, 1}


def _expr(value: Any) -> Expr:
    return value.expr if isinstance(value, Size) else to_expr(value)


def size_of(expr: Expr) -> Size | int:
    return expr.value if expr.is_const else Size(expr)


@dataclass(frozen=True, slots=True)
class Value:
    """Describe one tensor of a match. ``is_weight``: a Parameter or buffer of the module."""

    shape: tuple[Size | int, ...]
    dtype: torch.dtype
    device: torch.device
    is_weight: bool

    @property
    def ndim(self) -> int:
        return len(self.shape)


def value_of(node: Node, device: str) -> Value:
    is_weight = node.op == "input" and bool(node.attrs["state"])
    return Value(tuple(map(size_of, node.shape)), node.dtype, torch.device(device), is_weight)
