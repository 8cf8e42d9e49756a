"""Compute linears in 8 bits where ``Options.numerics`` names a format (``ir.eight_bit``).

``eight_bit_choice`` marks the linears of the graph that are to be so, by the table of rules, before
linears of one input are merged; ``eight_bit_products`` writes them down: the rows of values are
quantised by kernels, into which whatever computes the values is fused, and the weight is read as
codes and scales. These are arguments of their own that the runtime makes of the weights, once for
each content (``dispatch.coded_weights``). The nodes are those that become of a module of torchao's
dynamic quantisation (``code_sums``, ``scaled_products``), so that all later stages treat both
alike.
"""

from __future__ import annotations

import fnmatch
import logging
from collections.abc import Sequence
from dataclasses import replace

import torch

from strop.ir.contractions import NHWC
from strop.ir.dims import product
from strop.ir.e4m3 import encoded
from strop.ir.eight_bit import CODES, FORMATS, LEAST, MARK, SCALES, Format
from strop.ir.graph import Builder, Graph, Node, rewrite
from strop.ir.ops import OPS
from strop.options import Options
from strop.passes.eight_bit_rules import reasons
from strop.passes.scaled_products import scaled_product

log = logging.getLogger("strop")
_F32 = torch.float32


def left_exact(graph: Graph, options: Options) -> dict[Node, str]:
    """Return the linears of a graph that stay exact though 8 bits are allowed, with the reasons."""
    own = FORMATS.get(options.eight_bit)
    found = reasons(graph, own, options.exact_layers) if own else {}
    return {node: reason for node, reason in found.items() if reason}


def eight_bit_choice(graph: Graph, options: Options) -> Graph:
    own = FORMATS.get(options.eight_bit)
    if own is None:
        return graph
    found = reasons(graph, own, options.exact_layers)
    able = {node for node, reason in found.items() if not reason}
    layers = [*found, *(_others(graph) if own.dtype.is_floating_point else ())]
    _warn_of_others(options.exact_layers, [layer.origin for layer in layers])

    def rule(b: Builder, node: Node, inputs: tuple[Node, ...]) -> Node | None:
        if node not in able:
            return None
        return b.make("linear", inputs, node.shape, node.dtype, format=own.name)

    return rewrite(graph, rule) if able else graph


def _others(graph: Graph) -> list[Node]:
    """Return convolutions and attention, exact ones and those in fp8 (``passes.eight_bit_convs``,
    ``passes.eight_bit_attention``)."""
    kinds = "convolution", "attention"
    anchors = ((node, OPS[node.op].anchor) for node in graph.nodes)
    return [node for node, anchor in anchors if anchor and anchor.category in kinds]


def _warn_of_others(exact_layers: Sequence[str], origins: Sequence[str]) -> None:
    """Say which names stand for no layer that 8 bits are for: one of them may be misspelt."""
    for name in exact_layers:
        if not any(fnmatch.fnmatchcase(origin, name) for origin in origins):
            log.warning("Options.exact_layers names %r, which no layer for 8 bits here has", name)


class MadeOfWeights:
    """Hold further arguments of a graph, behind so many, that are made of its weights, each
    once."""

    def __init__(self, num_before: int) -> None:
        self._num_before = num_before
        self._made: dict[tuple[Node, str], Node] = {}

    @property
    def nodes(self) -> tuple[Node, ...]:
        return tuple(self._made.values())

    def of(self, b: Builder, weight: Node, own: Format, role: str) -> Node:
        """Return the argument that holds the codes or the scales of a weight."""
        if (weight, role) not in self._made:
            index = self._num_before + len(self._made)
            self._made[weight, role] = _made_of(b, weight, own, role, index)
        return self._made[weight, role]


def eight_bit_products(graph: Graph, options: Options) -> Graph:
    if not any(map(_is_marked, graph.nodes)):
        return graph
    marked = {node.inputs[1]: node for node in graph.nodes if _is_marked(node)}
    made = MadeOfWeights(len(graph.inputs))

    def rule(b: Builder, node: Node, inputs: tuple[Node, ...]) -> Node | None:
        if node in marked and node.attrs["merged"]:  # which nothing else reads
            return _made_of(b, node, _format(marked[node]), CODES, node.attrs["index"])
        if not _is_marked(node):
            return None
        own, weight = _format(node), node.inputs[1]
        codes = inputs[1] if weight.attrs["merged"] else made.of(b, weight, own, CODES)
        read = inputs[0], codes, made.of(b, weight, own, SCALES)
        return _linear(b, node, own, read, inputs[2:])

    found = rewrite(graph, rule)
    return replace(found, inputs=(*found.inputs, *made.nodes))


def _format(linear: Node) -> Format:
    return FORMATS[linear.attrs[MARK]]


def _is_marked(node: Node) -> bool:
    return node.op == "linear" and MARK in node.attrs


def _made_of(b: Builder, weight: Node, own: Format, role: str, index: int) -> Node:
    """Return an argument that holds the codes (N, K) or the scales (N,) of a weight; of a
    convolution's, codes (O, C, KH, KW) with channels last."""
    parts = weight.attrs["merged"] or (weight.attrs["index"],)
    shape, dtype = (weight.shape, own.dtype) if role == CODES else (weight.shape[:1], _F32)
    given = {"index": index, "state": True, "merged": parts, "made": f"{own.name} {role}"}
    order = NHWC if len(shape) == len(NHWC) else None
    return b.make("input", (), shape, dtype, order=order, **given)


def _linear(
    b: Builder, node: Node, own: Format, read: tuple[Node, ...], bias: tuple[Node, ...]
) -> Node:
    """Return a linear by codes, in the shape and type of ``node``. ``read``: values, codes and
    scales of the weight."""
    x, weight, columns = read
    depth, count = x.shape[-1], product(x.shape[:-1])
    scaled, scales = scaled_by_most(b, b.reshape(x, (count, depth)), own)
    if own.dtype is not torch.int8:
        codes = encoded(b, scaled, is_bounded=True)
        read = codes, weight, scales, b.reshape(columns, (1, weight.shape[0])), *bias
        return b.reshape(scaled_product(b, read, node.dtype), node.shape)
    y = _of_whole_codes(b, scaled, scales, weight, columns)
    for added in bias:
        y = b.pointwise("add", y, b.cast(added, _F32), dtype=_F32, alpha=1)
    return b.reshape(b.cast(y, node.dtype), node.shape)


def scaled_by_most(b: Builder, x: Node, own: Format) -> tuple[Node, Node]:
    """Return values over their scales, in fp32, and these: one for all of the second dim."""
    wide = b.cast(x, _F32)
    largest = b.reduce("amax", b.pointwise("abs", wide, dtype=_F32), (1,), _F32)
    most = b.pointwise("maximum", largest, b.constant(LEAST, _F32), dtype=_F32)
    by = b.pointwise("div", b.constant(own.most, _F32), most, dtype=_F32)
    scaled = b.pointwise("mul", wide, by, dtype=_F32)
    return scaled, b.pointwise("mul", most, b.constant(1 / own.most, _F32), dtype=_F32)


def _of_whole_codes(b: Builder, scaled: Node, scales: Node, weight: Node, columns: Node) -> Node:
    codes = b.cast(b.pointwise("round", scaled, dtype=_F32), torch.int8)
    shape = (scaled.shape[0], weight.shape[0])
    sums = b.cast(b.make("code_sums", (codes, weight), shape, torch.int32), _F32)
    both = b.pointwise("mul", scales, b.reshape(columns, (1, shape[1])), dtype=_F32)
    return b.pointwise("mul", sums, both, dtype=_F32)
