"""Find which values may be computed for several batches at once.

A value (b, ...) is made by rows if its row ``i`` needs nothing but the rows ``i`` of other values
(b, ...), and what is the same for every batch. So what is computed for a batch that is made of
several, one after the other, holds the results of each: the embeddings of all timesteps of a
denoise loop, say.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from strop.ir.contractions import FACTORS, LINEARS
from strop.ir.dims import Expr
from strop.ir.graph import Node
from strop.ir.ops import OPS, Kind


def made_by_rows(nodes: Sequence[Node], stored: Collection[Node]) -> set[Node]:
    """Return those of ``nodes``, in execution order, that are made by rows of values that are
    ``stored``; each step between such values is looked at by itself."""
    steady, found = set[Node](), set[Node]()
    for node in nodes:
        if _is_steady(node, steady):
            steady.add(node)
        elif _keeps_rows(node) and all(
            x in steady or (_is_aligned(place, node) and (x in stored or x in found))
            for place, x in enumerate(node.inputs)
        ):
            found.add(node)
    return found


def _is_steady(node: Node, steady: Collection[Node]) -> bool:
    """Tell whether it is the same for every batch, as weights are and what is made of them
    alone."""
    if node.op == "input":
        return bool(node.attrs["state"])
    values = (*node.shape, *node.attrs.values())
    has_sizes = any(isinstance(value, Expr) and not value.is_const for value in values)
    return not has_sizes and all(x in steady for x in node.inputs)


def _keeps_rows(node: Node) -> bool:
    """Tell whether its rows are made of the same rows of what it reads, if that has as many."""
    return _has_rows(node) and OPS[node.op].keeps_rows(node.attrs, len(node.shape))


def _is_aligned(place: int, reader: Node) -> bool:
    """Tell whether the first dim of what is read there is the reader's."""
    x = reader.inputs[place]
    if reader.op in LINEARS and place not in range(0, FACTORS[reader.op], 2):
        return False  # each row reads all of a weight
    has_rank = len(x.shape) == len(reader.shape) or reader.kind is Kind.VIEW
    return has_rank and _has_rows(x) and x.shape[0] == reader.shape[0]


def _has_rows(node: Node) -> bool:
    """Tell whether its first size is that of a batch, and nothing else of it depends on the batch:
    which columns are read, say."""
    if not node.shape or node.shape[0].is_const:
        return False
    others = (*node.shape[1:], *node.attrs.values())
    return not any(
        isinstance(value, Expr) and value.roots & node.shape[0].roots for value in others
    )
