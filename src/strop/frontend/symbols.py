"""From torch's sympy sizes to our polynomials, and from its guards to checks that we can run.

Torch keeps facts such as ``s0 % 8 == 0`` as guards and goes on printing sizes as
``8*((s0 - 1)//8) + 8``. Here such guards are *solved*: s0 becomes ``8*t0``, after which every
size is a plain polynomial again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import sympy
import torch
from torch.utils._sympy.functions import (
    CleanDiv,
    FloatTrueDiv,
    FloorDiv,
    IntTrueDiv,
    Max,
    Min,
    Mod,
    PythonMod,
    ToFloat,
)
from torch.utils._sympy.symbol import SymT, symbol_is_type

from strop.errors import UnsupportedError
from strop.ir.dims import Expr, const, symbol, to_expr
from strop.ir.program import Guard

SYMPY_MAX, SYMPY_MIN = (sympy.Max, Max), (sympy.Min, Min)
_RELATIONS = {
    sympy.Eq: "==", sympy.Ne: "!=", sympy.Lt: "<", sympy.Le: "<=", sympy.Gt: ">", sympy.Ge: ">=",
}  # fmt: skip


@dataclass
class Symbols:
    """Converts sympy sizes. ``names`` maps torch's symbol names to root names of our own.

    ``decide`` settles a relation of sizes as it is at the traced sizes, and guards on it.
    """

    names: dict[str, Expr] = field(default_factory=dict)
    decide: Callable[[Any], bool] | None = None
    _memo: dict[Any, Expr] = field(default_factory=dict)

    def size(self, value: int | torch.SymInt | Any) -> Expr:
        if isinstance(value, int):
            return const(value)
        expression = value.node.expr if isinstance(value, torch.SymInt) else value
        if expression not in self._memo:
            self._memo[expression] = self._convert(expression)
        return self._memo[expression]

    def shape(self, sizes: Iterable[Any]) -> tuple[Expr, ...]:
        return tuple(self.size(s) for s in sizes)

    def _convert(self, e: Any) -> Expr:
        if isinstance(e, sympy.Integer):
            return const(int(e))
        if isinstance(e, sympy.Symbol):
            if symbol_is_type(e, SymT.UNBACKED_INT):
                raise UnsupportedError(f"size {e} depends on the values of a tensor")
            return self.names.get(e.name, symbol(e.name))
        if isinstance(e, sympy.Pow) and isinstance(e.exp, sympy.Integer) and e.exp > 0:
            return self._multiplied([e.base] * int(e.exp))
        if isinstance(e, sympy.Mul):
            return self._multiplied(e.args)
        if isinstance(e, sympy.Add):
            return sum((self.size(a) for a in e.args), start=const(0))
        if isinstance(e, FloorDiv | CleanDiv):
            return self._floor_div(*e.args)
        if isinstance(e, SYMPY_MAX + SYMPY_MIN):
            return self.size(self._extreme(e))
        if isinstance(e, Mod | PythonMod):
            return self.size(e.args[0]) - self._floor_div(*e.args) * self.size(e.args[1])
        raise UnsupportedError(f"size {e} ({type(e).__name__}) is outside the size language")

    def _extreme(self, e: Any) -> Any:
        """The operand that is the result at the traced sizes: Max(0, s - 2) is s - 2."""
        if isinstance(e, SYMPY_MAX) and sympy.S.One in e.args and len(e.args) == 2:
            return next(a for a in e.args if a != 1)  # sizes are positive
        if self.decide is None:
            raise UnsupportedError(f"size {e} is one of two, and nothing tells which")
        relation = sympy.Ge if isinstance(e, SYMPY_MAX) else sympy.Le
        found, *others = e.args
        for other in others:
            if self.decide(relation(other, found)):
                found = other
        return found

    def _multiplied(self, factors: Iterable[Any]) -> Expr:
        total = const(1)
        for factor in factors:
            total = total * self.size(factor)
        return total

    def _floor_div(self, numerator: Any, divisor: Any) -> Expr:
        top, bottom = self.size(numerator), self.size(divisor)
        exact = top.exact_div(bottom)
        if exact is not None:
            return exact
        if not bottom.is_const:
            raise UnsupportedError(f"({top})//({bottom}): division of sizes by a symbolic size")
        return top // bottom.value

    def solve(self, guards: Iterable[Any], hints: Mapping[str, int]) -> None:
        """Rewrite roots that a guard shows to be multiples, s becomes k*t, or one number."""
        for guard in (part for whole in guards for part in self._conjuncts(whole)):
            if not isinstance(guard, sympy.Eq):
                continue
            if isinstance(guard.lhs, sympy.Symbol) and isinstance(guard.rhs, sympy.Integer):
                self.names[guard.lhs.name] = const(int(guard.rhs))
            else:
                self._solve_equation(guard, hints)

    def _solve_equation(self, guard: Any, hints: Mapping[str, int]) -> None:
        """Whether it holds once what is divided by k is a multiple of k."""
        divisions = [(int(d.args[1]), d) for d in guard.atoms(FloorDiv, Mod, PythonMod)
                     if isinstance(d.args[1], sympy.Integer)]  # fmt: skip
        for k in sorted({k for k, _ in divisions}):
            divided = {s.name for other, d in divisions if other == k for s in d.free_symbols}
            roots = {name: self.names.get(name, symbol(name)) for name in divided}
            if any(len(r.roots) != 1 or r != symbol(str(r)) for r in roots.values()):
                continue
            multiples = {name: k * symbol(f"{root}_{k}") for name, root in roots.items()}
            trial = Symbols(self.names | multiples, self.decide)
            fits = all(hints.get(name, 0) % k == 0 for name in divided)
            if fits and trial.size(guard.lhs) == trial.size(guard.rhs):
                self.names.update(trial.names)
                self._memo.clear()
                return

    def replace(self, replacements: Mapping[Any, Any]) -> None:
        """Sizes that torch found to be equal: ``s5`` is ``s0``, or a constant."""
        for old, new in replacements.items():
            self.names[old.name] = self.size(new)
        self._memo.clear()

    def root_values(self, hints: Mapping[str, int]) -> dict[str, int]:
        """Values of our roots, given those of torch's symbols."""
        values: dict[str, int] = {}
        for name, value in hints.items():
            size = self.names.get(name, symbol(name))
            if len(size.roots) == 1 and size.divisor:
                (root,) = size.roots
                values.setdefault(root, value // size.divisor)
        return values

    def _fraction(self, e: Any) -> tuple[Expr, Expr]:
        """(numerator, positive denominator): guards may compare ratios of sizes, as upsampling
        to a given size does. Sizes themselves are always whole."""
        if isinstance(e, ToFloat):
            return self._fraction(e.args[0])
        if isinstance(e, sympy.Float | sympy.Rational):
            ratio = Fraction(str(e))
            return const(ratio.numerator), const(ratio.denominator)
        if isinstance(e, IntTrueDiv | FloatTrueDiv):
            (a, b), (c, d) = self._fraction(e.args[0]), self._fraction(e.args[1])
            return a * d, b * c
        if isinstance(e, sympy.Mul):
            top, bottom = const(1), const(1)
            for factor in e.args:
                a, b = self._fraction(factor)
                top, bottom = top * a, bottom * b
            return top, bottom
        return self.size(e), const(1)

    def guards(self, expressions: Iterable[Any]) -> tuple[Guard, ...]:
        """Run-time checks for torch's guards; those that are now identities drop out."""
        kept: dict[str, Guard] = {}
        for e in (part for whole in expressions for part in self._conjuncts(whole)):
            relation = _RELATIONS.get(type(e))
            if relation is None:
                raise UnsupportedError(f"guard {e} is outside the size language")
            (a, b), (c, d) = self._fraction(e.lhs), self._fraction(e.rhs)
            guard = Guard(a * d, relation, c * b)
            if not _always_holds(guard):
                kept[str(guard)] = guard
        return tuple(kept[text] for text in sorted(kept))

    def _conjuncts(self, e: Any) -> Iterator[Any]:
        """Relations that together imply the guard: of alternatives, one that holds as traced."""
        if isinstance(e, sympy.And):
            for part in e.args:
                yield from self._conjuncts(part)
        elif isinstance(e, sympy.Or) and self.decide:
            yield from self._conjuncts(next(part for part in e.args if self.decide(part)))
        elif e is not sympy.true:
            yield e


def _always_holds(guard: Guard) -> bool:
    difference = guard.left - guard.right
    return difference.is_const and Guard(difference, guard.relation, to_expr(0)).holds({})
