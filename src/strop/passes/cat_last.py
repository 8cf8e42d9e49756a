"""Do elementwise work before a cat and not after it: ``f(cat(a, b))`` is ``cat(f(a), f(b))``.

Texts and pictures are normed apart, joined, rotated and read by attention. A norm and a rotation
of the same rows are one kernel, and with the cat last, it stores where attention reads
(``joined_parts``). What else the work reads is cut like the pieces.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from dataclasses import dataclass, field

from strop.ir.dims import Expr, const, product
from strop.ir.graph import Builder, Graph, Node, finish
from strop.ir.ops import Kind
from strop.options import Options
from strop.passes.joined_parts import Users, is_of_apart, is_read_by_calls

ONE = const(1)
MOST_NODES = 64  # behind one cat


@dataclass(frozen=True, slots=True)
class _Work:
    """Hold what follows a cat: for each of its nodes the dim along which the pieces lie."""

    cat: Node
    dims: Mapping[Node, int]
    starts: tuple[Expr, ...]
    made: dict[tuple[Node, int], Node] = field(default_factory=dict)


def cat_last(graph: Graph, options: Options) -> Graph:
    users = graph.users()
    ends: dict[Node, _Work] = {}
    for node in graph.nodes:
        if node.op == "cat" and is_of_apart(node, graph.hints):
            work = _work_behind(node, users, graph.hints)
            ends |= {n: work for n in work.dims if n is not node and _is_end(n, graph, users)}
    return _rebuilt(graph, ends) if ends else graph


def _is_end(node: Node, graph: Graph, users: Users) -> bool:
    return node.kind is Kind.POINTWISE and is_read_by_calls(node, graph.outputs, users)


def _work_behind(cat: Node, users: Users, hints: Mapping[str, int]) -> _Work:
    dims, beyond = {cat: cat.attrs["dim"]}, set[Node]()
    waiting, num_seen = [(user.serial, user) for user in users[cat]], 0
    heapq.heapify(waiting)  # operands come first
    while waiting and num_seen < MOST_NODES:
        _, node = heapq.heappop(waiting)
        if node in dims or node in beyond:
            continue
        num_seen += 1
        dim = None if beyond.intersection(node.inputs) else _dim_of(node, cat, dims, hints)
        if dim is None:
            beyond.add(node)  # what reads it wants the cat as a whole
        else:
            dims[node] = dim
        for user in users[node]:
            heapq.heappush(waiting, (user.serial, user))
    starts = [const(0)]
    for piece in cat.inputs:
        starts.append(starts[-1] + piece.shape[cat.attrs["dim"]])
    return _Work(cat, dims, tuple(starts))


def _dim_of(
    node: Node, cat: Node, dims: Mapping[Node, int], hints: Mapping[str, int]
) -> int | None:
    """Return the dim along which a node consists of what it has of each piece, if it does."""
    found = {dim_behind(node, x, dims[x]) for x in node.inputs if x in dims}
    dim = found.pop() if len(found) == 1 else None
    if dim is None or node.shape[dim] != cat.shape[cat.attrs["dim"]]:
        return None
    return dim if node.numel.eval(hints) <= cat.numel.eval(hints) else None


def dim_behind(node: Node, x: Node, dim: int) -> int | None:
    """Return the dim of a node that dim of its operand is; None where each piece of the one is not
    of the same piece of the other."""
    if node.op == "reshape":
        before = product(x.shape[:dim])
        ends = [product(node.shape[:d]) for d in range(len(node.shape))]
        return next(
            (d for d, end in enumerate(ends) if end == before and node.shape[d] == x.shape[dim]),
            None,
        )
    if node.op == "permute":
        return tuple(node.attrs["dims"]).index(dim)
    if node.op in ("slice", "cat"):
        return dim if node.attrs["dim"] != dim else None
    if node.op in ("expand", "copy"):
        return dim
    is_elementwise = node.kind is Kind.POINTWISE and node.row.is_elementwise
    return dim + len(node.shape) - len(x.shape) if is_elementwise else None


def _rebuilt(graph: Graph, ends: Mapping[Node, _Work]) -> Graph:
    b = Builder()
    new: dict[Node, Node] = {}
    for node in graph.nodes:
        b.origin = node.origin
        if node in ends:
            work = ends[node]
            pieces = [_piece(b, node, n, work, new) for n in range(len(work.cat.inputs))]
            shape, dim = node.shape, work.dims[node]
            new[node] = b.make("cat", pieces, shape, node.dtype, order=node.order, dim=dim)
        else:
            new[node] = b.copy_of(node, tuple(new[i] for i in node.inputs))
    inputs, outputs = ([new[node] for node in of] for of in (graph.inputs, graph.outputs))
    return finish(b, inputs, outputs, graph.hints, graph.num_saved)


def _piece(b: Builder, node: Node, number: int, work: _Work, new: Mapping[Node, Node]) -> Node:
    """Make what a node has of one piece of the cat."""
    if node is work.cat:
        return new[node.inputs[number]]
    if (node, number) not in work.made:
        work.made[node, number] = _cut(b, node, number, work, new)
    return work.made[node, number]


def _cut(b: Builder, node: Node, number: int, work: _Work, new: Mapping[Node, Node]) -> Node:
    dim, start = work.dims[node], work.starts[number]
    length = work.starts[number + 1] - start
    inputs = list[Node]()
    for x in node.inputs:
        at = dim - len(node.shape) + len(x.shape)
        if x in work.dims:
            inputs.append(_piece(b, x, number, work, new))
        elif at < 0 or x.shape[at] == ONE != node.shape[dim]:
            inputs.append(new[x])  # the same for all pieces
        else:
            inputs.append(b.slice(new[x], at, start, length))
    shape = (*node.shape[:dim], length, *node.shape[dim + 1 :])
    if node.op == "reshape":
        return b.reshape(inputs[0], shape)
    if node.op == "permute":
        return b.permute(inputs[0], node.attrs["dims"])
    if node.op == "expand":
        return b.expand(inputs[0], shape)
    if node.op == "slice":
        at, first, step = (node.attrs[name] for name in ("dim", "start", "step"))
        return b.slice(inputs[0], at, first, node.shape[at], step)
    return b.make(node.op, inputs, shape, node.dtype, order=node.order, **node.attrs)
