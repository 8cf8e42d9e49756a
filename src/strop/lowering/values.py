"""Write the statements that compute a group's values: pull from what is stored to what is loaded.

``value(node, index)`` emits whatever is needed to have one element of ``node`` at ``index`` and
returns its name. Views turn into other indices, stored values into loads, and pointwise rows and
reductions into statements. Statements hold unresolved axes until ``lower`` finishes the kernel.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch

from strop.errors import UnsupportedError
from strop.ir.affine import Atom, base_of, merge, strided
from strop.ir.dims import Expr, const, product, to_expr
from strop.ir.graph import Node
from strop.ir.ops import Kind, Operands, compute_dtype
from strop.lowering.axes import ONE, AxisTable, Strides
from strop.lowering.positions import ZERO, Dim, NodeIndex, Positions

LIMIT = 2**31  # of positions that have 32 bits


@dataclass(frozen=True, slots=True)
class Access:
    """Hold an affine index before axes are final, and the values that move it."""

    offset: Expr
    strides: tuple[tuple[int, Expr], ...]
    lookups: tuple[tuple[str, Expr], ...] = ()


@dataclass(frozen=True, slots=True)
class DraftStatement:
    """Hold a statement before axes are final. ``kind`` names the loop IR statement it becomes."""

    kind: str
    outs: tuple[str, ...]
    args: tuple[str, ...] = ()
    dtype: torch.dtype = torch.float32
    access: Access | None = None
    detail: Any = None  # op name, literal value, reduction kind, or the node loaded or stored
    attrs: tuple[tuple[str, Any], ...] = ()


class Values:
    """Emits drafts for one group. ``inside`` holds the values that this kernel computes."""

    def __init__(self, stored: Set[Node], inside: Set[Node], domain: Expr) -> None:
        self.axes = AxisTable()
        self.positions = Positions(self.axes, self._divide)
        self.drafts: list[DraftStatement] = []
        self.dtypes: dict[str, torch.dtype] = {}
        self.reduced_axes: list[int] = []
        self._loaded = stored - inside
        self._domain = domain
        self._inside = inside
        self._reduces = any(n.kind is Kind.REDUCTION for n in inside)
        # whose mean comes with the variance; any other mean is a sum
        self._varied = {(n.inputs[0], n.attrs["dims"]) for n in inside if n.op == "var"}
        self._memo: dict[Any, str] = {}
        self._first_index: dict[Node, NodeIndex] = {}
        self._stored_axes: list[int] | None = None
        self._both_of: dict[str, tuple[str, str]] = {}  # guards of two tests
        self._loops: list[_Loop] = []  # what reductions run over
        self._reductions: list[tuple[str | None, list[int]]] = []  # their guards and reduced axes
        self._stores: list[tuple[Node, NodeIndex]] = []

    def emit(
        self,
        kind: str,
        args: tuple[str, ...] = (),
        dtype: torch.dtype = torch.float32,
        access: Access | None = None,
        detail: Any = None,
        attrs: tuple[tuple[str, Any], ...] = (),
    ) -> str:
        name = f"v{len(self.dtypes)}"
        self.dtypes[name] = compute_dtype(dtype)
        self.drafts.append(DraftStatement(kind, (name,), args, dtype, access, detail, attrs))
        return name

    def convert(self, name: str, dtype: torch.dtype) -> str:
        """Convert to another compute type: exact, or what ATen's own promotion does."""
        if self.dtypes[name] == dtype:
            return name
        return self.emit("apply", (name,), dtype, detail="cast")

    def literal(self, value: int | float | bool | Expr, dtype: torch.dtype) -> str:
        return self.emit("literal", (), compute_dtype(dtype), detail=value)

    def value(self, node: Node, index: NodeIndex, guard: str | None = None) -> str:
        pairs = zip(index, node.shape, strict=True)
        index = tuple(Dim() if size == ONE else dim for dim, size in pairs)
        self._unify(node, index)
        key = (node, self.positions.key(index), guard)
        if key not in self._memo:
            self._memo[key] = self._compute(node, index, guard)
        return self._memo[key]

    def _unify(self, node: Node, index: NodeIndex) -> None:
        """Make both ways to a full-size value of this kernel, which is reached twice, the same
        axes.

        Around a reduction that holds for what the kernel loads, too: a row that is summed and then
        divided by its sum is one row.
        """
        if node.numel != self._domain or not (self._reduces or node in self._inside):
            return
        ours = self.positions.runs(index, node.shape)
        if ours is not None:
            first = self._first_index.setdefault(node, index)
            self.axes.unify(self.positions.runs(first, node.shape) or [], ours)
        elif self._reduces:
            self._unify_loop(node, index)

    def _unify_loop(self, node: Node, index: NodeIndex) -> None:
        """Make the loop over a row that lies elsewhere, in what is rolled, say, the axes by which
        its elements are read one by one."""
        runs = [self.positions.run(dim, size) for dim, size in zip(index, node.shape, strict=True)]
        others = (dim if run is None else Dim() for dim, run in zip(index, runs, strict=True))
        key = ("row", node, self.positions.key(tuple(others)))
        first: list[list[int] | None] = self._memo.setdefault(key, runs)  # type: ignore[assignment,arg-type]
        for before, now in zip(first, runs, strict=True):
            a, b = (self.axes.leaves(run or []) for run in (before, now))
            if self.axes.loops.issuperset(b):
                self.axes.unify(a, b)
            elif self.axes.loops.issuperset(a):
                self.axes.unify(b, a)

    def _compute(self, node: Node, index: NodeIndex, guard: str | None) -> str:
        if node.kind is Kind.VIEW:
            return self._view(node, index, guard)
        if node.op == "constant":
            return self.literal(node.attrs["value"], node.dtype)
        if node.op == "iota":
            return self._iota(node, index[0])
        if node in self._loaded or not _computable(node):
            return self._load(node, index, guard)
        if node.kind is Kind.REDUCTION:
            return self._reduce(node, index, guard)
        if node.op == "cat":
            return self._cat(node, index, guard)
        if node.op == "take":
            return self._take(node, index, guard)
        return self._pointwise(node, index, guard)

    # reading

    def _view(self, node: Node, index: NodeIndex, guard: str | None) -> str:
        base = base_of(node)
        is_loaded = base in self._loaded or not _computable(base)
        # what is reduced through a view may be read beside it: both ways must meet at the base
        meets = self._reduces and base.numel == node.numel == self._domain
        meets = meets and self.positions.runs(index, node.shape) is not None
        if is_loaded and not meets and strided(node) is not None:
            return self._load(node, index, guard)
        source = node.inputs[0]
        if node.op == "permute":
            pulled = [Dim()] * len(index)
            for position, dim in enumerate(node.attrs["dims"]):
                pulled[dim] = index[position]
            return self.value(source, tuple(pulled), guard)
        if node.op == "expand":
            return self.value(source, _aligned(source, node, index), guard)
        if node.op == "slice":
            dims = list(index)
            dim = node.attrs["dim"]
            dims[dim] = dims[dim].moved(node.attrs["start"], node.attrs["step"])
            return self.value(source, tuple(dims), guard)
        if node.op == "diagonal":
            return self.value(source, _uncrossed(node, index), guard)
        pulled_back = self.positions.reshaped(index, node.shape, source.shape)
        return self.value(source, pulled_back, guard)

    def _load(self, node: Node, index: NodeIndex, guard: str | None) -> str:
        view = strided(node)
        if view is None:
            raise UnsupportedError(f"{node} is not affine over its base")
        access = self._access(view.offset, list(zip(index, view.dims, strict=True)))
        return self._emit_load(node, access, view.base, (), guard)

    def _emit_load(
        self,
        node: Node,
        access: Access,
        base: Node,
        lookups: tuple[tuple[str, Expr], ...],
        guard: str | None,
    ) -> str:
        lookups = (*lookups, *access.lookups)
        args = tuple(name for name, _ in lookups) + ((guard,) if guard else ())
        return self.emit("load", args, compute_dtype(node.dtype), access, base, lookups)

    def _access(self, offset: Expr, walked: Sequence[tuple[Dim, Sequence[Atom]]]) -> Access:
        """Compute the place in memory from positions along dims and the atoms of these dims."""
        strides, lookups = Strides(), list[tuple[str, Expr]]()
        for dim, atoms in walked:
            merged = merge(atoms)
            parts = self.positions.dealt(dim, [size for size, _ in merged])
            for part, (_, stride) in zip(parts, merged, strict=True):
                offset = offset + part.shift * stride
                for axis, step in self.axes.resolved(part.terms).items():
                    if axis in self.axes.names:
                        lookups.append((self.axes.names[axis], step * stride))
                    else:
                        strides[axis] = strides.get(axis, ZERO) + step * stride
        return Access(offset, tuple(strides.items()), tuple(lookups))

    def _take(self, node: Node, index: NodeIndex, guard: str | None) -> str:
        """Print a load that values move; the source is in memory."""
        source, *indices = node.inputs
        view = strided(source)
        if view is None:
            raise UnsupportedError(f"{source} is not affine over its base")
        walked: list[tuple[Dim, Sequence[Atom]]] = []
        lookups: list[tuple[str, Expr]] = []
        for size, atoms, walk in zip(source.shape, view.dims, node.attrs["walks"], strict=True):
            if walk is not None:
                walked.append((index[walk], atoms))
                continue
            merged, operand = merge(atoms), indices[len(lookups)]
            if len(merged) > 1:
                raise UnsupportedError(f"{source}: looked up along a dim of several strides")
            place = self.value(operand, _aligned(operand, node, index), guard)
            if node.attrs["bounds"] != "known":
                place = self._place(self.convert(place, torch.int64), size, node, guard)
            lookups.append((place, merged[0][1] if merged else ZERO))
            guard = self._not_empty(size, guard)
        access = self._access(view.offset, walked)
        return self._emit_load(node, access, view.base, tuple(lookups), guard)

    def _place(self, value: str, size: Expr, node: Node, guard: str | None) -> str:
        args = (value, guard) if guard else (value,)
        wraps = node.attrs["bounds"] == "wrapped"
        return self.emit("place", args, torch.int64, detail=(size, wraps))

    def _not_empty(self, size: Expr, guard: str | None) -> str | None:
        """Guard a dim that may have no element: then there is none to read in place of a missing
        one."""
        if size.terms and all(c > 0 and all(isinstance(a, str) for a in m) for m, c in size.terms):
            return guard  # sizes are positive
        count = self.literal(size.value if size.is_const else size, torch.int64)
        test = (count, self.literal(1, torch.int64))
        return self._both(self.emit("apply", test, torch.bool, detail="ge"), guard)

    # computing

    def _iota(self, node: Node, dim: Dim) -> str:
        start, step = node.attrs["start"], node.attrs["step"]
        if isinstance(start, float) or isinstance(step, float):
            place = self.convert(self._position(dim), compute_dtype(node.dtype))
            scaled = self._binary("mul", place, self.literal(step, node.dtype), node.dtype)
            return self._binary("add", scaled, self.literal(start, node.dtype), node.dtype)
        return self.convert(
            self._position(dim.moved(to_expr(start), step)), compute_dtype(node.dtype)
        )

    def _position(self, dim: Dim, dtype: torch.dtype = torch.int64) -> str:
        """Return the value of a position."""
        resolved = self.axes.resolved(dim.terms)
        names = self.axes.names
        walk = tuple((axis, stride) for axis, stride in resolved.items() if axis not in names)
        total = self.emit("position", (), dtype, Access(dim.shift, walk))
        for axis, stride in resolved.items():
            if axis in names:
                value = self.convert(names[axis], dtype)
                if stride != ONE:
                    factor = self.literal(stride.value if stride.is_const else stride, dtype)
                    value = self._binary("mul", value, factor, dtype)
                total = self._binary("add", total, value, dtype)
        return total

    def _divide(self, dim: Dim, size: Expr, total: Expr) -> tuple[str, str]:
        """Print a division of a position in [0, total): where nothing is read it may be
        negative."""
        key = ("division", self.positions.key((dim,)), size)
        if key not in self._memo:
            self._memo[key] = self._quotient_and_remainder(dim, size, total)  # type: ignore[assignment]
        return self._memo[key]  # type: ignore[return-value]

    def _quotient_and_remainder(self, dim: Dim, size: Expr, total: Expr) -> tuple[str, str]:
        is_short = total.is_const and total.value < LIMIT
        dtype = torch.int32 if is_short else torch.int64
        place = self._position(dim, dtype)
        divisor = self.literal(size.value if size.is_const else size, dtype)
        quotient = self.emit("apply", (place, divisor), dtype, detail="div_trunc_int")
        remainder = self.emit("apply", (place, divisor), dtype, detail="fmod_int")
        return quotient, remainder

    def _binary(self, op: str, x: str, y: str, dtype: torch.dtype) -> str:
        attrs = (("alpha", 1),) if op == "add" else ()
        return self.emit("apply", (x, y), dtype, detail=op, attrs=attrs)

    def _pointwise(self, node: Node, index: NodeIndex, guard: str | None) -> str:
        args = [self.value(x, _aligned(x, node, index), guard) for x in node.inputs]
        if node.op == "copy":
            return self.convert(args[0], compute_dtype(node.dtype))
        if node.op == "cast":
            return self.emit("apply", (args[0],), node.dtype, detail="cast")
        wanted = compute_dtype(node.dtype)
        if node.row.operands is Operands.PROMOTED:
            wanted = node.inputs[0].dtype
            for x in node.inputs[1:]:
                wanted = torch.promote_types(wanted, x.dtype)
            wanted = compute_dtype(wanted)
        if node.row.operands is Operands.TRUTH:
            wanted = torch.bool
        first_is_bool = node.row.operands is Operands.SELECT
        names = tuple(
            self.convert(name, torch.bool if first_is_bool and i == 0 else wanted)
            for i, name in enumerate(args)
        )
        attrs = tuple((k, v) for k, v in sorted(node.attrs.items()))
        return self.emit("apply", names, node.dtype, detail=node.op, attrs=attrs)

    def _cat(self, node: Node, index: NodeIndex, guard: str | None) -> str:
        """Print nested selects; each piece loads only where it is the one selected."""
        dim = node.attrs["dim"]
        position = self._position(index[dim])
        starts = [ZERO]
        for piece in node.inputs:
            starts.append(starts[-1] + piece.shape[dim])
        if _is_reordered(node):
            return self._reordered(node, index, starts, position, guard)
        result = ""
        for piece, start, end in reversed(list(zip(node.inputs, starts, starts[1:], strict=False))):
            inside = self._between(position, start, end, starts[-1])
            both = self._both(inside, guard)
            dims = list(index)
            dims[dim] = dims[dim].moved(ZERO - start)
            name = self.convert(self.value(piece, tuple(dims), both), compute_dtype(node.dtype))
            if result:
                name = self.emit("apply", (inside, name, result), node.dtype, detail="where")
            result = name
        return result

    def _reordered(
        self,
        node: Node,
        index: NodeIndex,
        starts: Sequence[Expr],
        position: str,
        guard: str | None,
    ) -> str:
        """Read one value at a place that is selected: rolled, it is computed once."""
        dim, source = node.attrs["dim"], node.inputs[0].inputs[0]
        places = list(zip(node.inputs, starts, starts[1:], strict=False))
        shift = ""
        for piece, start, end in reversed(places):
            offset = piece.attrs["start"] - start
            name = self.literal(offset.value if offset.is_const else offset, torch.int64)
            if shift:
                inside = self._between(position, start, end, starts[-1])
                name = self.emit("apply", (inside, name, shift), torch.int64, detail="where")
            shift = name
        place = self._binary("add", position, shift, torch.int64)
        dims = list(index)
        dims[dim] = self.positions.computed(place, source.shape[dim])
        return self.value(source, tuple(dims), guard)

    def _between(self, position: str, start: Expr, end: Expr, total: Expr) -> str:
        bounds = [("ge", start)] if start != ZERO else []
        bounds += [("lt", end)] if end != total else []
        inside: str | None = None
        for op, bound in bounds:
            limit = self.literal(bound.value if bound.is_const else bound, torch.int64)
            test = self.emit("apply", (position, limit), torch.bool, detail=op)
            inside = self._both(test, inside)
        assert inside is not None, "a cat of one piece is that piece"
        return inside

    def _both(self, test: str, other: str | None) -> str:
        if other is None:
            return test
        both = self.emit("apply", (test, other), torch.bool, detail="logical_and")
        self._both_of[both] = test, other
        return both

    def _about(self, guard: str, axes: Set[int]) -> str | None:
        """Return what a guard asks about these axes: the others say where in its row a reduced
        value is wanted."""
        if guard not in self._both_of:
            return guard if self._axes_behind([guard]) & axes else None
        test, other = self._both_of[guard]
        kept, rest = self._about(test, axes), self._about(other, axes)
        if (kept, rest) == (test, other):
            return guard
        return self._both(kept, rest) if kept else rest

    def _reduce(self, node: Node, index: NodeIndex, guard: str | None) -> str:
        """Print a reduction; reductions of one shape over the same dims share their loop, whatever
        they read."""
        x, dims = node.inputs[0], node.attrs["dims"]
        kept = tuple(Dim() if d in dims else dim for d, dim in enumerate(index))
        kept_shape = [ONE if d in dims else size for d, size in enumerate(x.shape)]
        is_whole = self.positions.runs(kept, kept_shape) is not None
        key = (x.shape, dims, self.positions.key(kept))
        fresh = self._memo_axes(key, [x.shape[d] for d in dims])
        if is_whole:
            guard = None  # all elements count, wherever in its row the result is wanted
        elif guard:
            guard = self._about(guard, set().union(*map(self._axes_of, kept)))
        axes = [axis for dim in fresh for axis, _ in dim.terms]
        self._reductions.append((guard, axes))
        inner = list(index)
        for d, dim in zip(dims, fresh, strict=True):
            inner[d] = dim
        self._loops.append(_Loop(x.shape, dims, tuple(inner), axes))
        arg = self.convert(self.value(x, tuple(inner), guard), compute_dtype(node.dtype))
        if (x, dims) in self._varied and node.op in ("mean", "var"):
            mean, var = self._moments(arg, node.dtype)
            return mean if node.op == "mean" else self._corrected(var, node)
        if node.op == "mean":
            (total,) = self._reduction(("sum", arg), "sum", arg, node.dtype, 1)
            return self._binary("div", total, self._count(node), node.dtype)
        return self._reduction((node.op, arg), node.op, arg, node.dtype, 1)[0]

    def _count(self, node: Node) -> str:
        count = product(node.inputs[0].shape[d] for d in node.attrs["dims"])
        return self.literal(float(count.value) if count.is_const else count, node.dtype)

    def _corrected(self, var: str, node: Node) -> str:
        """Compute var * count / max(0, count - correction), as in ATen."""
        correction, dtype = node.attrs["correction"], node.dtype
        if not correction:
            return var
        total = self._count(node)
        count = product(node.inputs[0].shape[d] for d in node.attrs["dims"])
        if count.is_const:
            rest = self.literal(max(0.0, count.value - float(correction)), dtype)
        else:
            less = self.literal(-float(correction), dtype)
            rest = self._binary("add", total, less, dtype)
            rest = self._binary("maximum", rest, self.literal(0.0, dtype), dtype)
        return self._binary("div", self._binary("mul", var, total, dtype), rest, dtype)

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
        for loop in self._loops:
            self._share_sweep(loop)

    def _share_sweep(self, loop: _Loop) -> None:
        """Let a loop over what nothing else reads here run over the elements of its row that the
        kernel writes."""
        looped = self.axes.leaves(loop.axes)
        if self._stored_axes is None or not self.axes.loops.issuperset(looped):
            return
        dims = [dim for d, dim in enumerate(loop.index) if d not in loop.dims]
        kept = {axis for dim in dims for axis in self._axes_of(dim)}
        rest = [axis for axis in self.axes.leaves(self._stored_axes) if axis not in kept]
        sizes = self.axes.size
        if product(sizes[axis] for axis in rest) == product(sizes[axis] for axis in looped):
            self.axes.unify(rest, looped)

    def align_stores(self) -> frozenset[Node]:
        """Let stores of the kernel's full size run over the axes of its reductions' loop, and
        return those that cannot.

        ``y * x.mean(-1)`` has no value that both the mean and the product read, so nothing has made
        their axes the same: each element of y would take the mean of its row again.
        """
        if not self._loops:
            return frozenset()
        moving = set[int]().union(*map(self._axes_of, self._loops[0].index))
        kept = moving - {*self.axes.leaves(self.reduced_axes)}
        read = [name for draft in self.drafts if draft.kind == "reduce" for name in draft.args]
        asked = self._axes_behind(read)
        unaligned = set[Node]()
        for node, walk in self._stores:
            reduced = list(dict.fromkeys(self.axes.leaves(self.reduced_axes)))
            whole = self.positions.runs(walk, node.shape)
            own = list(set().union(*map(self._axes_of, walk))) if whole is None else whole
            beside = [a for a in own if a not in kept and a not in reduced]
            if node.numel != self._domain or not beside:
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
        loops = {frozenset(self.axes.leaves(axes)) for _, axes in self._reductions}
        if len(loops) > 1:
            raise UnsupportedError("reductions over different axes")
        for guard, axes in self._reductions:
            if guard and self._axes_behind([guard]) & set(self.axes.leaves(axes)):
                raise UnsupportedError("part of a reduction's own row")

    def _axes_of(self, dim: Dim) -> set[int]:
        """Return the axes that move a position, those behind its computed axes among them."""
        found, names = set[int](), self.axes.names
        for axis in self.axes.resolved(dim.terms):
            found |= self._axes_behind([names[axis]]) if axis in names else {axis}
        return found

    def _axes_behind(self, names: list[str]) -> set[int]:
        """Return the axes that these values depend on."""
        makers = {out: draft for draft in self.drafts for out in draft.outs}
        stack, seen, found = list(names), set(names), set[int]()
        while stack:
            draft = makers[stack.pop()]
            if draft.access is not None:
                found.update(self.axes.resolved(draft.access.strides))
            stack += [name for name in draft.args if name not in seen]
            seen.update(draft.args)
        return found

    def _memo_axes(self, key: Any, sizes: list[Expr]) -> NodeIndex:
        if ("axes", key) not in self._memo:
            fresh = self.positions.fresh(sizes)
            self._memo["axes", key] = fresh  # type: ignore[assignment]
            axes = [axis for dim in fresh for axis, _ in dim.terms]
            self.reduced_axes += axes
            self.axes.loops.update(axes)
        return self._memo["axes", key]  # type: ignore[return-value]

    def _moments(self, arg: str, dtype: torch.dtype) -> tuple[str, str]:
        mean, var = self._reduction(("moments", arg), "moments", arg, dtype, 2)
        return mean, var

    def _reduction(
        self, key: Any, kind: str, arg: str, dtype: torch.dtype, count: int
    ) -> tuple[str, ...]:
        if key not in self._memo:
            names = tuple(f"v{len(self.dtypes) + i}" for i in range(count))
            self.dtypes.update(dict.fromkeys(names, compute_dtype(dtype)))
            computed = compute_dtype(dtype)  # halves are summed as fp32
            self.drafts.append(DraftStatement("reduce", names, (arg,), computed, None, kind))
            self._memo[key] = names  # type: ignore[assignment]
        return self._memo[key]  # type: ignore[return-value]

    def _alike(self, node: Node) -> NodeIndex:
        """Return an index of what nothing here reads as a whole: one sweep does for all."""
        if node.numel != self._domain:
            return self.positions.fresh(node.shape)
        for other, index in self._first_index.items():
            if other.shape == node.shape:
                return index
        index = self.positions.fresh(node.shape)
        axes = self.positions.runs(index, node.shape)
        if self._stored_axes is not None and axes is not None:
            self.axes.unify(self._stored_axes, axes)
        return index

    def store(self, node: Node) -> None:
        """Print a store of all elements, in the order in which others are read or stored here."""
        index = self._first_index.get(node) or self._alike(node)
        self._stores.append((node, index))
        name = self.value(node, index)
        if node.numel == self._domain and self._stored_axes is None:
            self._stored_axes = self.positions.runs(index, node.shape)
        walked = [
            (dim, ((size, stride),))
            for dim, size, stride in zip(index, node.shape, node.strides, strict=True)
        ]
        access = self._access(ZERO, walked)
        assert not access.lookups, f"{node}: stored where a value says"
        self.drafts.append(DraftStatement("store", (), (name,), node.dtype, access, node))


@dataclass(frozen=True, slots=True)
class _Loop:
    """Hold what one reduction runs over: the dims ``dims`` of a value, read at ``index``."""

    shape: tuple[Expr, ...]
    dims: tuple[int, ...]
    index: NodeIndex
    axes: list[int]  # of the reduced dims


def _is_reordered(cat: Node) -> bool:
    """Tell whether a cat puts pieces of one value that is computed here into another order.

    Along the last dim, pieces are better read under guards, whose neighbours lie side by side.
    """
    dim, first = cat.attrs["dim"], cat.inputs[0]
    return (
        dim < len(cat.shape) - 1
        and all(
            piece.op == "slice"
            and piece.inputs[0] is first.inputs[0]
            and piece.attrs["dim"] == dim
            and piece.attrs["step"] == 1
            for piece in cat.inputs
        )
        and _computable(base_of(first))
    )


def _computable(node: Node) -> bool:
    return node.kind in (Kind.POINTWISE, Kind.REDUCTION)


def _uncrossed(node: Node, index: NodeIndex) -> NodeIndex:
    """Turn an index over a diagonal into one over both of its dims."""
    dims = list(index[:-1])
    for dim, start in sorted(zip(node.attrs["dims"], node.attrs["starts"], strict=True)):
        dims.insert(dim, index[-1].moved(const(start)))
    return tuple(dims)


def _aligned(operand: Node, node: Node, index: NodeIndex) -> NodeIndex:
    """Align the operand's index under broadcasting: dims of size 1 do not move."""
    skipped = len(node.shape) - len(operand.shape)
    pairs = zip(index[skipped:], operand.shape, node.shape[skipped:], strict=True)
    return tuple(Dim() if own == ONE and full != ONE else d for d, own, full in pairs)
