"""Mark attention that may be computed by e4m3 codes where ``Options.numerics`` names "fp8".

The call stays an attention, with the format as an attribute. So the kernel of codes
(``kernels.attention.codes``) is one more among those that may run it, and runs where it is the
fastest; where it is not, as for few keys, and on a GPU without it, attention is exact.
"""

from __future__ import annotations

from strop.ir.eight_bit import FORMATS, MARK
from strop.ir.functions import HALVES
from strop.ir.graph import Builder, Graph, Node, rewrite
from strop.options import Options
from strop.passes.eight_bit_rules import is_named

_FP8 = FORMATS["fp8"]


def eight_bit_attention(graph: Graph, options: Options) -> Graph:
    if options.eight_bit != _FP8.name:
        return graph
    able = {n for n in graph.nodes if is_able(n) and not is_named(n, options.exact_layers)}

    def rule(b: Builder, node: Node, inputs: tuple[Node, ...]) -> Node | None:
        if node not in able:
            return None
        attrs = {**node.attrs, MARK: _FP8.name}
        return b.make(node.op, inputs, node.shape, node.dtype, order=node.order, **attrs)

    return rewrite(graph, rule) if able else graph


def is_able(node: Node) -> bool:
    """Tell whether this is attention of as many queries as keys, in halves, of (B, H, S, D), with
    neither mask nor order. Attention to a prompt's words is little work, and a picture follows
    them: it stays exact."""
    if node.op != "attention" or node.dtype not in HALVES or len(node.inputs) != 3:
        return False
    q, k, v = node.inputs
    is_of_halves = all(x.dtype is node.dtype and len(x.shape) == 4 for x in node.inputs)
    is_alike = is_of_halves and q.shape == k.shape == v.shape
    return is_alike and q.shape[-1].is_const and not node.attrs["causal"]
