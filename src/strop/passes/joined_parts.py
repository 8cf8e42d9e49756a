"""Store pieces of a cat where the cat has them, so that the cat is no kernel.

Pieces that are normed apart are stored by a kernel each, as rows of two values are reduced by two
kernels. Where the cat is wanted in memory, these store there (``ir.parts``).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from strop.ir.affine import base_of, reduced_runs
from strop.ir.graph import Graph, Node, rewrite
from strop.ir.ops import Kind
from strop.ir.parts import join
from strop.options import Options

Users = Mapping[Node, Sequence[Node]]


def joined_parts(graph: Graph, options: Options) -> Graph:
    users = graph.users()

    def is_stored_in_parts(node: Node) -> bool:
        if node.op != "cat" or not is_of_apart(node, graph.hints):
            return False
        return is_read_by_calls(node, graph.outputs, users)

    return rewrite(graph, join, is_stored_in_parts)


def is_read_by_calls(node: Node, results: Collection[Node], users: Users) -> bool:
    """Tell whether a value is wanted in memory: a call reads it or a view of it, or the caller."""
    return node in results or any(
        user.kind in (Kind.CONTRACTION, Kind.OPAQUE)
        or (user.kind is Kind.VIEW and is_read_by_calls(user, results, users))
        for user in users[node]
    )


def is_of_apart(cat: Node, hints: Mapping[str, int]) -> bool:
    """Tell whether at least half of a cat is computed by kernels that reduce a piece of it."""
    apart = sum(piece.numel.eval(hints) for piece in cat.inputs if _is_reduced(piece, hints))
    return 2 * apart >= cat.numel.eval(hints)


def _is_reduced(piece: Node, hints: Mapping[str, int]) -> bool:
    """Tell whether a piece is what follows a reduction of rows of as many elements."""
    stack, seen = [base_of(piece)], set[Node]()
    while stack:
        node = stack.pop()
        if node.kind is Kind.REDUCTION:
            if node.inputs[0].numel == piece.numel and _is_of_rows(node, hints):
                return True
            continue
        if node in seen or node.kind is not Kind.POINTWISE:
            continue
        seen.add(node)
        stack += map(base_of, node.inputs)
    return False


def _is_of_rows(node: Node, hints: Mapping[str, int]) -> bool:
    """Tell whether what is reduced lies side by side: elsewhere statistics are a kernel alone."""
    return reduced_runs(node.inputs[0], node.attrs["dims"], hints) in ([True], [False, True])
