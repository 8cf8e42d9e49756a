"""Let products of e4m3 codes be one call that reads bytes and writes where it is told.

torch's ``_scaled_mm`` wants codes in their own type, and kernels store bytes: a view between the
two is a call of torch, whose result is copied, as views of working memory would not outlive it
(4.5 us for each linear of SDXL on an H200). The call sees bytes as codes by itself. These products
come of modules of torchao, and of users who call ``_scaled_mm``; ``eight_bit`` makes them at once.
"""

from __future__ import annotations

from typing import Any

import torch

from strop.ir.functions import HALVES
from strop.ir.graph import Builder, Graph, Node, Ref, rewrite
from strop.ir.ops import Kind
from strop.options import Options

_E4M3 = torch.float8_e4m3fn
_TARGET = "aten._scaled_mm.default"
# The arguments of ``_scaled_mm`` in their order; the first five are tensors.
_ARGUMENTS = (
    *("self", "mat2", "scale_a", "scale_b"),
    *("bias", "scale_result", "out_dtype", "use_fast_accum"),
)


def scaled_products(graph: Graph, options: Options) -> Graph:
    if not any(map(_is_scaled_mm, graph.nodes)):
        return graph

    def rule(b: Builder, node: Node, inputs: tuple[Node, ...]) -> Node | None:
        return _product(b, node, inputs) if _is_scaled_mm(node) else None

    return rewrite(graph, rule)


def scaled_product(
    b: Builder, operands: tuple[Node, ...], dtype: torch.dtype, *, is_fast: bool = False
) -> Node:
    """Return the product (M, N) in ``dtype`` of codes (M, K) and the codes of a weight (N, K), with
    their scales in the shapes that torch wants: (M, 1) and (1, N), or one number each. Behind these
    may come a bias (N,) of the same type."""
    shape = (operands[0].shape[0], operands[1].shape[0])
    return b.make("scaled_product", operands, shape, dtype, is_fast=is_fast)


def _is_scaled_mm(node: Node) -> bool:
    return node.op == "aten" and node.attrs["target"] == _TARGET


def _product(b: Builder, node: Node, inputs: tuple[Node, ...]) -> Node | None:
    """Return the call for codes of e4m3 by rows of a weight, None for other products."""
    given = dict(zip(_ARGUMENTS, node.attrs["args"], strict=False)) | dict(node.attrs["kwargs"])
    found = {name: _operand(given.get(name), inputs) for name in _ARGUMENTS[:5]}
    x, turned, bias = found["self"], found["mat2"], found["bias"]
    if x is None or turned is None or turned.op != "permute" or given.get("scale_result"):
        return None
    codes, weight = _codes(b, x), _codes(b, turned.inputs[0])
    if codes is None or weight is None or node.dtype not in (*HALVES, torch.float32):
        return None
    scales = [one for one in (found["scale_a"], found["scale_b"], bias) if one is not None]
    read = (codes, weight, *scales)
    return scaled_product(b, read, node.dtype, is_fast=bool(given.get("use_fast_accum")))


def _operand(given: Any, inputs: tuple[Node, ...]) -> Node | None:
    return inputs[given.index] if isinstance(given, Ref) else None


def _codes(b: Builder, node: Node) -> Node | None:
    """Return codes of e4m3 as the bytes that they are views of, if they are such; None for codes of
    another type."""
    if node.dtype is not _E4M3:
        return None
    return _bytes(b, node) or node


def _bytes(b: Builder, node: Node) -> Node | None:
    if node.op == "aten" and node.attrs["target"] == "aten.view.dtype":
        (inner,) = node.inputs
        return inner if inner.dtype is torch.uint8 else None
    if node.kind is not Kind.VIEW or (found := _bytes(b, node.inputs[0])) is None:
        return None
    attrs = dict(node.attrs)
    return b.make(node.op, (found,), node.shape, found.dtype, order=node.order, **attrs)
