"""Say what one row of the operator table says. ``ops`` is the table, ``pointwise`` most of its
rows."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum, Flag, auto
from typing import Any

import torch


class Kind(Enum):
    POINTWISE = "pointwise"  # one output element from one element of each operand
    REDUCTION = "reduction"  # many elements to one, over attrs["dims"]
    VIEW = "view"  # another way to read the same elements: an affine index map
    CONTRACTION = "contraction"  # GEMM, convolution, attention: library anchors
    OPAQUE = "opaque"  # anything else, run by torch


class Operands(Enum):
    """Name the compute type in which the operands of a pointwise row arrive."""

    RESULT = "result"  # all in the compute type of the result
    PROMOTED = "promoted"  # all in the promoted type of the operands (comparisons)
    SELECT = "select"  # the first is a bool, the others as RESULT
    TRUTH = "truth"  # all as bools: is it different from zero
    OWN = "own"  # each in its own type (cast)


# Functions of ``vmath.h`` that are an instruction or a few.
SIMPLE = frozenset(
    (
        "abs",
        "sqrt",
        "max",
        "min",
        "fmax",
        "fmin",
        "limit",
        "sign",
        "signbit",
        "copysign",
        "floor",
        "ceil",
        "trunc",
        "round",
        "half",
        "or_nan",
        "lowest",
        "highest",
        "shift_left",
        "shift_right",
    )
)


class Types(Flag):
    """Name the types that a pointwise row computes in."""

    FLOAT = auto()
    INTEGER = auto()
    BOOL = auto()
    NUMBER = FLOAT | INTEGER
    BITS = INTEGER | BOOL
    ANY = FLOAT | INTEGER | BOOL

    @staticmethod
    def of(dtype: torch.dtype) -> Types:
        if dtype is torch.bool:
            return Types.BOOL
        return Types.FLOAT if dtype.is_floating_point else Types.INTEGER


@dataclass(frozen=True, slots=True)
class Op:
    name: str
    kind: Kind
    overloads: tuple[Any, ...] = ()
    triton: str = ""
    cpp: str = ""
    triton_half: str = ""  # a shorter one, whose error no result of 16 bits shows
    reference: Callable[..., Any] | None = None
    operands: Operands = Operands.RESULT
    types: Types = Types.ANY
    # picks among the rows of an overload
    when: Callable[[Mapping[str, Any]], bool] = lambda attrs: True
    example: tuple[float, float] = (-3.0, 3.0)  # operand range that tests draw from
    attrs: Mapping[str, Any] = field(default_factory=dict)  # attribute values that tests use

    @property
    def arity(self) -> int:
        """Return how many operands a pointwise row has."""
        return sum(f"{{{place}}}" in self.cpp for place in range(3))

    @property
    def is_heavy(self) -> bool:
        """Tell whether it takes as long as a dozen additions: it calls more than one
        instruction."""
        return not SIMPLE.issuperset(re.findall(r"sp::(\w+)", self.cpp))


def of_nothing(reduction: str, dtype: torch.dtype) -> float | int | bool:
    """Return the reduction over no element. Of extremes torch has none, but kernels need the value
    that any other replaces."""
    if reduction in ("sum", "prod"):
        return int(reduction == "prod")
    if reduction in ("mean", "var"):
        return math.nan
    if dtype is torch.bool:
        return reduction == "amin"
    if dtype.is_floating_point:
        return math.inf if reduction == "amin" else -math.inf
    limits = torch.iinfo(dtype)
    return limits.max if reduction == "amin" else limits.min


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the type in which a kernel holds a value of this dtype (ATen's opmath type)."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
