"""Move the bias of a linear into the kernel that reads its result, where it is free.

A bias epilogue costs 0.4 to 4 us a GEMM on an H100 (docs/log/), an operand of a kernel that
runs anyway next to nothing. Linears that a library call or the user reads keep theirs.
"""

from __future__ import annotations

from strop.ir.contractions import FACTORS, LINEARS
from strop.ir.graph import Builder, Graph, Node, rewrite
from strop.ir.ops import Kind
from strop.options import Options


def bias_to_consumer(graph: Graph, options: Options) -> Graph:
    users = graph.users()

    def is_read_by_kernels(node: Node) -> bool:
        return node not in graph.outputs and all(
            user.kind in (Kind.POINTWISE, Kind.REDUCTION)
            or (user.kind is Kind.VIEW and is_read_by_kernels(user))
            for user in users[node]
        )

    def rule(b: Builder, node: Node, inputs: tuple[Node, ...]) -> Node | None:
        if node.op not in LINEARS or not is_read_by_kernels(node):
            return None
        factors, bias = inputs[: FACTORS[node.op]], inputs[FACTORS[node.op] :]
        if not bias:
            return None
        y = b.make(node.op, factors, node.shape, node.dtype)
        return b.pointwise("add", y, *bias, dtype=node.dtype, alpha=1)

    return rewrite(graph, rule)
