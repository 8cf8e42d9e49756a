"""Which kernels written by hand run for an anchor, by sizes alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from strop.ir.dims import Expr
from strop.ir.graph import Node
from strop.ir.source import KernelSource
from strop.kernels import attention, box_conv, geglu


def is_boxed(node: Node) -> bool:
    """Whether at some sizes a kernel that reads by the tensor memory accelerator is faster."""
    if node.op == "attention":
        return attention.is_boxed(node.attrs, [x.shape for x in node.inputs], node.dtype)
    return node.op == "geglu" or box_conv.is_boxed(node)


def sources_at(op: str, attrs: Mapping[str, Any], shapes: Sequence[Sequence[int]],
               dtype: torch.dtype, *, boxed: bool) -> list[KernelSource]:  # fmt: skip
    """In the order of their launches; nothing where a library does all of it. ``boxed``: kernels
    that read by the tensor memory accelerator may."""
    if op == "geglu":
        return geglu.sources_at(shapes, dtype, has_boxes=boxed)
    if op == "conv2d" and boxed:
        return box_conv.sources_at(shapes, dtype)
    if op == "attention" and boxed:
        return attention.sources_at(attrs, shapes, dtype)
    return []


def sources_anywhere(op: str, attrs: Mapping[str, Any], shapes: Sequence[Sequence[Expr]],
                     dtype: torch.dtype) -> list[KernelSource]:  # fmt: skip
    """What ``sources_at`` says at any sizes where kernels read by that accelerator, or more."""
    if op == "geglu":
        return geglu.sources_anywhere(shapes, dtype)
    if op == "conv2d":
        return box_conv.sources_anywhere(shapes[1], dtype)
    if op == "attention":
        return attention.sources_anywhere(attrs, shapes[0][-1].value, dtype)
    return []


def sources_of(node: Node, sizes: Mapping[str, int]) -> list[KernelSource]:
    """The same of a node, where such kernels may."""
    shapes = [[size.eval(sizes) for size in x.shape] for x in node.inputs]
    return sources_at(node.op, node.attrs, shapes, node.dtype, boxed=True)
