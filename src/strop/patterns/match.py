"""Find where a pattern's search occurs in a graph.

First the skeleton, loosely: operators must agree from the result down to the arguments, whatever
views, casts and sizes lie between. That gives candidates for the arguments. Then exactly: the
search is traced for those very arguments and its nodes are looked up in the graph by value number,
so that sizes, types, attributes and every folded view must agree. What is not found says why.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from strop.ir.graph import Builder, Graph, Node
from strop.ir.ops import OPS, Kind
from strop.passes.canonicalize import simplify

MOST_TRIES = 64  # ways to bind the arguments at one place
Places = Mapping[tuple[Node, str], str]
Bound = Mapping[Any, Any]  # argument of the skeleton -> candidates; name of a keyword -> number


def is_transparent(node: Node) -> bool:
    """Tell whether the skeleton looks through a node: sizes and types decide whether it is
    there."""
    return node.kind is Kind.VIEW or node.op in ("cast", "copy")


def stripped(node: Node) -> Node:
    while is_transparent(node):
        node = node.inputs[0]
    return node


def is_number(node: Node) -> bool:
    """Tell whether a value without dims is made of numbers and sizes alone."""
    is_made = bool(node.inputs) and not node.shape
    return node.op == "constant" or (is_made and all(map(is_number, node.inputs)))


def swaps(node: Node) -> bool:
    """Tell whether its two operands may change places."""
    return OPS[node.op].commutes and len(node.inputs) == 2 and node.attrs.get("alpha", 1) == 1


class ValueNumbers:
    """Number values: the numbers are equal for nodes that compute the same from the same."""

    def __init__(self, graph: Graph) -> None:
        self.nodes: dict[int, list[Node]] = {}
        self._of: dict[Node, int] = {}
        self._known: dict[Any, int] = {}
        for node in graph.nodes:
            self.nodes.setdefault(self.of(node), []).append(node)

    def of(self, node: Node) -> int:
        if node not in self._of:
            key = self._key(node)
            self._of[node] = self._known.setdefault(key, len(self._known))
        return self._of[node]

    def _key(self, node: Node) -> Any:
        operands = [self.of(i) for i in node.inputs]
        if swaps(node):
            operands.sort()
        apart = node.serial if node.op == "write" else 0
        return (
            node.op,
            tuple(operands),
            repr(sorted(node.attrs.items())),
            node.shape,
            node.dtype,
            node.order,
            apart,
        )

    def twins(self, node: Node) -> Sequence[Node]:
        """Return the nodes of the graph that compute the same."""
        return self.nodes.get(self.of(node), ())


class Skeleton:
    """Hold candidates for the arguments of a pattern. ``places``: nodes and attributes of them that
    hold the value of a keyword."""

    def __init__(self, places: Places) -> None:
        self.places, self.builder = places, Builder()

    def bindings(self, wanted: Node, node: Node) -> Iterator[Bound]:
        """Return ways in which the values that ``wanted`` reads may be those that ``node``
        reads."""
        return itertools.islice(self._match(wanted, node, {}), MOST_TRIES)

    def _match(self, wanted: Node, node: Node, bound: Bound) -> Iterator[Bound]:
        base = stripped(wanted)
        if base.op == "input":
            yield from self._argument(base, wanted, node, bound)
            return
        node = stripped(node)
        if base.op == "constant" and node.op != "constant" and is_number(node):
            if (base, "value") not in self.places:  # of the example's sizes, there of any
                yield bound
            return
        if base.op != node.op or len(base.inputs) != len(node.inputs):
            return
        if any(base.attrs.get(k) != node.attrs.get(k) for k in ("target", "index")):
            return
        found = self._attributes(base, node, bound)
        if found is None:
            return
        yield from self._operands(base.inputs, node.inputs, found)
        if swaps(base):
            yield from self._operands(base.inputs, node.inputs[::-1], found)

    def _operands(
        self, wanted: Sequence[Node], given: Sequence[Node], bound: Bound
    ) -> Iterator[Bound]:
        if not wanted:
            yield bound
            return
        for found in self._match(wanted[0], given[0], bound):
            yield from self._operands(wanted[1:], given[1:], found)

    def _attributes(self, wanted: Node, node: Node, bound: Bound) -> Bound | None:
        """Bind keywords to what the graph has at their places, if that is the same at all of
        them."""
        found = dict(bound)
        for name, value in wanted.attrs.items():
            keyword = self.places.get((wanted, name))
            if keyword is not None:
                given = node.attrs.get(name)
                if type(given) is not type(value) or found.get(keyword, given) != given:
                    return None
                found[keyword] = given
        return found

    def _argument(self, argument: Node, wanted: Node, node: Node, bound: Bound) -> Iterator[Bound]:
        candidates = self._candidates(wanted, node)
        if argument in bound:
            candidates = [c for c in bound[argument] if c in candidates]
        if candidates:
            yield {**bound, argument: candidates}

    def _candidates(self, wanted: Node, node: Node) -> list[Node]:
        """Return the value itself, what it is a view or cast of, and what it would be a view of;
        first those as far down as the argument lies, and of its rank."""
        chain = [node]
        while is_transparent(chain[-1]):
            chain.append(chain[-1].inputs[0])
        depth, permutations = 0, []
        while is_transparent(wanted):
            if wanted.op == "permute":
                permutations.append(wanted.attrs["dims"])
            depth, wanted = depth + 1, wanted.inputs[0]
        place = {value: number for number, value in enumerate(chain)}
        chain.sort(key=lambda value: abs(place[value] - depth))
        if len(permutations) == 1:
            (dims,) = permutations
            back = sorted(range(len(dims)), key=lambda d: dims[d])
            chain += [self.builder.permute(c, back) for c in chain if len(c.shape) == len(back)]
        return sorted(dict.fromkeys(chain), key=lambda c: len(c.shape) != len(wanted.shape))


def choices(arguments: Iterable[Node], bound: Bound) -> Iterator[tuple[Node, ...]]:
    """Yield one candidate for each argument, likely ones first."""
    each = [bound[argument] for argument in arguments]
    return itertools.islice(itertools.product(*each), MOST_TRIES)


def replayed(graph: Graph, arguments: Sequence[Node]) -> dict[Node, Node]:
    """Replay the nodes of a search's graph over these arguments; views fold as they would there."""
    builder, new = Builder(), dict(zip(graph.inputs, arguments, strict=True))
    for node in graph.nodes:
        if node not in new:
            inputs = tuple(new[i] for i in node.inputs)
            new[node] = simplify(builder, node, inputs) or builder.copy_of(node, inputs)
    return new
