"""Find results of a graph of AOTAutograd's that are views of its arguments.

AOTAutograd makes such a result anew from the caller's argument, by the strides and the offset of
what the graph has given. Programs read dense copies of arguments with gaps, and a view of a copy
has other strides: these results are made here, of the arguments as they came.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch.fx import Graph, GraphModule, Node

from strop.frontend.functional import view_root


@dataclass(frozen=True, slots=True)
class ArgumentViews:
    """``graph`` has the arguments of the whole, and gives the results at ``places``."""

    places: tuple[int, ...]
    graph: GraphModule

    def put(self, results: list[Any], arguments: Sequence[Any]) -> None:
        """Put arguments: tensors, and numbers for sizes."""
        for place, view in zip(self.places, self.graph(*arguments), strict=True):
            results[place] = view


def argument_views(gm: GraphModule, num_results: int) -> ArgumentViews | None:
    """Return the views among the first ``num_results`` results; None where there are none."""
    (output,) = gm.graph.find_nodes(op="output")
    items = output.args[0][:num_results]
    places = tuple(place for place, item in enumerate(items) if _is_view_of_argument(item))
    if not places:
        return None
    return ArgumentViews(places, GraphModule(gm, _graph_of(gm.graph, [items[p] for p in places])))


def _is_view_of_argument(item: Any) -> bool:
    root = view_root(item) if isinstance(item, Node) else item
    return root is not item and bool(root.op == "placeholder")


def _graph_of(whole: Graph, items: Sequence[Node]) -> Graph:
    """Return the graph that computes ``items``: views, and the sizes that they name."""
    needed, left = set[Node](), list(items)
    while left:
        node = left.pop()
        if node not in needed:
            needed.add(node)
            left += node.all_input_nodes
    graph, copies = Graph(), dict[Node, Node]()
    for node in whole.nodes:
        if node.op == "placeholder" or node in needed:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[item] for item in items))
    return graph
