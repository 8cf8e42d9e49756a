"""Give a linear whose width is no multiple of 8 some columns more, of which nobody reads anything.

A library writes 16 bytes at a time only where each row of its result begins at a multiple of them:
the vocabulary of GPT-2, 50,257 columns in fp16, is multiplied by a kernel of sm_75 on an H100, at a
tenth of the speed. So the weight is read with rows of zeros behind its own. It is one piece of
memory whose first rows are the Parameter (``dispatch.placed_weights``): an embedding that is tied
to it goes on reading the same memory, and whoever writes to either writes to both.

What reads the result reads a view of its columns. A user gets a result of eager's strides: without
a bias the product is computed for some rows at a time, whose columns are copied
(``trimmed_linear``); else all of it is copied.

A depth that is no multiple of 8 stays: the values would need more columns too, where they are made,
and no model of the zoo has one. So does a product of two values, which has no weight to lay out.
"""

from __future__ import annotations

from dataclasses import replace

from strop.ir.dims import const
from strop.ir.functions import HALVES
from strop.ir.graph import Builder, Graph, Node, rewrite
from strop.options import Options

MULTIPLE = 8  # columns: 16 bytes
# With fewer columns, as of a classifier or of the pixels of a picture, a product waits for its
# values, whatever kernel it is. With less depth a copy of the result takes longer than a slow
# product loses: 4 bytes a number at 2.5 TB/s, against 2 operations a channel at 65 TFLOP/s for 600.
LEAST_COLUMNS, LEAST_DEPTH = 128, 64


def aligned_linear(graph: Graph, options: Options) -> Graph:
    linears = _unaligned(graph)
    return _Alignment(graph, linears).graph() if linears else graph


def _unaligned(graph: Graph) -> set[Node]:
    """Return the linears that get more columns. A weight that is a part of others' piece lies there
    already."""
    parts = {index for node in graph.inputs for index in node.attrs["merged"]}
    users = graph.users()

    def is_able(weight: Node) -> bool:
        attrs = weight.attrs
        if weight.op != "input" or not attrs["state"] or attrs.get("small") or attrs.get("tied"):
            return False
        if attrs["merged"]:
            return len(users[weight]) == 1 and "corners" not in attrs
        return attrs["index"] not in parts

    return {
        node
        for node in graph.nodes
        if node.op == "linear" and _is_unaligned(node) and all(map(is_able, node.inputs[1:]))
    }


def _is_unaligned(linear: Node) -> bool:
    weight = linear.inputs[1]
    if linear.dtype not in HALVES or not all(size.is_const for size in weight.shape):
        return False
    columns, depth = (size.value for size in weight.shape)
    is_large = columns >= LEAST_COLUMNS and depth >= LEAST_DEPTH
    return is_large and columns % MULTIPLE > 0 and depth % MULTIPLE == 0


class _Alignment:
    """Build the graph anew. ``self._added``: what is read in the place of a weight, by the
    weight."""

    def __init__(self, graph: Graph, linears: set[Node]) -> None:
        self._graph, self._linears, self._given = graph, linears, graph.given()
        self._merged = {w for n in linears for w in n.inputs[1:] if w.attrs["merged"]}
        self._added: dict[Node, Node] = {}

    def graph(self) -> Graph:
        found = rewrite(self._graph, self._rule)
        return replace(found, inputs=(*found.inputs, *self._added.values()))

    def _rule(self, b: Builder, node: Node, inputs: tuple[Node, ...]) -> Node | None:
        if node in self._merged:
            return _with_more_rows(b, node, **node.attrs)
        if node not in self._linears:
            return None
        weights = [
            twin if own in self._merged else self._in_place_of(b, own)
            for own, twin in zip(node.inputs[1:], inputs[1:], strict=True)
        ]
        shape = (*node.shape[:-1], weights[0].shape[0])
        if node in self._given and len(weights) == 1:
            columns = node.shape[-1].value
            made = (inputs[0], *weights)
            return b.make("trimmed_linear", made, node.shape, node.dtype, columns=columns)
        whole = b.make("linear", (inputs[0], *weights), shape, node.dtype)
        found = b.slice(whole, len(shape) - 1, 0, node.shape[-1])
        return b.make("copy", (found,), node.shape, node.dtype) if node in self._given else found

    def _in_place_of(self, b: Builder, weight: Node) -> Node:
        if weight not in self._added:
            index = len(self._graph.inputs) + len(self._added)
            parts = (weight.attrs["index"],)
            self._added[weight] = _with_more_rows(b, weight, index=index, state=True, merged=parts)
        return self._added[weight]


def _with_more_rows(b: Builder, weight: Node, **attrs: object) -> Node:
    rows = -(-weight.shape[0].value // MULTIPLE) * MULTIPLE
    return b.make("input", (), (const(rows), *weight.shape[1:]), weight.dtype, **attrs)  # type: ignore[arg-type]
