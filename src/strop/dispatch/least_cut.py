"""Find the minimum cut of a graph in which most edges must not be cut.

torch's partitioner asks networkx, whose time grows faster than the graph: 3 s for SDXL. What has to
lie on one side, as edges without a bound say, is taken for the source or the sink here; what is
left falls apart into hundreds of small graphs, which are cut one by one. The cut is networkx's own:
of all least ones that with the fewest nodes on the side of the sink, and there is only one such.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any

import networkx as nx  # type: ignore[import-untyped]

from strop.frontend.quick import replaced

Side = set[Hashable]
_SOURCE, _SINK = "a source", ("a sink",)  # no node of torch's has such a name


@contextmanager
def least_cuts() -> Iterator[None]:
    """Have ``networkx.minimum_cut`` be ours within the body."""

    def replacement(usual: Callable[..., Any]) -> Callable[..., Any]:
        def cut(graph: Any, source: Any, sink: Any, *args: Any, **kwargs: Any) -> Any:
            if args or kwargs:
                return usual(graph, source, sink, *args, **kwargs)
            return least_cut(graph, source, sink, usual)

        return cut

    with replaced(nx, "minimum_cut", replacement):
        yield


def least_cut(
    graph: Any, source: Hashable, sink: Hashable, usual: Callable[..., Any]
) -> tuple[float, tuple[Side, Side]]:
    """Return what ``usual``, networkx's own function, returns for ``graph``."""
    behind = _bound_to(graph.succ, source)
    before = _bound_to(graph.pred, sink)
    if not behind.isdisjoint(before):
        found: tuple[float, tuple[Side, Side]] = usual(graph, source, sink)  # raises
        return found
    value, of_sink = 0.0, set(before)
    joined = nx.Graph()
    for a, b, capacity in graph.edges(data="capacity", default=math.inf):
        if a in behind and b in before:
            value += capacity
        elif a not in behind and a not in before and b not in behind and b not in before:
            joined.add_edge(a, b)
        elif a not in behind and a not in before:
            joined.add_node(a)
        elif b not in behind and b not in before:
            joined.add_node(b)
    for part in nx.connected_components(joined):
        least, side = _cut_apart(graph, part, behind, before, usual)
        value += least
        of_sink |= side
    return value, (set(graph) - of_sink, of_sink)


def _bound_to(neighbours: Any, start: Hashable) -> Side:
    """Return what edges without a bound lead to from ``start``, which is on the same side."""
    found, left = {start}, [start]
    while left:
        for node, edge in neighbours[left.pop()].items():
            if edge.get("capacity", math.inf) == math.inf and node not in found:
                found.add(node)
                left.append(node)
    return found


def _cut_apart(
    graph: Any, part: Side, behind: Side, before: Side, usual: Callable[..., Any]
) -> tuple[float, Side]:
    """Cut a part that touches the rest of the graph at the source and the sink alone. Return its
    nodes on the side of the sink."""
    small = nx.DiGraph()
    small.add_nodes_from((_SOURCE, _SINK))

    def add(a: Hashable, b: Hashable, capacity: float) -> None:
        known = small.edges[a, b]["capacity"] if small.has_edge(a, b) else 0
        small.add_edge(a, b, capacity=known + capacity)

    for node in part:
        for other, edge in graph.succ[node].items():
            if other in part or other in before:
                end = other if other in part else _SINK
                add(node, end, edge.get("capacity", math.inf))
        for other, edge in graph.pred[node].items():
            if other in behind:
                add(_SOURCE, node, edge.get("capacity", math.inf))
    value, (_, side) = usual(small, _SOURCE, _SINK)
    return value, side - {_SINK}
