"""The operator table: one row per operator, for every stage that needs to know about it.

The pointwise rows are in ``pointwise``, which says how to read one; ``op`` has the type of a row.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from strop.ir.op import Kind, Op, Operands, Types, compute_dtype
from strop.ir.pointwise import POINTWISE

__all__ = ["OPS", "POINTWISE", "Kind", "Op", "Operands", "Types", "compute_dtype", "is_foreign",
           "rows_for"]  # fmt: skip

aten = torch.ops.aten

REDUCTIONS: tuple[Op, ...] = (
    Op("sum", Kind.REDUCTION, (aten.sum.dim_IntList,), reference=torch.sum),
    Op("mean", Kind.REDUCTION, (aten.mean.dim,), reference=torch.mean),
    Op("var", Kind.REDUCTION, (aten.var.correction,), reference=torch.var),
    Op("amax", Kind.REDUCTION, (aten.amax.default,), reference=torch.amax),
    Op("amin", Kind.REDUCTION, (aten.amin.default,), reference=torch.amin),
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
    Op("slice", Kind.VIEW),  # attrs["dim"], attrs["start"]
    Op("linear", Kind.CONTRACTION),  # x (..., K), weight (N, K)[, bias (N,)] -> (..., N)
    Op("matmul", Kind.CONTRACTION),  # a (..., M, K), b (..., K, N) -> (..., M, N)
    Op("conv2d", Kind.CONTRACTION),  # x (N, C, H, W), weight (O, C/groups, KH, KW)[, bias]
    Op("attention", Kind.CONTRACTION),  # q, k, v (B, H, S, D)[, mask] -> (B, H, S, D)
    Op("aten", Kind.OPAQUE),  # attrs["target"]: any other overload, run by torch
    Op("item", Kind.OPAQUE),  # attrs["index"]: one output of a node that has several
    Op("write", Kind.OPAQUE),  # inputs (destination, value): copy_ into a graph input
)


# Calls that belong in torch: gathers, and what training needs until it has rows of its own. Any
# other overload without a row also runs in torch, but counts as a fallback.
LIBRARY: tuple[Op, ...] = tuple(
    Op(f"library {overload}", Kind.OPAQUE, (overload,))
    for overload in (
        aten.embedding.default,
        aten.embedding_dense_backward.default,
        aten.index.Tensor,
        aten._unsafe_index.Tensor,
        aten.argmax.default,
        aten.convolution.default,
        aten.convolution_backward.default,
        aten.native_group_norm_backward.default,
        aten.native_layer_norm_backward.default,
        aten._scaled_dot_product_flash_attention_for_cpu.default,
        aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
        aten._scaled_dot_product_flash_attention.default,
        aten._scaled_dot_product_flash_attention_backward.default,
        aten._scaled_dot_product_efficient_attention.default,
        aten._scaled_dot_product_efficient_attention_backward.default,
        aten._scaled_dot_product_cudnn_attention.default,
        aten._scaled_dot_product_cudnn_attention_backward.default,
    )
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
