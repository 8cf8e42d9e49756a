"""Make floats that a user turns from call to call, such as the scale of an adapter, inputs.

A trace gets such a number as a symbol of torch's (``SymFloat``). What Python code computes of it
stays in the graph, in Python's 64 bits and in its order. Where code compares it with a constant,
the outcome is a guard; where it needs the number itself (for a text, a size, a key of a dict), the
trace ends with ``NumbersNeeded``, and the caller traces that number as the constant that it is.
"""

from __future__ import annotations

import builtins
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import sympy
import torch
from torch import SymFloat, SymInt
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._sympy.symbol import SymT, make_symbol, symbol_is_type
from torch.utils._sympy.value_ranges import ValueRanges

from strop.errors import CaptureError
from strop.ir.program import NumberGuard

_OPPOSITE = {"==": "!=", "!=": "==", "<": ">=", ">=": "<", ">": "<=", "<=": ">"}
_SWAPPED = {"==": "==", "!=": "!=", "<": ">", ">": "<", "<=": ">=", ">=": "<="}
_SYMPY = {
    sympy.Eq: "==",
    sympy.Ne: "!=",
    sympy.Lt: "<",
    sympy.Le: "<=",
    sympy.Gt: ">",
    sympy.Ge: ">=",
}


class NumbersNeeded(CaptureError):
    """The code of a module needs these numbers themselves, counted from 0."""

    def __init__(self, numbers: frozenset[int]) -> None:
        super().__init__("its code needs the value of a number among its arguments")
        self.numbers = numbers


class Numbers:
    """Hold the numbers of one trace, and what its code has asked about them."""

    def __init__(self, values: Sequence[float]) -> None:
        self.values = tuple(values)
        self.asked: list[NumberGuard] = []  # in order, with those that were asked before
        self.needed: frozenset[int] = frozenset()

    @property
    def guards(self) -> tuple[NumberGuard, ...]:
        return tuple(dict.fromkeys(self.asked))

    def symbol(self, env: ShapeEnv, number: int) -> Any:
        """Return a SymFloat that stands for this number."""
        symbol = make_symbol(SymT.FLOAT, number, real=True)
        value = self.values[number]
        env.backed_var_to_val[symbol] = sympy.Float(value)
        env.var_to_range[symbol] = ValueRanges.unknown()
        return env.create_symfloatnode(symbol, hint=value)

    def decided(self, e: Any) -> Any:
        """Return what a relation is for the traced values, as torch wants it; raises NumbersNeeded
        for all but a number beside a constant."""
        name = _SYMPY.get(type(e))
        left, right = e.args if name else (None, None)
        if isinstance(right, sympy.Symbol):
            left, right, name = right, left, _SWAPPED[name or "=="]
        if (
            name is None
            or not isinstance(left, sympy.Symbol)
            or not isinstance(right, sympy.Number)
        ):
            self.need(e)
        assert name is not None
        (number,) = numbers_in(left)
        guard = NumberGuard(number, name, float(right))
        outcome = guard.holds(self.values)
        if not outcome:
            guard = NumberGuard(number, _OPPOSITE[name], guard.value)
        self.asked.append(guard)
        return sympy.true if outcome else sympy.false

    def need(self, e: Any) -> NoReturn:
        """Note that a number is needed, and raise it; the note stays where the code catches what is
        raised."""
        self.needed |= numbers_in(e)
        raise NumbersNeeded(self.needed)

    def check(self, results: Sequence[Any]) -> None:
        """Raises NumbersNeeded after a trace that has asked for some, or that returns some."""
        given = [r.node.expr for r in results if isinstance(r, SymFloat)]
        self.needed = self.needed.union(*map(numbers_in, given))
        if self.needed:
            raise NumbersNeeded(self.needed)


def numbers_in(e: Any) -> frozenset[int]:
    """Return the numbers in a sympy expression."""
    symbols = getattr(e, "free_symbols", ())
    return frozenset(int(s.name[2:]) for s in symbols if symbol_is_type(s, SymT.FLOAT))


def as_input(value: SymFloat) -> int | None:
    """Return which number a traced value is, or None for one that is computed."""
    e = value.node.expr
    return next(iter(numbers_in(e)), None) if isinstance(e, sympy.Symbol) else None


def is_number(value: Any) -> bool:
    """Tell whether a traced value is made of numbers that are inputs."""
    return isinstance(value, SymFloat) and bool(numbers_in(value.node.expr))


_ON_THE_WAY = (
    *(str(Path(file).parent) for file in (torch.__file__, sympy.__file__, __file__)),
    "<frozen",
)


def is_asked_by_torch(frame: FrameType) -> bool:
    """Tell whether a frame is that of torch's code, or of Strop's or Python's own on its way. A
    trace asks a hundred thousand times."""
    return frame.f_code.co_filename.startswith(_ON_THE_WAY)


def _attribute_of(number: Any, name: str) -> Any:
    """Answer for a SymFloat: to a module's code that asks for its class it is a float, to torch
    what it is."""
    is_class = name == "__class__" and not is_asked_by_torch(sys._getframe(1))
    return (
        builtins.float if is_class and is_number(number) else object.__getattribute__(number, name)
    )


def _text_of(number: Any) -> str:
    """Write a SymInt or SymFloat as the number that it is in this call. Code that computes with its
    text gets a graph for each. torch's own messages name the symbol."""
    if is_asked_by_torch(sys._getframe(1)):
        return str(number.node.str())
    return repr(_python(number))


def _format_of(number: Any, form: str) -> str:
    if is_asked_by_torch(sys._getframe(1)):
        return str(number.node.str())
    return format(_python(number), form)


def _python(number: Any) -> int | float:
    return builtins.int(number) if isinstance(number, SymInt) else builtins.float(number)


def _truth_of(number: Any) -> bool:
    return bool(number != 0.0) if is_number(number) else bool(number.node.bool_())


_TEXTS: dict[str, Any] = {"__repr__": _text_of, "__str__": _text_of, "__format__": _format_of}


@contextmanager
def python_texts() -> Iterator[None]:
    """Let the text of a size, or of a number that is an input, be that of its value."""
    with _having(SymInt, _TEXTS), _having(SymFloat, _TEXTS):
        yield


@contextmanager
def attributes_of_class(kinds: Sequence[type], answer: Callable[[Any, str], Any]) -> Iterator[None]:
    """Let ``answer`` look attributes up of all that has one of these classes."""
    with ExitStack() as stack:
        for kind in kinds:
            stack.enter_context(_having(kind, {"__getattribute__": answer}))
        yield


@contextmanager
def python_floats() -> Iterator[None]:
    """Let a SymFloat be a float to those who ask for its class."""
    with _having(SymFloat, {"__getattribute__": _attribute_of, "__bool__": _truth_of}):
        yield


@contextmanager
def _having(kind: type, ours: Mapping[str, Any]) -> Iterator[None]:
    """Give a class these members in the body. Traces take turns."""
    before = {name: vars(kind).get(name) for name in ours}
    for name, value in ours.items():
        setattr(kind, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                delattr(kind, name)
            else:
                setattr(kind, name, value)
