"""What a random program knows about its values while it grows: shape, type, size of numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hypothesis import strategies as st

from strop.ir.dims import Expr
from tests.fuzz.programs import FLOATS, ONE, numel

LARGEST = 2048  # elements of a value
WIDEST = 8  # size of a symbolic dim at most: what sums can grow by
MOST = {
    "f16": 500.0,
    "bf16": 500.0,
    "f32": 500.0,
    "f64": 500.0,
    "i64": 1e6,
    "i32": 1e6,
    "u8": 1e9,
    "i8": 1e9,
    "bool": 1.0,
}


class NoFit(Exception):
    """No value that a move could take, or too large a result: the program goes on without it."""


@dataclass(frozen=True)
class Value:
    """``is_exact``: the same in every precision. ``bound`` on magnitudes. ``root``: whose memory
    it may share; values of the arguments' have negative ones."""

    name: str
    dtype: str
    shape: tuple[Expr, ...]
    is_exact: bool
    bound: float
    root: int

    @property
    def is_float(self) -> bool:
        return self.dtype in FLOATS

    @property
    def rank(self) -> int:
        return len(self.shape)

    @property
    def is_integer(self) -> bool:
        return self.dtype in ("i64", "i32", "u8", "i8")


@dataclass
class Draft:
    """A program while it is drawn."""

    draw: Callable[[st.SearchStrategy[Any]], Any]
    values: list[Value] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    weights: list[tuple[int, ...]] = field(default_factory=list)

    def pick(self, fits: Callable[[Value], bool]) -> Value:
        """Any value that fits, late ones more often."""
        found = [v for v in self.values if fits(v)]
        if not found:
            raise NoFit
        return self.draw(st.sampled_from((found + found[-2:])[::-1]))

    def one_of(self, options: Sequence[Any]) -> Any:
        if not options:
            raise NoFit
        return self.draw(st.sampled_from(options))

    def integer(self, low: int, high: int) -> int:
        return self.draw(st.integers(low, high))

    def chance(self) -> bool:
        return self.draw(st.booleans())

    def dim(self, x: Value, fits: Callable[[Expr], bool] = lambda size: True) -> int:
        return self.one_of([d for d in range(x.rank) if fits(x.shape[d])])

    def weight(self, shape: tuple[int, ...]) -> str:
        self.weights.append(shape)
        return f"self.w{len(self.weights) - 1}"

    def add(
        self,
        text: str,
        dtype: str,
        shape: Sequence[Expr],
        bound: float,
        *,
        is_exact: bool = False,
        root: int | None = None,
    ) -> Value:
        """The value of an expression, scaled down by a power of 2 where it may grow too large."""
        if numel(tuple(shape)) > LARGEST:
            raise NoFit
        name = f"v{len(self.lines)}"
        while bound > MOST[dtype] and dtype in FLOATS:
            text, bound, is_exact, root = f"({text}) * 0.0078125", bound / 128, False, None
        if bound > MOST[dtype]:
            raise NoFit
        own = len(self.values) + 1
        value = Value(name, dtype, tuple(shape), is_exact, bound, own if root is None else root)
        self.lines.append(f"{name} = {text}")
        self.values.append(value)
        return value

    def like(self, x: Value, text: str, **changes: Any) -> Value:
        """As ``x`` but for ``changes``; in memory of its own unless told otherwise."""
        facts = {"dtype": x.dtype, "shape": x.shape, "bound": x.bound, "is_exact": x.is_exact}
        return self.add(text, **{**facts, **changes})

    def partner(self, x: Value, fits: Callable[[Value], bool]) -> Value:
        """A value that broadcasts with x."""
        return self.pick(lambda y: fits(y) and broadcast(x.shape, y.shape) is not None)

    def overwritten(self, x: Value, y_bound: float) -> None:
        """Whatever may share memory with x is no longer known exactly."""
        self.values = [
            replace(v, is_exact=False, bound=max(v.bound, y_bound)) if v.root == x.root else v
            for v in self.values
        ]


def broadcast(a: Sequence[Expr], b: Sequence[Expr]) -> tuple[Expr, ...] | None:
    rank = max(len(a), len(b))
    left, right = ((ONE,) * (rank - len(s)) + tuple(s) for s in (a, b))
    if any(m != n and ONE not in (m, n) for m, n in zip(left, right, strict=True)):
        return None
    return tuple(n if m == ONE else m for m, n in zip(left, right, strict=True))


def is_width(size: Expr) -> bool:
    """Whether a library may be asked for so many channels."""
    return size.is_const and size.value > 0


def widest(size: Expr) -> int:
    """The most elements that a dim may have."""
    return max(size.eval(dict.fromkeys("bs", WIDEST)), 1)
