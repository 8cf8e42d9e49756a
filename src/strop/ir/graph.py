"""Define the graph IR: a list of nodes in execution order, each a pure function of earlier nodes.

Shapes are logical (torch's), sizes symbolic. ``order`` says in which order the logical dims lie
in memory (None: as they are); it is set by the layout pass and nothing else looks at memory.
Nodes are immutable: a pass builds a new graph with ``rewrite``. ``Builder`` merges equal nodes
and folds views as it goes, so common subexpressions and dead code never survive a rewrite.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from operator import attrgetter
from typing import Any

import torch

from strop.errors import ShapeError
from strop.ir.dims import Expr, const, product, to_expr
from strop.ir.ops import OPS, Kind, Op, of_nothing

Shape = tuple[Expr, ...]
_serial = itertools.count()
_TERMS = attrgetter("terms")


@dataclass(frozen=True, slots=True)
class Ref:
    """Stands for ``inputs[index]`` inside the argument list of an ``aten`` node."""

    index: int


@dataclass(frozen=True, slots=True)
class GeneratorRef:
    """Stands for generator ``index`` among a call's arguments, in the arguments of an ``aten`` node
    that draws by it."""

    index: int


@dataclass(frozen=True, eq=False, slots=True)
class Node:
    """Describe one value. ``origin`` is the path of the module in the user's model that asked for
    it."""

    op: str
    inputs: tuple[Node, ...]
    attrs: Mapping[str, Any]
    shape: Shape
    dtype: torch.dtype
    origin: str = ""
    order: tuple[int, ...] | None = None
    serial: int = field(default_factory=lambda: next(_serial))

    @property
    def row(self) -> Op:
        return OPS[self.op]

    @property
    def kind(self) -> Kind:
        return OPS[self.op].kind

    @property
    def numel(self) -> Expr:
        return product(self.shape)

    @property
    def strides(self) -> Shape:
        """Return dense strides in elements for ``order``."""
        return dense_strides(self.shape, self.order)

    def __repr__(self) -> str:
        sizes = ", ".join(map(str, self.shape))
        args = ", ".join(f"n{i.serial}" for i in self.inputs)
        return f"n{self.serial} = {self.op}({args}) {self.dtype} [{sizes}]  {self.origin}"


@lru_cache(maxsize=4096)
def dense_strides(shape: Shape, order: tuple[int, ...] | None = None) -> Shape:
    strides: list[Expr] = [const(1)] * len(shape)
    step = const(1)
    for dim in reversed(order or tuple(range(len(shape)))):
        strides[dim] = step
        step = step * shape[dim]
    return tuple(strides)


def memory_order(strides: Sequence[Expr], shape: Sequence[Expr]) -> tuple[int, ...] | None:
    """Return the order of dims in memory for dense strides; None when contiguous."""
    remaining = [d for d in range(len(shape)) if shape[d] != const(1)]
    ones = [d for d in range(len(shape)) if shape[d] == const(1)]
    order: list[int] = []
    step = const(1)
    while remaining:
        dim = next((d for d in reversed(remaining) if strides[d] == step), None)
        if dim is None:
            raise ShapeError(f"strides {list(map(str, strides))} are not dense")
        order.insert(0, dim)
        remaining.remove(dim)
        step = step * shape[dim]
    full = ones + order
    return None if [d for d in full if d not in ones] == sorted(order) else tuple(full)


@dataclass(frozen=True, slots=True)
class Graph:
    """Hold a program over tensors. ``hints`` are the root sizes that it was traced with. The last
    ``num_saved`` outputs are for a backward graph, which takes them as they lie in memory."""

    nodes: tuple[Node, ...]
    inputs: tuple[Node, ...]
    outputs: tuple[Node, ...]
    hints: Mapping[str, int]
    num_saved: int = 0

    def users(self) -> dict[Node, list[Node]]:
        users: dict[Node, list[Node]] = {node: [] for node in self.nodes}
        for node in self.nodes:
            for operand in dict.fromkeys(node.inputs):
                users[operand].append(node)
        return users

    def given(self) -> set[Node]:
        """Return the nodes whose memory the user gets: results, and what they are views of."""
        found, stack = set[Node](), [*self.outputs[: len(self.outputs) - self.num_saved]]
        while stack:
            node = stack.pop()
            found.add(node)
            if node.kind is Kind.VIEW:
                stack.append(node.inputs[0])
        return found

    def __str__(self) -> str:
        return "\n".join(map(repr, self.nodes))


class Builder:
    """Makes nodes. Equal nodes are made once, but for those that say where values lie; views of
    views become one view or none; of a value that never has an element nothing is computed."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.origin = ""
        self._made: dict[Any, Node] = {}

    def make(
        self,
        op: str,
        inputs: Sequence[Node],
        shape: Iterable[Expr | int],
        dtype: torch.dtype,
        *,
        order: tuple[int, ...] | None = None,
        **attrs: Any,
    ) -> Node:
        return self._make(op, tuple(inputs), tuple(map(to_expr, shape)), dtype, order, attrs)

    def _make(
        self,
        op: str,
        inputs: tuple[Node, ...],
        sizes: Shape,
        dtype: torch.dtype,
        order: tuple[int, ...] | None,
        attrs: Mapping[str, Any],
    ) -> Node:
        if not all(map(_TERMS, sizes)) and _needs_nothing(op, inputs):
            none = self.view_as_rank(self.constant(0, dtype), len(sizes))
            op, inputs, order, attrs = "expand", (none,), None, {}
        # attributes as text: 1, 1.0 and True are equal, and so are 0.0 and -0.0
        text = repr(sorted(attrs.items())) if attrs else ""
        key = (op, inputs, text, sizes, dtype, order)
        made = self._made.get(key)
        if made is not None and not OPS[op].is_placed:
            return made
        node = Node(op, inputs, attrs, sizes, dtype, self.origin, order, next(_serial))
        self._made[key] = node
        self.nodes.append(node)
        return node

    def constant(self, value: int | float | bool | Expr, dtype: torch.dtype) -> Node:
        return self.make("constant", (), (), dtype, value=value)

    def pointwise(self, op: str, *operands: Node, dtype: torch.dtype, **attrs: Any) -> Node:
        return self.make(op, operands, broadcast(op, *(x.shape for x in operands)), dtype, **attrs)

    def cast(self, x: Node, dtype: torch.dtype) -> Node:
        return x if x.dtype == dtype else self.pointwise("cast", x, dtype=dtype)

    def reduce(
        self, op: str, x: Node, dims: tuple[int, ...], dtype: torch.dtype, **attrs: Any
    ) -> Node:
        """Reduce ``dims`` of x; they stay as dims of size 1."""
        shape = [const(1) if d in dims else s for d, s in enumerate(x.shape)]
        if const(0) in x.shape:
            of_none = self.constant(of_nothing(op, dtype), dtype)
            spread = self.expand(self.view_as_rank(of_none, len(shape)), shape)
            return self.make("copy", (spread,), shape, dtype)  # a value of its own, as any other
        return self.make(op, (x,), shape, dtype, dims=dims, **attrs)

    def reshape(self, x: Node, shape: Iterable[Expr | int]) -> Node:
        sizes = tuple(map(to_expr, shape))
        if product(sizes) != x.numel:
            raise ShapeError(f"reshape of {list(map(str, x.shape))} to {list(map(str, sizes))}")
        if x.op == "reshape":
            return self.reshape(x.inputs[0], sizes)
        return x if sizes == x.shape else self.make("reshape", (x,), sizes, x.dtype)

    def permute(self, x: Node, dims: Sequence[int]) -> Node:
        order = tuple(d % len(x.shape) for d in dims)
        if x.op == "permute":
            return self.permute(x.inputs[0], [x.attrs["dims"][d] for d in order])
        if order == tuple(range(len(order))):
            return x
        return self.make("permute", (x,), [x.shape[d] for d in order], x.dtype, dims=order)

    def expand(self, x: Node, shape: Iterable[Expr | int]) -> Node:
        """Broadcast dims of size 1; x has as many dims as ``shape``."""
        sizes = tuple(map(to_expr, shape))
        return x if sizes == x.shape else self.make("expand", (x,), sizes, x.dtype)

    def slice(
        self, x: Node, dim: int, start: Expr | int, length: Expr | int, step: int = 1
    ) -> Node:
        """Take the elements start, start + step, ... of a dim; a negative step walks back."""
        if to_expr(length) == x.shape[dim] and step == 1:
            return x
        shape = list(x.shape)
        shape[dim] = to_expr(length)
        return self.make("slice", (x,), shape, x.dtype, dim=dim, start=to_expr(start), step=step)

    def diagonal(
        self, x: Node, dims: tuple[int, int], starts: tuple[int, int], length: Expr | int
    ) -> Node:
        """Take the elements where two dims walk together: they go, and the last dim is new."""
        kept = [size for d, size in enumerate(x.shape) if d not in dims]
        shape = (*kept, to_expr(length))
        return self.make("diagonal", (x,), shape, x.dtype, dims=dims, starts=starts)

    def view_as_rank(self, x: Node, rank: int) -> Node:
        """Add leading dims of size 1."""
        return self.reshape(x, (*[const(1)] * (rank - len(x.shape)), *x.shape))

    def copy_of(self, node: Node, inputs: tuple[Node, ...]) -> Node:
        """Copy ``node`` over other inputs. Views fold; a changed operand shape is the caller's
        duty."""
        if node.op == "reshape" and _may_fold(node, inputs[0]):
            return self.reshape(inputs[0], node.shape)
        if node.op == "permute":
            return self.permute(inputs[0], node.attrs["dims"])
        return self._make(node.op, inputs, node.shape, node.dtype, node.order, node.attrs)


def _may_fold(reshape: Node, x: Node) -> bool:
    """Tell whether a reshape over another operand may be none, or one that reads what x reads."""
    return x.op == "reshape" or x.shape != reshape.inputs[0].shape


def _needs_nothing(op: str, inputs: Sequence[Node]) -> bool:
    """Tell whether a node without elements is computed. Copies are results in a place of their own;
    arguments keep their views."""
    if op == "copy":
        return False
    if OPS[op].kind is not Kind.VIEW:
        return OPS[op].kind is not Kind.OPAQUE
    source = inputs[0]
    while source.kind is Kind.VIEW:
        source = source.inputs[0]
    return source.op != "input"


def broadcast(what: str, *shapes: Shape) -> Shape:
    """Return the broadcast shape; sizes are equal only if the polynomials are."""
    rank = max((len(s) for s in shapes), default=0)
    result: list[Expr] = []
    for dim in range(-rank, 0):
        sizes = {s[dim] for s in shapes if len(s) >= -dim} - {const(1)}
        if len(sizes) > 1:
            raise ShapeError(f"{what}: sizes {sorted(map(str, sizes))} do not broadcast")
        result.append(sizes.pop() if sizes else const(1))
    return tuple(result)


Rule = Callable[[Builder, Node, tuple[Node, ...]], Node | None]


def rewrite(graph: Graph, rule: Rule, only: Callable[[Node], bool] | None = None) -> Graph:
    """Rebuild the graph: ``rule`` returns what replaces a node, or None to copy it. With ``only``,
    it is asked about such nodes alone, and a graph without them stays as it is: to rebuild that
    of a quantised model, which has 40,000 nodes, takes a quarter of a second."""
    asked = None if only is None else frozenset(filter(only, graph.nodes))
    if asked is not None and not asked:
        return graph
    builder = Builder()
    new: dict[Node, Node] = {}
    for node in graph.nodes:
        builder.origin = node.origin
        inputs = tuple(map(new.__getitem__, node.inputs))
        made = rule(builder, node, inputs) if asked is None or node in asked else None
        new[node] = made or builder.copy_of(node, inputs)
    return finish(
        builder,
        [new[i] for i in graph.inputs],
        [new[o] for o in graph.outputs],
        graph.hints,
        graph.num_saved,
    )


def finish(
    builder: Builder,
    inputs: Iterable[Node],
    outputs: Iterable[Node],
    hints: Mapping[str, int],
    num_saved: int = 0,
) -> Graph:
    """Build the graph of what the outputs (and writes) need; inputs stay even when unused."""
    inputs, outputs = tuple(inputs), tuple(outputs)
    live = set(outputs) | set(inputs) | {n for n in builder.nodes if n.op == "write"}
    for node in reversed(builder.nodes):
        if node in live:
            live.update(node.inputs)
    return Graph(tuple(n for n in builder.nodes if n in live), inputs, outputs, hints, num_saved)


def compute_nodes(graph: Graph) -> Iterator[Node]:
    """Yield nodes that do work: everything but inputs, constants and views."""
    for node in graph.nodes:
        if node.kind is not Kind.VIEW and node.op not in ("input", "constant"):
            yield node
