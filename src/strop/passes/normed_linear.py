"""Let a product normalise its own columns, where a batch norm by known statistics follows.

A network of 1x1 convolutions reads and writes each of their results once more for the norm, the sum
with the value that goes around a block, and the activation: 29 of ResNet-50's 49 kernels. Kernels
of ours for products do all that to sums that have not been rounded (``kernels.gemm.column_norm``):
eager rounds the product, the norm and the sum, this the end alone.

Weights stay as they are, and the norm's vectors are read where they lie: nothing is derived that
could be stale, out of range, or rounded a second time, as weights times factors would be
(docs/log/convolutions-and-gemms.md). A library has no such end, so other devices than Hopper keep
the kernel behind the product, and so do products that a kernel reads next, which does more.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from strop.ir.contractions import NORM_ACTIVATIONS, NORMED, RELU, SILU
from strop.ir.eight_bit import MARK
from strop.ir.graph import Builder, Graph, Node, rewrite
from strop.ir.ops import OPS, Kind
from strop.ir.parts import undone
from strop.options import Options
from strop.passes.gated_linear import fits
from strop.passes.linear_add import Users, is_sum, readers_of

PIECE = 8  # columns and depth are multiples of this: 16 bytes
LEAST_COLUMNS = 32  # of a tile: what is added is read for all of its columns


@dataclass(frozen=True, slots=True, eq=False)
class _Norm:
    """This is a linear, seen through views, and the norm of it, which is ``end``."""

    linear: Node
    views: tuple[Node, ...]
    vectors: tuple[Node, ...]  # mean, variance, factor, shift
    eps: float
    end: Node


@dataclass(frozen=True, slots=True, eq=False)
class _Chain:
    """This is a norm and what follows it, up to ``last``."""

    norm: _Norm
    last: Node
    added: Node | None = None
    activation: str = ""


def normed_linear(graph: Graph, options: Options) -> Graph:
    if "wgmma_gemm" in options.kernels_off:
        return graph
    chains = {chain.last: chain for chain in _Chains(graph).found()}
    if not chains:
        return graph
    twins = dict[Node, Node]()

    def rule(b: Builder, node: Node, inputs: tuple[Node, ...]) -> Node | None:
        twins.update(zip(node.inputs, inputs, strict=True))
        return _made(b, chains[node], twins) if node in chains else None

    return rewrite(graph, rule)


class _Walk:
    """Walk along values that are each read once, and that no user gets."""

    def __init__(self, start: Node, users: Users, given: Collection[Node]) -> None:
        self.at, self._users, self._given = start, users, given

    def goes_on(self, fits_here: Callable[[Node], bool]) -> Node | None:
        """Go to the only node that reads where this is, and return it, if it is as asked for."""
        readers = self._users[self.at]
        if len(readers) != 1 or self.at in self._given or not fits_here(readers[0]):
            return None
        self.at = readers[0]
        return self.at

    def norm(self) -> _Norm | None:
        """Go from a linear through a change of the dims' order, as of a 1x1 convolution's result,
        and through (x - mean) * (rsqrt(variance + eps) * factor) + shift."""
        linear = self.at
        view = self.goes_on(lambda node: node.op == "permute")
        views = (view,) if view else ()
        start = self.at
        less = self.goes_on(lambda node: _is(node, "sub", alpha=1) and node.inputs[0] is start)
        times = self.goes_on(lambda node: _is(node, "mul")) if less else None
        plus = self.goes_on(lambda node: _is(node, "add", alpha=1)) if times else None
        if less is None or times is None or plus is None or plus.dtype != linear.dtype:
            return None
        factors = _factors(_other(times, less))
        if factors is None:
            return None
        variance, factor, eps = factors
        read = (less.inputs[1], variance, factor, _other(plus, times))
        found = [_vector(value, linear, views) for value in read]
        vectors = tuple(vector for vector in found if vector is not None)
        return _Norm(linear, views, vectors, eps, plus) if len(vectors) == len(read) else None


class _Chains:
    """Find what products of ours are to end with."""

    def __init__(self, graph: Graph) -> None:
        self._users, self._given = graph.users(), graph.given()
        linears = (node for node in graph.nodes if _is_able(node))
        norms = (_Walk(node, self._users, self._given).norm() for node in linears)
        self._norms = {norm.end: norm for norm in norms if norm is not None}
        self._ends = set[Node]()  # of chains: they lie in memory

    def found(self) -> Iterator[_Chain]:
        """Yield each of them. Of two norms that are added to each other one is added to the
        other."""
        added = set[Node]()
        for norm in self._norms.values():
            chain = _Chain(norm, norm.end) if norm.end in added else self._behind(norm)
            if chain is not None:
                added |= {chain.added} if chain.added in self._norms else set()
                self._ends.add(chain.last)
                yield chain

    def _behind(self, norm: _Norm) -> _Chain | None:
        """Return what follows a norm, if a call reads its end: else a kernel computes all of it on
        its way."""
        walk = _Walk(norm.end, self._users, self._given)
        added = self._added(walk)
        if added is None:  # rounded all the same, as it is added to something later
            walk.goes_on(lambda node: node.op == "cast" and node.dtype == norm.end.dtype)
        start = walk.at
        last = walk.goes_on(lambda node: node.op in (RELU, SILU) and node.dtype == start.dtype)
        if walk.at in self._given or not self._is_stored(walk.at):
            return None
        return _Chain(norm, walk.at, added, last.op if last else NORM_ACTIVATIONS[0])

    def _added(self, walk: _Walk) -> Node | None:
        """Go through the sum with a value that lies in memory, and return that value. A norm is
        rounded before it is added."""
        norm = walk.at
        ahead = _Walk(norm, self._users, self._given)
        ahead.goes_on(lambda node: node.op == "cast" and node.dtype == norm.dtype)
        rounded = ahead.at
        total = ahead.goes_on(is_sum)
        other = _other(total, rounded) if total else None
        if total is None or other is None or not _is_alike(norm, total, other):
            return None
        if other not in self._ends and self._is_only_added(other):
            other = other.inputs[0] if other.op == "cast" else other
        elif not self._lies_in_memory(other):
            return None
        walk.at = total
        return other

    def _is_only_added(self, value: Node) -> bool:
        """Tell whether a value is a norm, rounded or not, which nothing reads but one sum: its
        product can store it."""
        norm = value.inputs[0] if value.op == "cast" else value
        alone = all(len(self._users[each]) == 1 for each in (value, norm))
        return norm in self._norms and alone and self._given.isdisjoint((value, norm))

    def _lies_in_memory(self, value: Node) -> bool:
        """Tell whether a value is stored for others than the sum."""
        base = value
        while OPS[base.op].has_all_once:
            base = base.inputs[0]
        if base.op in ("input", "constant") or base.kind in (Kind.VIEW, Kind.OPAQUE):
            return False
        return base in self._ends or base.kind is Kind.CONTRACTION or self._is_stored(base)

    def _is_stored(self, value: Node) -> bool:
        """Tell whether a call reads a value."""
        calls = (Kind.CONTRACTION, Kind.OPAQUE)
        return any(reader.kind in calls for reader in readers_of(value, self._users))


def _is_able(linear: Node) -> bool:
    """Tell whether it is a linear without biases, and not in 8 bits, as kernels take them."""
    is_plain = linear.op == "linear" and len(linear.inputs) == 2 and MARK not in linear.attrs
    if not is_plain or not fits(linear, PIECE, halves=1):
        return False
    return bool(linear.shape[-1].value >= LEAST_COLUMNS)


def _is_alike(norm: Node, total: Node, other: Node) -> bool:
    """Tell whether nothing is broadcast or converted."""
    looks = {(node.shape, node.dtype) for node in (norm, total, other)}
    return len(looks) == 1


def _vector(value: Node | None, linear: Node, views: Sequence[Node]) -> Node | None:
    """Return the argument that a value is a view of, if it has a number for each column."""
    if value is None or value.op != "reshape" or value.inputs[0].op != "input":
        return None
    (argument,), columns, last = value.inputs, linear.shape[-1], len(linear.shape) - 1
    dim = views[0].attrs["dims"].index(last) if views else last
    is_along = len(value.shape) == len(linear.shape) and value.shape[dim] == columns
    is_alike = argument.shape == (columns,) and argument.dtype == linear.dtype
    return argument if is_along and is_alike else None


def _is(node: Node, op: str, **attrs: Any) -> bool:
    return node.op == op and len(node.inputs) == 2 and dict(node.attrs) == attrs


def _other(node: Node, value: Node) -> Node | None:
    """Return the other operand of two; None where both are this value."""
    others = [operand for operand in node.inputs if operand is not value]
    return others[0] if len(others) == 1 else None


def _factors(value: Node | None) -> tuple[Node, Node, float] | None:
    """Return variance, factor and eps of rsqrt(variance + eps) * factor."""
    if value is None or not _is(value, "mul"):
        return None
    for root in value.inputs:
        factor = _other(value, root)
        if root.op != "rsqrt" or factor is None or not _is(root.inputs[0], "add", alpha=1):
            continue
        for eps in root.inputs[0].inputs:
            variance = _other(root.inputs[0], eps)
            number = eps.attrs.get("value") if eps.op == "constant" else None
            if variance is not None and isinstance(number, float):
                return variance, factor, number
    return None


def _made(b: Builder, chain: _Chain, twins: Mapping[Node, Node]) -> Node:
    """Make the product that ends so, and view it as the linear was seen."""
    norm = chain.norm
    b.origin = norm.linear.origin
    addend: tuple[Node, ...] = ()
    if chain.added is not None:
        value = twins[chain.added]
        for view in reversed(norm.views):
            value = undone(b, view, value)
        addend = (value,)
    factors = tuple(twins[operand] for operand in norm.linear.inputs)
    vectors = tuple(twins[vector] for vector in norm.vectors)
    how: dict[str, Any] = {"eps": norm.eps, "activation": chain.activation}
    made = (*factors, *addend, *vectors)
    found = b.make(NORMED[len(addend)], made, norm.linear.shape, chain.last.dtype, **how)
    for view in norm.views:
        found = b.copy_of(view, (found,))
    return found
