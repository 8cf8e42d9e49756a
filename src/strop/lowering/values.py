"""Write the statements that compute a group's values: pull from what is stored to what is loaded.

``value(node, index)`` emits whatever is needed to have one element of ``node`` at ``index`` and
returns its name. Views turn into other indices, stored values into loads, and pointwise rows and
reductions into statements. Statements hold unresolved axes until ``lower`` finishes the kernel.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import Any

import torch

from strop.errors import UnsupportedError
from strop.ir.affine import Atom, base_of, merge, strided
from strop.ir.dims import Expr, const, product, to_expr
from strop.ir.graph import Node
from strop.ir.ops import Kind, Operands, compute_dtype
from strop.ir.parts import stored_at
from strop.lowering.axes import ONE, AxisTable, Strides
from strop.lowering.bags import bag_of
from strop.lowering.drafts import Access, Drafts, DraftStatement
from strop.lowering.positions import ZERO, Dim, NodeIndex, Positions
from strop.lowering.shared_axes import ReductionLoop, SharedAxes


class Values:
    """Emits drafts for one group. ``inside`` holds the values that this kernel computes."""

    def __init__(self, stored: Set[Node], inside: Set[Node], domain: Expr) -> None:
        self.axes = AxisTable()
        self.drafts = Drafts(self.axes)
        self.positions = Positions(self.axes, self.drafts.divided)
        self.shared = SharedAxes(self.positions, self.drafts, domain)
        self._loaded = stored - inside
        self._inside = inside
        self._reduces = any(n.kind is Kind.REDUCTION for n in inside)
        # whose mean comes with the variance; any other mean is a sum
        self._varied = {(n.inputs[0], n.attrs["dims"]) for n in inside if n.op == "var"}
        self._memo: dict[Any, str] = {}

    def value(self, node: Node, index: NodeIndex, guard: str | None = None) -> str:
        pairs = zip(index, node.shape, strict=True)
        index = tuple(Dim() if size == ONE else dim for dim, size in pairs)
        if self._reduces or node in self._inside:
            self.shared.meet(node, index, in_rows=self._reduces)
        key = (node, self.positions.key(index), guard)
        if key not in self._memo:
            self._memo[key] = self._compute(node, index, guard)
        return self._memo[key]

    def _compute(self, node: Node, index: NodeIndex, guard: str | None) -> str:
        if node.kind is Kind.VIEW:
            return self._view(node, index, guard)
        if node.op == "constant":
            return self.drafts.literal(node.attrs["value"], node.dtype)
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
        if node.op == "bag":
            return bag_of(self, node, index, guard)
        return self._pointwise(node, index, guard)

    # reading

    def _view(self, node: Node, index: NodeIndex, guard: str | None) -> str:
        base = base_of(node)
        is_loaded = base in self._loaded or not _computable(base)
        # what is reduced through a view may be read beside it: both ways must meet at the base
        meets = self._reduces and base.numel == node.numel == self.shared.domain
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
        access = self.access(view.offset, list(zip(index, view.dims, strict=True)))
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
        return self.drafts.emit("load", args, compute_dtype(node.dtype), access, base, lookups)

    def access(self, offset: Expr, walked: Sequence[tuple[Dim, Sequence[Atom]]]) -> Access:
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
                place = self._place(self.drafts.convert(place, torch.int64), size, node, guard)
            lookups.append((place, merged[0][1] if merged else ZERO))
            guard = self._not_empty(size, guard)
        access = self.access(view.offset, walked)
        return self._emit_load(node, access, view.base, tuple(lookups), guard)

    def _place(self, value: str, size: Expr, node: Node, guard: str | None) -> str:
        args = (value, guard) if guard else (value,)
        wraps = node.attrs["bounds"] == "wrapped"
        return self.drafts.emit("place", args, torch.int64, detail=(size, wraps))

    def _not_empty(self, size: Expr, guard: str | None) -> str | None:
        """Guard a dim that may have no element: then there is none to read in place of a missing
        one."""
        if size.terms and all(c > 0 and all(isinstance(a, str) for a in m) for m, c in size.terms):
            return guard  # sizes are positive
        count = self.drafts.literal(size.value if size.is_const else size, torch.int64)
        test = (count, self.drafts.literal(1, torch.int64))
        return self.drafts.both(self.drafts.emit("apply", test, torch.bool, detail="ge"), guard)

    # computing

    def _iota(self, node: Node, dim: Dim) -> str:
        start, step = node.attrs["start"], node.attrs["step"]
        write, dtype = self.drafts, compute_dtype(node.dtype)
        if isinstance(start, float) or isinstance(step, float):
            place = write.convert(write.position(dim), dtype)
            scaled = write.binary("mul", place, write.literal(step, node.dtype), node.dtype)
            return write.binary("add", scaled, write.literal(start, node.dtype), node.dtype)
        return write.convert(write.position(dim.moved(to_expr(start), step)), dtype)

    def _pointwise(self, node: Node, index: NodeIndex, guard: str | None) -> str:
        args = [self.value(x, _aligned(x, node, index), guard) for x in node.inputs]
        if node.op in ("copy", "part"):
            return self.drafts.convert(args[0], compute_dtype(node.dtype))
        if node.op == "cast":
            return self.drafts.emit("apply", (args[0],), node.dtype, detail="cast")
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
            self.drafts.convert(name, torch.bool if first_is_bool and i == 0 else wanted)
            for i, name in enumerate(args)
        )
        attrs = tuple((k, v) for k, v in sorted(node.attrs.items()))
        return self.drafts.emit("apply", names, node.dtype, detail=node.op, attrs=attrs)

    def _cat(self, node: Node, index: NodeIndex, guard: str | None) -> str:
        """Print nested selects; each piece loads only where it is the one selected."""
        dim = node.attrs["dim"]
        position = self.drafts.position(index[dim])
        starts = [ZERO]
        for piece in node.inputs:
            starts.append(starts[-1] + piece.shape[dim])
        if _is_reordered(node):
            return self._reordered(node, index, starts, position, guard)
        result = ""
        for piece, start, end in reversed(list(zip(node.inputs, starts, starts[1:], strict=False))):
            inside = self.drafts.between(position, start, end, starts[-1])
            both = self.drafts.both(inside, guard)
            dims = list(index)
            dims[dim] = dims[dim].moved(ZERO - start)
            name = self.drafts.convert(
                self.value(piece, tuple(dims), both), compute_dtype(node.dtype)
            )
            if result:
                name = self.drafts.emit("apply", (inside, name, result), node.dtype, detail="where")
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
            name = self.drafts.literal(offset.value if offset.is_const else offset, torch.int64)
            if shift:
                inside = self.drafts.between(position, start, end, starts[-1])
                name = self.drafts.emit("apply", (inside, name, shift), torch.int64, detail="where")
            shift = name
        place = self.drafts.binary("add", position, shift, torch.int64)
        dims = list(index)
        dims[dim] = self.positions.computed(place, source.shape[dim])
        return self.value(source, tuple(dims), guard)

    def _reduce(self, node: Node, index: NodeIndex, guard: str | None) -> str:
        """Print a reduction; reductions of one shape over the same dims share their loop, whatever
        they read."""
        x, dims = node.inputs[0], node.attrs["dims"]
        kept = tuple(Dim() if d in dims else dim for d, dim in enumerate(index))
        kept_shape = [ONE if d in dims else size for d, size in enumerate(x.shape)]
        is_whole = self.positions.runs(kept, kept_shape) is not None
        key = (x.shape, dims, self.positions.key(kept))
        fresh = self.shared.loop_axes(key, [x.shape[d] for d in dims])
        if is_whole:
            guard = None  # all elements count, wherever in its row the result is wanted
        elif guard:
            guard = self.drafts.about(guard, set().union(*map(self.drafts.axes_of, kept)))
        axes = [axis for dim in fresh for axis, _ in dim.terms]
        inner = list(index)
        for d, dim in zip(dims, fresh, strict=True):
            inner[d] = dim
        self.shared.add_loop(ReductionLoop(x.shape, dims, tuple(inner), axes, guard))
        arg = self.drafts.convert(self.value(x, tuple(inner), guard), compute_dtype(node.dtype))
        if (x, dims) in self._varied and node.op in ("mean", "var"):
            mean, var = self.drafts.reduction("moments", arg, node.dtype)
            return mean if node.op == "mean" else self._corrected(var, node)
        if node.op == "mean":
            (total,) = self.drafts.reduction("sum", arg, node.dtype)
            return self.drafts.binary("div", total, self._count(node), node.dtype)
        return self.drafts.reduction(node.op, arg, node.dtype)[0]

    def _count(self, node: Node) -> str:
        count = product(node.inputs[0].shape[d] for d in node.attrs["dims"])
        return self.drafts.literal(float(count.value) if count.is_const else count, node.dtype)

    def _corrected(self, var: str, node: Node) -> str:
        """Compute var * count / max(0, count - correction), as in ATen."""
        correction, dtype = node.attrs["correction"], node.dtype
        if not correction:
            return var
        total = self._count(node)
        count = product(node.inputs[0].shape[d] for d in node.attrs["dims"])
        if count.is_const:
            rest = self.drafts.literal(max(0.0, count.value - float(correction)), dtype)
        else:
            less = self.drafts.literal(-float(correction), dtype)
            rest = self.drafts.binary("add", total, less, dtype)
            rest = self.drafts.binary("maximum", rest, self.drafts.literal(0.0, dtype), dtype)
        return self.drafts.binary("div", self.drafts.binary("mul", var, total, dtype), rest, dtype)

    def store(self, node: Node) -> None:
        """Print a store of all elements, in the order in which others are read or stored here."""
        index, (start, strides) = self.shared.order_of(node), stored_at(node)
        self.shared.add_store(node, index)
        name = self.value(node, index)
        self.shared.keep_order(node, index)
        walked = [
            (dim, ((size, stride),))
            for dim, size, stride in zip(index, node.shape, strides, strict=True)
        ]
        access = self.access(start, walked)
        assert not access.lookups, f"{node}: stored where a value says"
        self.drafts.all.append(DraftStatement("store", (), (name,), node.dtype, access, node))


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
