"""Define what the pointwise rows of the operator table are written with.

A row holds the ATen overloads it stands for, one scalar expression for each code generator, and
the function that is its reference (the first overload, where it takes operands and attributes as
they are). ``{0}``, ``{1}`` are the operands, ``{name}`` an attribute under the name that the ATen
schema gives it, ``{type}`` and ``{bits}`` the compute type and its width. Operands arrive in the
row's compute type (fp32 for half types, see ``compute_dtype``) and nothing rounds before a store.

Where eager raises or is undefined (an integer divided by zero), kernels give some number.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from strop.ir.op import Kind, Op, Operands, Types


def row(name: str, overloads: tuple[Any, ...], triton: str, cpp: str = "", **more: Any) -> Op:
    more.setdefault("reference", overloads[0])
    more.setdefault("types", Types.FLOAT)
    return Op(name, Kind.POINTWISE, overloads, triton, cpp or triton, **more)


def has(**wanted: Any) -> Callable[[Mapping[str, Any]], bool]:
    return lambda attrs: all(attrs.get(name) == value for name, value in wanted.items())


def triton_max(x: str, y: str) -> str:
    return f"tl.maximum({x}, {y}, propagate_nan=tl.PropagateNan.ALL)"


def triton_min(x: str, y: str) -> str:
    return f"tl.minimum({x}, {y}, propagate_nan=tl.PropagateNan.ALL)"


NUMBER: dict[str, Any] = {"types": Types.NUMBER}
INTEGER: dict[str, Any] = {"types": Types.INTEGER}
BOOL: dict[str, Any] = {"types": Types.BOOL}
BITS: dict[str, Any] = {"types": Types.BITS}
COMPARES: dict[str, Any] = {"operands": Operands.PROMOTED, "types": Types.ANY}
TESTS: dict[str, Any] = {"operands": Operands.PROMOTED}
TRUTH: dict[str, Any] = {"operands": Operands.TRUTH, "types": Types.ANY}
ALPHA: dict[str, Any] = {"attrs": {"alpha": 1}, "types": Types.NUMBER}
POSITIVE: dict[str, Any] = {"example": (0.1, 3.0)}
UNIT: dict[str, Any] = {"example": (-0.95, 0.95)}
FRACTION: dict[str, Any] = {"example": (0.05, 0.95)}
