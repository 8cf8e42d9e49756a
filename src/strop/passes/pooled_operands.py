"""Compute what only a pool reads where the pool looks: one kernel, and no trip to memory.

``max_pool(relu(batch_norm(x)))`` looks up nine elements of ``x`` and computes each again, 2.25
times in all, where it had nine of a tensor that a kernel of its own had to write. Worth it where
the elements come from one tensor and are looked up seldom.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from strop.ir.dims import const
from strop.ir.graph import Builder, Graph, Node, rewrite
from strop.ir.ops import OPS, Kind
from strop.options import Options

MOST_READ = 2.5  # times that an element may be computed: windows of 3x3 in steps of 2, not of 1
Users = Mapping[Node, Sequence[Node]]


@dataclass(frozen=True, slots=True)
class _Pool:
    """Hold a chain of pointwise nodes, all of one shape, and who reads its last one."""

    chain: frozenset[Node]
    readers: frozenset[Node]


def pooled_operands(graph: Graph, options: Options) -> Graph:
    users = graph.users()
    found = [pool for node in graph.nodes if (pool := _pool(graph, users, node))]
    chains = frozenset[Node]().union(*(pool.chain for pool in found))
    readers = frozenset[Node]().union(*(pool.readers for pool in found))
    movable: set[Node] = set()  # of the new graph

    def rule(b: Builder, node: Node, inputs: tuple[Node, ...]) -> Node | None:
        if node in readers:
            return read(b, node, *inputs)
        if node not in chains:
            return None
        made = b.copy_of(node, inputs)
        movable.add(made)
        return made

    def read(b: Builder, reader: Node, source: Node, *indices: Node) -> Node:
        """Return what the reader sees of the source."""
        if source not in movable:
            return b.make(reader.op, (source, *indices), reader.shape, source.dtype, **reader.attrs)
        operands = [
            read(b, reader, operand, *indices) if operand.shape == source.shape else operand
            for operand in source.inputs
        ]
        made = b.make(source.op, operands, reader.shape, source.dtype, **source.attrs)
        movable.add(made)
        return made

    return rewrite(graph, rule) if found else graph


def _pool(graph: Graph, users: Users, last: Node) -> _Pool | None:
    """Return the pool that reads this node, if it is one."""
    readers = _readers(users, last)
    if not any(reader.op == "take" for reader in readers):
        return None  # of slices alone, the planner computes again what they need
    ends = [r for r in readers if r.op == "take" or any(u not in readers for u in users[r])]
    looked = sum(reader.numel.eval(graph.hints) for reader in ends)
    if looked > MOST_READ * last.numel.eval(graph.hints):
        return None
    moved = frozenset(dim for reader in readers for dim in _moved(reader))
    chain, sources = _chain(graph, users, last, moved)
    return _Pool(chain, readers) if chain and len(sources) == 1 else None


def _readers(users: Users, last: Node) -> frozenset[Node]:
    """Return slices of the node and lookups in it or them; none where anybody else reads it."""
    found: set[Node] = set()
    waiting = [last]
    while waiting:
        node = waiting.pop()
        theirs = [user for user in users[node] if _is_reader(user, node)]
        if node is last and len(theirs) < len(users[node]):
            return frozenset()
        found.update(theirs)
        waiting += [user for user in theirs if user.op == "slice"]
    return frozenset(found)


def _is_reader(user: Node, node: Node) -> bool:
    if user.op == "slice":
        return True
    is_pool = user.op == "take" and user.attrs["bounds"] == "known"
    same_rank = len(user.shape) == len(node.shape)
    return is_pool and same_rank and user.inputs[0] is node and node not in user.inputs[1:]


def _moved(reader: Node) -> tuple[int, ...]:
    """Return dims along which it does not read everything in order."""
    if reader.op == "slice":
        return (reader.attrs["dim"],)
    return tuple(dim for dim, walk in enumerate(reader.attrs["walks"]) if walk != dim)


def _chain(
    graph: Graph, users: Users, last: Node, moved: frozenset[int]
) -> tuple[frozenset[Node], frozenset[Node]]:
    """Return pointwise nodes that nobody else needs, and the tensors of their shape that they
    read."""
    chain: set[Node] = set()
    sources: set[Node] = set()
    waiting = [last]
    while waiting:
        node = waiting.pop()
        if (
            _may_move(node, last, moved)
            and node not in graph.outputs
            and (node is last or all(user in chain for user in users[node]))
        ):
            chain.add(node)
            waiting += [operand for operand in node.inputs if operand.shape == last.shape]
        else:
            sources.add(node)
    return frozenset(chain), frozenset(sources)


def _may_move(node: Node, last: Node, moved: frozenset[int]) -> bool:
    is_elementwise = node.kind is Kind.POINTWISE and OPS[node.op].is_elementwise
    if not is_elementwise or node.shape != last.shape:
        return False
    rank = len(last.shape)
    others = [operand.shape for operand in node.inputs if operand.shape != last.shape]
    return all(
        shape[dim - rank + len(shape)] == const(1)
        for shape in others
        for dim in moved
        if dim >= rank - len(shape)
    )
