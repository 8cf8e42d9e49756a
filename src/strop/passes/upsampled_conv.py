"""Compute the 3x3 convolution behind a nearest 2x upsampling from the small picture: four windows
of 2x2 pixels, with four ninths of the products.

A result's row reads three rows of the larger picture, two of which are the same row of the smaller
one: their taps are added up first (Shi et al., Is the deconvolution layer the same as a
convolutional layer?, https://arxiv.org/abs/1609.07009). Which two depends on whether the result's
row is even or odd, and so does it for columns: four windows, each of 2x2 taps, that the node
``folded_taps`` has as four times as many output channels. Their sums are made in fp32 and rounded
once; what no longer is stored, the larger picture, costs no time either.
"""

from __future__ import annotations

from strop.ir.dims import const
from strop.ir.functions import HALVES
from strop.ir.graph import Builder, Graph, Node, rewrite
from strop.options import Options

# Channels either way: fewer have not been measured; and what they are a multiple of.
LEAST, MULTIPLE = 256, 64
_PLAIN = {"stride": (1, 1), "padding": (1, 1), "dilation": (1, 1)}


def upsampled_conv(graph: Graph, options: Options) -> Graph:
    if "wgmma_gemm" in options.kernels_off:
        return graph
    users, outputs = graph.users(), set(graph.outputs)

    def rule(b: Builder, node: Node, inputs: tuple[Node, ...]) -> Node | None:
        if node.op != "conv2d" or not _fits(node):
            return None
        larger = node.inputs[0]
        if not _is_doubled(larger) or len(users[larger]) > 1 or larger in outputs:
            return None
        (spread,) = inputs[0].inputs
        pixels = b.reshape(spread.inputs[0], [spread.shape[dim] for dim in (0, 1, 2, 4)])
        outs, ins, *_ = node.inputs[1].shape
        taps = b.make("folded_taps", (inputs[1],), (4 * outs, ins, 2, 2), node.dtype)
        return b.make("upsampled_conv2d", (pixels, taps), node.shape, node.dtype)

    return rewrite(graph, rule)


def _is_doubled(value: Node) -> bool:
    """Tell whether each pixel was spread over two lines and two columns."""
    if value.op != "reshape" or value.inputs[0].op != "expand":
        return False
    (spread,) = value.inputs
    if len(spread.shape) != 6 or spread.inputs[0].op != "reshape":
        return False
    batch, channels, height, _, width, _ = spread.shape
    is_over = spread.shape == (batch, channels, height, const(2), width, const(2))
    was = (batch, channels, height, const(1), width, const(1))
    sizes = (batch, channels, height + height, width + width)
    return is_over and spread.inputs[0].shape == was and value.shape == sizes


def _fits(node: Node) -> bool:
    """Tell whether it is a plain 3x3 convolution as the kernel takes them."""
    weight = node.inputs[1].shape
    if len(node.inputs) != 2 or node.dtype not in HALVES or not all(s.is_const for s in weight):
        return False
    outs, ins, *window = (size.value for size in weight)
    is_wide = min(outs, ins) >= LEAST and outs % MULTIPLE == ins % MULTIPLE == 0
    is_plain = all(tuple(node.attrs[name]) == value for name, value in _PLAIN.items())
    return is_wide and window == [3, 3] and is_plain and node.attrs["groups"] == 1
