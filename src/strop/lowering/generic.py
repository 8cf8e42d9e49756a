"""Print kernels without sizes of their own: what is outer takes every size as an argument.

``torch.compile`` traces the first shape with constants and later ones with symbols. Both graphs
have the same kernels but for these numbers. With names in their place the sources are equal, and
what the first graph has built serves the others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from strop.ir.dims import Expr, const, symbol
from strop.ir.loops import (
    Axis,
    CheckIndex,
    Index,
    Load,
    LoopKernel,
    Position,
    Schedule,
    Stmt,
    Store,
)
from strop.ir.source import Emitted

ONE = const(1)
MIN_COLS = 64  # constant inner axes are gathered up to this many elements, and no further


def without_sizes(emit: Callable[[LoopKernel], Emitted]) -> Callable[[LoopKernel], Emitted]:
    """Wrap a code generator so that it prints the generic form of each kernel."""

    def emit_generic(kernel: LoopKernel) -> Emitted:
        naming = _Naming(kernel)
        emitted = emit(naming.kernel())

        def here(sizes: Sequence[Expr]) -> tuple[Expr, ...]:
            return tuple(size.substitute(naming.sizes) for size in sizes)

        variants = (
            replace(v, scalars=here(v.scalars), size=v.size.substitute(naming.sizes))
            for v in emitted.variants
        )
        return replace(emitted, scalars=here(emitted.scalars), variants=tuple(variants))

    return emit_generic


def generic_split(axes: Sequence[Axis], stmts: Sequence[Stmt]) -> int:
    """Return how many outer axes of a pointwise kernel are rows; never asks whether these are
    constant."""
    split = len(axes) - 1
    elements = axes[split].size
    while split > 1 and elements.is_const and elements.value < MIN_COLS:
        outer = axes[split - 1]
        if not outer.size.is_const or _is_transposed(outer, axes[split], stmts):
            break
        split -= 1
        elements = elements * outer.size
    return split


def _is_transposed(outer: Axis, inner: Axis, stmts: Sequence[Stmt]) -> bool:
    """Tell whether some access has the two axes the other way round in memory."""
    for stmt in stmts:
        if isinstance(stmt, Load | Store):
            strides = dict(stmt.index.strides)
            if outer.name in strides and strides.get(inner.name, ONE) != ONE:
                return True
    return False


@dataclass
class _Naming:
    """Name sizes. ``sizes``: what each name stands for in this graph."""

    source: LoopKernel
    sizes: dict[str, Expr] = field(default_factory=dict)

    def kernel(self) -> LoopKernel:
        source = self.source
        rows, cols = tuple(map(self._axis, source.rows)), source.cols
        if source.schedule is Schedule.POINTWISE and len(cols) == 1 and self._is_spread(cols[0]):
            cols = (self._axis(cols[0]),)
        self._suffixes = self._products(rows, cols)
        return replace(
            source, rows=rows, cols=cols, body=self._all(source.body), tail=self._all(source.tail)
        )

    def _is_spread(self, col: Axis) -> bool:
        """Tell whether cols may be anything: the whole tensor, or the other side of a transpose."""
        strides = [
            dict(s.index.strides).get(col.name, ONE)
            for s in self.source.body
            if isinstance(s, Load | Store)
        ]
        return not self.source.rows or any(stride != ONE for stride in strides)

    def _axis(self, axis: Axis) -> Axis:
        return axis if axis.size == ONE else replace(axis, size=self._name(axis.name, axis.size))

    def _name(self, name: str, size: Expr) -> Expr:
        self.sizes[name] = size
        return symbol(name)

    def _products(self, rows: Sequence[Axis], cols: Sequence[Axis]) -> list[tuple[Expr, Expr]]:
        """Return (size here, generic size) of everything inside each axis: the dense strides."""
        pairs, here, named = [], ONE, ONE
        inner_first = list(zip((*self.source.rows, *self.source.cols), (*rows, *cols), strict=True))
        for original, axis in reversed(inner_first):
            pairs.append((here, named))
            here, named = here * original.size, named * axis.size
        return pairs

    def _all(self, stmts: Sequence[Stmt]) -> tuple[Stmt, ...]:
        return tuple(map(self._stmt, stmts))

    def _stmt(self, stmt: Stmt) -> Stmt:
        if isinstance(stmt, CheckIndex):
            return replace(stmt, size=self._name(f"{stmt.out}_size", stmt.size))
        if not isinstance(stmt, Load | Store | Position):
            return stmt
        if isinstance(stmt, Load):
            lookups = tuple((name, self._stride(name, s)) for name, s in stmt.lookups)
            stmt = replace(stmt, lookups=lookups)
        return replace(stmt, index=self._index(stmt.index))

    def _index(self, index: Index) -> Index:
        strides = tuple(
            (axis, self._stride(axis, stride) if axis in self.sizes else stride)
            for axis, stride in index.strides
        )
        return Index(index.offset, strides)

    def _stride(self, axis: str, stride: Expr) -> Expr:
        """Return a generic stride: dense strides keep their relation to the sizes, others their
        factor of whole rows."""
        for here, named in self._suffixes:
            if stride == here:
                return named
        width = self.source.num_cols
        rows = stride.exact_div(width)
        factor, rest = (width, rows) if width.is_const and rows else (ONE, stride)
        if rest == ONE:
            return factor
        for name, size in self.sizes.items():
            if name.startswith(f"{axis}_") and size == rest:
                return factor * symbol(name)
        count = sum(name.startswith(f"{axis}_") for name in self.sizes)
        return factor * self._name(f"{axis}_{count}", rest)
