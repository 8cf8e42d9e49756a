"""Join a linear whose halves are a value and its gate with the gate to one node (GEGLU, SwiGLU).

On a GPU one kernel then does both at sizes where it is faster: each program computes a tile of both
halves, and what is twice as wide as the result is never written. Source: Shazeer, GLU Variants
Improve Transformer, https://arxiv.org/abs/2002.05202.
"""

from __future__ import annotations

from collections.abc import Callable

from strop.ir.contractions import GATE_OPS, LINEARS, Gate, alike
from strop.ir.dims import const
from strop.ir.functions import HALVES
from strop.ir.graph import Builder, Graph, Node, rewrite
from strop.options import Options

# The depth and the result's width are multiples of these: gates wherever kernels take them; sums
# as in Stable Diffusion's UNets alone, because 4096 x 4608 x 1152 takes 89 us with the sum in the
# GEMM on an H100, and 70 us by cuBLAS and torch.
GATES, SUMS = 16, 320


def gated_linear(graph: Graph, options: Options) -> Graph:
    if "wgmma_gemm" in options.kernels_off:  # in training, where nothing was measured
        return graph
    users = graph.users()

    def is_read_once(node: Node, times: int = 1) -> bool:
        return len(users[node]) == times and node not in graph.outputs

    def rule(b: Builder, node: Node, inputs: tuple[Node, ...]) -> Node | None:
        found = halves(node, _is_linear)
        if found is None:
            return None
        value, gate, activation, how = found
        linear = value.inputs[0]
        once = all(map(is_read_once, (value, gate, activation)))
        if not (once and is_read_once(linear, 2) and fits(linear, GATES)):
            return None
        which = node.inputs.index(value)  # the builder's twin of what the linear read
        twin = inputs[which].inputs[0]
        op = alike("geglu", linear.op)
        return b.make(op, twin.inputs, node.shape, node.dtype, **how.attrs)

    return rewrite(graph, rule)


def _is_linear(node: Node) -> bool:
    return node.op in LINEARS


def halves(node: Node, is_layer: Callable[[Node], bool]) -> tuple[Node, Node, Node, Gate] | None:
    """Return value and gate of value * gelu(gate), the gelu or another of GATE_OPS, and what it is,
    where they are halves of one layer."""
    if node.op != "mul" or len(node.inputs) != 2:
        return None
    for value, activation in (node.inputs, node.inputs[::-1]):
        if activation.op not in GATE_OPS or activation.attrs or activation.dtype != node.dtype:
            continue
        gate = activation.inputs[0]
        for is_first in (False, True):
            are_halves = _is_half(value, int(is_first)) and _is_half(gate, int(not is_first))
            if are_halves and value.inputs == gate.inputs and is_layer(value.inputs[0]):
                return value, gate, activation, Gate(activation.op, is_first)
    return None


def _is_half(node: Node, which: int) -> bool:
    if node.op != "slice":
        return False
    layer, width = node.inputs[0], node.shape[-1]
    is_last = node.attrs["dim"] == len(node.shape) - 1 and node.attrs["step"] == 1
    is_half = width + width == layer.shape[-1]
    return bool(is_last and is_half and node.attrs["start"] == width * const(which))


def fits(linear: Node, multiple: int, halves: int = 2) -> bool:
    """Tell whether a linear is of a half type, and its depth and each of so many halves of its
    weight's rows are known multiples of a number."""
    rows, depth = linear.inputs[1].shape
    is_known = rows.is_const and depth.is_const and linear.dtype in HALVES
    return bool(is_known and rows.value % (halves * multiple) == depth.value % multiple == 0)


def fits_sum(linear: Node) -> bool:
    """Tell whether a sum is made in the GEMM for a linear of such weights."""
    return fits(linear, SUMS, halves=1)
