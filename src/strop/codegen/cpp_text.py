"""Print the words of generated C++: types, numbers, operator expressions, indented lines."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from strop.ir.dims import Expr, symbol
from strop.ir.functions import HALVES
from strop.ir.loops import Apply
from strop.ir.ops import OPS, compute_dtype

TYPES = {
    torch.float64: "double",
    torch.float32: "float",
    torch.float16: "sp::fp16",
    torch.bfloat16: "sp::bf16",
    torch.int64: "int64_t",
    torch.int32: "int32_t",
    torch.int16: "int16_t",
    torch.int8: "int8_t",
    torch.uint8: "uint8_t",
    torch.bool: "bool",
}


OF_NEGATIVE = ("of_negative", True)  # attribute of an exp whose argument is never positive
CODED = ("coded", True)  # of a cast of (x, zero, least, most): of the code of x between two limits
LIMITED = ("limited", True)  # of a cast of what limits keep within int32, and of these alone


def scalar_type(dtype: torch.dtype) -> str:
    """Return the C++ type that a kernel computes in for this dtype."""
    return TYPES[compute_dtype(dtype)]


@dataclass
class Text:
    lines: list[str] = field(default_factory=list)
    depth: int = 1

    def __call__(self, line: str) -> None:
        self.lines.append("  " * self.depth + line)

    def all(self, lines: Iterable[str]) -> None:
        for line in lines:
            self(line)

    @contextmanager
    def block(self, header: str) -> Iterator[None]:
        self(f"{header} {{" if header else "{")
        self.depth += 1
        yield
        self.depth -= 1
        self("}")

    @contextmanager
    def loop(self, name: str, end: str, begin: str = "0", step: str = "") -> Iterator[None]:
        forward = f"{name} += {step}" if step else f"++{name}"
        with self.block(f"for (int64_t {name} = {begin}; {name} < {end}; {forward})"):
            yield


class CppScalars:
    """Name sizes: constants are printed, every other expression becomes s0, s1, ..."""

    def __init__(self) -> None:
        self.names: dict[Expr, str] = {}

    def __call__(self, expr: Expr) -> str:
        if expr.is_const:
            return str(expr.value)
        return self.names.setdefault(expr, f"s{len(self.names)}")

    def symbol(self, expr: Expr) -> Expr:
        """Return the same size over the scalar names."""
        return expr if expr.is_const else symbol(self(expr))


def times(name: str, factor: str) -> str:
    return name if factor == "1" else f"{name} * {factor}"


def number(value: float, dtype: torch.dtype) -> str:
    """Return a literal of the compute type of ``dtype``."""
    kind = scalar_type(dtype)
    if kind == "bool":
        return "true" if value else "false"
    if not dtype.is_floating_point:
        lowest = int(value) == -(2**63)
        return "sp::lowest<int64_t>()" if lowest else str(int(value))
    if math.isnan(value):
        return f"sp::not_a_number<{kind}>()"
    if abs(value) > torch.finfo(compute_dtype(dtype)).max:
        return f"{'-' if value < 0 else ''}sp::infinity<{kind}>()"
    return repr(float(value)) + ("f" if kind == "float" else "")


def apply_text(stmt: Apply) -> str:
    """Return the expression of a pointwise statement."""
    if stmt.op == "cast" and CODED in stmt.attrs:
        return f"static_cast<{TYPES[stmt.dtype]}>(sp::code({', '.join(stmt.args)}))"
    if stmt.op == "cast":
        return _cast(stmt.args[0], stmt.dtype, is_limited=LIMITED in stmt.attrs)
    if stmt.op == "clamp" and LIMITED in stmt.attrs:
        return "sp::between({}, {}, {})".format(*stmt.args)
    if OF_NEGATIVE in stmt.attrs:
        return f"sp::exp_of_negative({stmt.args[0]})"
    row, attrs = OPS[stmt.op], dict(stmt.attrs)
    template = row.cpp_half if row.cpp_half and stmt.dtype in HALVES else row.cpp
    if attrs.get("alpha") == 1:
        template = template.replace("{alpha} * ", "")
    texts = {name: _attribute(value, stmt.dtype) for name, value in attrs.items()}
    text = template.format(*stmt.args, type=scalar_type(stmt.dtype), **texts)
    if compute_dtype(stmt.dtype) is torch.float64:
        text = re.sub(r"(?<=\d)f\b", "", text)  # the table's constants are written for fp32
    return text


def _attribute(value: float | str, dtype: torch.dtype) -> str:
    if isinstance(value, bool | int | str):
        return str(value).lower() if isinstance(value, bool) else str(value)
    return number(value, dtype if dtype.is_floating_point else torch.float64)


def _cast(arg: str, dtype: torch.dtype, *, is_limited: bool = False) -> str:
    if dtype in HALVES:
        return f"sp::round_to<{TYPES[dtype]}>({arg})"
    if is_limited:
        return f"static_cast<{TYPES[dtype]}>(static_cast<int32_t>({arg}))"
    if dtype is torch.uint8:  # from a negative number by way of a signed type, as ATen
        return f"static_cast<uint8_t>(static_cast<int64_t>({arg}))"
    return f"static_cast<{TYPES[dtype]}>({arg})"


OMP_REDUCTIONS = {"sum": "+", "prod": "*", "amax": "max", "amin": "min"}


def identity(kind: str, scalar: str) -> str:
    return {
        "sum": "0",
        "prod": "1",
        "amax": f"sp::lowest<{scalar}>()",
        "amin": f"sp::highest<{scalar}>()",
    }[kind]


def combine(kind: str, scalar: str, into: str, value: str) -> str:
    if kind in ("sum", "prod"):
        return f"{into} {OMP_REDUCTIONS[kind]}= {value};"
    return f"{into} = sp::{kind[1:]}<{scalar}>({into}, {value});"
