"""Add the low-rank part of a layer with adapters where a library multiplies it up.

y = W x + B (A x): a library's GEMM adds B (A x) to W x in fp32 before it rounds, which saves a
launch where no kernel reads y first. Where one does it adds both on its way. Eager rounds both
products and the sum, we W x and the sum.
"""

from __future__ import annotations

from strop.ir.graph import Builder, Graph, Node, rewrite
from strop.options import Options
from strop.passes.linear_add import is_kernel_next, is_sum


def low_rank_add(graph: Graph, options: Options) -> Graph:
    users, outputs = graph.users(), set(graph.outputs)

    def side(node: Node) -> int | None:
        """Return which operand of a sum is a low-rank part that nothing else reads."""
        if not is_sum(node) or node in outputs or is_kernel_next(node, users):
            return None
        if len({(n.shape, n.dtype) for n in (node, *node.inputs)}) > 1:
            return None
        parts = enumerate(node.inputs)
        return next((n for n, x in parts if _is_low_rank(x) and len(users[x]) == 1), None)

    def rule(b: Builder, node: Node, inputs: tuple[Node, ...]) -> Node | None:
        which = side(node)
        assert which is not None
        operands = *inputs[which].inputs, inputs[1 - which]
        return b.make("linear_add", operands, node.shape, node.dtype)

    return rewrite(graph, rule, lambda node: side(node) is not None)


def _is_low_rank(node: Node) -> bool:
    """Tell whether it is B (A x)."""
    return node.op == "linear" and len(node.inputs) == 2 and bool(node.inputs[1].attrs.get("small"))
