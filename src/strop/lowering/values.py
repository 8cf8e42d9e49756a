"""The statements that compute a group's values: pull from what is stored to what is loaded.

``value(node, index)`` emits whatever is needed to have one element of ``node`` at ``index`` and
returns its name. Views turn into other indices, stored values into loads, and pointwise rows and
reductions into statements. Statements hold unresolved axes until ``lower`` finishes the kernel.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from typing import Any

import torch

from strop.errors import UnsupportedError
from strop.ir.affine import base_of, merge, regroup, strided
from strop.ir.dims import Expr, const, to_expr
from strop.ir.graph import Node
from strop.ir.ops import Kind, Operands, compute_dtype
from strop.lowering.axes import ONE, AxisTable, Strides

ZERO = const(0)


@dataclass(frozen=True, slots=True)
class Dim:
    """Position along one dim: the axes, row-major, plus a shift.

    Through a slice or a piece of a cat the axes no longer run over the whole dim: ``partial``.
    """

    axes: tuple[int, ...]
    shift: Expr = ZERO
    partial: bool = False


NodeIndex = tuple[Dim, ...]


@dataclass(frozen=True, slots=True)
class Access:
    """An affine index before axes are final."""

    offset: Expr
    strides: tuple[tuple[int, Expr], ...]


@dataclass(frozen=True, slots=True)
class Draft:
    """A statement before axes are final. ``kind`` names the loop IR statement it becomes."""

    kind: str
    outs: tuple[str, ...]
    args: tuple[str, ...] = ()
    dtype: torch.dtype = torch.float32
    access: Access | None = None
    detail: Any = None  # op name, literal value, reduction kind, or the node loaded or stored
    attrs: tuple[tuple[str, Any], ...] = ()


def whole(axes: tuple[tuple[int, ...], ...]) -> NodeIndex:
    return tuple(Dim(a) for a in axes)


class Values:
    """Emits drafts for one group. ``inside`` holds the values that this kernel computes."""

    def __init__(self, stored: Set[Node], inside: Set[Node], domain: Expr) -> None:
        self.axes = AxisTable()
        self.drafts: list[Draft] = []
        self.dtypes: dict[str, torch.dtype] = {}
        self.reduced_axes: list[int] = []
        self._loaded = stored - inside
        self._domain = domain
        self._shared = inside | {n.inputs[0] for n in inside if n.kind is Kind.REDUCTION}
        self._memo: dict[Any, str] = {}
        self._first_index: dict[Node, NodeIndex] = {}

    def emit(self, kind: str, args: tuple[str, ...] = (), dtype: torch.dtype = torch.float32,
             access: Access | None = None, detail: Any = None,
             attrs: tuple[tuple[str, Any], ...] = ()) -> str:  # fmt: skip
        name = f"v{len(self.dtypes)}"
        self.dtypes[name] = compute_dtype(dtype)
        self.drafts.append(Draft(kind, (name,), args, dtype, access, detail, attrs))
        return name

    def convert(self, name: str, dtype: torch.dtype) -> str:
        """To another compute type; exact, or what ATen's own promotion does."""
        if self.dtypes[name] == dtype:
            return name
        return self.emit("apply", (name,), dtype, detail="cast")

    def literal(self, value: int | float | bool | Expr, dtype: torch.dtype) -> str:
        return self.emit("literal", (), compute_dtype(dtype), detail=value)

    def value(self, node: Node, index: NodeIndex, guard: str | None = None) -> str:
        index = self._unified(node, index)
        key = (node, tuple((*self.axes.leaves(d.axes), d.shift) for d in index), guard)
        if key not in self._memo:
            self._memo[key] = self._compute(node, index, guard)
        return self._memo[key]

    def _unified(self, node: Node, index: NodeIndex) -> NodeIndex:
        """Reaching a full-size value of this kernel twice makes both ways the same axes."""
        if node not in self._shared or node.numel != self._domain:
            return index
        if any(d.partial for d in index):
            return index
        first = self._first_index.setdefault(node, index)
        self.axes.unify([a for d in first for a in d.axes], [a for d in index for a in d.axes])
        return index

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
        return self._pointwise(node, index, guard)

    # reading

    def _view(self, node: Node, index: NodeIndex, guard: str | None) -> str:
        base = base_of(node)
        if (base in self._loaded or not _computable(base)) and strided(node) is not None:
            return self._load(node, index, guard)
        source = node.inputs[0]
        if node.op == "permute":
            pulled: list[Dim] = [Dim(())] * len(index)
            for position, dim in enumerate(node.attrs["dims"]):
                pulled[dim] = index[position]
            return self.value(source, tuple(pulled), guard)
        if node.op == "expand":
            return self.value(source, _aligned(source, node, index), guard)
        if node.op == "slice":
            dims = list(index)
            dim = node.attrs["dim"]
            dims[dim] = Dim(dims[dim].axes, dims[dim].shift + node.attrs["start"], True)
            return self.value(source, tuple(dims), guard)
        return self.value(source, self._reshaped(node, source, index), guard)

    def _reshaped(self, node: Node, source: Node, index: NodeIndex) -> NodeIndex:
        """Deal the axes of ``node``'s dims out to the dims of ``source``."""
        if any(d.partial for d in index):
            return self._reshaped_around_partial(node, source, index)
        flat = [a for d in index for a in d.axes]
        atoms = [(self.axes.size[a], ONE) for a in self.axes.leaves(flat)]
        groups = regroup(atoms, source.shape)
        if groups is None:
            raise UnsupportedError(f"{node}: index does not divide into {source}")
        dims: list[Dim] = []
        rest = self.axes.leaves(flat)
        for group in reversed(groups):
            dim: list[int] = []
            for size, _ in reversed(group):
                axis = rest.pop()
                if self.axes.size[axis] != size:
                    outer, axis = self.axes.split(axis, size)
                    rest.append(outer)
                dim.insert(0, axis)
            dims.insert(0, Dim(tuple(dim)))
        return tuple(dims)

    def _reshaped_around_partial(self, node: Node, source: Node, index: NodeIndex) -> NodeIndex:
        """Only size-1 dims come or go: the partial dim itself is untouched."""
        kept = [d for d, size in zip(index, node.shape, strict=True) if size != ONE]
        if [s for s in node.shape if s != ONE] != [s for s in source.shape if s != ONE]:
            raise UnsupportedError(f"{node}: a reshape of a slice that is computed in this kernel")
        remaining = iter(kept)
        return tuple(Dim(()) if size == ONE else next(remaining) for size in source.shape)

    def _load(self, node: Node, index: NodeIndex, guard: str | None) -> str:
        view = strided(node)
        if view is None:
            raise UnsupportedError(f"{node} is not affine over its base")
        offset, strides = view.offset, Strides()
        for dim, atoms in zip(index, view.dims, strict=True):
            merged = merge(atoms)
            if not dim.partial:
                steps = self.axes.match(dim.axes, merged)
            elif len(merged) > 1:
                raise UnsupportedError(f"{node}: part of a dim that has several strides")
            else:
                stride = merged[0][1] if merged else ONE
                steps = {a: s * stride for a, s in self.axes.row_major(dim.axes).items()}
                offset = offset + dim.shift * stride
            for axis, step in steps.items():
                strides[axis] = strides.get(axis, ZERO) + step
        access = Access(offset, tuple(strides.items()))
        args = (guard,) if guard else ()
        return self.emit("load", args, compute_dtype(node.dtype), access, view.base)

    # computing

    def _iota(self, node: Node, dim: Dim) -> str:
        start, step = node.attrs["start"], node.attrs["step"]
        if isinstance(start, float) or isinstance(step, float):
            place = self.convert(self._position(dim), compute_dtype(node.dtype))
            scaled = self._binary("mul", place, self.literal(step, node.dtype), node.dtype)
            return self._binary("add", scaled, self.literal(start, node.dtype), node.dtype)
        strides = {a: s * to_expr(step) for a, s in self.axes.row_major(dim.axes).items()}
        offset = to_expr(start) + dim.shift * to_expr(step)
        access = Access(offset, tuple(strides.items()))
        position = self.emit("position", (), torch.int64, access)
        return self.convert(position, compute_dtype(node.dtype))

    def _position(self, dim: Dim) -> str:
        access = Access(dim.shift, tuple(self.axes.row_major(dim.axes).items()))
        return self.emit("position", (), torch.int64, access)

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
        """Nested selects; each piece loads only where it is the one selected."""
        dim = node.attrs["dim"]
        position = self._position(index[dim])
        starts = [ZERO]
        for piece in node.inputs:
            starts.append(starts[-1] + piece.shape[dim])
        result = ""
        for piece, start, end in reversed(list(zip(node.inputs, starts, starts[1:], strict=False))):
            inside = self._between(position, start, end, starts[-1])
            both = self._both(inside, guard)
            dims = list(index)
            dims[dim] = Dim(dims[dim].axes, dims[dim].shift - start, True)
            name = self.convert(self.value(piece, tuple(dims), both), compute_dtype(node.dtype))
            if result:
                name = self.emit("apply", (inside, name, result), node.dtype, detail="where")
            result = name
        return result

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
        return self.emit("apply", (test, other), torch.bool, detail="logical_and")

    def _reduce(self, node: Node, index: NodeIndex, guard: str | None) -> str:
        x, dims = node.inputs[0], node.attrs["dims"]
        key = (x, dims, tuple(tuple(self.axes.leaves(d.axes)) for d in index))
        fresh = self._memo_axes(key, [x.shape[d] for d in dims])
        inner = list(index)
        for d, axes in zip(dims, fresh, strict=True):
            inner[d] = Dim(axes)
        arg = self.convert(self.value(x, tuple(inner), guard), compute_dtype(node.dtype))
        if node.op in ("mean", "var"):
            mean, var = self._moments(arg, node.dtype)
            return mean if node.op == "mean" else self._corrected(var, node)
        return self._reduction((node.op, arg), node.op, arg, node.dtype, 1)[0]

    def _memo_axes(self, key: Any, sizes: list[Expr]) -> tuple[tuple[int, ...], ...]:
        if ("axes", key) not in self._memo:
            fresh = self.axes.fresh(sizes)
            self._memo["axes", key] = fresh  # type: ignore[assignment]
            self.reduced_axes += [a for axes in fresh for a in axes]
        return self._memo["axes", key]  # type: ignore[return-value]

    def _moments(self, arg: str, dtype: torch.dtype) -> tuple[str, str]:
        mean, var = self._reduction(("moments", arg), "moments", arg, dtype, 2)
        return mean, var

    def _reduction(self, key: Any, kind: str, arg: str, dtype: torch.dtype, count: int
                   ) -> tuple[str, ...]:  # fmt: skip
        if key not in self._memo:
            names = tuple(f"v{len(self.dtypes) + i}" for i in range(count))
            self.dtypes.update(dict.fromkeys(names, compute_dtype(dtype)))
            self.drafts.append(Draft("reduce", names, (arg,), dtype, None, kind))
            self._memo[key] = names  # type: ignore[assignment]
        return self._memo[key]  # type: ignore[return-value]

    def _corrected(self, var: str, node: Node) -> str:
        correction = node.attrs["correction"]
        if not correction:
            return var
        count = node.inputs[0].numel.exact_div(node.numel)
        assert count is not None, node
        total, less = self.literal(count, node.dtype), self.literal(count - correction, node.dtype)
        scaled = self._binary("mul", var, total, node.dtype)
        return self.emit("apply", (scaled, less), node.dtype, detail="div")

    def store(self, node: Node, index: NodeIndex) -> None:
        name = self.value(node, index)
        strides = Strides()
        for dim, size, stride in zip(index, node.shape, node.strides, strict=True):
            strides |= self.axes.match(dim.axes, [(size, stride)])
        access = Access(ZERO, tuple(strides.items()))
        self.drafts.append(Draft("store", (), (name,), node.dtype, access, node))


def _computable(node: Node) -> bool:
    return node.kind in (Kind.POINTWISE, Kind.REDUCTION)


def _aligned(operand: Node, node: Node, index: NodeIndex) -> NodeIndex:
    """The operand's index under broadcasting: dims of size 1 do not move."""
    skipped = len(node.shape) - len(operand.shape)
    pairs = zip(index[skipped:], operand.shape, node.shape[skipped:], strict=True)
    return tuple(Dim(()) if own == ONE and full != ONE else d for d, own, full in pairs)
