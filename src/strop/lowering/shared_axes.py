"""Let everything in a kernel run over the same axes: one sweep loads, reduces and stores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from strop.errors import UnsupportedError
from strop.ir.dims import Expr
from strop.ir.graph import Node
from strop.lowering.drafts import Drafts
from strop.lowering.positions import Dim, NodeIndex, Positions


@dataclass(frozen=True, slots=True)
class ReductionLoop:
    """Hold what one reduction runs over: the dims ``dims`` of a value, read at ``index``."""

    shape: tuple[Expr, ...]
    dims: tuple[int, ...]
    index: NodeIndex
    axes: list[int]  # of the reduced dims
    guard: str | None


class SharedAxes:
    """Holds what the values of a kernel are read, reduced and stored over.

    ``domain`` is the kernel's number of elements.
    """

    def __init__(self, positions: Positions, drafts: Drafts, domain: Expr) -> None:
        self.positions, self.axes, self.drafts = positions, positions.axes, drafts
        self.domain = domain
        self.reduced_axes: list[int] = []
        self._fresh: dict[object, NodeIndex] = {}
        self._rows: dict[object, list[list[int] | None]] = {}
        self._first_index: dict[Node, NodeIndex] = {}
        self._stored_axes: list[int] | None = None
        self._loops: list[ReductionLoop] = []
        self._stores: list[tuple[Node, NodeIndex]] = []

    def loop_axes(self, key: object, sizes: Sequence[Expr]) -> NodeIndex:
        """Return the axes that a reduction runs over; reductions of one key share them."""
        if key not in self._fresh:
            fresh = self._fresh[key] = self.positions.fresh(sizes)
            axes = [axis for dim in fresh for axis, _ in dim.terms]
            self.reduced_axes += axes
            self.axes.loops.update(axes)
        return self._fresh[key]

    def add_loop(self, loop: ReductionLoop) -> None:
        self._loops.append(loop)

    def add_store(self, node: Node, index: NodeIndex) -> None:
        self._stores.append((node, index))

    def keep_order(self, node: Node, index: NodeIndex) -> None:
        """Note the order in which a value of the full size is stored: others follow it."""
        if node.numel == self.domain and self._stored_axes is None:
            self._stored_axes = self.positions.runs(index, node.shape)

    def order_of(self, node: Node) -> NodeIndex:
        """Return the index to store a value at: in the order in which others are read or stored."""
        return self._first_index.get(node) or self._alike(node)

    def _alike(self, node: Node) -> NodeIndex:
        """Return an index of what nothing here reads as a whole: one sweep does for all."""
        if node.numel != self.domain:
            return self.positions.fresh(node.shape)
        for other, index in self._first_index.items():
            if other.shape == node.shape:
                return index
        index = self.positions.fresh(node.shape)
        axes = self.positions.runs(index, node.shape)
        if self._stored_axes is not None and axes is not None:
            self.axes.unify(self._stored_axes, axes)
        return index

    def meet(self, node: Node, index: NodeIndex, *, in_rows: bool) -> None:
        """Make both ways to a value of the full size, which is reached twice, the same axes.

        ``in_rows`` is set around a reduction: a row that is summed and then divided by its sum is
        one row, and so is one that lies elsewhere, as in what is rolled.
        """
        if node.numel != self.domain:
            return
        ours = self.positions.runs(index, node.shape)
        if ours is not None:
            first = self._first_index.setdefault(node, index)
            self.axes.unify(self.positions.runs(first, node.shape) or [], ours)
        elif in_rows:
            self._meet_in_rows(node, index)

    def _meet_in_rows(self, node: Node, index: NodeIndex) -> None:
        """Make the loop over a row that lies elsewhere, in what is rolled, say, the axes by which
        its elements are read one by one."""
        runs = [self.positions.run(dim, size) for dim, size in zip(index, node.shape, strict=True)]
        others = (dim if run is None else Dim() for dim, run in zip(index, runs, strict=True))
        first = self._rows.setdefault((node, self.positions.key(tuple(others))), runs)
        for before, now in zip(first, runs, strict=True):
            a, b = (self.axes.leaves(run or []) for run in (before, now))
            if self.axes.loops.issuperset(b):
                self.axes.unify(a, b)
            elif self.axes.loops.issuperset(a):
                self.axes.unify(b, a)

    def share_loops(self) -> None:
        """Let reductions of one shape that have no axis in common by now run over the same axes."""
        for loop in self._loops[1:]:
            first = self._loops[0]
            if loop.shape != first.shape:
                continue
            ours, theirs = (self.positions.runs(at.index, at.shape) for at in (first, loop))
            if ours is None or theirs is None:  # other rows of it
                if loop.dims == first.dims:
                    self.axes.unify(first.axes, loop.axes)
            elif not set(ours) & set(theirs):
                self.axes.unify(ours, theirs)

    def align_stores(self) -> frozenset[Node]:
        """Let stores of the kernel's full size run over the axes of its reductions' loop, and
        return those that cannot.

        ``y * x.mean(-1)`` has no value that both the mean and the product read, so nothing has made
        their axes the same: each element of y would take the mean of its row again.
        """
        if not self._loops:
            return frozenset()
        moving = set[int]().union(*map(self.drafts.axes_of, self._loops[0].index))
        kept = moving - {*self.axes.leaves(self.reduced_axes)}
        read = [name for draft in self.drafts.all if draft.kind == "reduce" for name in draft.args]
        asked = self.drafts.axes_behind(read)
        unaligned = set[Node]()
        for node, walk in self._stores:
            reduced = list(dict.fromkeys(self.axes.leaves(self.reduced_axes)))
            whole = self.positions.runs(walk, node.shape)
            own = list(set().union(*map(self.drafts.axes_of, walk))) if whole is None else whole
            beside = [a for a in own if a not in kept and a not in reduced]
            if node.numel != self.domain or not beside:
                continue
            missing = [a for a in reduced if a not in own]
            # an axis that says which part of the row is reduced is no place in that row
            is_free = whole is not None and asked.isdisjoint(beside)
            if not is_free or not self.axes.unify(missing, beside):
                unaligned.add(node)
        return frozenset(unaligned)

    def check_reductions(self) -> None:
        """Check that all run over the same axes, those of the kernel's one loop, and that no guard
        of one asks where in that loop it is."""
        loops = {frozenset(self.axes.leaves(loop.axes)) for loop in self._loops}
        if len(loops) > 1:
            raise UnsupportedError("reductions over different axes")
        for loop in self._loops:
            asked = self.drafts.axes_behind([loop.guard]) if loop.guard else set()
            if asked & set(self.axes.leaves(loop.axes)):
                raise UnsupportedError("part of a reduction's own row")
