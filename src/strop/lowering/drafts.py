"""Collect the statements of a kernel while its axes are still being found."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from typing import Any

import torch

from strop.ir.dims import Expr
from strop.ir.ops import compute_dtype
from strop.lowering.axes import ONE, AxisTable
from strop.lowering.positions import ZERO, Dim

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


class Drafts:
    """Writes statements, and names the values that they compute."""

    def __init__(self, axes: AxisTable) -> None:
        self.axes = axes
        self.all: list[DraftStatement] = []
        self._dtypes: dict[str, torch.dtype] = {}
        self._both_of: dict[str, tuple[str, str]] = {}  # guards of two tests
        self._memo: dict[Any, tuple[str, ...]] = {}

    def emit(
        self,
        kind: str,
        args: tuple[str, ...] = (),
        dtype: torch.dtype = torch.float32,
        access: Access | None = None,
        detail: Any = None,
        attrs: tuple[tuple[str, Any], ...] = (),
    ) -> str:
        name = f"v{len(self._dtypes)}"
        self._dtypes[name] = compute_dtype(dtype)
        self.all.append(DraftStatement(kind, (name,), args, dtype, access, detail, attrs))
        return name

    def convert(self, name: str, dtype: torch.dtype) -> str:
        """Convert to another compute type: exact, or what ATen's own promotion does."""
        if self._dtypes[name] == dtype:
            return name
        return self.emit("apply", (name,), dtype, detail="cast")

    def literal(self, value: int | float | bool | Expr, dtype: torch.dtype) -> str:
        return self.emit("literal", (), compute_dtype(dtype), detail=value)

    def binary(self, op: str, x: str, y: str, dtype: torch.dtype) -> str:
        attrs = (("alpha", 1),) if op in ("add", "sub") else ()
        return self.emit("apply", (x, y), dtype, detail=op, attrs=attrs)

    def position(self, dim: Dim, dtype: torch.dtype = torch.int64) -> str:
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
                    value = self.binary("mul", value, factor, dtype)
                total = self.binary("add", total, value, dtype)
        return total

    def divided(self, dim: Dim, size: Expr, total: Expr) -> tuple[str, str]:
        """Print a division of a position in [0, total): where nothing is read it may be
        negative."""
        place = tuple(self.axes.resolved(dim.terms).items()), dim.shift
        key = ("division", place, size)
        if key not in self._memo:
            self._memo[key] = self._quotient_and_remainder(dim, size, total)
        quotient, remainder = self._memo[key]
        return quotient, remainder

    def _quotient_and_remainder(self, dim: Dim, size: Expr, total: Expr) -> tuple[str, str]:
        is_short = total.is_const and total.value < LIMIT
        dtype = torch.int32 if is_short else torch.int64
        place = self.position(dim, dtype)
        divisor = self.literal(size.value if size.is_const else size, dtype)
        quotient = self.emit("apply", (place, divisor), dtype, detail="div_trunc_int")
        remainder = self.emit("apply", (place, divisor), dtype, detail="fmod_int")
        return quotient, remainder

    def reduction(self, kind: str, arg: str, dtype: torch.dtype) -> tuple[str, ...]:
        """Print a reduction, of which moments have two results; once for equal operands."""
        key = ("reduction", kind, arg)
        if key not in self._memo:
            count = 2 if kind == "moments" else 1
            names = tuple(f"v{len(self._dtypes) + i}" for i in range(count))
            self._dtypes.update(dict.fromkeys(names, compute_dtype(dtype)))
            computed = compute_dtype(dtype)  # halves are summed as fp32
            self.all.append(DraftStatement("reduce", names, (arg,), computed, None, kind))
            self._memo[key] = names
        return self._memo[key]

    # guards

    def between(self, position: str, start: Expr, end: Expr, total: Expr) -> str:
        bounds = [("ge", start)] if start != ZERO else []
        bounds += [("lt", end)] if end != total else []
        inside: str | None = None
        for op, bound in bounds:
            limit = self.literal(bound.value if bound.is_const else bound, torch.int64)
            test = self.emit("apply", (position, limit), torch.bool, detail=op)
            inside = self.both(test, inside)
        assert inside is not None, "a cat of one piece is that piece"
        return inside

    def both(self, test: str, other: str | None) -> str:
        if other is None:
            return test
        both = self.emit("apply", (test, other), torch.bool, detail="logical_and")
        self._both_of[both] = test, other
        return both

    def about(self, guard: str, axes: Set[int]) -> str | None:
        """Return what a guard asks about these axes: the others say where in its row a reduced
        value is wanted."""
        if guard not in self._both_of:
            return guard if self.axes_behind([guard]) & axes else None
        test, other = self._both_of[guard]
        kept, rest = self.about(test, axes), self.about(other, axes)
        if (kept, rest) == (test, other):
            return guard
        return self.both(kept, rest) if kept else rest

    # what a value depends on

    def axes_of(self, dim: Dim) -> set[int]:
        """Return the axes that move a position, those behind its computed axes among them."""
        found, names = set[int](), self.axes.names
        for axis in self.axes.resolved(dim.terms):
            found |= self.axes_behind([names[axis]]) if axis in names else {axis}
        return found

    def axes_behind(self, names: list[str]) -> set[int]:
        """Return the axes that these values depend on."""
        makers = {out: draft for draft in self.all for out in draft.outs}
        stack, seen, found = list(names), set(names), set[int]()
        while stack:
            draft = makers[stack.pop()]
            if draft.access is not None:
                found.update(self.axes.resolved(draft.access.strides))
            stack += [name for name in draft.args if name not in seen]
            seen.update(draft.args)
        return found
