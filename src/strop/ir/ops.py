"""Hold the operator table: one row per operator, for every stage that needs to know about it.

The pointwise rows are in ``pointwise`` and what it imports, what libraries compute in
``contractions``; ``pointwise_row`` says how to read one,
and ``op`` has the type of a row.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from strop.ir import philox
from strop.ir.contractions import CONTRACTIONS
from strop.ir.op import Kind, Op, Operands, Types, compute_dtype, of_nothing
from strop.ir.pointwise import POINTWISE

__all__ = [
    "OPS",
    "POINTWISE",
    "Kind",
    "Op",
    "Operands",
    "Types",
    "compute_dtype",
    "is_foreign",
    "of_nothing",
    "planned_on",
    "rows_for",
]

aten = torch.ops.aten

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


def _always(attrs: Mapping[str, Any], rank: int) -> bool:
    return True


def _never(attrs: Mapping[str, Any], rank: int) -> bool:
    return False


def _e4m3_code(x: torch.Tensor) -> torch.Tensor:
    return x.float().clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8).to(torch.int32)


def _along_others(attrs: Mapping[str, Any], rank: int) -> bool:
    return bool(attrs["dim"] % rank != 0)


def _if_first_stays(attrs: Mapping[str, Any], rank: int) -> bool:
    return bool(attrs["dims"][0] == 0)


# Graph-level operators: their ATen spellings differ too much for one overload a row, so
# ``frontend.importer`` and ``frontend.decompositions`` build them.
STRUCTURAL: tuple[Op, ...] = (
    Op("input", Kind.OPAQUE),
    # its value, a number or Expr, is attrs["value"]
    Op("constant", Kind.POINTWISE, only_moves=True, is_elementwise=False),
    # start + step * index along the only dim
    Op("iota", Kind.POINTWISE, only_moves=True, is_elementwise=False, rows_kept=_never),
    # along attrs["dim"]
    Op("cat", Kind.POINTWISE, only_moves=True, is_elementwise=False, rows_kept=_along_others),
    # a cat that no kernel computes, of parts that lie where it has them (``ir.parts``)
    Op("join", Kind.OPAQUE, rows_kept=_along_others),
    # its place in the join: attrs["start"] along ["dim"], which has ["whole"] elements there
    Op(
        "part",
        Kind.POINTWISE,
        only_moves=True,
        is_placed=True,
        is_elementwise=False,
        rows_kept=_along_others,
    ),
    # Elements of a source where indices say, inputs (source, index, ...); the indices broadcast to
    # the result. attrs["walks"]: for each dim of the source the dim of the result that runs along
    # it, or None where the next index looks it up. attrs["bounds"]: "wrapped" (negative ones count
    # from the end), "checked", or "known" to be inside. The source is always in memory.
    Op("take", Kind.POINTWISE, only_moves=True, is_elementwise=False, rows_kept=_never),
    # Sums, or the largest, of rows (D,) of a table (R, D): inputs (table, ids (N,), offsets
    # (B,) or (B + 1,)[, a factor (N,) of each id]) -> (B, D), all in memory. attrs["kind"]: "sum"
    # or "amax"; ["ends"]: the offsets have the end of the last bag; ["padding"]: the id that is
    # left out, or None. The frontend makes it on a CPU alone.
    Op("bag", Kind.POINTWISE, is_elementwise=False, rows_kept=_never),
    # the same values in another layout
    Op("copy", Kind.POINTWISE, triton="{0}", cpp="{0}", only_moves=True, is_elementwise=False),
    # seed and position, both int64, to a number in [0, 1): ``frontend.random``
    Op(
        "uniform",
        Kind.POINTWISE,
        triton="tl.uint_to_uniform_float(tl.philox({0}, ({1}).to(tl.uint32),"
        " ({1} >> 32).to(tl.uint32), 0, 0)[0])",
        cpp="sp::uniform({0}, {1})",
        reference=philox.uniform,
        operands=Operands.PROMOTED,
        types=Types.FLOAT,
        is_elementwise=False,
        rows_kept=_never,
    ),
    # the low bits of an int32 as a number: ``frontend.bits``
    Op(
        "half_of_bits",
        Kind.POINTWISE,
        triton="({0}).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)",
        cpp="sp::half_of_bits({0})",
        reference=lambda bits: bits.to(torch.int16).view(torch.float16).float(),
        operands=Operands.PROMOTED,
        types=Types.FLOAT,
    ),
    Op(
        "float_of_bits",
        Kind.POINTWISE,
        triton="({0}).to(tl.float32, bitcast=True)",
        cpp="sp::float_of_bits({0})",
        reference=lambda bits: bits.view(torch.float32),
        operands=Operands.PROMOTED,
        types=Types.FLOAT,
    ),
    # an fp32 as an int32 of the same bits; those of a NaN are any NaN's
    Op(
        "bits_of_float",
        Kind.POINTWISE,
        triton="({0}).to(tl.int32, bitcast=True)",
        cpp="sp::bits_of_float({0})",
        reference=lambda x: x.float().view(torch.int32),
        operands=Operands.PROMOTED,
        types=Types.INTEGER,
    ),
    # an fp32 as the nearest e4m3, a byte in an int32: what is too large is the largest
    Op(
        "e4m3_code",
        Kind.POINTWISE,
        triton="e4m3_code({0}, SM_90)",
        cpp="sp::e4m3_code({0})",
        reference=_e4m3_code,
        operands=Operands.PROMOTED,
        types=Types.INTEGER,
    ),
    Op("reshape", Kind.VIEW, has_all_once=True, rows_kept=_always),
    # by attrs["dims"]
    Op(
        "permute", Kind.VIEW, has_all_once=True, rows_kept=lambda attrs, rank: attrs["dims"][0] == 0
    ),
    Op("expand", Kind.VIEW, rows_kept=_always),
    # along attrs["dim"], from ["start"] on, by ["step"], which may be negative
    Op("slice", Kind.VIEW, rows_kept=_along_others),
    Op("diagonal", Kind.VIEW),  # attrs["dims"], two that become the last one, ["starts"] in them
    # attrs["strides"] from attrs["start"] on in the memory of a dense value: what only results are
    Op("window", Kind.VIEW),
    Op("aten", Kind.OPAQUE),  # attrs["target"]: any other overload, run by torch
    Op("pattern", Kind.OPAQUE),  # attrs["key"]: the replacement that ``strop.patterns`` calls
    Op("item", Kind.OPAQUE),  # attrs["index"]: one output of a node that has several
    # inputs (destination, value): copy_ into a graph input
    Op("write", Kind.OPAQUE, is_placed=True),
)


# Calls that belong in torch, by decision. Any other overload without a row also runs in torch,
# but counts as a fallback. A row per operator: all overloads of these packets but out variants.
_LOOKUPS = (  # read or write where another tensor says
    "embedding",
    "_embedding_bag",
    "_embedding_bag_forward_only",
    "gather",
    "index",
    "_unsafe_index",
    "index_select",
    "take",
    "index_put",
    "_unsafe_index_put",
    "index_add",
    "index_copy",
    "index_fill",
    "put",
    "scatter",
    "scatter_add",
    "scatter_reduce",
    "masked_scatter",
    "slice_scatter",
    "diagonal_scatter",
    "diag_embed",
    "roll",
    "as_strided",
    "clone",
    "unfold",
    "view.dtype",
    "view_as_real",  # of complex numbers that a call without a rule has made,
    "complex",  # or of which the result, or such a call, is
    "linspace",
    "logspace",
)
_SEQUENCES = (  # order or accumulate along a dim
    "argmax",
    "argmin",
    "topk",
    "sort",
    "kthvalue",
    "median",
    "nanmedian",
    "mode",
    "cumsum",
    "cumprod",
    "cummax",
    "cummin",
    "logcumsumexp",
    "searchsorted",
    "bucketize",
    "histc",
    "bincount",
)
_RECURRENT = ("lstm.input", "gru.input", "rnn_tanh.input", "rnn_relu.input")
_RESIZING = (
    "upsample_nearest1d",
    "upsample_nearest2d",
    "upsample_nearest3d",
    "_upsample_nearest_exact1d",
    "_upsample_nearest_exact2d",
    "_upsample_nearest_exact3d",
    "upsample_linear1d",
    "upsample_bilinear2d",
    "upsample_trilinear3d",
    "upsample_bicubic2d",
)
_IMAGES = (  # windows over an image, and images of another size
    "max_pool2d_with_indices",
    "max_pool3d_with_indices",
    "avg_pool2d",
    "avg_pool3d",
    "_adaptive_avg_pool2d",
    "_adaptive_avg_pool3d",
    "adaptive_max_pool2d",
    "adaptive_max_pool3d",
    "reflection_pad1d",
    "reflection_pad2d",
    "reflection_pad3d",
    "replication_pad1d",
    "replication_pad2d",
    "replication_pad3d",
    *_RESIZING,
    "_upsample_bilinear2d_aa",
    "_upsample_bicubic2d_aa",
    "im2col",
    "col2im",
    "grid_sampler_2d",
    "grid_sampler_3d",
    "convolution",
)
_ATTENTION = (
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
)
_QUANTISED = (  # products of codes, and of activations and codes
    "_int_mm",
    "_scaled_mm",
    "_weight_int8pack_mm",
    "_weight_int4pack_mm",
    "_weight_int4pack_mm_for_cpu",
)
_RANDOM = (  # with torch's generator and its numbers
    "rand",
    "randn",
    "rand_like",
    "randn_like",
    "randint",
    "randint_like",
    "randperm",
    "bernoulli",
    "multinomial",
    "normal",
    "normal_functional",
    "uniform",
    "exponential",
    "native_dropout",
)
_BACKWARD = (  # libraries' own, and scatters to where a forward has read
    "embedding_dense_backward",
    "convolution_backward",
    "max_pool2d_with_indices_backward",
    "max_pool3d_with_indices_backward",
    "adaptive_max_pool2d_backward",
    "adaptive_max_pool3d_backward",
    "avg_pool2d_backward",
    "avg_pool3d_backward",
    "_adaptive_avg_pool2d_backward",
    "_adaptive_avg_pool3d_backward",
    *(f"{name}_backward" for name in _RESIZING),
    "_upsample_bilinear2d_aa_backward",
    "_upsample_bicubic2d_aa_backward",
    "reflection_pad1d_backward",
    "reflection_pad2d_backward",
    "reflection_pad3d_backward",
    "replication_pad1d_backward",
    "replication_pad2d_backward",
    "replication_pad3d_backward",
    "grid_sampler_2d_backward",
    "grid_sampler_3d_backward",
    "cudnn_grid_sampler_backward",
    "unfold_backward",
    "masked_scatter_backward",
    "_embedding_bag_backward",
    "_weight_norm_interface_backward",
    *(f"{name}_backward" for name in _ATTENTION),
)


def _overloads(text: str) -> tuple[Any, ...]:
    name, _, chosen = text.partition(".")
    packet = getattr(aten, name)
    names = [chosen] if chosen else packet.overloads()
    found = (getattr(packet, n) for n in names)
    return tuple(o for o in found if not any(a.is_out for a in o._schema.arguments))


LIBRARY: tuple[Op, ...] = tuple(
    Op(f"library {text}", Kind.OPAQUE, _overloads(text))
    for text in (
        *_LOOKUPS,
        *_SEQUENCES,
        *_RECURRENT,
        *_IMAGES,
        *_ATTENTION,
        *_QUANTISED,
        *_RANDOM,
        *_BACKWARD,
    )
)


def _index(rows: tuple[Op, ...]) -> dict[str, Op]:
    table: dict[str, Op] = {}
    for row in rows:
        if row.name in table:
            raise AssertionError(f"operator {row.name!r} has two rows")
        table[row.name] = row
    return table


OPS: Mapping[str, Op] = _index(POINTWISE + REDUCTIONS + STRUCTURAL + CONTRACTIONS + LIBRARY)


def rows_for(overload: Any) -> tuple[Op, ...]:
    """Return the rows that name this ATen overload, in table order."""
    return _BY_OVERLOAD.get(overload, ())


def is_foreign(target: str) -> bool:
    """Tell whether an overload, by name, has no row: nobody decided that it should run in torch."""
    return target not in _NAMES


_BY_OVERLOAD: dict[Any, tuple[Op, ...]] = {}
for _row in OPS.values():
    for _overload in _row.overloads:
        _BY_OVERLOAD[_overload] = (*_BY_OVERLOAD.get(_overload, ()), _row)
# Of libraries that quantise weights, which have kernels of their own for that, and ours for them.
_OF_LIBRARIES = (
    "strop.int_mm.default",
    "bitsandbytes.dequantize_4bit.default",
    "bitsandbytes.dequantize_blockwise.default",
    "bitsandbytes.gemv_4bit.default",  # of weights that it packs for CPUs with AVX512 BF16
)
_NAMES = frozenset((*map(str, _BY_OVERLOAD), *_OF_LIBRARIES))

# How many operands of a lookup are in memory, as it reads elements of them that values say.
LOOKED_INTO: Mapping[str, int] = {"take": 1, "bag": 4}
# How many operands of a contraction are read as rows.
OF_ROWS: Mapping[str, int] = {row.name: row.anchor.rows for row in CONTRACTIONS if row.anchor.rows}


def planned_on(device: str) -> frozenset[str]:
    """Return the library calls that write where they are told on devices of this kind."""
    return frozenset(row.name for row in CONTRACTIONS if device in row.anchor.planned)


# The types that both code generators read and write.
KERNEL_DTYPES = frozenset(
    {
        torch.bool,
        torch.uint8,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
    }
)
# The types of quantised weights. Others, such as indices, come in these seldom, and small.
CODES = frozenset((torch.int8, torch.uint8, torch.float8_e4m3fn, torch.float8_e5m2))
