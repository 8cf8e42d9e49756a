"""Give sums of products of int8 codes to a kernel of ours, which is exact on every processor.

torch multiplies codes by oneDNN, which multiplies unsigned codes by signed ones: torchao adds 128
to the codes of values, and takes 128 times the sums of a weight's columns off the result. The
kernel does the same where that is fast, so here the codes are what they were. A CPU without VNNI
adds products of unsigned codes in 16 bits, where oneDNN lets large ones saturate.

Rows are quantised by a scale that may be a half. It is rounded before codes are made by it, as it
is for whoever multiplies by it later: codes are those of eager then.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from strop.ir.functions import HALVES
from strop.ir.graph import Builder, Graph, Node, Ref, rewrite
from strop.ir.ops import Kind
from strop.options import Options

_PRODUCTS = frozenset(("aten._int_mm.default", "strop.int_mm.default"))
_TO_UNSIGNED = 128


def code_sums(graph: Graph, options: Options) -> Graph:
    if "code_sums" in options.kernels_off or not any(map(_is_product, graph.nodes)):
        return graph
    users = graph.users()

    def rule(b: Builder, node: Node, inputs: tuple[Node, ...]) -> Node | None:
        if node.op == "sub" and node.attrs.get("alpha") == 1:
            found = _of_unsigned(*inputs)
        elif node.op == "aten" and _is_product(node):
            found = (inputs[0], inputs[1]) if inputs[0].dtype is torch.int8 else None
        elif _is_wide_scale(node, users[node]):
            return b.cast(b.pointwise("cast", *inputs, dtype=inputs[0].dtype), node.dtype)
        else:
            return None
        if found is None or (weight := _transposed(found[1])) is None:
            return None
        return b.make("code_sums", (found[0], weight), node.shape, torch.int32)

    return rewrite(graph, rule)


def _is_wide_scale(node: Node, users: Sequence[Node]) -> bool:
    """Tell whether a half that a kernel computes is widened to divide by it."""
    if node.op != "cast" or node.dtype is not torch.float32:
        return False
    (scale,) = node.inputs
    is_computed = scale.kind is Kind.POINTWISE and scale.op != "cast"
    return scale.dtype in HALVES and is_computed and any(map(_divides, users))


def _divides(user: Node) -> bool:
    return user.op in ("reciprocal", "div")


def _is_product(node: Node) -> bool:
    is_plain = node.op == "aten" and node.attrs.get("args") == (Ref(0), Ref(1))
    return is_plain and node.attrs["target"] in _PRODUCTS


def _transposed(x: Node) -> Node | None:
    """Return the weight (N, K) of which this is the transpose, or None."""
    is_transpose = x.op == "permute" and x.attrs["dims"] == (1, 0) and x.dtype is torch.int8
    return x.inputs[0] if is_transpose else None


def _of_unsigned(product: Node, excess: Node) -> tuple[Node, Node] | None:
    """Return the signed codes and the weight of a product of codes to which 128 was added, where
    ``excess`` is what that has added to it."""
    if not _is_product(product) or product.inputs[0].op != "cast":
        return None
    unsigned, weight = product.inputs
    codes = _codes_below(unsigned)
    sums = _by_128(excess, "mul")
    is_excess = sums is not None and sums.op == "sum" and sums.attrs["dims"] == (0,)
    if codes is None or not is_excess or sums is None:
        return None
    summed = sums.inputs[0]
    summed = summed.inputs[0] if summed.op == "cast" else summed
    return (codes, weight) if summed is weight else None


def _codes_below(unsigned: Node) -> Node | None:
    """Return the codes to which 128 was added, or None."""
    if unsigned.dtype is not torch.uint8 or (wide := _by_128(unsigned.inputs[0], "add")) is None:
        return None
    codes = wide.inputs[0] if wide.op == "cast" else wide
    return codes if codes.dtype is torch.int8 else None


def _by_128(node: Node, op: str) -> Node | None:
    """Return what 128 is added to, or multiplied by, in int32."""
    if node.op != op or node.dtype is not torch.int32 or node.attrs.get("alpha", 1) != 1:
        return None
    x, other = node.inputs
    while other.op in ("expand", "reshape"):
        other = other.inputs[0]
    return x if other.op == "constant" and other.attrs["value"] == _TO_UNSIGNED else None
