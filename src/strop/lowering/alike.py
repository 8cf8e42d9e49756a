"""Groups that compute the same from operands that lie alike are one kernel, lowered once.

A model has many of them: its blocks repeat. What is compared is all that ``lower`` looks at; which
values are read and written, and from which element on, is filled in for each group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass
from typing import Any

from strop.fusion.plan import Group
from strop.ir.affine import Strided, strided
from strop.ir.dims import Expr, const
from strop.ir.graph import Node
from strop.ir.loops import Load, LoopKernel
from strop.ir.ops import Kind
from strop.lowering.lower import Lowered, domain_of, lower

Lower = Callable[[Group, Set[Node]], Lowered]
ALIGNED = 16  # elements: a kernel that reads from a multiple of this on is told where by its caller
ZERO = const(0)


def lower_once(hints: Mapping[str, int], *, generic: bool = False) -> Lower:
    """Apply ``lower`` to the groups of one graph, once for groups that are alike."""
    made: dict[Any, tuple[Lowered, _Structure]] = {}

    def lower_group(group: Group, stored: Set[Node]) -> Lowered:
        here = _structure(group, stored)
        if here.key in made:
            low, there = made[here.key]
            if here.starts == there.starts or not _has_offsets(low.kernel):
                return _moved(low, there, here)
        made[here.key] = low, _ = lower(group, stored, hints, generic=generic), here
        return low

    return lower_group


@dataclass(frozen=True, slots=True)
class _Structure:
    """Hold the structure of a group. ``number``: of each node in ``key``. ``starts``: by number,
    where the only view of a value that is read begins, if that is no part of ``key``."""

    key: Any
    number: Mapping[Node, int]
    starts: Mapping[int, Expr]


def _has_offsets(kernel: LoopKernel) -> bool:
    loads = (stmt for stmt in kernel.body + kernel.tail if isinstance(stmt, Load))
    return any(stmt.index.offset != ZERO for stmt in loads)


def _moved(low: Lowered, there: _Structure, here: _Structure) -> Lowered:
    nodes, numbers = list(here.number), [there.number[node] for node in low.buffers]
    offsets = (
        offset + here.starts.get(n, ZERO) - there.starts.get(n, ZERO)
        for n, offset in zip(numbers, low.offsets, strict=True)
    )
    return Lowered(low.kernel, tuple(nodes[n] for n in numbers), tuple(offsets))


def _structure(group: Group, stored: Set[Node]) -> _Structure:
    walk = _Walk(group, stored)
    walk.run()
    free = walk.free_bases()

    def numbers(nodes: Iterable[Node]) -> tuple[int, ...]:
        return tuple(map(walk.number.__getitem__, nodes))

    starts = tuple(tuple(found) for base, found in walk.begins.items() if base not in free)
    key = (
        group.schedule,
        numbers(group.nodes),
        numbers(group.stores),
        numbers(walk.used),
        numbers(walk.bases),
        starts,
        tuple(walk.rows),
    )
    return _Structure(key, walk.number, {walk.number[base]: at for base, at in free.items()})


class _Walk:
    """Walk over what a group computes, from its nodes to what it reads."""

    def __init__(self, group: Group, stored: Set[Node]) -> None:
        self.number: dict[Node, int] = {}
        self.rows: list[Any] = []  # what is said of each node
        self.used: list[Node] = []  # the operands of all rows, in order
        self.bases: list[Node] = []  # of all views of what is read, in order
        self.begins: dict[Node, list[Expr]] = {}  # of the views of each base
        self._stored, self._inside, self._domain = stored, set(group.nodes), domain_of(group)
        self._stack = [*reversed(group.nodes), *reversed(group.stores)]

    def run(self) -> None:
        while self._stack:
            node = self._stack.pop()
            if node in self.number:
                continue
            self.number[node] = len(self.number)
            if (view := self._read_view(node)) is not None:
                self._add_view(node, view)
            else:
                self._add(node)

    def _read_view(self, node: Node) -> Strided | None:
        """The way that a kernel loads it, if it does."""
        view = strided(node)
        if view is None or not _is_read(view.base, self._stored, self._inside):
            return None
        # through a view of all that is reduced, its loop is that of other views of the same value
        is_loop = node is not view.base and self._domain == node.numel
        return None if is_loop and view.base.numel == self._domain else view

    def _add_view(self, node: Node, view: Strided) -> None:
        self.rows.append((node.shape, node.dtype, view.dims))
        if node is not view.base:
            self.bases.append(view.base)
            self.begins.setdefault(view.base, []).append(view.offset)
            self._stack.append(view.base)

    def _add(self, node: Node) -> None:
        # as text: 1, 1.0 and True are equal, and so are 0.0, -0.0
        attrs = repr(sorted(node.attrs.items())) if node.attrs else ""
        places = (node in self._inside, node in self._stored)
        operation = (node.op, len(node.inputs), attrs)
        self.rows.append((node.shape, node.dtype, node.order, *operation, *places))
        self.used += node.inputs
        self._stack += reversed(node.inputs)

    def free_bases(self) -> dict[Node, Expr]:
        """The values whose only view may begin elsewhere, with where it begins."""
        return {
            base: found[0]
            for base, found in self.begins.items()
            if len(found) == 1 and base not in self.used and found[0].is_multiple_of(ALIGNED)
        }


def _is_read(node: Node, stored: Set[Node], inside: Set[Node]) -> bool:
    """Tell whether a kernel loads it, whatever it was computed from."""
    if node.op in ("constant", "iota"):
        return False
    is_computable = node.kind in (Kind.POINTWISE, Kind.REDUCTION)
    return not is_computable or (node in stored and node not in inside)
