"""Hold the iteration axes of a kernel under construction.

They are the iteration atoms of the design. Reading through a view splits axes by exact division
(``positions``); two ways to reach one value unify theirs. Splits and aliases are recorded here and
applied when the kernel is complete. A *computed* axis is no loop: it stands for an integer that the
kernel computes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from strop.errors import UnsupportedError
from strop.ir.dims import Expr, const
from strop.ir.loops import Index

ONE = const(1)
Strides = dict[int, Expr]


class AxisTable:
    """Number the axes: they are small integers; ``size[a]`` is the extent of axis a."""

    def __init__(self) -> None:
        self.size: list[Expr] = []
        self.names: dict[int, str] = {}  # of the values that computed axes stand for
        self.loops: set[int] = set()  # of reductions, which mean nothing outside of these
        self._parts: dict[int, tuple[int, int]] = {}
        self._alias: dict[int, int] = {}

    def new(self, size: Expr) -> int:
        self.size.append(size)
        return len(self.size) - 1

    def computed(self, name: str, size: Expr) -> int:
        """Return the axis that stands for a value in [0, size), or for any where nothing is read
        that it moves."""
        axis = next((a for a, other in self.names.items() if other == name), None)
        if axis is None:
            axis = self.new(size)
            self.names[axis] = name
        return axis

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
        if axis in self.loops:
            self.loops.update(self._parts[axis])
        return self._parts[axis]

    def resolved(self, terms: Iterable[tuple[int, Expr]]) -> Strides:
        """Return the strides of the axes that those in ``terms`` stand for by now."""
        total: Strides = {}
        for axis, stride in terms:
            step = stride
            for leaf in reversed(self.leaves([axis])):
                total[leaf] = total.get(leaf, const(0)) + step
                step = step * self.size[leaf]
        return {axis: stride for axis, stride in total.items() if stride != const(0)}

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

    def index(self, offset: Expr, strides: Strides) -> Index:
        """Return a finished Index over leaf axes, named ``a<number>``."""
        total = self.resolved(strides.items())
        return Index(offset, tuple((f"a{axis}", total[axis]) for axis in sorted(total)))
