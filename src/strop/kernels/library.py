"""Which kernels written by hand run for an anchor, by sizes alone.

They come in families, each with an option of its name. A family may do a call at some sizes; the
first of those that may and can at these does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from strop.ir.dims import Expr
from strop.ir.graph import Node
from strop.ir.source import KernelSource
from strop.kernels.attention import choice as attention
from strop.kernels.conv import folded_taps
from strop.kernels.conv import narrow as narrow_conv
from strop.kernels.gemm import choice as products
from strop.kernels.gemm import geglu
from strop.kernels.gemm import skinny as skinny_gemm

Attrs = Mapping[str, Any]
Sizes = Sequence[Sequence[int]]
Shapes = Sequence[Sequence[Expr]]


@dataclass(frozen=True, slots=True)
class Family:
    """``fits``: whether some sizes may come at which it is faster than a library. ``at``: what it
    launches for operands of these sizes, in order; nothing where something else is faster.
    ``anywhere``: at any sizes, or more. ``boxed``: it reads by the tensor memory accelerator."""

    fits: Callable[[Node], bool]
    at: Callable[[str, Attrs, Sizes, torch.dtype], list[KernelSource]]
    anywhere: Callable[[str, Attrs, Shapes, torch.dtype], list[KernelSource]]
    boxed: bool = True


FAMILIES: Mapping[str, Family] = {
    "skinny_gemm": Family(skinny_gemm.fits, skinny_gemm.sources_at, skinny_gemm.sources_anywhere),
    "wgmma_gemm": Family(
        products.fits,
        products.sources_at,
        products.sources_anywhere,
    ),
    "tma_attention": Family(
        lambda node: (
            node.op == "attention"
            and attention.is_boxed(node.attrs, [x.shape for x in node.inputs], node.dtype)
        ),
        lambda op, attrs, shapes, dtype: attention.sources_at(attrs, shapes, dtype),
        lambda op, attrs, shapes, dtype: attention.sources_anywhere(
            attrs, shapes[0][-1].value, dtype
        ),
    ),
    "tma_geglu": Family(
        lambda node: node.op == "geglu",
        lambda op, attrs, shapes, dtype: geglu.boxed_at(shapes, dtype),
        lambda op, attrs, shapes, dtype: geglu.boxed_anywhere(shapes, dtype),
    ),
    "geglu": Family(  # behind a library's product: nothing else computes the gates well
        lambda node: node.op == "geglu",
        lambda op, attrs, shapes, dtype: [geglu.behind(shapes, dtype)],
        lambda op, attrs, shapes, dtype: [geglu.behind(shapes, dtype)],
        boxed=False,
    ),
}


def of_node(node: Node) -> KernelSource | None:
    """The kernel that does it at all sizes, if there is one."""
    return narrow_conv.of_node(node) or folded_taps.of_node(node)


def families(node: Node) -> tuple[str, ...]:
    """Of kernels that may do it at some sizes."""
    return tuple(name for name, family in FAMILIES.items() if family.fits(node))


def chosen_at(
    some: Sequence[str], op: str, attrs: Attrs, shapes: Sizes, dtype: torch.dtype, *, boxed: bool
) -> tuple[str, list[KernelSource]]:
    """The first of ``some`` families that does it at these sizes and what it launches, or "" and
    nothing. ``boxed``: kernels that read by the tensor memory accelerator may."""
    for name in some:
        family = FAMILIES[name]
        sources = family.at(op, attrs, shapes, dtype) if boxed or not family.boxed else []
        if sources:
            return name, sources
    return "", []


def sources_anywhere(
    some: Sequence[str], op: str, attrs: Attrs, shapes: Shapes, dtype: torch.dtype
) -> list[KernelSource]:
    """What ``chosen_at`` says at any sizes where kernels read by that accelerator, or more."""
    found = dict[KernelSource, None]()
    for name in some:
        found |= dict.fromkeys(FAMILIES[name].anywhere(op, attrs, shapes, dtype))
    return list(found)


def sources_of(node: Node, some: Sequence[str], sizes: Mapping[str, int]) -> list[KernelSource]:
    """What ``chosen_at`` says of a node, where such kernels may."""
    if not some:  # of most nodes: their sizes need not be known
        return []
    shapes = [[size.eval(sizes) for size in x.shape] for x in node.inputs]
    return chosen_at(some, node.op, node.attrs, shapes, node.dtype, boxed=True)[1]
