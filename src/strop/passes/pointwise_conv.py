"""Turn 1x1 convolutions into linears over the channels-last view, where they are plain GEMMs.

On a GPU those of fp32 stay: torch lets cuDNN compute convolutions in TF32 by default, and products
not, which take seven times as long there.

On a CPU those with few results stay, too: oneDNN takes 3,302 us of a Zen 5 for the product of
65,536 rows of 8 numbers with 4 columns, and 437 for the convolution; for 8 columns 234 and 432.

The bias of every other convolution becomes an add, which fuses into whatever reads the result:
cuDNN would launch a kernel of its own for it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from strop.ir.graph import Builder, Graph, Node, rewrite
from strop.options import Options

# Results of a product that is slower than the convolution; in half types of so few channels alone.
NARROW, SHALLOW = 4, 64


def pointwise_conv(graph: Graph, options: Options) -> Graph:
    return rewrite(graph, partial(_conv, stays=_is_narrow))


def gpu_pointwise_conv(graph: Graph, options: Options) -> Graph:
    return rewrite(graph, partial(_conv, stays=lambda node: node.dtype == torch.float32))


def _is_narrow(node: Node) -> bool:
    num_out, num_in = (size.value for size in node.inputs[1].shape[:2])
    return num_out <= NARROW and (node.dtype == torch.float32 or num_in < SHALLOW)


def _conv(
    b: Builder, node: Node, inputs: tuple[Node, ...], *, stays: Callable[[Node], bool]
) -> Node | None:
    """Return what takes the place of a convolution; ``stays`` tells of which pointwise ones
    nothing does."""
    if node.op != "conv2d":
        return None
    weight = inputs[1]
    if _is_pointwise(node) and not stays(node):
        rows = b.permute(inputs[0], (0, 2, 3, 1))
        matrix = b.reshape(weight, (weight.shape[0], weight.shape[1]))
        shape = (*rows.shape[:3], weight.shape[0])
        y = b.make("linear", (rows, matrix, *inputs[2:]), shape, node.dtype)
        return b.permute(y, (0, 3, 1, 2))
    if len(inputs) < 3:
        return None
    y = b.make("conv2d", inputs[:2], node.shape, node.dtype, **node.attrs)
    bias = b.reshape(inputs[2], (1, weight.shape[0], 1, 1))
    return b.pointwise("add", y, bias, dtype=node.dtype, alpha=1)


def _is_pointwise(node: Node) -> bool:
    weight = node.inputs[1].shape
    return (
        all(k.is_const and k.value == 1 for k in weight[2:])
        and set(node.attrs["stride"]) == {1}
        and set(node.attrs["padding"]) == {0}
        and node.attrs["groups"] == 1
    )
