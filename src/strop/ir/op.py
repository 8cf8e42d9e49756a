"""Say what one row of the operator table says. ``ops`` is the table, ``pointwise`` most of its
rows."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
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
        "half_of_bits",
        "float_of_bits",
        "bits_of_float",
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


Shapes = Sequence[Sequence[int]]  # of operands
OTHER = "other calls"  # the category of what nobody has sorted


def no_flops(shapes: Shapes, attrs: Mapping[str, Any]) -> int:
    """Return 0, as nobody has counted them."""
    return 0


@dataclass(frozen=True, slots=True)
class Anchor:
    """Say what a call of a library, or of a kernel in its place, asks of others and costs.

    ``category`` is its name in profiles. ``planned`` are the kinds of device on which it writes
    where it is told, so that its result lies in the arena. ``rows`` operands are read as rows,
    (..., N) as (prod(...), N), and the result is one of rows then. ``pictures`` operands are read
    channels-last. ``order`` is how the result lies. ``weight`` is the operand that may be a user's
    weight of a convolution, which is laid out channels-last for good. ``warm_up`` ranks how long a
    library loads at its first call; 0 loads nothing. ``flops`` counts multiplications and
    additions, by the sizes of the operands and the attributes.
    """

    category: str = OTHER
    planned: frozenset[str] = frozenset()
    rows: int = 0
    pictures: int = 0
    order: tuple[int, ...] | None = None
    takes_gaps: bool = False  # rows of its result may have gaps, as columns of a wider value
    has_dense_ends: bool = False  # operands want elements of the last dim side by side
    weight: int | None = None
    is_movable: bool = False  # it draws no numbers and writes to nothing but its result
    warm_up: int = 0
    flops: Callable[[Shapes, Mapping[str, Any]], int] = no_flops


@dataclass(frozen=True, slots=True)
class Op:
    name: str
    kind: Kind
    overloads: tuple[Any, ...] = ()
    triton: str = ""
    cpp: str = ""
    triton_half: str = ""  # a shorter one, whose error no result of 16 bits shows
    cpp_half: str = ""  # the same in C++
    reference: Callable[..., Any] | None = None
    operands: Operands = Operands.RESULT
    types: Types = Types.ANY
    # picks among the rows of an overload
    when: Callable[[Mapping[str, Any]], bool] = lambda attrs: True
    example: tuple[float, float] = (-3.0, 3.0)  # operand range that tests draw from
    attrs: Mapping[str, Any] = field(default_factory=dict)  # attribute values that tests use
    commutes: bool = False  # its two operands may change places
    rounds: bool = False  # to whole numbers: the last bit of an operand may decide which
    only_moves: bool = False  # it computes nothing
    # It says where a value lies, not what it is: in place of two equal ones, one would leave the
    # memory of the other as it was.
    is_placed: bool = False
    has_all_once: bool = False  # a view of each element of its operand, once
    is_elementwise: bool = True  # pointwise, and at each place from the same place of its operands
    # Whether the first dim of a result is that of its operands, by attributes and number of dims.
    # Without this, that of pointwise rows is, and no other.
    rows_kept: Callable[[Mapping[str, Any], int], bool] | None = None
    anchor: Anchor = Anchor()

    @property
    def arity(self) -> int:
        """Return how many operands a pointwise row has."""
        return sum(f"{{{place}}}" in self.cpp for place in range(3))

    def keeps_rows(self, attrs: Mapping[str, Any], rank: int) -> bool:
        """Tell whether row ``i`` of a result is made of the rows ``i`` of operands as long."""
        if self.rows_kept is None:
            return self.kind is Kind.POINTWISE
        return self.rows_kept(attrs, rank)

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
