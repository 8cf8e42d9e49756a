"""Turn torch's sympy sizes into our polynomials, and its guards into checks that we can run.

Torch keeps facts such as ``s0 % 8 == 0`` as guards and goes on printing sizes as
``8*((s0 - 1)//8) + 8``. Here such guards are *solved*: s0 becomes ``8*t0``, after which every
size is a plain polynomial again. What no polynomial can say is assumed: of ``Min(64, s0)`` the side
that the traced sizes choose, of a square root the very sizes that were traced. Every assumption
is a guard, so a program never runs where it does not hold.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import sympy
import torch
from torch.utils._sympy.functions import (
    CeilToInt,
    CleanDiv,
    FloatTrueDiv,
    FloorDiv,
    FloorToInt,
    IntTrueDiv,
    Max,
    Min,
    Mod,
    PythonMod,
    ToFloat,
    TruncToInt,
)
from torch.utils._sympy.symbol import SymT, symbol_is_type

from strop.errors import UnsupportedError
from strop.frontend.numbers import NumbersNeeded, numbers_in
from strop.ir.dims import Expr, Floor, Larger, const, larger, symbol, to_expr
from strop.ir.program import Guard

SYMPY_MAX = (sympy.Max, Max)
SYMPY_MIN = (sympy.Min, Min)
_RELATIONS = {
    sympy.Eq: "==",
    sympy.Ne: "!=",
    sympy.Lt: "<",
    sympy.Le: "<=",
    sympy.Gt: ">",
    sympy.Ge: ">=",
}


_OF_VALUES = ("u", "zuf")  # names that torch gives to integers and numbers without a traced value


class SizeOfValuesError(UnsupportedError):
    """This is raised for a size that the values of a tensor decide, as ``unique`` does."""


class OutsideLanguage(UnsupportedError):
    """``expression`` is no polynomial in sizes."""

    def __init__(self, expression: Any) -> None:
        names = {symbol.name for symbol in getattr(expression, "free_symbols", ())}
        is_value = any(name.startswith(_OF_VALUES) for name in names)
        super().__init__(
            "it computes with a number that it reads from a tensor, as .item() does"
            if is_value
            else f"size {expression} ({type(expression).__name__}) is outside the size language"
        )
        self.expression = expression


@dataclass
class Symbols:
    """Converts sympy sizes. ``names`` maps torch's symbol names to root names of our own,
    ``hints`` to the traced sizes; without hints nothing is assumed."""

    names: dict[str, Expr] = field(default_factory=dict)
    hints: Mapping[str, int] = field(default_factory=dict)
    assumed: dict[str, Guard] = field(default_factory=dict)
    floors: dict[Floor, int] = field(default_factory=dict)  # quotients taken as traced
    taken: set[Expr] = field(default_factory=set)  # larger sizes, of which one is taken as traced
    multiples: dict[str, tuple[str, int]] = field(default_factory=dict)  # root: 8 of "h_8" are h
    decide: Callable[[Any], bool] | None = None  # asks torch, which adds the answer to its guards
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
        if isinstance(e, sympy.Symbol) and symbol_is_type(e, SymT.UNBACKED_INT):
            raise SizeOfValuesError(f"size {e} depends on the values of a tensor")
        if isinstance(e, sympy.Symbol):
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
            return self._chosen(e)
        if isinstance(e, Mod | PythonMod):
            return self.size(e.args[0]) - self._floor_div(*e.args) * self.size(e.args[1])
        return self._foreign(e)

    def _foreign(self, e: Any) -> Expr:
        if isinstance(e, TruncToInt | FloorToInt | CeilToInt) and _is_exact(e.args[0]):
            top, bottom = self._fraction(e.args[0])
            if bottom.is_const:
                above = bottom.value - 1 if isinstance(e, CeilToInt) else 0
                return self._as_fixed((top + above) // bottom.value)
        if self._is_fixed(e):
            return const(int(self._value(e)))
        raise OutsideLanguage(e)

    def number(self, value: torch.SymFloat) -> float:
        """Return a number computed from sizes, which have to be fixed."""
        expression = value.node.expr
        if not self._is_fixed(expression):
            raise OutsideLanguage(expression)
        return float(self._value(expression))

    def _is_fixed(self, e: Any) -> bool:
        return all(self.size_of(s.name).is_const for s in e.free_symbols)

    def _value(self, e: Any) -> Any:
        """Return what a foreign expression comes to at fixed sizes."""
        fixed = {s: sympy.Integer(self.size_of(s.name).value) for s in e.free_symbols}
        return e.xreplace(fixed)

    def _chosen(self, e: Any) -> Expr:
        """Return the side of a minimum or maximum that the traced sizes take. Which of two sizes is
        the larger, such as height and width, is left open where that does no harm (``pin``)."""
        if isinstance(e, SYMPY_MAX) and sympy.S.One in e.args and len(e.args) == 2:
            other = next(a for a in e.args if a != 1)
            if other.is_integer and other.is_positive:
                return self.size(other)  # sympy leaves products as they are
        if self.decide is not None:
            return self.size(self._decided(e, self.decide))
        if not self.hints:
            raise OutsideLanguage(e)
        sides, is_min = [self.size(a) for a in e.args], isinstance(e, SYMPY_MIN)
        env, open_ = self.root_values(self.hints), [side for side in sides if not side.is_const]
        if open_ and not is_min:
            both = functools.reduce(larger, open_)
            if both not in self.taken:
                sides = [*(side for side in sides if side.is_const), both]
        best = (min if is_min else max)(sides, key=lambda side: side.eval(env))
        for side in sides:
            self._assume(Guard(best, "<=" if is_min else ">=", side))
        return best

    def _decided(self, e: Any, decide: Callable[[Any], bool]) -> Any:
        relation = sympy.Ge if isinstance(e, SYMPY_MAX) else sympy.Le
        found, *others = e.args
        for other in others:
            found = other if decide(relation(other, found)) else found
        return found

    def unite_divisors(self, sizes: Iterable[Any], hints: Mapping[str, int]) -> None:
        """Unite divisors: in ``(s0*s1)//s2`` where s0 was traced with the value of s2, ask whether
        they are one size, such as the batch of two arguments. This comes before ``replace``, which
        takes over the answer."""
        asked = set()
        for quotient in set().union(*(size.atoms(FloorDiv) for size in sizes)):
            top, bottom = quotient.args
            same = [
                f
                for f in sympy.Mul.make_args(top)
                if isinstance(f, sympy.Symbol)
                and isinstance(bottom, sympy.Symbol)
                and hints.get(f.name, 0) == hints.get(bottom.name, 1)
            ]
            is_open = bottom not in top.free_symbols and bottom not in asked
            if same and is_open and self.decide is not None:
                asked.add(bottom)
                self.decide(sympy.Eq(same[0], bottom))

    def _assume(self, guard: Guard) -> None:
        if not always_holds(guard):
            self.assumed[str(guard)] = guard

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
            raise OutsideLanguage(numerator // divisor)
        return self._as_fixed(top // bottom.value)

    def _as_fixed(self, size: Expr) -> Expr:
        """Write ``size`` with the values of ``floors``, which are then checked."""
        for atom in floors_of(size) & self.floors.keys():
            self._assume(Guard(_of_atom(atom), "==", const(self.floors[atom])))
            size = _with_value(size, atom, self.floors[atom])
        return size

    def settle(
        self, sizes: Iterable[Any], guards: Iterable[Any], indices: Iterable[Any] = ()
    ) -> None:
        """Choose names in which every size of a tensor, every equation of ``guards`` and what else
        is computed from sizes, ``indices``, is inside the language."""
        sizes, guards, indices = list(sizes), list(guards), list(indices)
        while True:
            self._memo.clear()
            self.solve(guards, self.hints)
            self._memo.clear()
            self.assumed.clear()  # in names that the solution has replaced
            try:
                for size in sizes:
                    self._require_plain(size)
                for index in indices:
                    self.number(index) if isinstance(index, torch.SymFloat) else self.size(index)
                for guard in _parts(guards):
                    self._require(guard)
                return
            except OutsideLanguage as error:
                self.pin(error)

    def _require_plain(self, size: int | torch.SymInt) -> None:
        """Raise OutsideLanguage for the larger of two sizes: nothing divides that."""
        if any(True for _ in _larger_in(self.size(size))):
            assert isinstance(size, torch.SymInt)
            raise OutsideLanguage(size.node.expr)

    def _require(self, guard: Any) -> None:
        """Fix the sizes of an equation that the names do not show to hold; others are checked."""
        is_equation = isinstance(guard, sympy.Eq) and not guard.has(Mod, PythonMod)
        if is_equation and self._difference(guard) != const(0):
            raise OutsideLanguage(guard)

    def pin(self, error: OutsideLanguage) -> None:
        """Give the sizes in a foreign expression the values that were traced.

        In an equation of quotients, such as (h//8)*(w//8) == 16, the quotients are enough.
        Raises NumbersNeeded for one with numbers that are inputs.
        """
        if needed := numbers_in(error.expression):
            raise NumbersNeeded(needed)
        if self._take_sides(error.expression):
            return
        if isinstance(error.expression, sympy.Eq) and self._fix_floors(error.expression):
            return
        env = self.root_values(self.hints)
        free = [s.name for s in error.expression.free_symbols if s.name in self.hints]
        fixed = {n: const(self.size_of(n).eval(env)) for n in free}
        if all(self.size_of(n) == value for n, value in fixed.items()):
            raise error
        roots = [self.size_of(n).roots for n in fixed if self.size_of(n).divisor]
        known = {r: const(env[r]) for only in roots if len(only) == 1 for r in only}
        self.names = {n: size.substitute(known) for n, size in self.names.items()}
        self.names.update(fixed)

    def _take_sides(self, expression: Any) -> bool:
        """Take the traced side of each maximum in an expression, and say whether there is one that
        was open."""
        found = {self.size(e) for e in expression.atoms(*SYMPY_MAX)}
        open_ = {size for size in found if any(True for _ in _larger_in(size))} - self.taken
        self.taken |= open_
        self._memo.clear()
        return bool(open_)

    def size_of(self, name: str) -> Expr:
        return self.names.get(name, symbol(name))

    def _fix_floors(self, equation: Any) -> bool:
        difference, env = self._difference(equation), self.root_values(self.hints)
        atoms = floors_of(difference)
        values = {atom: _of_atom(atom).eval(env) for atom in atoms}
        for atom, value in values.items():
            difference = _with_value(difference, atom, value)
        if not atoms or difference != const(0):
            return False
        self.floors.update(values)
        return True

    def _difference(self, equation: Any) -> Expr:
        (a, b), (c, d) = self._fraction(equation.lhs), self._fraction(equation.rhs)
        return a * d - c * b

    def solve(self, guards: Iterable[Any], hints: Mapping[str, int]) -> None:
        """Rewrite roots that a guard shows to be multiples (s becomes k*t) or other sizes."""
        for guard in _parts(guards):
            if isinstance(guard, sympy.Eq):
                self._solve_multiple(guard, hints)
                if self.hints:
                    self._solve_root(guard)
                    self._solve_sum(guard)

    def _solve_multiple(self, guard: Any, hints: Mapping[str, int]) -> None:
        divisors = {
            int(d.args[1])
            for d in guard.atoms(FloorDiv, Mod, PythonMod)
            if isinstance(d.args[1], sympy.Integer)
        }
        divisors |= {a * b for a in divisors for b in divisors}  # a patch of a patch
        divisors = {k for d in divisors for k in sympy.divisors(d) if k > 1}
        roots = sorted(set().union(*(self.size_of(s.name).roots for s in guard.free_symbols)))
        if not divisors or self._is_identity(guard):
            return
        ways = [{root: k} for root, k in itertools.product(roots, sorted(divisors))]
        values = self.root_values(hints)
        for way in (*ways, self._divided_roots(guard)):
            is_exact = all(values.get(root, 0) % k == 0 for root, k in way.items())
            if is_exact and self._take_multiples(guard, way):
                return

    def _divided_roots(self, guard: Any) -> dict[str, int]:
        """Return what each root is divided by: a picture in patches is even in height and in
        width."""
        found: dict[str, int] = {}
        for quotient in guard.atoms(FloorDiv):
            top, bottom = self.size(quotient.args[0]), quotient.args[1]
            if len(top.roots) == 1 and isinstance(bottom, sympy.Integer):
                (root,) = top.roots
                found[root] = math.lcm(found.get(root, 1), int(bottom))
        return found

    def _take_multiples(self, guard: Any, factors: Mapping[str, int]) -> bool:
        """Let each root be so many times another, if ``guard`` then always holds."""
        known = {**self.names, **{s.name: self.size_of(s.name) for s in guard.free_symbols}}
        wholes = {root: self.multiples.get(root, (root, 1)) for root in factors}
        parts = {
            root: f"{whole}_{factor * factors[root]}" for root, (whole, factor) in wholes.items()
        }
        multiple = {root: k * symbol(parts[root]) for root, k in factors.items()}
        trial = Symbols({n: size.substitute(multiple) for n, size in known.items()})
        if not factors or not trial._is_identity(guard):
            return False
        self.names.update(trial.names)
        for root, (whole, factor) in wholes.items():
            self.multiples[parts[root]] = whole, factor * factors[root]
        self._memo.clear()
        return True

    def _is_identity(self, equation: Any) -> bool:
        try:
            return self.size(equation.lhs) == self.size(equation.rhs)
        except UnsupportedError:
            return False

    def _solve_sum(self, guard: Any) -> None:
        """Solve ``s0 + s1 == s2 + s3``: parts that were traced with the same value are the same
        size."""
        try:
            difference = self._difference(guard)
        except UnsupportedError:
            return
        env = self.root_values(self.hints)
        sides: dict[int, list[str]] = {1: [], -1: []}
        for monomial, factor in difference.terms:
            if factor not in sides or len(monomial) != 1 or not isinstance(monomial[0], str):
                return
            sides[factor].append(monomial[0])
        left, right = (sorted(side, key=lambda root: env[root]) for side in sides.values())
        if len(left) > 1 and [env[r] for r in left] == [env[r] for r in right]:
            equal = {a: symbol(b) for a, b in zip(left, right, strict=True)}
            self.names = {n: size.substitute(equal) for n, size in self.names.items()}
            self._memo.clear()

    def _solve_root(self, guard: Any) -> None:
        """Solve ``s0 == (s1 - 1)//8 + 1``: the symbol that stands alone is the other side."""
        for alone, other in ((guard.lhs, guard.rhs), (guard.rhs, guard.lhs)):
            if not isinstance(alone, sympy.Symbol) or not self._is_free(alone.name):
                continue
            try:
                value = self.size(other)
            except UnsupportedError:
                continue
            if not self.size_of(alone.name).roots & value.roots:
                self._substitute(alone.name, value)
                return

    def _substitute(self, name: str, value: Expr) -> None:
        (root,) = self.size_of(name).roots
        self.names = {n: e.substitute({root: value}) for n, e in self.names.items()}
        self.names[name] = value
        self._memo.clear()

    def _is_free(self, name: str) -> bool:
        """Tell whether nothing is known of a symbol yet."""
        size = self.size_of(name)
        return (
            len(size.roots) == 1
            and size == symbol(next(iter(size.roots)))
            and (bool(self.hints) or name not in self.names)
        )

    def replace(self, replacements: Mapping[Any, Any]) -> None:
        """Replace sizes that torch found to be equal: ``s5`` is ``s0``, or a constant. What stands
        for one size may have been replaced since, in its turn."""
        for old, new in replacements.items():
            while new.free_symbols & replacements.keys():
                new = new.xreplace(replacements)
            self.names[old.name] = self.size(new)
        self._memo.clear()

    def root_values(self, hints: Mapping[str, int]) -> dict[str, int]:
        """Return values of our roots, given those of torch's symbols."""
        values: dict[str, int] = {}
        for name, value in hints.items():
            size = self.names.get(name, symbol(name))
            if len(size.roots) == 1 and size.divisor:
                (root,) = size.roots
                values.setdefault(root, value // size.divisor)
        return values

    def _fraction(self, e: Any) -> tuple[Expr, Expr]:
        """Return (numerator, positive denominator): guards may compare ratios of sizes, as
        upsampling to a given size does. Sizes themselves are always whole."""
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
        """Return run-time checks for torch's guards; those that are now identities drop out."""
        kept: dict[str, Guard] = {}
        for e in _parts(expressions):
            for guard in self._checks(e):
                if not always_holds(guard):
                    kept[str(guard)] = guard
        return tuple(kept[text] for text in sorted(kept))

    def _checks(self, e: Any) -> list[Guard]:
        """Write ``e`` as relations that must all hold. Of alternatives, the one that was traced
        counts."""
        if e in (sympy.true, True):
            return []
        if isinstance(e, sympy.And):
            return [guard for part in e.args for guard in self._checks(part)]
        if isinstance(e, sympy.Not):
            return self._checks(e.args[0].negated)
        if isinstance(e, sympy.Or) and self.hints:
            env = self.root_values(self.hints)
            ways = [self._checks(part) for part in e.args]
            return next(way for way in ways if all(guard.holds(env) for guard in way))
        if self._is_fixed(e):
            return []  # of sizes that the arguments' specs fix
        relation = _RELATIONS.get(type(e))
        ways = _ways(e)
        if ways is not None:
            return self._checks(ways)
        if relation is None:
            raise OutsideLanguage(e)
        (a, b), (c, d) = self._fraction(e.lhs), self._fraction(e.rhs)
        return [Guard(a * d, relation, c * b), Guard(b, ">", const(0)), Guard(d, ">", const(0))]


def _ways(e: Any) -> Any:
    """Write ``Min(a, b) > c`` as ``a > c and b > c``, and so on, also under factors; None for what
    has no such form. Alternatives need factors that are no less than 0."""
    bigger, smaller = (sympy.Gt, sympy.Ge), (sympy.Lt, sympy.Le)
    for side, other, up in ((0, 1, bigger), (1, 0, smaller)):
        if type(e) not in bigger + smaller:
            continue
        limit, factors = e.args[other], sympy.Mul.make_args(e.args[side])
        extremes = [f for f in factors if isinstance(f, SYMPY_MIN + SYMPY_MAX)]
        if len(extremes) != 1:
            continue
        (extreme,) = extremes
        rest = [f for f in factors if f is not extreme]
        sides = [sympy.Mul(*rest, a, evaluate=False) if rest else a for a in extreme.args]
        parts = [e.func(*((a, limit) if side == 0 else (limit, a))) for a in sides]
        every = isinstance(extreme, SYMPY_MIN) == isinstance(e, up)
        if not every and not all(factor.is_nonnegative for factor in rest):
            return None
        return (sympy.And if every else sympy.Or)(*parts, evaluate=False)
    return None


def _is_exact(e: Any) -> bool:
    """Tell whether a float expression rounds nothing that matters: a quotient of sizes, or one
    times a power of two."""
    if isinstance(e, sympy.Mul):
        return all(map(_is_exact, e.args))
    if isinstance(e, sympy.Float):
        return math.frexp(abs(float(e)))[0] == 0.5
    return isinstance(e, ToFloat | IntTrueDiv | sympy.Symbol | sympy.Integer)


def floors_of(size: Expr) -> set[Floor]:
    return {atom for monomial, _ in size.terms for atom in monomial if isinstance(atom, Floor)}


def _larger_in(size: Expr) -> Iterator[Larger]:
    """Yield what stands for the larger of two sizes, in quotients too."""
    for monomial, _ in size.terms:
        for atom in monomial:
            if isinstance(atom, Larger):
                yield atom
            elif isinstance(atom, Floor):
                yield from _larger_in(atom.numerator)


def _of_atom(atom: Floor) -> Expr:
    return Expr((((atom,), 1),))


def _with_value(size: Expr, atom: Floor, value: int) -> Expr:
    total = const(0)
    for monomial, factor in size.terms:
        rest = tuple(a for a in monomial if a != atom)
        count = len(monomial) - len(rest)
        total = total + Expr(((rest, 1),)) * (factor * value**count)
    return total


def _parts(guards: Iterable[Any]) -> Iterator[Any]:
    """Yield the terms of conjunctions."""
    for guard in guards:
        if isinstance(guard, sympy.And):
            yield from _parts(guard.args)
        else:
            yield guard


def always_holds(guard: Guard) -> bool:
    """Tell whether all sizes satisfy it: roots are positive (``capture`` and ``Variant.fits`` see
    to that), differences and quotients of them need not be."""
    sides, relation = (guard.left, guard.right), guard.relation
    if relation in ("<", "<="):
        sides, relation = (guard.right, guard.left), {"<": ">", "<=": ">="}[relation]
    difference = sides[0] - sides[1]
    if difference.is_const:
        return Guard(difference, relation, to_expr(0)).holds({})
    if difference.least is None:
        return False
    return difference.least >= 0 if relation == ">=" else relation != "==" and difference.least > 0
