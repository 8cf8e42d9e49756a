"""Join a product of e4m3 codes whose halves are a value and its gate with the gate to one node.

On Hopper one kernel then does both, as of a linear in halves (``gated_linear``): what is twice as
wide as the result is neither rounded nor written, and the kernel that quantises the result reads
half as much. Elsewhere that kernel computes the gates, too, which a library would do in two more.
"""

from __future__ import annotations

from strop.ir.graph import Builder, Graph, Node, rewrite
from strop.options import Options
from strop.passes.gated_linear import GATES, fits, halves

PRODUCT = "scaled_product"
LEAST_COLUMNS = 80  # of values and gates together: those of the smallest tile


def gated_codes(graph: Graph, options: Options) -> Graph:
    if "wgmma_codes" in options.kernels_off or not any(n.op == PRODUCT for n in graph.nodes):
        return graph
    users = graph.users()

    def is_read(node: Node, times: int = 1) -> bool:
        return len(users[node]) == times and node not in graph.outputs

    def rule(b: Builder, node: Node, inputs: tuple[Node, ...]) -> Node | None:
        found = halves(node, _is_layer)
        if found is None:
            return None
        value, gate, activation, how = found
        layer = value.inputs[0]
        product = _product_of(layer)
        once = all(map(is_read, (value, gate, activation))) and is_read(layer, 2)
        if not once or not (product is layer or is_read(product)) or not _fits(product):
            return None
        twin = _product_of(inputs[node.inputs.index(value)].inputs[0])
        shape, attrs = (product.shape[0], node.shape[-1]), {**twin.attrs, **how.attrs}
        return b.reshape(
            b.make("scaled_geglu", twin.inputs, shape, node.dtype, **attrs), node.shape
        )

    return rewrite(graph, rule)


def _is_layer(node: Node) -> bool:
    """Tell whether this is a product of codes, or one seen with the dims of what it was made of."""
    is_seen = node.op == "reshape" and node.shape[-1] == node.inputs[0].shape[-1]
    return node.op == PRODUCT or (is_seen and node.inputs[0].op == PRODUCT)


def _product_of(layer: Node) -> Node:
    return layer if layer.op == PRODUCT else layer.inputs[0]


def _fits(product: Node) -> bool:
    """Tell whether the kernel computes it: scales are those of rows and of columns."""
    codes, weight, rows, columns = product.inputs[:4]
    by_both = rows.shape[:1] == codes.shape[:1] and columns.shape[1:] == weight.shape[:1]
    return by_both and fits(product, GATES) and weight.shape[0].value >= LEAST_COLUMNS
