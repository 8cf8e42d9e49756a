"""Find which whole numbers a graph computes of indices alone: a + b i + c j, and compares.

Models make masks that way (``arange(keys) <= arange(queries)[:, None]``), by way of cats, slices,
lookups and sums whose numbers are known before anything runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

import torch

from strop.ir.dims import Expr, const, to_expr
from strop.ir.graph import Node

ZERO, ONE = const(0), const(1)
DTYPES = (torch.bool, torch.int32, torch.int64)  # in which nothing overflows that indices make


@dataclass(frozen=True, slots=True)
class Affine:
    """The number ``start`` plus, for each dim, the index times its ``steps``."""

    start: Expr
    steps: tuple[Expr, ...]

    @property
    def is_same(self) -> bool:
        """Tell whether it is one number everywhere."""
        return all(step == ZERO for step in self.steps)

    def value(self) -> int | None:
        """Return the number that it is everywhere, if that is known."""
        return self.start.value if self.is_same and self.start.is_const else None

    def minus(self, other: Affine) -> Affine:
        steps = (a - b for a, b in zip(self.steps, other.steps, strict=True))
        return Affine(self.start - other.start, tuple(steps))


@dataclass(frozen=True, slots=True)
class NotAbove:
    """The condition that a number is at most 0."""

    number: Affine


Known = Affine | NotAbove | None
COMPARED: Mapping[str, Callable[[Affine, Affine], Affine]] = {
    "le": lambda a, b: a.minus(b),
    "lt": lambda a, b: _more(a.minus(b), ONE),
    "ge": lambda a, b: b.minus(a),
    "gt": lambda a, b: _more(b.minus(a), ONE),
}


class IndexValues:
    """Know what nodes are as numbers of indices. They come in the order in which they are
    computed, as a graph has them."""

    def __init__(self, nodes: Iterable[Node]) -> None:
        self._known: dict[Node, Known] = {}
        for node in nodes:
            rule = _RULES.get(node.op) if node.dtype in DTYPES or node.op == "constant" else None
            self._known[node] = _settled(rule(self, node), node) if rule else None

    def of(self, node: Node) -> Known:
        return self._known[node]

    def number(self, node: Node) -> Affine | None:
        found = self.of(node)
        return found if isinstance(found, Affine) else None


def _settled(found: Known, node: Node) -> Known:
    """Leave out the steps along dims that have one index, and conditions that hold for all indices
    or for none."""
    if isinstance(found, NotAbove):
        number = _settled(found.number, node)
        assert isinstance(number, Affine)
        least, most = (_extreme(number, node, sign) for sign in (-1, 1))
        if most is not None and most <= 0:
            return _truth(True, node)
        return _truth(False, node) if least is not None and least > 0 else NotAbove(number)
    if found is None:
        return None
    pairs = zip(found.steps, node.shape, strict=True)
    return replace(found, steps=tuple(ZERO if size == ONE else step for step, size in pairs))


def _extreme(number: Affine, node: Node, sign: int) -> int | None:
    """Return its largest value among all indices of the node (``sign`` 1) or its smallest (-1), if
    that is known whatever the sizes are."""
    found = number.start
    for step, size in zip(number.steps, node.shape, strict=True):
        if not step.is_const:
            return None
        if step.value * sign > 0:
            found = found + step * (size - ONE)
    return found.value if found.is_const else None


def _more(number: Affine, by: Expr) -> Affine:
    return replace(number, start=number.start + by)


def _spread(number: Affine, node: Node) -> Affine:
    """Return a number as an operand that is broadcast to a node's dims."""
    missing = len(node.shape) - len(number.steps)
    return replace(number, steps=(ZERO,) * missing + number.steps)


def _constant(known: IndexValues, node: Node) -> Known:
    value = node.attrs["value"]
    return Affine(to_expr(value), ()) if isinstance(value, int | Expr) else None


def _iota(known: IndexValues, node: Node) -> Known:
    return Affine(to_expr(node.attrs["start"]), (to_expr(node.attrs["step"]),))


def _operands(known: IndexValues, node: Node) -> list[Affine] | None:
    found = [known.number(x) for x in node.inputs]
    spread = [_spread(x, node) for x in found if x is not None]
    return spread if len(spread) == len(found) else None


def _sum(known: IndexValues, node: Node) -> Known:
    operands, alpha = _operands(known, node), node.attrs.get("alpha", 1)
    if operands is None or not isinstance(alpha, int) or node.dtype is torch.bool:
        return None  # a sum of conditions is one
    first, second = operands
    factor = const(alpha if node.op == "sub" else -alpha)
    return first.minus(Affine(second.start * factor, tuple(s * factor for s in second.steps)))


def _compared(known: IndexValues, node: Node) -> Known:
    operands = _operands(known, node)
    if operands is None:
        return None
    number = COMPARED[node.op](*operands)
    value = number.value()
    return NotAbove(number) if value is None else _truth(value <= 0, node)


def _alike(known: IndexValues, node: Node) -> Known:
    operands = _operands(known, node)
    value = None if operands is None else operands[0].minus(operands[1]).value()
    return None if value is None else _truth((value == 0) == (node.op == "eq"), node)


def _truth(is_true: bool, node: Node) -> Affine:
    return Affine(const(int(is_true)), (ZERO,) * len(node.shape))


def _both(known: IndexValues, node: Node) -> Known:
    """Conditions of which one always holds, or never, or which are the same."""
    first, second = (_condition(known.of(x), node) for x in node.inputs)
    for one, other in ((first, second), (second, first)):
        value = one.value() if isinstance(one, Affine) else None
        if value is not None:
            return other if value else _truth(False, node)
    return first if first == second else None


def _condition(found: Known, node: Node) -> Known:
    if isinstance(found, NotAbove):
        return NotAbove(_spread(found.number, node))
    return None if found is None else _spread(found, node)


def _reshape(number: Affine, node: Node) -> Affine | None:
    """Dims of one index come and go."""
    if number.is_same:
        return replace(number, steps=(ZERO,) * len(node.shape))
    before = node.inputs[0].shape
    if [n for n in before if n != ONE] != [n for n in node.shape if n != ONE]:
        return None
    steps = iter([step for step, n in zip(number.steps, before, strict=True) if n != ONE])
    return replace(number, steps=tuple(ZERO if n == ONE else next(steps) for n in node.shape))


def _permute(number: Affine, node: Node) -> Affine:
    return replace(number, steps=tuple(number.steps[dim] for dim in node.attrs["dims"]))


def _slice(number: Affine, node: Node) -> Affine:
    dim = node.attrs["dim"]
    step = number.steps[dim]
    steps = _at(number.steps, dim, step * node.attrs["step"])
    return Affine(number.start + step * node.attrs["start"], steps)


VIEWS: Mapping[str, Callable[[Affine, Node], Affine | None]] = {
    "reshape": _reshape,
    "expand": _spread,
    "permute": _permute,
    "slice": _slice,
}


def _view(known: IndexValues, node: Node) -> Known:
    """A view of numbers, or of a condition on some."""
    found = known.of(node.inputs[0])
    seen = found.number if isinstance(found, NotAbove) else found
    number = None if seen is None else VIEWS[node.op](seen, node)
    return NotAbove(number) if number is not None and isinstance(found, NotAbove) else number


def _cat(known: IndexValues, node: Node) -> Known:
    """Pieces that go on where the one before them ends: each is the same number of an index."""
    pieces, dim = _operands(known, node), node.attrs["dim"]
    if pieces is None:
        return None
    sizes = [x.shape[dim] for x in node.inputs]
    starts = [sum(sizes[:n], ZERO) for n in range(len(sizes))]
    long = [piece.steps[dim] for piece, size in zip(pieces, sizes, strict=True) if size != ONE]
    step = long[0] if long else pieces[-1].start - pieces[-2].start if len(pieces) > 1 else ZERO
    wanted = replace(pieces[0], steps=_at(pieces[0].steps, dim, step))
    for piece, size, start in zip(pieces, sizes, starts, strict=True):
        own = piece if size != ONE else replace(piece, steps=_at(piece.steps, dim, step))
        if own != _more(wanted, step * start):
            return None
    return wanted


def _at(steps: tuple[Expr, ...], dim: int, step: Expr) -> tuple[Expr, ...]:
    return (*steps[:dim], step, *steps[dim + 1 :])


def _take(known: IndexValues, node: Node) -> Known:
    """Look up elements, all of whose indices are known to be inside."""
    source = known.number(node.inputs[0])
    indices = iter(node.inputs[1:])
    if source is None:
        return None
    found = Affine(source.start, (ZERO,) * len(node.shape))
    pairs = zip(source.steps, node.inputs[0].shape, node.attrs["walks"], strict=True)
    for step, size, walk in pairs:
        if walk is not None:
            found = replace(found, steps=_at(found.steps, walk, found.steps[walk] + step))
            continue
        index = known.number(next(indices))
        if index is None or not _is_inside(own := _spread(index, node), node, size):
            return None
        steps = tuple(a + step * b for a, b in zip(found.steps, own.steps, strict=True))
        found = Affine(found.start + step * own.start, steps)
    return found


def _is_inside(index: Affine, node: Node, size: Expr) -> bool:
    """Tell whether an index lies in a dim of this size: one number does, or all in their order."""
    value = index.value()
    if value is not None:
        return size.is_const and 0 <= value < size.value
    moving = [(step, n) for step, n in zip(index.steps, node.shape, strict=True) if step != ZERO]
    return index.start == ZERO and moving == [(ONE, size)]


def _aten(known: IndexValues, node: Node) -> Known:
    """The sums of one number, up to each place."""
    args = node.attrs["args"]
    if node.attrs["target"] != "aten.cumsum.default" or node.attrs["kwargs"] or len(args) != 2:
        return None
    number, dim = known.number(node.inputs[0]), args[1]
    if number is None or not number.is_same:
        return None
    return replace(number, steps=_at(number.steps, dim % len(number.steps), number.start))


def _cast(known: IndexValues, node: Node) -> Known:
    """A number stays itself in another type of whole numbers."""
    return None if node.dtype is torch.bool else known.number(node.inputs[0])


Rule = Callable[[IndexValues, Node], Known]
_RULES: Mapping[str, Rule] = {
    "constant": _constant,
    "iota": _iota,
    "add": _sum,
    "sub": _sum,
    **dict.fromkeys(COMPARED, _compared),
    "eq": _alike,
    "ne": _alike,
    "bitwise_and": _both,
    "logical_and": _both,
    **dict.fromkeys(VIEWS, _view),
    "cat": _cat,
    "take": _take,
    "aten": _aten,
    "cast": _cast,
}
