"""Hold the iteration axes of a kernel under construction.

An index is a list of axes a dim, outermost first (the iteration atoms of the design). Reading
through a view splits axes by exact division; two ways to reach one value unify theirs. Splits
and aliases are recorded here and applied when the kernel is complete.
"""

from __future__ import annotations

from collections.abc import Sequence

from strop.errors import UnsupportedError
from strop.ir.dims import Expr, const
from strop.ir.loops import Index

ONE = const(1)
Strides = dict[int, Expr]


class AxisTable:
    """Number the axes: they are small integers; ``size[a]`` is the extent of axis a."""

    def __init__(self) -> None:
        self.size: list[Expr] = []
        self._parts: dict[int, tuple[int, int]] = {}
        self._alias: dict[int, int] = {}

    def new(self, size: Expr) -> int:
        self.size.append(size)
        return len(self.size) - 1

    def fresh(self, shape: Sequence[Expr]) -> tuple[tuple[int, ...], ...]:
        """Make one new axis for each dim that is not 1."""
        return tuple(() if size == ONE else (self.new(size),) for size in shape)

    def leaves(self, axes: Sequence[int]) -> list[int]:
        """Return the axes that these stand for by now."""
        result: list[int] = []
        for axis in axes:
            while axis in self._alias:
                axis = self._alias[axis]
            if axis in self._parts:
                result += self.leaves(self._parts[axis])
            else:
                result.append(axis)
        return result

    def split(self, axis: int, inner: Expr) -> tuple[int, int]:
        """Map axis -> (outer, inner) with an inner extent that divides it."""
        outer = self.size[axis].exact_div(inner)
        if outer is None:
            raise UnsupportedError(f"an axis of {self.size[axis]} does not split by {inner}")
        self._parts[axis] = (self.new(outer), self.new(inner))
        return self._parts[axis]

    def match(self, axes: Sequence[int], atoms: Sequence[tuple[Expr, Expr]]) -> Strides:
        """Return strides by which ``axes`` walk over (size, stride) atoms of the same total
        size."""
        left, rest = self.leaves(axes), list(atoms)
        strides: Strides = {}
        while left:
            if not rest:
                raise UnsupportedError("an index is longer than the value it reads")
            axis, (size, stride) = left.pop(), rest.pop()
            if self.size[axis] != size:
                outer = size.exact_div(self.size[axis])
                if outer is not None:
                    rest.append((outer, stride * self.size[axis]))
                else:
                    left.extend(self.split(axis, size))
                    rest.append((size, stride))
                    continue
            strides[axis] = strides.get(axis, const(0)) + stride
        return strides

    def unify(self, first: Sequence[int], second: Sequence[int]) -> bool:
        """Make two index lists of one value the same axes; False when they truly differ.

        They differ when an axis stands in both lists at different places (x and its transpose).
        """
        a, b = self.leaves(first), self.leaves(second)
        while a and b:
            x, y = a[-1], b[-1]
            if x != y:
                if self.size[x] != self.size[y]:
                    if not self._split_longer(a, b):
                        return False
                    continue
                if x in b or y in a:
                    return False
                self._alias[y] = x
                a, b = self.leaves(a), self.leaves(b)
            a.pop()
            b.pop()
        return not a and not b

    def _split_longer(self, a: list[int], b: list[int]) -> bool:
        for longer, shorter in ((a, b), (b, a)):
            inner = self.size[shorter[-1]]
            if self.size[longer[-1]].exact_div(inner) is not None:
                longer[-1:] = self.split(longer[-1], inner)
                return True
        return False

    def row_major(self, axes: Sequence[int]) -> Strides:
        """Return strides that turn a list of axes into the linear position along a dim."""
        strides: Strides = {}
        step = ONE
        for axis in reversed(self.leaves(axes)):
            strides[axis] = step
            step = step * self.size[axis]
        return strides

    def index(self, offset: Expr, strides: Strides) -> Index:
        """Return a finished Index over leaf axes, named ``a<number>``."""
        total: Strides = {}
        for axis, stride in strides.items():
            step = stride
            for leaf in reversed(self.leaves([axis])):
                total[leaf] = total.get(leaf, const(0)) + step
                step = step * self.size[leaf]
        kept = ((f"a{axis}", total[axis]) for axis in sorted(total) if total[axis] != const(0))
        return Index(offset, tuple(kept))
