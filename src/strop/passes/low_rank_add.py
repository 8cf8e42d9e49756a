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

    def rule(b: Builder, node: Node, inputs: tuple[Node, ...]) -> Node | None:
        if not is_sum(node) or node in outputs or is_kernel_next(node, users):
            return None
        for which, part in enumerate(node.inputs):
            alike = {(n.shape, n.dtype) for n in (node, *node.inputs)}
            if _is_low_rank(part) and len(users[part]) == 1 and len(alike) == 1:
                return b.make(
                    "linear_add", (*inputs[which].inputs, inputs[1 - which]), node.shape, node.dtype
                )
        return None

    return rewrite(graph, rule)


def _is_low_rank(node: Node) -> bool:
    """Tell whether it is B (A x)."""
    return node.op == "linear" and len(node.inputs) == 2 and bool(node.inputs[1].attrs.get("small"))
