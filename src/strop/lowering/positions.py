"""Say where an element lies along each dim, while axes of a kernel are still being found.

A position is affine over axes: shift + sum(stride * axis). Slices, pieces of a cat and diagonals
move it, a reshape adds the positions of its dims up and deals the sum out again, by division. Most
divisions are exact: what the divisor divides goes to the quotient, an axis that crosses its edge is
split, and what is left is proved to lie below it. Where that fails, as for ``(2, 6) -> (3, 4)``,
the kernel computes quotient and remainder, and each becomes a *computed axis*: it moves a load as a
looked-up place does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

from strop.errors import UnsupportedError
from strop.ir.dims import Expr, const, product
from strop.lowering.axes import ONE, AxisTable, Strides

ZERO = const(0)
Terms = tuple[tuple[int, Expr], ...]  # axis, stride


@dataclass(frozen=True, slots=True)
class Dim:
    """Hold the position along one dim. Axes may have been split since: ``AxisTable.resolved``."""

    terms: Terms = ()
    shift: Expr = ZERO

    def moved(self, start: Expr, step: int = 1) -> Dim:
        """Return the same elements where they lie in a dim of which this one is a part."""
        terms = tuple((axis, stride * step) for axis, stride in self.terms)
        return Dim(terms, start + self.shift * step)


NodeIndex = tuple[Dim, ...]
Shape = Sequence[Expr]


class Divider(Protocol):
    """Write statements that divide a position; the names of quotient and remainder."""

    def __call__(self, dim: Dim, size: Expr, total: Expr) -> tuple[str, str]: ...


class Positions:
    """Deals positions out to dims of other sizes."""

    def __init__(self, axes: AxisTable, divide: Divider) -> None:
        self.axes, self._divide = axes, divide

    def fresh(self, shape: Shape) -> NodeIndex:
        """Make one new axis for each dim that is not 1."""
        return tuple(Dim() if s == ONE else Dim(((self.axes.new(s), ONE),)) for s in shape)

    def computed(self, name: str, size: Expr) -> Dim:
        """Return the position that a value of the kernel says."""
        return Dim(((self.axes.computed(name, size), ONE),))

    def key(self, index: NodeIndex) -> tuple[object, ...]:
        """Return what is equal for equal positions, as axes are by now."""
        return tuple((tuple(self.axes.resolved(d.terms).items()), d.shift) for d in index)

    def run(self, dim: Dim, size: Expr) -> list[int] | None:
        """Return the axes that walk over the whole dim, row-major, if they do."""
        left, step, found = self.axes.resolved(dim.terms), ONE, list[int]()
        if dim.shift != ZERO or any(axis in self.axes.names for axis in left):
            return None
        while left:
            axis = next((axis for axis, stride in left.items() if stride == step), None)
            if axis is None:
                return None
            del left[axis]
            found.insert(0, axis)
            step = step * self.axes.size[axis]
        return found if step == size else None

    def runs(self, index: NodeIndex, shape: Shape) -> list[int] | None:
        """Return the axes that walk over a whole value, each once, if they do."""
        found: list[int] = []
        for dim, size in zip(index, shape, strict=True):
            run = self.run(dim, size)
            if run is None or not set(run).isdisjoint(found):
                return None
            found += run
        return found

    def reshaped(self, index: NodeIndex, shape: Shape, sizes: Shape) -> NodeIndex:
        """Return where the elements of a value of this shape lie in one of these ``sizes``."""
        dims: list[Dim] = []
        for ours, theirs in _stretches(tuple(shape), tuple(sizes)):
            flat = self._flat(index[ours], shape[ours])
            dims += self.dealt(flat, sizes[theirs])
        return tuple(dims)

    def _flat(self, dims: NodeIndex, shape: Shape) -> Dim:
        """Return the row-major position in several dims."""
        terms, shift, step = Strides(), ZERO, ONE
        for dim, size in zip(reversed(dims), reversed(shape), strict=True):
            for axis, stride in self.axes.resolved(dim.terms).items():
                terms[axis] = terms.get(axis, ZERO) + stride * step
            shift = shift + dim.shift * step
            step = step * size
        return Dim(tuple(terms.items()), shift)

    def dealt(self, dim: Dim, sizes: Shape) -> list[Dim]:
        """Deal a position out to dims of these sizes, which it walks row-major."""
        dims = [Dim()] * len(sizes)
        long = [place for place, size in enumerate(sizes) if size != ONE]
        for place in reversed(long[1:]):
            outer = product(sizes[:place])
            dim, dims[place] = self._halves(dim, sizes[place], outer)
        if long:
            dims[long[0]] = dim  # it is below its size, or nothing is read there
        return dims

    def _halves(self, dim: Dim, size: Expr, outer: Expr) -> tuple[Dim, Dim]:
        exact = self._exact_halves(dim, size)
        if exact is not None:
            return exact
        if size.least is None or size.least < 1:
            raise UnsupportedError(f"a position is divided by {size}, which may be 0")
        quotient, remainder = self._divide(dim, size, outer * size)
        return self.computed(quotient, outer), self.computed(remainder, size)

    def _exact_halves(self, dim: Dim, size: Expr) -> tuple[Dim, Dim] | None:
        outer, inner = Strides(), Strides()
        for axis, stride in self.axes.resolved(dim.terms).items():
            self._split_term(axis, stride, size, outer, inner)
        shift, rest = dim.shift.divided(size)
        remainder = Dim(tuple(inner.items()), rest)
        if not self._is_below(remainder, size):
            return None
        return Dim(tuple(outer.items()), shift), remainder

    def _split_term(
        self, axis: int, stride: Expr, size: Expr, outer: Strides, inner: Strides
    ) -> None:
        """Add one term to the quotient, to the remainder, or split to both."""
        quotient = stride.exact_div(size)
        if quotient is not None:
            outer[axis] = quotient
            return
        sign = -1 if all(c < 0 for _, c in stride.terms) else 1
        count, extent = size.exact_div(stride * sign), self.axes.size[axis]
        splits = count is not None and count != extent and axis not in self.axes.names
        if count is None or not splits or extent.exact_div(count) is None:
            inner[axis] = stride
            return
        high, low = self.axes.split(axis, count)
        outer[high], inner[low] = const(sign), stride

    def _is_below(self, dim: Dim, size: Expr) -> bool:
        """Tell whether a position is surely in a dim of this size."""
        if self.run(dim, size) is not None:
            return True
        low = high = dim.shift
        for axis, stride in self.axes.resolved(dim.terms).items():
            reach = stride * (self.axes.size[axis] - 1)
            if not stride.may_be_negative:
                high = high + reach
            elif not (stride * -1).may_be_negative:
                low = low + reach
            else:
                return False
        return not low.may_be_negative and not (size - 1 - high).may_be_negative


@lru_cache(maxsize=4096)
def _stretches(shape: tuple[Expr, ...], sizes: tuple[Expr, ...]) -> list[tuple[slice, slice]]:
    """Return the shortest runs of dims of two shapes that have as many elements."""
    found: list[tuple[slice, slice]] = []
    here = there = 0
    while here < len(shape) or there < len(sizes):
        ends = _ends(shape[here:], sizes[there:])
        found.append((slice(here, here + ends[0]), slice(there, there + ends[1])))
        here, there = here + ends[0], there + ends[1]
    return found


def _ends(shape: Shape, sizes: Shape) -> tuple[int, int]:
    ours = [product(shape[:end]) for end in range(len(shape) + 1)]
    theirs = [product(sizes[:end]) for end in range(len(sizes) + 1)]
    for total in range(1, len(shape) + len(sizes) + 1):
        for end in range(max(0, total - len(sizes)), min(total, len(shape)) + 1):
            if ours[end] == theirs[total - end]:
                return end, total - end
    return len(shape), len(sizes)
