"""Turn one fusion group into one loop-IR kernel, with the buffers that its params stand for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

from strop.errors import UnsupportedError
from strop.fusion.plan import Group
from strop.ir.affine import base_of
from strop.ir.dims import Expr, const, product
from strop.ir.graph import Node
from strop.ir.loops import (
    MAX_LANES,
    Apply,
    Axis,
    Bag,
    CheckIndex,
    Index,
    Literal,
    Load,
    LoopKernel,
    Param,
    Position,
    Reduce,
    Schedule,
    Stmt,
    Store,
    args_of,
    bags_of,
    outs_of,
    with_args,
)
from strop.ir.ops import Kind
from strop.lowering.affine_places import without_affine_places
from strop.lowering.bags import BagDraft
from strop.lowering.drafts import DraftStatement
from strop.lowering.generic import generic_split
from strop.lowering.values import Values

MAX_COLS = 4096  # static inner axes are gathered into one inner level up to this many elements


@dataclass(frozen=True, slots=True)
class Lowered:
    """Hold a kernel and, for each of its params, the value whose buffer it reads or writes, and
    from which element on: a slice that is read at one offset only is not a kernel of its own."""

    kernel: LoopKernel
    buffers: tuple[Node, ...]
    offsets: tuple[Expr, ...]


class OutOfPlaceError(UnsupportedError):
    """Members of a group have no common index, as they read ``values`` of it in other places: a
    table, say, that is repeated for each of them and has as many elements by chance."""

    def __init__(self, text: str, values: frozenset[Node]) -> None:
        super().__init__(text)
        self.values = values


def lower(
    group: Group, stored: Set[Node], hints: Mapping[str, int], *, generic: bool = False
) -> Lowered:
    """Lower a group. ``generic`` is for ``without_sizes``, which prints outer sizes as arguments.

    Raises UnsupportedError where indices cannot be expressed; the planner avoids those.
    """
    domain = domain_of(group)
    values = Values(stored, set(group.nodes), domain)
    for node in _roots(group):
        values.store(node)
    values.shared.share_loops()
    unaligned = values.shared.align_stores()
    values.shared.check_reductions()
    return _Finish(group, values, hints, generic, unaligned).kernel()


def domain_of(group: Group) -> Expr:
    for node in group.nodes:
        if node.kind is Kind.REDUCTION:
            return node.inputs[0].numel
    return group.stores[-1].numel


def _roots(group: Group) -> list[Node]:
    """Return the stores, consumers first: what they need fixes the axes of stores that feed
    them."""
    return list(reversed(group.stores))


def _spread(group: Group) -> frozenset[Node]:
    """Return members that others read through a view of more or fewer elements."""
    found, members = set[Node](), set(group.nodes)
    for view in (operand for node in group.nodes for operand in node.inputs):
        base = base_of(view)
        while base in members and view is not base:
            if view.numel != base.numel:
                found.add(base)
            view = view.inputs[0]
    return frozenset(found)


class _Finish:
    """Resolves axes, orders them into rows and cols, and prints drafts as statements."""

    def __init__(
        self,
        group: Group,
        values: Values,
        hints: Mapping[str, int],
        generic: bool,
        unaligned: frozenset[Node],
    ) -> None:
        self.group, self.values, self.hints, self.generic = group, values, hints, generic
        self.unaligned = unaligned
        self.buffers: list[Node] = []
        self.params: list[Param] = []

    def kernel(self) -> Lowered:
        stmts = _deduplicated([self._stmt(d) for d in self.values.drafts.all])
        table = self.values.axes
        stmts = without_affine_places(stmts, lambda axis: table.size[int(axis[1:])])
        reduced = {f"a{a}" for a in self.values.axes.leaves(self.values.shared.reduced_axes)}
        axes = self._ordered_axes(stmts, reduced)
        flagged = [replace(axis, reduced=axis.name in reduced) for axis in axes]
        schedule = self.group.schedule
        self._check_sweep(flagged)
        merged, stmts = _merge_axes(flagged, stmts)
        outer = stmts if self.generic else None
        rows, cols = _rows_and_cols(schedule, merged, outer, has_bags=bool(bags_of(stmts)))
        stmts, rows, cols = _renamed(stmts, rows, cols)
        offsets = tuple(_common_offset(stmts, i, p) for i, p in enumerate(self.params))
        stmts = [_moved(stmt, offsets) for stmt in stmts]
        body, tail = _body_and_tail(schedule, stmts)
        kernel = LoopKernel(_name(self.group), schedule, rows, cols, tuple(self.params), body, tail)
        return Lowered(kernel, tuple(self.buffers), offsets)

    def _check_sweep(self, axes: Sequence[Axis]) -> None:
        """Raise OutOfPlaceError unless one sweep computes each element and reduction once."""
        if self.group.schedule is Schedule.COLUMN and not self.unaligned:
            return
        steps, domain = (
            size.eval(self.hints)
            for size in (product(axis.size for axis in axes), domain_of(self.group))
        )
        if steps > domain:
            values = self.unaligned or _spread(self.group)
            raise OutOfPlaceError(f"{steps} steps for {domain} elements", values)

    def _param(self, node: Node, *, is_output: bool) -> int:
        if node not in self.buffers:
            self.buffers.append(node)
            self.params.append(Param(node.dtype, is_output))
        return self.buffers.index(node)

    def _stmt(self, draft: DraftStatement) -> Stmt:
        out = draft.outs[0] if draft.outs else ""
        if draft.kind == "literal":
            return Literal(out, draft.detail, draft.dtype)
        if draft.kind == "apply":
            return Apply(out, draft.detail, draft.args, draft.dtype, draft.attrs)
        if draft.kind == "reduce":
            return Reduce(draft.outs, draft.detail, draft.args[0], draft.dtype)
        if draft.kind == "place":
            value, *guards = draft.args
            return CheckIndex(out, value, *draft.detail, *guards)
        assert draft.access is not None
        index = self.values.axes.index(draft.access.offset, dict(draft.access.strides))
        if draft.kind == "position":
            return Position(out, index, draft.dtype)
        if draft.kind == "bag":
            lookups = tuple((name, const(0)) for name in draft.args)
            bag, table = self._bag(draft.detail), draft.detail.table
            number = self._param(table, is_output=False)
            return Load(out, number, index, draft.dtype, None, lookups, bag)
        if draft.kind == "load":
            strides = tuple(stride for _, stride in draft.attrs)
            lookups = tuple(zip(draft.args, strides, strict=False))
            guard = draft.args[len(lookups)] if len(draft.args) > len(lookups) else None
            number = self._param(draft.detail, is_output=False)
            return Load(out, number, index, draft.dtype, guard, lookups)
        return Store(self._param(draft.detail, is_output=True), index, draft.args[0])

    def _bag(self, draft: BagDraft) -> Bag:
        ids = self._param(draft.ids, is_output=False)
        weights = None if draft.weights is None else self._param(draft.weights, is_output=False)
        return Bag(
            draft.kind,
            ids,
            draft.at,
            draft.count,
            draft.stride,
            draft.size,
            draft.padding,
            weights,
            draft.weights_at,
        )

    def _ordered_axes(self, stmts: Sequence[Stmt], reduced: Set[str]) -> list[Axis]:
        """Return all axes, outermost first, in the order in which the fullest access walks memory.

        Reduced axes run even where nothing moves along them: the sum of an expanded value.
        """
        walks = _walks(stmts, self.hints)
        used = {axis for walk in walks for axis in walk} | reduced
        used |= {axis for s in stmts if isinstance(s, Position) for axis in s.index.axes}
        table = self.values.axes
        sizes = {name: table.size[int(name[1:])] for name in used}
        stride_of = max(walks, key=len)
        if set(stride_of) != used:
            stride_of = _largest(walks)
        names = sorted(used, key=lambda a: (-stride_of.get(a, 0), a))
        return [Axis(name, sizes[name]) for name in names]


Walk = dict[str, int]  # how far each axis moves something, in elements at the traced sizes


def _walks(stmts: Sequence[Stmt], hints: Mapping[str, int]) -> list[Walk]:
    """Describe how the axes move each access. What moves a place moves the load that looks there,
    too."""
    walks: list[Walk] = []
    moved: dict[str, Walk] = {}
    for stmt in stmts:
        walk = _largest([moved[arg] for arg in args_of(stmt)])
        if isinstance(stmt, Load | Store | Position):
            walk = {axis: abs(stride.eval(hints)) for axis, stride in stmt.index.strides}
        if isinstance(stmt, Load) and stmt.bag is None:
            for name, stride in stmt.lookups:
                step = abs(stride.eval(hints))
                walk = _largest([walk, {axis: n * step for axis, n in moved[name].items()}])
        if isinstance(stmt, Load | Store):
            walks.append(walk)
        moved.update(dict.fromkeys(outs_of(stmt), walk))
    return walks


def _largest(walks: Sequence[Walk]) -> Walk:
    largest: Walk = {}
    for walk in walks:
        for axis, stride in walk.items():
            largest[axis] = max(largest.get(axis, 0), stride)
    return largest


def _common_offset(stmts: Sequence[Stmt], number: int, param: Param) -> Expr:
    """Return the offset of all accesses to a param, if it is one and keeps 16-byte alignment."""
    if any(load.bag is not None and number in load.bag.params for load in bags_of(stmts)):
        return const(0)
    offsets = {s.index.offset for s in stmts if isinstance(s, Load | Store) and s.param == number}
    if len(offsets) != 1 or not next(iter(offsets)).is_multiple_of(16 // param.dtype.itemsize):
        return const(0)
    return offsets.pop()


def _moved(stmt: Stmt, offsets: Sequence[Expr]) -> Stmt:
    if not isinstance(stmt, Load | Store):
        return stmt
    if not offsets[stmt.param].terms:
        return stmt
    offset = stmt.index.offset - offsets[stmt.param]
    return replace(stmt, index=Index(offset, stmt.index.strides))


def _deduplicated(stmts: Sequence[Stmt]) -> list[Stmt]:
    """Keep equal statements once: after unification two ways to a value are the same statements."""
    renamed: dict[str, str] = {}
    made: dict[object, tuple[str, ...]] = {}
    kept: list[Stmt] = []
    for stmt in stmts:
        if renamed:
            stmt = with_args(stmt, renamed)
        outs = outs_of(stmt)
        key = (
            replace(stmt, outs=())
            if isinstance(stmt, Reduce)
            else (stmt if isinstance(stmt, Store) else replace(stmt, out=""))
        )
        # 1, 1.0 and True are equal and hash alike, and so are 0.0 and -0.0
        detail = repr(stmt.value) if isinstance(stmt, Literal) else None
        if (key, detail) in made and not isinstance(stmt, Store):
            renamed.update(zip(outs, made[key, detail], strict=True))
            continue
        made[key, detail] = outs
        kept.append(stmt)
    return kept


def _merge_axes(axes: list[Axis], stmts: list[Stmt]) -> tuple[list[Axis], list[Stmt]]:
    """Join neighbours that every access walks as one axis."""
    result = list(axes)
    position = 0
    while position + 1 < len(result):
        outer, inner = result[position], result[position + 1]
        indices = [s.index for s in stmts if isinstance(s, Load | Store | Position)]
        if outer.reduced == inner.reduced and all(_walks_as_one(i, outer, inner) for i in indices):
            joined = Axis(inner.name, outer.size * inner.size, inner.reduced)
            result[position : position + 2] = [joined]
            stmts = [_without_axis(s, outer.name) for s in stmts]
            position = max(position - 1, 0)
        else:
            position += 1
    return result, stmts


def _walks_as_one(index: Index, outer: Axis, inner: Axis) -> bool:
    strides = dict(index.strides)
    zero = const(0)
    return strides.get(outer.name, zero) == strides.get(inner.name, zero) * inner.size


def _without_axis(stmt: Stmt, axis: str) -> Stmt:
    if not isinstance(stmt, Load | Store | Position):
        return stmt
    kept = tuple((a, s) for a, s in stmt.index.strides if a != axis)
    return replace(stmt, index=Index(stmt.index.offset, kept))


def _rows_and_cols(
    schedule: Schedule,
    axes: Sequence[Axis],
    generic: Sequence[Stmt] | None,
    *,
    has_bags: bool,
) -> tuple[tuple[Axis, ...], tuple[Axis, ...]]:
    if not axes:
        return (), (Axis("one", const(1), schedule is not Schedule.POINTWISE),)
    if schedule is Schedule.ROW:
        rows = tuple(a for a in axes if not a.reduced)
        cols = tuple(a for a in axes if a.reduced) or (Axis("one", const(1), True),)
        return rows, cols
    if schedule is Schedule.COLUMN:
        return _column_levels(axes)
    if generic is not None:
        split = generic_split(axes, generic)
        return tuple(axes[:split]), tuple(axes[split:])
    split = len(axes) - 1
    if has_bags:  # a row of one bag at a time
        return tuple(axes[:split]), tuple(axes[split:])
    elements = axes[split].size
    while split > 0 and elements.is_const and axes[split - 1].size.is_const:
        if (elements * axes[split - 1].size).value > MAX_COLS:
            break
        split -= 1
        elements = elements * axes[split].size
    return tuple(axes[:split]), tuple(axes[split:])


def _column_levels(axes: Sequence[Axis]) -> tuple[tuple[Axis, ...], tuple[Axis, ...]]:
    """Order levels: kept*, reduced+ are rows; then kept*, reduced* are lanes."""
    start = next(i for i, a in enumerate(axes) if a.reduced)
    split = next((i for i in range(start, len(axes)) if not axes[i].reduced), None)
    if split is None:  # nothing is kept inside: one lane, and the rows are what gets split
        return tuple(axes), (Axis("one", const(1)),)
    rows, cols = axes[:split], axes[split:]
    flags = [a.reduced for a in cols]
    if flags != sorted(flags):
        raise UnsupportedError("kept and reduced axes alternate within the lanes")
    lanes = product(a.size for a in cols)
    if flags[-1] and not (lanes.is_const and lanes.value <= MAX_LANES):
        raise UnsupportedError(f"{lanes} lanes, some of them reduced, do not fit in one tile")
    return tuple(rows), tuple(cols)


def _renamed(
    stmts: Sequence[Stmt], rows: tuple[Axis, ...], cols: tuple[Axis, ...]
) -> tuple[list[Stmt], tuple[Axis, ...], tuple[Axis, ...]]:
    """Rename to r0, r1, ... and c0, c1, ..., and values to v0, v1, ...: equal kernels must print
    equally."""
    names = {a.name: f"r{i}" for i, a in enumerate(rows)}
    names |= {a.name: f"c{i}" for i, a in enumerate(cols)}
    values: dict[str, str] = {}
    for stmt in stmts:
        for out in outs_of(stmt):
            values[out] = f"v{len(values)}"
    position = {new: i for i, new in enumerate(names.values())}
    renamed = []
    for stmt in stmts:
        changes: dict[str, Any] = {}
        if isinstance(stmt, Load | Store | Position):
            strides = sorted(
                ((names[a], s) for a, s in stmt.index.strides), key=lambda pair: position[pair[0]]
            )
            changes["index"] = Index(stmt.index.offset, tuple(strides))
        if isinstance(stmt, Reduce):
            changes["outs"] = tuple(values[o] for o in stmt.outs)
        elif not isinstance(stmt, Store):
            changes["out"] = values[stmt.out]
        renamed.append(with_args(replace(stmt, **changes), values))
    new_rows = tuple(replace(a, name=names[a.name]) for a in rows)
    return renamed, new_rows, tuple(replace(a, name=names[a.name]) for a in cols)


def _body_and_tail(
    schedule: Schedule, stmts: Sequence[Stmt]
) -> tuple[tuple[Stmt, ...], tuple[Stmt, ...]]:
    """Split a COLUMN kernel: what needs a reduction's result, and what only that needs, is the
    tail."""
    if schedule is not Schedule.COLUMN:
        return tuple(stmts), ()
    late: set[str] = set()
    tail: list[Stmt] = []
    for stmt in stmts:
        if isinstance(stmt, Reduce):
            late.update(stmt.outs)
        elif any(arg in late for arg in args_of(stmt)):
            late.update(outs_of(stmt))
            tail.append(stmt)
    body = [s for s in stmts if s not in tail]
    wanted: set[str] = set()
    first: list[Stmt] = []
    moved: list[Stmt] = []
    for stmt in reversed(body):
        if isinstance(stmt, Store | Reduce) or any(o in wanted for o in outs_of(stmt)):
            wanted.update(args_of(stmt))
            first.insert(0, stmt)
        else:
            moved.insert(0, stmt)
    return tuple(first), tuple(moved + tail)


def _name(group: Group) -> str:
    """Name a kernel after its operators: readable in a profile, and the same for equal kernels."""
    ops = [n.op for n in group.nodes if n.op not in ("copy", "part", "constant")] or ["copy"]
    short = list(dict.fromkeys(ops))
    return f"{group.schedule.value}_" + "_".join(short[:6])
