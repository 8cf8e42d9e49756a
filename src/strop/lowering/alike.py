"""Groups that compute the same from operands that lie alike are one kernel, lowered once.

A model has many of them: its blocks repeat. What is compared is all that ``lower`` looks at; which
values are read and written, and from which element on, is filled in for each group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass
from typing import Any

from strop.fusion.plan import Group
from strop.ir.affine import strided
from strop.ir.dims import Expr, const
from strop.ir.graph import Node
from strop.ir.loops import Kernel, Load
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


def _has_offsets(kernel: Kernel) -> bool:
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
    inside, domain = set(group.nodes), domain_of(group)
    number, rows = dict[Node, int](), list[Any]()
    used: list[Node] = []  # the operands of all rows, in order
    bases: list[Node] = []  # of all views of what is read, in order
    begins: dict[Node, list[Expr]] = {}  # of the views of each base
    stack = [*reversed(group.nodes), *reversed(group.stores)]
    while stack:
        node = stack.pop()
        if node in number:
            continue
        number[node] = len(number)
        view = strided(node)
        # through a view of all that is reduced, its loop is that of other views of the same value
        is_loop = view is not None and node is not view.base and domain == node.numel
        if (
            view is not None
            and _is_read(view.base, stored, inside)
            and not (is_loop and view.base.numel == domain)
        ):
            rows.append((node.shape, node.dtype, view.dims))
            if node is not view.base:
                bases.append(view.base)
                begins.setdefault(view.base, []).append(view.offset)
                stack.append(view.base)
            continue
        # as text: 1, 1.0 and True are equal, and so are 0.0, -0.0
        attrs = repr(sorted(node.attrs.items())) if node.attrs else ""
        rows.append(
            (
                node.shape,
                node.dtype,
                node.order,
                node.op,
                len(node.inputs),
                attrs,
                node in inside,
                node in stored,
            )
        )
        used += node.inputs
        stack += reversed(node.inputs)
    free = {
        base: found[0]
        for base, found in begins.items()
        if len(found) == 1 and base not in used and found[0].is_multiple_of(ALIGNED)
    }

    def numbers(nodes: Iterable[Node]) -> tuple[int, ...]:
        return tuple(map(number.__getitem__, nodes))

    starts = tuple(tuple(found) for base, found in begins.items() if base not in free)
    key = (
        group.schedule,
        numbers(group.nodes),
        numbers(group.stores),
        numbers(used),
        numbers(bases),
        starts,
        tuple(rows),
    )
    return _Structure(key, number, {number[base]: start for base, start in free.items()})


def _is_read(node: Node, stored: Set[Node], inside: Set[Node]) -> bool:
    """Tell whether a kernel loads it, whatever it was computed from."""
    if node.op in ("constant", "iota"):
        return False
    is_computable = node.kind in (Kind.POINTWISE, Kind.REDUCTION)
    return not is_computable or (node in stored and node not in inside)
