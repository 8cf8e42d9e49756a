"""Let a library's GEMM compute the GELU (tanh form) of its result, biases added.

The feed-forward layers of Flux, SD3, Wan and Qwen-Image read and write their widest values once
more for it. In the epilogue of cuBLASLt it costs 1 to 70 us on an H100 where a kernel of its own
takes 5 to 170 (docs/log/convolutions-and-gemms.md), and the layer's result is rounded once, not
twice: GELU is computed of the sum in fp32.
"""

from __future__ import annotations

from strop.ir.contractions import GELU_TANH, has_few_rows
from strop.ir.dims import product
from strop.ir.graph import Builder, Graph, Node, rewrite
from strop.options import Options
from strop.passes.gated_linear import fits

# With fewer rows a product waits for its weights, and a library's epilogue was not measured. With
# very few a skinny GEMM computes GELU as well.
LEAST_ROWS = 128
PIECE = 8  # columns and depth are multiples of this: 16 bytes


def activated_linear(graph: Graph, options: Options) -> Graph:
    users = graph.users()

    def is_last(node: Node) -> bool:
        linear = node.inputs[0] if node.op == GELU_TANH else None
        if linear is None or len(users[linear]) > 1 or linear in graph.outputs:
            return False
        return node.dtype == linear.dtype and can_end_in_gelu(linear, graph)

    def rule(b: Builder, node: Node, inputs: tuple[Node, ...]) -> Node | None:
        return b.make("linear_gelu", inputs[0].inputs, node.shape, node.dtype)

    return rewrite(graph, rule, is_last)


def can_end_in_gelu(linear: Node, graph: Graph) -> bool:
    """Tell whether a library can compute GELU of a linear, and its rows are enough for that."""
    if linear.op != "linear" or len(linear.inputs) < 3 or not fits(linear, PIECE, halves=1):
        return False
    rows = product(linear.shape[:-1]).eval(graph.hints)
    return rows >= LEAST_ROWS or has_few_rows(rows, linear.inputs[1].shape[-1])
