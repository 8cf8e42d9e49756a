"""Look rows up before what is computed of them: those in int8 are decoded where they are read.

A table that is computed, of codes and a scale a row, say, would be computed as a whole for the few
rows that somebody looks up.
"""

from __future__ import annotations

from collections import defaultdict

from strop.ir.dims import Expr, const
from strop.ir.graph import Builder, Graph, Node, rewrite
from strop.ir.ops import Kind
from strop.options import Options

ONE = const(1)


def looked_up_rows(graph: Graph, options: Options) -> Graph:
    users = defaultdict[Node, list[Node]](list)
    for node in graph.nodes:
        for operand in node.inputs:
            users[operand].append(node)
    results = frozenset(graph.outputs)

    def is_of_few(node: Node) -> bool:
        if node.op != "take" or not _looks_up_rows(node):
            return False
        table = node.inputs[0]
        if table in results or any(user.op != "take" for user in users[table]):
            return False
        return node.numel.eval(graph.hints) < table.numel.eval(graph.hints)

    def rule(b: Builder, node: Node, inputs: tuple[Node, ...]) -> Node | None:
        return _rows(b, inputs[0], node, inputs[1])

    return rewrite(graph, rule, is_of_few)


def _looks_up_rows(node: Node) -> bool:
    first, *others = node.attrs["walks"]
    return first is None and None not in others


def _rows(b: Builder, table: Node, node: Node, index: Node) -> Node | None:
    """Return the rows of a table that is computed element by element, or None for any other."""
    is_own = table.kind is Kind.POINTWISE and table.row.is_elementwise and table.order is None
    if not is_own:
        return None
    operands = [_of_operand(b, x, table, node, index) for x in table.inputs]
    if table.op == "cast":
        return b.cast(operands[0], table.dtype)
    made = b.pointwise(table.op, *operands, dtype=table.dtype, **table.attrs)
    return made if made.shape == node.shape else b.expand(made, node.shape)


def _of_operand(b: Builder, x: Node, table: Node, node: Node, index: Node) -> Node:
    """Return the rows of an operand, which all rows may share."""
    x = b.view_as_rank(x, len(table.shape))
    above: tuple[Expr, ...] = node.shape[: len(node.shape) - len(table.shape) + 1]
    if x.shape[0] == ONE:
        return b.reshape(x, (*[ONE] * len(above), *x.shape[1:]))
    shape = (*above, *x.shape[1:])
    found = None
    if x.kind is Kind.POINTWISE:
        moved = Node("take", (x, index), node.attrs, shape, x.dtype, node.origin, None)
        found = _rows(b, x, moved, index)
    if found is not None:
        return found
    attrs = {"walks": node.attrs["walks"], "bounds": node.attrs["bounds"]}
    return b.make("take", (x, index), shape, x.dtype, **attrs)
