"""Tag the nodes of a region whose values the backward pass computes again.

The tags are those of torch's partitioner. Numbers of regions grow along the graph: what one region
hands to a later one is kept.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from torch.fx import Node
from torch.utils.checkpoint import CheckpointPolicy

_POLICY, _REGION = "recompute", "ac_graph_id"
_numbers = itertools.count(1)


def mark(nodes: Iterable[Node]) -> None:
    """Make a new region of these nodes, which takes in the regions that they were in."""
    number = next(_numbers)
    for node in nodes:
        node.meta[_POLICY], node.meta[_REGION] = CheckpointPolicy.PREFER_RECOMPUTE, number


def unmark(node: Node) -> None:
    """Take a node out of its region."""
    node.meta.pop(_POLICY, None)
    node.meta.pop(_REGION, None)


def regions_of(nodes: Iterable[Node]) -> tuple[tuple[Node, ...], ...]:
    """Return those of the nodes that lie in regions, by region, the first one first."""
    found: dict[int, list[Node]] = {}
    for node in nodes:
        if _REGION in node.meta:
            found.setdefault(node.meta[_REGION], []).append(node)
    return tuple(tuple(found[number]) for number in sorted(found))
