"""Compute 3x3 convolutions by e4m3 codes where ``Options.numerics`` names "fp8" (``ir.eight_bit``).

Each pixel has a scale, and each column of the result: the kernel that normalises a picture
quantises it. A convolution sums over pixels, so libraries want one scale for a picture, which is
known only when all of it has been computed; the kernel for these multiplies what it sums up by the
scale of each pixel (``kernels.gemm.scaled_codes``).
"""

from __future__ import annotations

from dataclasses import replace

from strop.ir.e4m3 import encoded
from strop.ir.eight_bit import CODES, FORMATS, SCALES
from strop.ir.functions import HALVES
from strop.ir.graph import Builder, Graph, Node, rewrite
from strop.options import Options
from strop.passes.eight_bit import MadeOfWeights, scaled_by_most
from strop.passes.eight_bit_rules import is_named

_FP8 = FORMATS["fp8"]
# Channels that the kernel takes, either way, multiples of the latter; and steps of its window.
LEAST_CHANNELS, CHANNELS = 320, 64
STRIDES = ((1, 1), (2, 2))


def eight_bit_convs(graph: Graph, options: Options) -> Graph:
    if options.eight_bit != _FP8.name:
        return graph
    able = {
        node for node in graph.nodes if is_able(node) and not is_named(node, options.exact_layers)
    }
    if not able:
        return graph
    made = MadeOfWeights(len(graph.inputs))

    def rule(b: Builder, node: Node, inputs: tuple[Node, ...]) -> Node | None:
        if node not in able:
            return None
        scaled, pixels = scaled_by_most(b, inputs[0], _FP8)
        weight = node.inputs[1]
        codes, columns = (made.of(b, weight, _FP8, role) for role in (CODES, SCALES))
        read = encoded(b, scaled, is_bounded=True), codes, pixels, columns
        y = b.make("scaled_conv2d", read, node.shape, node.dtype, **node.attrs)
        for bias in inputs[2:]:
            y = b.pointwise("add", y, b.reshape(bias, (1, *bias.shape, 1, 1)), dtype=node.dtype)
        return y

    found = rewrite(graph, rule)
    return replace(found, inputs=(*found.inputs, *made.nodes))


def is_able(node: Node) -> bool:
    """Tell whether this is a convolution for which there are kernels of codes, at any size of
    pictures: of a weight of the module, of halves, with the window and the channels that these
    take."""
    if node.op != "conv2d" or node.dtype not in HALVES:
        return False
    x, weight = node.inputs[:2]
    is_own = weight.op == "input" and weight.attrs["state"] and not weight.attrs["merged"]
    if not is_own or x.dtype is not node.dtype or not all(n.is_const for n in weight.shape):
        return False
    outs, ins, *window = (size.value for size in weight.shape)
    is_wide = min(outs, ins) >= LEAST_CHANNELS and not (outs % CHANNELS or ins % CHANNELS)
    stride, padding = tuple(node.attrs["stride"]), tuple(node.attrs["padding"])
    is_dense = node.attrs["groups"] == 1 and tuple(node.attrs["dilation"]) == (1, 1)
    is_square = window == [3, 3] and padding == (1, 1) and stride in STRIDES
    return is_wide and is_dense and is_square
