"""Import reductions: rows of ``ops.REDUCTIONS`` as they are, the other spellings made of those.

The judge of every rule is ATen: NaN wins an extreme, the first of equal elements gives the index,
an empty sum is 0, an empty product 1, the variance of too few elements NaN.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Node as FxNode

from strop.ir.affine import base_of
from strop.ir.dims import const
from strop.ir.graph import Builder, Node
from strop.ir.ops import Op, compute_dtype

if TYPE_CHECKING:
    from strop.frontend.importer import Importer

aten = torch.ops.aten
Rule = Callable[..., Any]
Dims = int | Sequence[int] | None


def reduction(im: Importer, fx: FxNode, row: Op, bound: Mapping[str, Any]) -> Node:
    """Import a call whose overload has a row: sum, prod, mean, var, amax, amin."""
    x, dtype = im.node(bound["self"]), fx.meta["val"].dtype
    dims = _dims(x, bound.get("dim"))
    if row.name == "var":
        return _shaped(im, fx, _var(im.builder, x, dims, bound.get("correction"), dtype))
    return _shaped(im, fx, _reduced(im.builder, row.name, x, dims, dtype))


def binary(b: Builder, op: str, x: Node, y: Node, dtype: torch.dtype) -> Node:
    attrs = {"alpha": 1} if op in ("add", "sub") else {}
    return b.pointwise(op, x, y, dtype=dtype, **attrs)


def unary(b: Builder, op: str, x: Node, dtype: torch.dtype) -> Node:
    return b.pointwise(op, x, dtype=dtype)


def rounded(b: Builder, x: Node) -> Node:
    """Round a value as it would be in memory: inside of a kernel half types have more digits, and
    one side of a comparison may be computed again where the other one is read."""
    is_half = x.dtype in (torch.float16, torch.bfloat16)
    is_exact = base_of(x).op in ("input", "cast")
    return b.pointwise("cast", x, dtype=x.dtype) if is_half and not is_exact else x


def _dims(x: Node, dim: Dims) -> tuple[int, ...]:
    """Return the dims to reduce, ascending; none named means all, as in ATen."""
    rank = len(x.shape)
    if dim is None or (not isinstance(dim, int) and not dim):
        return tuple(range(rank))
    named = (dim,) if isinstance(dim, int) else dim
    return tuple(sorted({d % rank for d in named})) if rank else ()


def _shaped(im: Importer, fx: FxNode, value: Node, place: int | None = None) -> Node:
    """Take out the reduced dims, unless the call keeps them. ``place`` says which of its results it
    is."""
    meta = fx.meta["val"]
    shape = (meta if place is None else meta[place]).shape
    return im.builder.reshape(value, im.symbols.shape(shape))


def _reduced(b: Builder, op: str, x: Node, dims: tuple[int, ...], dtype: torch.dtype) -> Node:
    """Reduce; extremes of bools are those of 0 and 1."""
    if op in ("amax", "amin") and x.dtype == torch.bool:
        return b.cast(b.reduce(op, b.cast(x, torch.int32), dims, torch.int32), dtype)
    return b.reduce(op, x, dims, dtype)


def _var(
    b: Builder, x: Node, dims: tuple[int, ...], correction: float | None, dtype: torch.dtype
) -> Node:
    return b.reduce("var", x, dims, dtype, correction=1 if correction is None else correction)


def _spread(takes_root: bool, gives_mean: bool) -> Rule:
    """Return a rule for var_mean, std and std_mean."""

    def rule(
        im: Importer,
        fx: FxNode,
        x: Any,
        dim: Dims = None,
        *,
        correction: float | None = None,
        keepdim: bool = False,
    ) -> Any:
        b, x = im.builder, im.node(x)
        if not x.dtype.is_floating_point:
            return None
        dims, wide = _dims(x, dim), compute_dtype(x.dtype)
        result = _var(b, x, dims, correction, wide if takes_root else x.dtype)
        if takes_root:
            result = unary(b, "sqrt", result, x.dtype)
        if not gives_mean:
            return _shaped(im, fx, result)
        mean = b.reduce("mean", x, dims, x.dtype)
        return _shaped(im, fx, result, 0), _shaped(im, fx, mean, 1)

    return rule


def _truth(op: str) -> Rule:
    """Return a rule for any and all: the largest and the smallest of 0 and 1; over nothing the
    identity decides."""

    def rule(im: Importer, fx: FxNode, x: Any, dim: Dims = None, keepdim: bool = False) -> Any:
        b, x = im.builder, im.node(x)
        if x.dtype.is_complex:
            return None
        bits = b.cast(_is_nonzero(b, x), torch.int32)
        found = b.reduce(op, bits, _dims(x, dim), torch.int32)
        truth = binary(b, "gt", found, b.constant(0, torch.int32), torch.bool)
        return _shaped(im, fx, b.cast(truth, fx.meta["val"].dtype))

    return rule


def _is_nonzero(b: Builder, x: Node) -> Node:
    if x.dtype == torch.bool:
        return x
    return binary(b, "ne", x, b.constant(0, compute_dtype(x.dtype)), torch.bool)


def _count_nonzero(im: Importer, fx: FxNode, x: Any, dim: Dims = None) -> Any:
    b, x = im.builder, im.node(x)
    if x.dtype.is_complex:
        return None
    return _shaped(im, fx, b.reduce("sum", _is_nonzero(b, x), _dims(x, dim), torch.int64))


def _place_of(b: Builder, x: Node, top: Node, dim: int) -> Node:
    """Find the first index along ``dim`` of an element equal to ``top``; the first NaN, if any."""
    size = x.shape[dim]
    shape = [size if d == dim else const(1) for d in range(len(x.shape))]
    places = b.make("iota", (), (size,), torch.int64, start=0, step=1)
    places = b.reshape(places, shape)
    end = b.constant(size.value if size.is_const else size, torch.int64)
    hit = binary(b, "eq", rounded(b, x), rounded(b, top), torch.bool)
    place = b.pointwise("where", hit, places, end, dtype=torch.int64)
    if x.dtype.is_floating_point:
        is_nan = binary(b, "ne", x, x, torch.bool)
        place = b.pointwise("where", is_nan, places, place, dtype=torch.int64)
    return b.reduce("amin", place, (dim,), torch.int64)


def _extreme_place(op: str) -> Rule:
    """Return a rule for argmax and argmin."""

    def rule(
        im: Importer, fx: FxNode, x: Any, dim: int | None = None, keepdim: bool = False
    ) -> Node:
        b, x = im.builder, im.node(x)
        if dim is None or not x.shape:
            x, dim = b.reshape(x, (x.numel,)), 0
        dim %= len(x.shape)
        return _shaped(im, fx, _place_of(b, x, _reduced(b, op, x, (dim,), x.dtype), dim))

    return rule


def _extreme_with_place(op: str) -> Rule:
    """Return a rule for max.dim and min.dim: values and indices."""

    def rule(im: Importer, fx: FxNode, x: Any, dim: int, keepdim: bool = False) -> Any:
        b, x = im.builder, im.node(x)
        if not x.shape:
            x = b.reshape(x, (1,))
        dim %= len(x.shape)
        top = _reduced(b, op, x, (dim,), x.dtype)
        place = _place_of(b, x, top, dim) if any(u.args[1:] == (1,) for u in fx.users) else None
        return _shaped(im, fx, top, 0), place and _shaped(im, fx, place, 1)

    return rule


def _aminmax(
    im: Importer, fx: FxNode, x: Any, *, dim: int | None = None, keepdim: bool = False
) -> tuple[Node, Node]:
    b, x = im.builder, im.node(x)
    dims = _dims(x, dim)
    low, high = (_reduced(b, op, x, dims, x.dtype) for op in ("amin", "amax"))
    return _shaped(im, fx, low, 0), _shaped(im, fx, high, 1)


def log_of_sum(b: Builder, x: Node, top: Node, dims: tuple[int, ...], wide: torch.dtype) -> Node:
    """Compute log(sum(exp(x - top)))."""
    powers = unary(b, "exp", binary(b, "sub", x, top, wide), wide)
    return unary(b, "log", b.reduce("sum", powers, dims, wide), wide)


def _logsumexp(im: Importer, fx: FxNode, x: Any, dim: Dims, keepdim: bool = False) -> Node | None:
    b, x, dtype = im.builder, im.node(x), fx.meta["val"].dtype
    if x.dtype.is_complex:
        return None
    x = x if x.dtype.is_floating_point else b.cast(x, dtype)
    dims, wide = _dims(x, dim), compute_dtype(dtype)
    top = b.reduce("amax", x, dims, wide)
    size = unary(b, "abs", top, wide)
    is_inf = binary(b, "eq", size, b.constant(math.inf, wide), torch.bool)
    top = b.pointwise("where", is_inf, b.constant(0.0, wide), top, dtype=wide)  # not inf - inf
    return _shaped(im, fx, binary(b, "add", log_of_sum(b, x, top, dims, wide), top, dtype))


def _vector_norm(
    im: Importer,
    fx: FxNode,
    x: Any,
    ord: float = 2,
    dim: Dims = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Node | None:
    b, x, result = im.builder, im.node(x), fx.meta["val"].dtype
    if x.dtype.is_complex or ord not in (0, 1, 2, math.inf, -math.inf):
        return None
    dims, wide = _dims(x, dim), compute_dtype(result)
    x = x if compute_dtype(x.dtype) == wide else b.cast(x, wide)
    if ord == 2:
        total = b.reduce("sum", binary(b, "mul", x, x, wide), dims, wide)
        return _shaped(im, fx, unary(b, "sqrt", total, result))
    if ord == 0:
        return _shaped(im, fx, b.reduce("sum", _is_nonzero(b, x), dims, result))
    op = {1: "sum", math.inf: "amax", -math.inf: "amin"}[ord]
    return _shaped(im, fx, b.reduce(op, unary(b, "abs", x, wide), dims, result))


def _norm(
    im: Importer, fx: FxNode, x: Any, p: float | None, dim: Dims, keepdim: bool = False, **_: Any
) -> Node | None:
    return _vector_norm(im, fx, x, 2 if p is None else p, dim, keepdim)


def _norm_of_all(im: Importer, fx: FxNode, x: Any, p: float = 2) -> Node | None:
    return _vector_norm(im, fx, x, p)


REDUCTION_RULES: dict[Any, Rule] = {
    aten.var_mean.correction: _spread(takes_root=False, gives_mean=True),
    aten.std.correction: _spread(takes_root=True, gives_mean=False),
    aten.std_mean.correction: _spread(takes_root=True, gives_mean=True),
    aten.any.default: _truth("amax"),
    aten.any.dim: _truth("amax"),
    aten.any.dims: _truth("amax"),
    aten.all.default: _truth("amin"),
    aten.all.dim: _truth("amin"),
    aten.all.dims: _truth("amin"),
    aten.count_nonzero.default: _count_nonzero,
    aten.count_nonzero.dim_IntList: _count_nonzero,
    aten.argmax.default: _extreme_place("amax"),
    aten.argmin.default: _extreme_place("amin"),
    aten.max.dim: _extreme_with_place("amax"),
    aten.min.dim: _extreme_with_place("amin"),
    aten.aminmax.default: _aminmax,
    aten.logsumexp.default: _logsumexp,
    aten.linalg_vector_norm.default: _vector_norm,
    aten.norm.ScalarOpt_dim: _norm,
    aten.norm.Scalar: _norm_of_all,
}
