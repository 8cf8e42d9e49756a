"""Compute with symbolic sizes: polynomials with integer coefficients over root symbols.

A size such as ``64*b*h*w`` is a sum of monomials. Roots stand for positive integers that are
known at run time (batch, latent height, ...). A floor division that does not come out even
becomes an atom of its own, as does the larger of two sizes, so that "any size" graphs work too.
Questions that the compiler asks (equal? a multiple of 16? how large, likely?) are answered from the
polynomial alone and never reach torch's ShapeEnv, where they would plant guards.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache

from strop.errors import ShapeError

Env = Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Floor:
    """Stand for floor(numerator / divisor) that no rule could divide out."""

    numerator: Expr
    divisor: int

    def __str__(self) -> str:
        return f"(({self.numerator})//{self.divisor})"

    @property
    def roots(self) -> frozenset[str]:
        return self.numerator.roots

    @property
    def least(self) -> int | None:
        """Return None, or something that has the sign of the least value."""
        return self.numerator.least

    def at(self, env: Env) -> int:
        return self.numerator.eval(env) // self.divisor

    def substituted(self, env: Mapping[str, Expr]) -> Expr:
        return self.numerator.substitute(env) // self.divisor


@dataclass(frozen=True, slots=True)
class Larger:
    """Stand for the larger of two sizes, of which neither is known to be."""

    left: Expr
    right: Expr

    def __str__(self) -> str:
        return f"max({self.left}, {self.right})"

    @property
    def roots(self) -> frozenset[str]:
        return self.left.roots | self.right.roots

    @property
    def least(self) -> int | None:
        low = (self.left.least, self.right.least)
        return None if low[0] is None or low[1] is None else max(low[0], low[1])

    def at(self, env: Env) -> int:
        return max(self.left.eval(env), self.right.eval(env))

    def substituted(self, env: Mapping[str, Expr]) -> Expr:
        return larger(self.left.substitute(env), self.right.substitute(env))


Atom = str | Floor | Larger
Monomial = tuple[Atom, ...]


@dataclass(frozen=True, eq=False)
class Expr:
    """Hold an immutable polynomial; build it with ``const``, ``symbol`` and the operators."""

    terms: tuple[tuple[Monomial, int], ...]

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Expr) and self.terms == other.terms)

    @cached_property
    def _hash(self) -> int:
        return hash(self.terms)

    def __hash__(self) -> int:
        return self._hash

    def __add__(self, other: Expr | int) -> Expr:
        return _added(self, to_expr(other))

    def __sub__(self, other: Expr | int) -> Expr:
        return self + to_expr(other) * -1

    def __mul__(self, other: Expr | int) -> Expr:
        return _multiplied(self, to_expr(other))

    __radd__ = __add__
    __rmul__ = __mul__

    def __rsub__(self, other: int) -> Expr:
        return to_expr(other) - self

    def __floordiv__(self, divisor: int) -> Expr:
        """Return floor(self / divisor), exact wherever the polynomial shows it."""
        if divisor <= 0:
            raise ShapeError(f"sizes are divided by positive integers only, got {divisor}")
        even = {m: c // divisor for m, c in self.terms if c % divisor == 0}
        rest = _from_terms({m: c for m, c in self.terms if c % divisor})
        if rest.is_const:
            return _from_terms(even) + rest.value // divisor
        return _from_terms(even) + _expr((((Floor(rest, divisor),), 1),))

    @property
    def is_const(self) -> bool:
        return not self.terms or (len(self.terms) == 1 and not self.terms[0][0])

    @property
    def value(self) -> int:
        """Return the integer that a constant expression stands for."""
        if not self.is_const:
            raise ShapeError(f"{self} is symbolic, a constant was needed")
        return self.terms[0][1] if self.terms else 0

    @cached_property
    def divisor(self) -> int:
        """Return the largest integer that provably divides this size whatever the roots are."""
        return math.gcd(*(c for _, c in self.terms)) if self.terms else 0

    @cached_property
    def least(self) -> int | None:
        """Return the value where all roots are 1, if no other positive ones give less; else
        None."""
        for monomial, coefficient in self.terms:
            if monomial and coefficient < 0:
                return None
            for atom in monomial:
                low = 1 if isinstance(atom, str) else atom.least
                if low is None or low < 0:
                    return None
        return self.eval(dict.fromkeys(self.roots, 1))

    @property
    def may_be_negative(self) -> bool:
        """Tell whether roots, which are positive, could give a negative number."""
        return self.least is None or self.least < 0

    def is_multiple_of(self, k: int) -> bool:
        return self.divisor % k == 0

    def exact_div(self, other: Expr) -> Expr | None:
        """Return self / other when it is a polynomial, else None."""
        return _divided(self, other)

    def divided(self, size: Expr) -> tuple[Expr, Expr]:
        """Return a quotient and a rest: self == quotient * size + rest. As much as shows is in the
        quotient; a rest that is constant lies in [0, size) where size is constant, too."""
        quotient = _divided(self, size)
        if quotient is None:
            quotient = const(0)
            for term in self.terms:
                part = _expr((term,))
                if part.is_const and size.is_const and size.value > 0:
                    quotient = quotient + part.value // size.value
                else:
                    quotient = quotient + (_divided(part, size) or 0)
        return quotient, self - quotient * size

    def eval(self, env: Env) -> int:
        """Evaluate the size for these values of the roots."""
        total = 0
        for monomial, coefficient in self.terms:
            product = coefficient
            for atom in monomial:
                product *= env[atom] if isinstance(atom, str) else atom.at(env)
            total += product
        return total

    def substitute(self, env: Mapping[str, Expr]) -> Expr:
        """Replace roots by expressions."""
        total = const(0)
        for monomial, coefficient in self.terms:
            product = const(coefficient)
            for atom in monomial:
                if isinstance(atom, str):
                    product = product * env.get(atom, symbol(atom))
                else:
                    product = product * atom.substituted(env)
            total = total + product
        return total

    @cached_property
    def roots(self) -> frozenset[str]:
        found: set[str] = set()
        for monomial, _ in self.terms:
            for atom in monomial:
                found |= {atom} if isinstance(atom, str) else atom.roots
        return frozenset(found)

    def __str__(self) -> str:
        return self._text

    @cached_property
    def _text(self) -> str:
        if not self.terms:
            return "0"
        parts = []
        for monomial, coefficient in self.terms:
            factors = [str(atom) for atom in monomial]
            if coefficient != 1 or not factors:
                factors.insert(0, str(coefficient))
            parts.append("*".join(factors))
        return " + ".join(parts).replace("+ -", "- ")

    def __repr__(self) -> str:
        return f"Expr({self})"


# A compile does the same sums, products and divisions of a few sizes 100,000 times.
_remembered = lru_cache(maxsize=16384)


@_remembered
def _added(x: Expr, y: Expr) -> Expr:
    total = dict(x.terms)
    for monomial, coefficient in y.terms:
        total[monomial] = total.get(monomial, 0) + coefficient
    return _from_terms(total)


@_remembered
def _multiplied(x: Expr, y: Expr) -> Expr:
    product: dict[Monomial, int] = {}
    for left, c in x.terms:
        for right, d in y.terms:
            monomial = _sorted_monomial(left + right)
            product[monomial] = product.get(monomial, 0) + c * d
    return _from_terms(product)


@_remembered
def _divided(x: Expr, y: Expr) -> Expr | None:
    if not y.terms:
        return None
    if len(y.terms) > 1:
        return _divide_polynomial(x, y)
    (monomial, coefficient) = y.terms[0]
    quotient: dict[Monomial, int] = {}
    for m, c in x.terms:
        rest = _remove(m, monomial)
        if rest is None or c % coefficient:
            return None
        quotient[rest] = c // coefficient
    return _from_terms(quotient)


def _sorted_monomial(atoms: Iterable[Atom]) -> Monomial:
    return tuple(sorted(atoms, key=str))


def _from_terms(terms: Mapping[Monomial, int]) -> Expr:
    kept = [(m, c) for m, c in terms.items() if c]
    kept.sort(key=lambda term: (-len(term[0]), [str(a) for a in term[0]]))
    return _expr(tuple(kept))


@_remembered  # equal sizes mostly are one object then: quick to compare, and what it knows is kept
def _expr(terms: tuple[tuple[Monomial, int], ...]) -> Expr:
    return Expr(terms)


def _remove(monomial: Monomial, factor: Monomial) -> Monomial | None:
    rest = list(monomial)
    for atom in factor:
        if atom not in rest:
            return None
        rest.remove(atom)
    return tuple(rest)


def _divide_polynomial(dividend: Expr, divisor: Expr) -> Expr | None:
    """Divide by the leading term, as in long division; None when a remainder is left."""
    quotient, rest = const(0), dividend
    lead = _expr((divisor.terms[0],))
    for _ in range(len(dividend.terms) + 1):
        if not rest.terms:
            return quotient
        step = _expr((rest.terms[0],)).exact_div(lead)
        if step is None:
            return None
        quotient, rest = quotient + step, rest - step * divisor
    return None


@lru_cache(maxsize=4096)
def const(value: int) -> Expr:
    return _expr((((), value),) if value else ())


@lru_cache(maxsize=256)
def symbol(name: str) -> Expr:
    return _expr((((name,), 1),))


def to_expr(value: Expr | int) -> Expr:
    return value if isinstance(value, Expr) else const(int(value))


def larger(left: Expr, right: Expr) -> Expr:
    """Return the larger of two sizes: one of them where all roots show which it is."""
    difference = left - right
    if difference.least is not None and difference.least >= 0:
        return left
    if (right - left).least is not None and (right - left).least >= 0:
        return right
    left, right = sorted((left, right), key=str)
    return _expr((((Larger(left, right),), 1),))


def product(sizes: Iterable[Expr]) -> Expr:
    return _product(tuple(sizes))


@lru_cache(maxsize=16384)
def _product(sizes: tuple[Expr, ...]) -> Expr:
    total = const(1)
    for size in sizes:
        total = total * size
    return total


@lru_cache(maxsize=16384)
def parse(text: str) -> Expr:
    """Parse what ``str`` writes: integers, names, + - * //, max(a, b) and parentheses.

    Raises ShapeError for any other text, so that a damaged plan is refused and never evaluated.
    """
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        raise ShapeError(f"not a size expression: {text!r}") from error
    return _parse_node(tree, text)


def _parse_node(node: ast.expr, text: str) -> Expr:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return const(node.value)
    if isinstance(node, ast.Name):
        return symbol(node.id)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return _parse_node(node.operand, text) * -1
    if isinstance(node, ast.Call):
        return larger(*(_parse_node(side, text) for side in _sides_of(node, text)))
    if isinstance(node, ast.BinOp):
        left, right = _parse_node(node.left, text), _parse_node(node.right, text)
        if isinstance(node.op, ast.Add):
            return left + right
        if isinstance(node.op, ast.Sub):
            return left - right
        if isinstance(node.op, ast.Mult):
            return left * right
        if isinstance(node.op, ast.FloorDiv) and right.is_const:
            return left // right.value
    raise ShapeError(f"not a size expression: {text!r}")


def _sides_of(node: ast.Call, text: str) -> tuple[ast.expr, ast.expr]:
    """Return the arguments of ``max(a, b)``."""
    is_max = isinstance(node.func, ast.Name) and node.func.id == "max" and not node.keywords
    if not is_max or len(node.args) != 2:
        raise ShapeError(f"not a size expression: {text!r}")
    return node.args[0], node.args[1]
