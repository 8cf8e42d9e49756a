"""Let the products of a text and of a picture write their rows one behind the other.

A block of Flux, Qwen-Image or SD3.5 multiplies the rows of a text by one weight and those of a
picture by another, and attention reads the values of both as they are. A kernel that only puts
these together takes 20 us of each block on an H100. Where the products write into one buffer,
attention reads the values there, as a slice of its columns; queries and keys are normed from there.
Biases stay with the products (``bias_to_consumer``), as no kernel would add them to the values.

The rows of one picture lie side by side there. Those of several do not, and a product writes each
picture's by itself, or all are copied (``run.placed_rows``).
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass

from strop.ir.dims import const
from strop.ir.graph import Builder, Graph, Node, finish
from strop.ir.ops import Kind
from strop.ir.parts import ZERO, has_strides, join, place_of
from strop.options import Options
from strop.passes.cat_last import dim_behind
from strop.passes.joined_calls import PIECE
from strop.passes.linear_add import Users

OF_STROP = frozenset({Kind.CONTRACTION, Kind.POINTWISE, Kind.REDUCTION})  # kinds of nodes
Views = tuple[Node, ...]  # from what a call writes to what a cat reads, in this order


@dataclass(frozen=True, slots=True)
class _Joint:
    """Hold products whose rows lie in one buffer, and what their cats read of it."""

    products: tuple[Node, ...]
    cats: Mapping[Node, Views]  # by cat: the views of its first piece

    @property
    def dim(self) -> int:
        return len(self.products[0].shape) - 2


def joined_products(graph: Graph, options: Options) -> Graph:
    joints = _joints(graph)
    return _rebuilt(graph, joints) if joints else graph


def _joints(graph: Graph) -> list[_Joint]:
    """Find products of which each is in one joint, and none needs what is made of another's."""
    users, found = graph.users(), defaultdict[tuple[Node, ...], dict[Node, Views]](dict)
    results = frozenset(graph.outputs)
    for cat in (node for node in graph.nodes if node.op == "cat"):
        if not _takes_any_strides(cat, results, users):
            continue
        pieces = [_seen(piece) for piece in cat.inputs]
        products = tuple(product for product, _ in pieces)
        if not all(_takes_any_strides(x, results, users, OF_STROP) for x in products):
            continue
        if _can_share(cat, products, graph) and len({_look(*each) for each in pieces}) == 1:
            product, views = pieces[0]
            *before, dim = _dims(product, views)
            if len(before) == len(views) and dim == cat.attrs["dim"]:
                found[products][cat] = views
    joints, taken = list[_Joint](), set[Node]()
    writes = [node.serial for node in graph.nodes if node.op == "write"]
    for products, cats in found.items():
        if (
            taken.isdisjoint(products)
            and _are_apart(products)
            and not _is_between(products, writes)
        ):
            taken.update(products)
            joints.append(_Joint(products, cats))
    return joints


def _takes_any_strides(
    value: Node, results: Set[Node], users: Users, kinds: Set[Kind] = frozenset({Kind.CONTRACTION})
) -> bool:
    """Tell whether only nodes of these kinds read a value, or views of it. The caller gets eager's
    strides, and what an operator of torch's returns may lie as its operand does."""
    readers = users[value]
    is_known = all(
        reader.kind in kinds
        or (reader.kind is Kind.VIEW and _takes_any_strides(reader, results, users, kinds))
        for reader in readers
    )
    return bool(readers) and is_known and value not in results


def _seen(piece: Node) -> tuple[Node, Views]:
    views = list[Node]()
    while piece.op in ("reshape", "permute", "slice"):
        views.append(piece)
        piece = piece.inputs[0]
    return piece, tuple(reversed(views))


def _dims(product: Node, views: Views) -> tuple[int, ...]:
    """Return the dim in which each view has a product's rows, up to one that has them apart."""
    found, x = [len(product.shape) - 2], product
    for view in views:
        if (dim := dim_behind(view, x, found[-1])) is None:
            break
        found.append(dim)
        x = view
    return tuple(found)


def _look(product: Node, views: Views) -> object:
    """Return what is alike for products that may share a buffer."""
    looks = list[object]()
    for view, dim in zip(views, _dims(product, views)[1:], strict=False):
        sizes = (*view.shape[:dim], *view.shape[dim + 1 :])
        looks.append((view.op, dim, sizes, tuple(sorted(view.attrs.items()))))
    return (*product.shape[:-2], product.shape[-1]), len(views), tuple(looks)


def _can_share(cat: Node, products: Sequence[Node], graph: Graph) -> bool:
    """Tell whether calls write all that a cat puts together, each its own."""
    if len(set(products)) < len(products) or not _are_linears(cat, products, graph):
        return False
    whole = _whole(Builder(), products)
    start = ZERO
    for product in products:
        if not has_strides(place_of(whole, product, start), PIECE):
            return False
        start = start + product.shape[-2]
    return True


def _are_linears(cat: Node, products: Sequence[Node], graph: Graph) -> bool:
    given = graph.given()
    return all(
        product.op == "linear"
        and len(product.shape) > 2
        and product.dtype == cat.dtype
        and product.shape[:-2] == products[0].shape[:-2]
        and product.shape[-1] == products[0].shape[-1]
        and ZERO not in product.shape
        and product not in given
        for product in products
    )


def _whole(b: Builder, products: Sequence[Node]) -> Node:
    """Make what has the rows of all products."""
    first, dim = products[0], len(products[0].shape) - 2
    rows = sum((x.shape[dim] for x in products), start=const(0))
    shape = (*first.shape[:dim], rows, first.shape[-1])
    cat = b.make("cat", tuple(products), shape, first.dtype, dim=dim)
    return join(b, cat, tuple(products), products)


def _are_apart(products: Sequence[Node]) -> bool:
    """Tell whether no product needs another: all are there before anyone reads what they share."""
    first = min(x.serial for x in products)
    stack, seen = [x for product in products for x in product.inputs], set[Node]()
    while stack:
        node = stack.pop()
        if node in products:
            return False
        if node.serial > first and node not in seen:
            seen.add(node)
            stack += node.inputs
    return True


def _is_between(products: Sequence[Node], writes: Sequence[int]) -> bool:
    """Tell whether an argument is written after one product and before another. What reads the
    first waits for the other, and might find that argument's new values."""
    first, *_, last = sorted(product.serial for product in products)
    return any(first < serial < last for serial in writes)


def _rebuilt(graph: Graph, joints: Sequence[_Joint]) -> Graph:
    b, new = Builder(), dict[Node, Node]()
    joint_of = {product: joint for joint in joints for product in joint.products}
    views_of = {cat: (joint, views) for joint in joints for cat, views in joint.cats.items()}
    written, wholes = dict[Node, Node](), dict[int, Node]()
    for node in _in_order(graph, joint_of):
        b.origin = node.origin
        if node in views_of:
            joint, views = views_of[node]
            new[node] = _viewed(b, wholes[id(joint)], joint, views)
            continue
        made = b.copy_of(node, tuple(new[i] for i in node.inputs))
        if node not in joint_of:
            new[node] = made
            continue
        written[node], joint = made, joint_of[node]
        if all(product in written for product in joint.products):
            whole = wholes[id(joint)] = _whole(b, [written[x] for x in joint.products])
            new.update(_rows(b, whole, joint))
    inputs, outputs = ([new[node] for node in of] for of in (graph.inputs, graph.outputs))
    return finish(b, inputs, outputs, graph.hints, graph.num_saved)


def _rows(b: Builder, whole: Node, joint: _Joint) -> Iterator[tuple[Node, Node]]:
    """Yield what others read of each product."""
    start = ZERO
    for product in joint.products:
        yield product, b.slice(whole, joint.dim, start, product.shape[joint.dim])
        start = start + product.shape[joint.dim]


def _viewed(b: Builder, whole: Node, joint: _Joint, views: Views) -> Node:
    """See all rows as a cat's first piece sees those of the first product."""
    value = whole
    for view, dim in zip(views, _dims(joint.products[0], views)[1:], strict=True):
        shape = (*view.shape[:dim], whole.shape[joint.dim], *view.shape[dim + 1 :])
        if view.op == "reshape":
            value = b.reshape(value, shape)
        elif view.op == "permute":
            value = b.permute(value, view.attrs["dims"])
        else:
            at = view.attrs["dim"]
            value = b.slice(value, at, view.attrs["start"], view.shape[at], view.attrs["step"])
    return value


def _in_order(graph: Graph, joint_of: Mapping[Node, _Joint]) -> Iterator[Node]:
    """Yield the nodes as the graph has them, but what reads a product after all that share its
    buffer."""
    waits, readers = dict[Node, int](), defaultdict[Node, list[Node]](list)
    for node in graph.nodes:
        needed = set[Node]()
        for x in node.inputs:
            needed.update(joint_of[x].products if x in joint_of else (x,))
        waits[node] = len(needed)
        for x in needed:
            readers[x].append(node)
    position = {node: n for n, node in enumerate(graph.nodes)}
    ready = [position[node] for node, count in waits.items() if not count]
    heapq.heapify(ready)
    while ready:
        node = graph.nodes[heapq.heappop(ready)]
        yield node
        for reader in readers[node]:
            waits[reader] -= 1
            if not waits[reader]:
                heapq.heappush(ready, position[reader])
