"""The operator table: one row per operator, for every stage that needs to know about it.

A pointwise row holds the ATen overloads it stands for, one scalar expression for each code
generator, and the torch function that is its reference. ``{0}``, ``{1}`` are the operands,
``{name}`` an attribute under the name that the ATen schema gives it. Operands arrive in the
row's compute type (fp32 for half types, see ``compute_dtype``) and nothing rounds before a store.
Adding an operator means adding a row here and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch

aten = torch.ops.aten


class Kind(Enum):
    POINTWISE = "pointwise"  # one output element from one element of each operand
    REDUCTION = "reduction"  # many elements to one, over attrs["dims"]
    VIEW = "view"  # another way to read the same elements: an affine index map
    CONTRACTION = "contraction"  # GEMM, convolution, attention: library anchors
    OPAQUE = "opaque"  # anything else, run by torch


class Operands(Enum):
    """The compute type in which the operands of a pointwise row arrive."""

    RESULT = "result"  # all in the compute type of the result
    PROMOTED = "promoted"  # all in the promoted type of the operands (comparisons)
    SELECT = "select"  # the first is a bool, the others as RESULT
    OWN = "own"  # each in its own type (cast)


@dataclass(frozen=True, slots=True)
class Op:
    name: str
    kind: Kind
    overloads: tuple[Any, ...] = ()
    triton: str = ""
    cpp: str = ""
    reference: Callable[..., Any] | None = None
    operands: Operands = Operands.RESULT
    when: Callable[[Mapping[str, Any]], bool] = lambda attrs: (
        True
    )  # picks among rows of an overload
    example: tuple[float, float] = (-3.0, 3.0)  # operand range that tests draw from
    attrs: Mapping[str, Any] = field(default_factory=dict)  # attribute values that tests use


def _pointwise(
    name: str, overloads: tuple[Any, ...], triton: str, cpp: str = "", **more: Any
) -> Op:
    return Op(name, Kind.POINTWISE, overloads, triton, cpp or triton, **more)


def _approximates(kind: str) -> Callable[[Mapping[str, Any]], bool]:
    return lambda attrs: attrs.get("approximate", "none") == kind


_ALPHA = {"alpha": 1}
_POSITIVE = (0.1, 3.0)

POINTWISE: tuple[Op, ...] = (
    _pointwise("add", (aten.add.Tensor, aten.add.Scalar), "{0} + {alpha} * {1}",
               reference=torch.add, attrs=_ALPHA),
    _pointwise("sub", (aten.sub.Tensor, aten.sub.Scalar), "{0} - {alpha} * {1}",
               reference=torch.sub, attrs=_ALPHA),
    _pointwise("rsub", (aten.rsub.Tensor, aten.rsub.Scalar), "{1} - {alpha} * {0}",
               reference=torch.rsub, attrs=_ALPHA),
    _pointwise("mul", (aten.mul.Tensor, aten.mul.Scalar), "{0} * {1}", reference=torch.mul),
    _pointwise("div", (aten.div.Tensor, aten.div.Scalar), "{0} / {1}", reference=torch.div,
               example=_POSITIVE),
    _pointwise("neg", (aten.neg.default,), "-{0}", reference=torch.neg),
    _pointwise("abs", (aten.abs.default,), "tl.abs({0})", "sp::abs({0})", reference=torch.abs),
    _pointwise("reciprocal", (aten.reciprocal.default,), "1.0 / {0}", "1 / {0}",
               reference=torch.reciprocal, example=_POSITIVE),
    _pointwise("sqrt", (aten.sqrt.default,), "tl.sqrt_rn({0})", "sp::sqrt({0})",
               reference=torch.sqrt, example=_POSITIVE),
    _pointwise("rsqrt", (aten.rsqrt.default,), "tl.rsqrt({0})", "1 / sp::sqrt({0})",
               reference=torch.rsqrt, example=_POSITIVE),
    _pointwise("exp", (aten.exp.default,), "tl.exp({0})", "sp::exp({0})", reference=torch.exp),
    _pointwise("log", (aten.log.default,), "tl.log({0})", "sp::log({0})", reference=torch.log,
               example=_POSITIVE),
    _pointwise("erf", (aten.erf.default,), "tl.erf({0})", "sp::erf({0})", reference=torch.erf),
    _pointwise("sin", (aten.sin.default,), "tl.sin({0})", "sp::sin({0})", reference=torch.sin),
    _pointwise("cos", (aten.cos.default,), "tl.cos({0})", "sp::cos({0})", reference=torch.cos),
    _pointwise("tanh", (aten.tanh.default,), "1.0 - 2.0 / (1.0 + tl.exp(2.0 * {0}))",
               "sp::tanh({0})", reference=torch.tanh),
    _pointwise("sigmoid", (aten.sigmoid.default,), "1.0 / (1.0 + tl.exp(-{0}))",
               "1 / (1 + sp::exp(-{0}))", reference=torch.sigmoid),
    _pointwise("silu", (aten.silu.default,), "{0} / (1.0 + tl.exp(-{0}))",
               "{0} / (1 + sp::exp(-{0}))", reference=torch.nn.functional.silu),
    _pointwise("gelu", (aten.gelu.default,), "0.5 * {0} * (1.0 + tl.erf({0} * 0.7071067811865476))",
               "sp::half({0}) * (1 + sp::erf({0} * 0.7071067811865476f))",
               reference=torch.nn.functional.gelu, when=_approximates("none")),
    _pointwise("relu", (aten.relu.default,), "tl.where({0} < 0, 0.0, {0})",
               "({0} < 0 ? 0 : {0})", reference=torch.relu),
    _pointwise("maximum", (aten.maximum.default,),
               "tl.maximum({0}, {1}, propagate_nan=tl.PropagateNan.ALL)", "sp::max({0}, {1})",
               reference=torch.maximum),
    _pointwise("minimum", (aten.minimum.default,),
               "tl.minimum({0}, {1}, propagate_nan=tl.PropagateNan.ALL)", "sp::min({0}, {1})",
               reference=torch.minimum),
    _pointwise("where", (aten.where.self,), "tl.where({0}, {1}, {2})", "({0} ? {1} : {2})",
               reference=torch.where, operands=Operands.SELECT),
    _pointwise("lt", (aten.lt.Tensor, aten.lt.Scalar), "{0} < {1}", reference=torch.lt,
               operands=Operands.PROMOTED),
    _pointwise("le", (aten.le.Tensor, aten.le.Scalar), "{0} <= {1}", reference=torch.le,
               operands=Operands.PROMOTED),
    _pointwise("gt", (aten.gt.Tensor, aten.gt.Scalar), "{0} > {1}", reference=torch.gt,
               operands=Operands.PROMOTED),
    _pointwise("ge", (aten.ge.Tensor, aten.ge.Scalar), "{0} >= {1}", reference=torch.ge,
               operands=Operands.PROMOTED),
    _pointwise("eq", (aten.eq.Tensor, aten.eq.Scalar), "{0} == {1}", reference=torch.eq,
               operands=Operands.PROMOTED),
    _pointwise("ne", (aten.ne.Tensor, aten.ne.Scalar), "{0} != {1}", reference=torch.ne,
               operands=Operands.PROMOTED),
    _pointwise("logical_and", (aten.logical_and.default,), "{0} & {1}",
               reference=torch.logical_and, example=(0, 1)),
    # The one row that rounds: the user asked for it. Code generators print it by result type.
    _pointwise("cast", (aten._to_copy.default,), "{0}", operands=Operands.OWN,
               reference=lambda x: x),
)  # fmt: skip

# Over attrs["dims"]; ``frontend.reductions`` makes the other reductions of these. var also has
# attrs["correction"].
REDUCTIONS: tuple[Op, ...] = (
    Op("sum", Kind.REDUCTION, (aten.sum.dim_IntList, aten.sum.default), reference=torch.sum),
    Op("prod", Kind.REDUCTION, (aten.prod.dim_int, aten.prod.default), reference=torch.prod),
    Op("mean", Kind.REDUCTION, (aten.mean.dim, aten.mean.default), reference=torch.mean),
    Op("var", Kind.REDUCTION, (aten.var.correction,), reference=torch.var),
    Op("amax", Kind.REDUCTION, (aten.amax.default, aten.max.default), reference=torch.amax),
    Op("amin", Kind.REDUCTION, (aten.amin.default, aten.min.default), reference=torch.amin),
)

# Graph-level operators: their ATen spellings differ too much for one overload a row, so
# ``frontend.importer`` and ``frontend.decompositions`` build them.
STRUCTURAL: tuple[Op, ...] = (
    Op("input", Kind.OPAQUE),
    Op("constant", Kind.POINTWISE),  # attrs["value"]: number or Expr
    Op("iota", Kind.POINTWISE),  # start + step * index along the only dim
    Op("cat", Kind.POINTWISE),  # attrs["dim"]
    Op("copy", Kind.POINTWISE, triton="{0}", cpp="{0}"),  # the same values in another layout
    Op("reshape", Kind.VIEW),
    Op("permute", Kind.VIEW),  # attrs["dims"]
    Op("expand", Kind.VIEW),
    Op("slice", Kind.VIEW),  # attrs["dim"], ["start"], ["step"], which may be negative
    Op("diagonal", Kind.VIEW),  # attrs["dims"], two that become the last one, ["starts"] in them
    Op("linear", Kind.CONTRACTION),  # x (..., K), weight (N, K)[, bias (N,)] -> (..., N)
    Op("matmul", Kind.CONTRACTION),  # a (..., M, K), b (..., K, N) -> (..., M, N)
    Op("conv2d", Kind.CONTRACTION),  # x (N, C, H, W), weight (O, C/groups, KH, KW)[, bias]
    Op("attention", Kind.CONTRACTION),  # q, k, v (B, H, S, D)[, mask] -> (B, H, S, D)
    Op("aten", Kind.OPAQUE),  # attrs["target"]: any other overload, run by torch
    Op("item", Kind.OPAQUE),  # attrs["index"]: one output of a node that has several
    Op("write", Kind.OPAQUE),  # inputs (destination, value): copy_ into a graph input
)


# Calls that belong in torch, by decision. Any other overload without a row also runs in torch,
# but counts as a fallback. A row per operator: all overloads of these packets but out variants.
_LOOKUPS = (  # read or write where another tensor says
    "embedding", "gather", "index", "_unsafe_index", "index_select", "take", "index_put",
    "_unsafe_index_put", "index_add", "index_copy", "index_fill", "scatter", "scatter_add",
    "scatter_reduce", "masked_scatter", "slice_scatter", "diagonal_scatter", "diag_embed", "roll",
    "as_strided", "clone", "unfold", "view.dtype", "linspace", "logspace",
)  # fmt: skip
_SEQUENCES = (  # order or accumulate along a dim
    "argmax", "argmin", "topk", "sort", "kthvalue", "median", "nanmedian", "mode", "cumsum",
    "cumprod", "cummax", "cummin", "logcumsumexp", "searchsorted", "bucketize", "histc",
    "bincount",
)  # fmt: skip
_IMAGES = (  # windows over an image, and images of another size
    "max_pool2d_with_indices", "max_pool3d_with_indices", "avg_pool2d", "avg_pool3d",
    "_adaptive_avg_pool2d", "_adaptive_avg_pool3d", "adaptive_max_pool2d", "adaptive_max_pool3d",
    "reflection_pad1d", "reflection_pad2d", "reflection_pad3d", "replication_pad1d",
    "replication_pad2d", "replication_pad3d", "upsample_nearest1d", "upsample_nearest2d",
    "upsample_nearest3d", "_upsample_nearest_exact1d", "_upsample_nearest_exact2d",
    "_upsample_nearest_exact3d", "upsample_linear1d", "upsample_bilinear2d",
    "upsample_trilinear3d", "upsample_bicubic2d", "_upsample_bilinear2d_aa",
    "_upsample_bicubic2d_aa", "im2col", "col2im", "grid_sampler_2d", "grid_sampler_3d",
    "convolution",
)  # fmt: skip
_ATTENTION = (
    "_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention",
)  # fmt: skip
_BACKWARD = (  # what training needs until it has rows of its own
    "embedding_dense_backward", "convolution_backward", "native_group_norm_backward",
    "native_layer_norm_backward", *(f"{name}_backward" for name in _ATTENTION),
)  # fmt: skip


def _overloads(text: str) -> tuple[Any, ...]:
    name, _, chosen = text.partition(".")
    packet = getattr(aten, name)
    names = [chosen] if chosen else packet.overloads()
    found = (getattr(packet, n) for n in names)
    return tuple(o for o in found if not any(a.is_out for a in o._schema.arguments))


LIBRARY: tuple[Op, ...] = tuple(
    Op(f"library {text}", Kind.OPAQUE, _overloads(text))
    for text in (*_LOOKUPS, *_SEQUENCES, *_IMAGES, *_ATTENTION, *_BACKWARD)
)


def _index(rows: tuple[Op, ...]) -> dict[str, Op]:
    table: dict[str, Op] = {}
    for row in rows:
        if row.name in table:
            raise AssertionError(f"operator {row.name!r} has two rows")
        table[row.name] = row
    return table


OPS: Mapping[str, Op] = _index(POINTWISE + REDUCTIONS + STRUCTURAL + LIBRARY)


def rows_for(overload: Any) -> tuple[Op, ...]:
    """The rows that name this ATen overload, in table order."""
    return _BY_OVERLOAD.get(overload, ())


def is_foreign(target: str) -> bool:
    """Whether an overload, by name, has no row: nobody decided that it should run in torch."""
    return target not in _NAMES


_BY_OVERLOAD: dict[Any, tuple[Op, ...]] = {}
for _row in OPS.values():
    for _overload in _row.overloads:
        _BY_OVERLOAD[_overload] = (*_BY_OVERLOAD.get(_overload, ()), _row)
_NAMES = frozenset(map(str, _BY_OVERLOAD))


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type in which a kernel holds a value of this dtype (ATen's opmath type)."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


# The types that both code generators read and write.
KERNEL_DTYPES = frozenset({
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
    torch.float16, torch.bfloat16, torch.float32, torch.float64,
})  # fmt: skip
