"""Let the product of a linear go on over the factors of its adapters: y = W x + B (A x) is
[x | A x] [W | B]^T.

A kernel of ours then goes on along the depth with a second pair of operands, so that neither W x
nor B (A x) is written, and all that a plain linear gets behind its product stays: gates, a sum
where it lies, a bias in the kernel that reads it. Layers of one input are one product, and so are
their A's. Their B's stand on the diagonal of one storage, from a row and a column of their own on,
with zeros elsewhere. Eager rounds both products and the sum, we round the sum.

What is wide beside each other is cut: many zeros would be multiplied where all layers of a model
read one text.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from strop.ir.affine import base_of
from strop.ir.contractions import PAIRED
from strop.ir.dims import const
from strop.ir.functions import HALVES
from strop.ir.graph import Builder, Graph, Node, finish
from strop.ir.ops import Kind
from strop.options import Options
from strop.passes.linear_add import Users, is_sum

MOST_COLUMNS = 256  # of the factors of several layers beside each other
LEAST_DIMS = 3  # of values with many rows: with few a linear is read as fast as its weights come


@dataclass(frozen=True, slots=True)
class LowRank:
    """This is the sum of a layer with its low-rank part, which is seen through ``views``."""

    total: Node
    views: tuple[Node, ...]
    low: Node
    up: Node

    @property
    def rank(self) -> int:
        return self.up.shape[1].value


@dataclass(frozen=True, slots=True)
class Layer:
    """This is one layer among those that a linear computes: columns of its result, from ``start``
    on, and the low-rank part, if there is one."""

    value: Node
    start: int
    part: LowRank | None

    @property
    def end(self) -> int:
        return self.start + self.value.shape[-1].value


def low_rank_pair(graph: Graph, options: Options) -> Graph:
    if "wgmma_gemm" in options.kernels_off:
        return graph
    found = _found(graph)
    return _Pairing(graph, found).graph() if found else graph


def _found(graph: Graph) -> dict[Node, list[Layer]]:
    """Return the layers of each linear of which one has a low-rank part."""
    users, found = graph.users(), dict[Node, list[Layer]]()
    for node in graph.nodes:
        if node.op != "linear" or not _is_able(node):
            continue
        layers = _layers(node, users, graph.outputs)
        if any(layer.part for layer in layers) and _follow_each_other(layers):
            found[node] = layers
    return found


def _is_able(linear: Node) -> bool:
    weight = linear.inputs[1]
    is_known = all(size.is_const for size in weight.shape)
    is_big = len(linear.shape) >= LEAST_DIMS and linear.dtype in HALVES
    return is_known and is_big and not _is_factor(weight)


def _is_factor(weight: Node) -> bool:
    return bool(base_of(weight).attrs.get("small"))


def _layers(linear: Node, users: Users, outputs: Sequence[Node]) -> list[Layer]:
    """Return the layers that a linear computes, in the order of their columns."""
    if linear in outputs:
        return []
    pieces = users[linear]
    if not pieces or not all(_is_columns(piece) for piece in pieces):
        return [Layer(linear, 0, _part(linear, linear, users, outputs))]
    found = [
        Layer(piece, piece.attrs["start"].value, _part(piece, linear, users, outputs))
        for piece in pieces
    ]
    return sorted(found, key=lambda layer: layer.start)


def _is_columns(node: Node) -> bool:
    """Tell whether it is some columns, all of them known."""
    if node.op != "slice" or node.attrs["dim"] != len(node.shape) - 1:
        return False
    return node.attrs["step"] == 1 and node.attrs["start"].is_const and node.shape[-1].is_const


def _follow_each_other(layers: Sequence[Layer]) -> bool:
    return all(a.end <= b.start for a, b in pairwise(layers))


def _part(value: Node, linear: Node, users: Users, outputs: Sequence[Node]) -> LowRank | None:
    """Return the sum of a layer and its low-rank part, where nobody reads the layer alone."""
    views, reader = list[Node](), value
    while len(users[reader]) == 1 and reader not in outputs:
        reader = users[reader][0]
        if reader.op != "permute":
            break
        views.append(reader)
    if reader is value or not is_sum(reader):
        return None
    seen = views[-1] if views else value
    return next(
        (
            LowRank(reader, tuple(views), product.inputs[0], product.inputs[1])
            for product in _products(reader, seen, views)
            if len(users[product]) == 1 and _is_beside(product, linear)
        ),
        None,
    )


def _products(total: Node, seen: Node, views: Sequence[Node]) -> Iterator[Node]:
    """Yield what is added to a layer as it is seen, without the views of both."""
    for which, value in enumerate(total.inputs):
        other = total.inputs[1 - which]
        if value is not seen or (other.shape, other.dtype) != (value.shape, value.dtype):
            continue
        for view in reversed(views):
            if other.op != "permute" or other.attrs["dims"] != view.attrs["dims"]:
                break
            other = other.inputs[0]
        else:
            yield other


def _is_beside(product: Node, linear: Node) -> bool:
    """Tell whether it is B (A x) of the x that the linear reads: then no part of it reads what the
    linear computes."""
    if product.op != "linear" or len(product.inputs) > 2 or not _is_factor(product.inputs[1]):
        return False
    stack = [product.inputs[0]]
    while stack:
        node = stack.pop()
        if node is linear.inputs[0] or node.op in ("input", "constant"):
            continue
        is_product = node.op == "linear" and _is_factor(node.inputs[1])
        if not is_product and node.kind not in (Kind.VIEW, Kind.POINTWISE):
            return False
        stack += node.inputs
    return True


class _Pairing:
    """Build the graph anew. What comes before a product may have stood behind it: the rows of
    another layer's A x."""

    def __init__(self, graph: Graph, found: Mapping[Node, Sequence[Layer]]) -> None:
        self._graph, self._found = graph, found
        self._builder = Builder()
        self._new: dict[Node, Node] = {}
        self._merged: list[Node] = []  # inputs that hold the B's of several layers

    def graph(self) -> Graph:
        for node in self._graph.nodes:
            if node not in self._new and node in self._found:
                for layers in _cut(self._found[node]):
                    self._pair(node, layers)
            self._twin(node)
        inputs = [*map(self._twin, self._graph.inputs), *self._merged]
        outputs = [*map(self._twin, self._graph.outputs)]
        graph = self._graph
        return finish(self._builder, inputs, outputs, graph.hints, graph.num_saved)

    def _twin(self, node: Node) -> Node:
        if node not in self._new:
            inputs = tuple(map(self._twin, node.inputs))
            self._builder.origin = node.origin
            self._new[node] = self._builder.copy_of(node, inputs)
        return self._new[node]

    def _pair(self, linear: Node, layers: Sequence[Layer]) -> None:
        """Make the product of these layers."""
        b, last = self._builder, len(linear.shape) - 1
        first, columns = layers[0].start, layers[-1].end - layers[0].start
        x, *weights = map(self._twin, linear.inputs)
        weight, *bias = (b.slice(w, 0, first, columns) for w in weights)
        low, up = self._lows(layers), self._ups(layers, columns)
        b.origin = linear.origin
        shape = (*linear.shape[:-1], const(columns))
        whole = b.make(PAIRED["linear"], (x, weight, low, up, *bias), shape, linear.dtype)
        for layer in layers:
            value = b.slice(whole, last, layer.start - first, layer.end - layer.start)
            self._new[layer.value] = value
            if layer.part is not None:
                for view in layer.part.views:
                    value = b.permute(value, view.attrs["dims"])
                self._new[layer.part.total] = value

    def _lows(self, layers: Iterable[Layer]) -> Node:
        """Return the A x of all layers, beside each other: most often pieces of one product."""
        lows = [self._twin(layer.part.low) for layer in layers if layer.part]
        last, total = len(lows[0].shape) - 1, sum(low.shape[-1].value for low in lows)
        if len(lows) == 1:
            return lows[0]
        if all(map(_is_columns, lows)) and len({low.inputs[0] for low in lows}) == 1:
            start = begin = lows[0].attrs["start"]
            for low in lows:
                if low.attrs["start"] != start:
                    break
                start = start + low.shape[-1]
            else:
                return self._builder.slice(lows[0].inputs[0], last, begin, total)
        shape = (*lows[0].shape[:-1], const(total))
        return self._builder.make("cat", lows, shape, lows[0].dtype, dim=last)

    def _ups(self, layers: Sequence[Layer], rows: int) -> Node:
        """Return the B's of all layers: the only one, or a storage that they stand in."""
        if len(layers) == 1 and layers[0].part:
            return self._twin(layers[0].part.up)
        ups, corners, column = list[Node](), list[tuple[int, int]](), 0
        for layer in layers:
            if layer.part is not None:
                ups.append(layer.part.up)
                corners.append((layer.start - layers[0].start, column))
                column += layer.part.rank
        merged = self._builder.make(
            "input",
            (),
            (rows, column),
            ups[0].dtype,
            index=len(self._graph.inputs) + len(self._merged),
            state=True,
            merged=tuple(up.attrs["index"] for up in ups),
            corners=tuple(corners),
        )
        self._merged.append(merged)
        return merged


def _cut(layers: Sequence[Layer]) -> Iterator[list[Layer]]:
    """Yield layers that are one product: as many as have ``MOST_COLUMNS`` beside each other."""
    found, columns = list[Layer](), 0
    for layer in layers:
        rank = layer.part.rank if layer.part else 0
        if found and columns and columns + rank > MOST_COLUMNS:
            yield found
            found, columns = [], 0
        found.append(layer)
        columns += rank
    yield found
