"""Write views as affine maps, which say where the elements of a view lie in the buffer under it.

Every dim of a view is a list of (size, stride) atoms, outermost first. Reshape regroups atoms,
splitting them by exact symbolic division; permute and expand are list surgery; slice moves the
offset. A dim whose atoms merge into one has a single stride, as torch and BLAS want it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from strop.ir.dims import Expr, const, product
from strop.ir.graph import Node, dense_strides
from strop.ir.loops import MAX_LANES
from strop.ir.ops import Kind

Atom = tuple[Expr, Expr]  # size, stride in elements
ONE = const(1)


@dataclass(frozen=True, slots=True)
class Strided:
    """Describe the elements of a value inside the buffer of ``base``."""

    base: Node
    offset: Expr
    dims: tuple[tuple[Atom, ...], ...]
    runs_back: bool = False  # along some dim; elsewhere a minus is that of a size

    @property
    def strides(self) -> tuple[Expr, ...] | None:
        """Return one stride per dim, or None when some dim needs several or one that torch has not.

        A dim of size 1 gets the stride that a dense one would have: libraries look at its
        alignment although nobody steps over it.
        """
        result: list[Expr] = []
        dense = ONE
        for dim in reversed(self.dims):
            merged = merge(dim)
            if len(merged) > 1 or (self.runs_back and merged and _has_minus(merged[0][1])):
                return None
            result.insert(0, merged[0][1] if merged else dense)
            dense = merged[0][0] * merged[0][1] if merged else dense
        return tuple(result)


def _has_minus(stride: Expr) -> bool:
    """Tell whether a stride subtracts: strides are products of sizes and steps, and a size may be n
    - n//2."""
    return any(coefficient < 0 for _, coefficient in stride.terms)


def merge(atoms: Iterable[Atom]) -> list[Atom]:
    """Join neighbours that step through memory as one."""
    merged: list[Atom] = []
    for size, stride in atoms:
        if size == ONE:
            continue
        if merged and merged[-1][1] == size * stride:
            merged[-1] = (merged[-1][0] * size, stride)
        else:
            merged.append((size, stride))
    return merged


def regroup(atoms: Sequence[Atom], sizes: Sequence[Expr]) -> tuple[tuple[Atom, ...], ...] | None:
    """Deal row-major ``atoms`` out to dims of these sizes; None when a split is not exact."""
    return _regrouped(tuple(atoms), tuple(sizes))


@lru_cache(maxsize=4096)
def _regrouped(
    atoms: tuple[Atom, ...], sizes: tuple[Expr, ...]
) -> tuple[tuple[Atom, ...], ...] | None:
    rest = [atom for atom in atoms if atom[0] != ONE]
    dims: list[tuple[Atom, ...]] = []
    for wanted in reversed(sizes):
        dim: list[Atom] = []
        while wanted != ONE:
            if not rest:
                return None
            size, stride = rest.pop()
            left = wanted.exact_div(size)
            if left is None:
                outer = size.exact_div(wanted)
                if outer is None:
                    return None
                rest.append((outer, stride * wanted))
                size, left = wanted, ONE
            dim.insert(0, (size, stride))
            wanted = left
        dims.insert(0, tuple(dim))
    return tuple(dims) if not rest else None


@lru_cache(maxsize=16384)  # asked several times of each view; nodes never change
def strided(node: Node) -> Strided | None:
    """Follow a chain of views down to the value it reads; None when it is not affine."""
    if node.kind is not Kind.VIEW:
        atoms = zip(node.shape, dense_strides(node.shape, node.order), strict=True)
        return Strided(node, const(0), tuple(((size, stride),) for size, stride in atoms))
    inner = strided(node.inputs[0])
    return None if inner is None else _apply(node, inner)


def _apply(view: Node, inner: Strided) -> Strided | None:
    if view.op == "permute":
        dims = tuple(inner.dims[d] for d in view.attrs["dims"])
    elif view.op == "expand":
        dims = tuple(
            ((size, const(0)),) if old == ONE and size != ONE else dim
            for dim, old, size in zip(inner.dims, view.inputs[0].shape, view.shape, strict=True)
        )
    elif view.op == "reshape":
        flat = [atom for dim in inner.dims for atom in merge(dim)]
        regrouped = regroup(flat, view.shape)
        if regrouped is None:
            regrouped = regroup(merge(flat), view.shape)
        if regrouped is None:
            return None
        dims = regrouped
    elif view.op == "diagonal":
        return _diagonal(view, inner)
    elif view.op == "window":
        return _window(view, inner)
    else:
        return _slice(view, inner)
    return Strided(inner.base, inner.offset, dims, inner.runs_back)


def _diagonal(view: Node, inner: Strided) -> Strided | None:
    crossed = [merge(inner.dims[dim]) for dim in view.attrs["dims"]]
    if any(len(merged) > 1 for merged in crossed):
        return None
    strides = [merged[0][1] if merged else const(0) for merged in crossed]
    offset = inner.offset
    for start, stride in zip(view.attrs["starts"], strides, strict=True):
        offset = offset + stride * start
    dims = [dim for d, dim in enumerate(inner.dims) if d not in view.attrs["dims"]]
    walk = (view.shape[-1], strides[0] + strides[1])
    return Strided(inner.base, offset, (*dims, (walk,)), inner.runs_back)


def _window(view: Node, inner: Strided) -> Strided | None:
    """View a value that lies by itself, whose memory is known."""
    if view.inputs[0] is not inner.base:
        return None
    dims = tuple(
        ((size, stride),) for size, stride in zip(view.shape, view.attrs["strides"], strict=True)
    )
    return Strided(inner.base, view.attrs["start"], dims)


def _slice(view: Node, inner: Strided) -> Strided | None:
    dim = view.attrs["dim"]
    merged = merge(inner.dims[dim])
    if len(merged) > 1:
        return None
    stride = merged[0][1] if merged else ONE
    dims = list(inner.dims)
    dims[dim] = ((view.shape[dim], stride * view.attrs["step"]),)
    start, step = inner.offset + view.attrs["start"] * stride, view.attrs["step"]
    return Strided(inner.base, start, tuple(dims), inner.runs_back or step < 0)


@dataclass(frozen=True, slots=True)
class MemoryRun:
    """Hold neighbours in memory that are all reduced or all kept."""

    is_reduced: bool
    size: Expr
    dims: frozenset[int]


def runs_of(x: Node, dims: Sequence[int], hints: Mapping[str, int]) -> list[MemoryRun] | None:
    """Return the runs of a value of which ``dims`` are reduced, outermost in memory first; None
    where it is not affine."""
    view = strided(x)
    if view is None:
        return None
    atoms = [
        (abs(stride.eval(hints)), MemoryRun(d in dims, size, frozenset((d,))))
        for d, dim in enumerate(view.dims)
        for size, stride in merge(dim)
    ]
    runs: list[MemoryRun] = []
    for _, run in sorted(atoms, key=lambda atom: -atom[0]):
        if runs and runs[-1].is_reduced == run.is_reduced:
            last = runs.pop()
            run = MemoryRun(run.is_reduced, last.size * run.size, last.dims | run.dims)
        runs.append(run)
    return runs


def lanes_fit(runs: Sequence[MemoryRun]) -> bool:
    """Tell whether what lies inside of the outermost reduced run may be the cols of a COLUMN
    kernel."""
    flags = [run.is_reduced for run in runs]
    lanes = product(run.size for run in runs[flags.index(True) + 1 :])
    return not any(flags[flags.index(True) + 1 :]) or (lanes.is_const and lanes.value <= MAX_LANES)


def reduced_runs(x: Node, dims: Sequence[int], hints: Mapping[str, int]) -> list[bool] | None:
    """Tell whether each run is among ``dims``."""
    runs = runs_of(x, dims, hints)
    return None if runs is None else [run.is_reduced for run in runs]


@lru_cache(maxsize=16384)
def base_of(node: Node) -> Node:
    """Return the value under a chain of views."""
    while node.kind is Kind.VIEW:
        node = node.inputs[0]
    return node


def forget_nodes() -> None:
    """Drop what is remembered of nodes. It would keep every graph in memory that one compile has
    gone through, and each collection of Python's garbage would look at all of them."""
    strided.cache_clear()
    base_of.cache_clear()
