"""Note the nodes that a part of a trace has added to its graph, and add copies of them.

Copies have the fake values of their originals, but for those in memory that somebody outside can
see, what was given to the part and its results, and in memory that the part writes into. Two copies
of another node seem to share memory, of which all of them are only made and read.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch._subclasses import FakeTensor
from torch.fx import Node, Proxy
from torch.fx.experimental.proxy_tensor import (
    disable_proxy_modes_tracing,
    snapshot_fake,
    track_tensor_tree,
)

from strop.frontend.draws import draws
from strop.frontend.fake_tensors import fake_memory, fake_view
from strop.frontend.functional import memory_of, storage_of
from strop.frontend.numbers import numbers_in
from strop.frontend.regions import mark, regions_of, unmark

_AS_STRIDED = torch.ops.aten.as_strided.default  # asks how an argument lies in memory
_LIFT, _LIFT_COPY = torch.ops.aten.lift_fresh.default, torch.ops.aten.lift_fresh_copy.default


@dataclass(frozen=True, slots=True)
class RecordedNodes:
    """Hold the nodes that a part of a trace has added. ``given`` are those of the tensors that it
    began with; each of its results, ``leaves``, is a node or a plain value."""

    path: str
    given: tuple[Node, ...]
    nodes: tuple[Node, ...]
    leaves: tuple[Any, ...]
    own: frozenset[int]  # memory that each copy has for itself
    regions: tuple[tuple[Node, ...], ...]  # within it, which are computed again


def record(
    path: str, last: Node, given: Sequence[Node], leaves: Iterable[Any], tracer: Any
) -> RecordedNodes | None:
    """Note what was added behind ``last``. ``given`` are nodes of tensors and of numbers that are
    inputs. Return None if it cannot be copied: it reads what was not given, or what Python has
    computed of these numbers, draws random numbers, or writes into what was given."""
    nodes = _own_nodes(nodes_behind(last, tracer))
    inside, known = set(nodes), set(given)
    numbers = {node for node in given if is_size(node)}
    inputs = frozenset[int]().union(*map(_numbers_of, numbers))
    memory = {storage_of(node) for node in given if node not in numbers}
    memory |= {storage_of(node) for node in nodes if node.target is _LIFT}  # one for all copies
    for node in nodes:
        sources = node.all_input_nodes
        if not all(s in inside or s in known or is_size(s) or is_literal(s) for s in sources):
            return None
        if not _may_repeat(node, memory) or _reads_computed(node, numbers, inputs):
            return None
    found = [_noted(leaf, inside | known, tracer) for leaf in leaves]
    if NotImplemented in found:
        return None
    written = (written_by(node) for node in nodes)
    seen = [n for n in (*found, *chain.from_iterable(written)) if isinstance(n, Node)]
    own = frozenset(s for node in seen for s in _storages(node.meta.get("val"))) - memory
    return RecordedNodes(path, tuple(given), nodes, tuple(found), own, regions_of(nodes))


def copy_nodes(
    known: RecordedNodes,
    given: Sequence[Node],
    path: str,
    origins: dict[str, str],
    tracer: Any,
) -> Mapping[Node, Node]:
    """Add copies of the nodes that are known, for what is ``given`` now. Return what stands for
    each of them, and for what was given."""
    nodes = dict(zip(known.given, given, strict=True))
    values = _values(known, nodes)
    for node in known.nodes:
        copy = nodes[node] = tracer.graph.node_copy(node, lambda n: nodes.get(n, n))
        unmark(copy)  # of what is around the original
        origin = origins.get(node.name, known.path)
        origins[copy.name] = path + origin.removeprefix(known.path)
        if node in values:
            copy.meta["val"] = values[node]
    for region in known.regions:
        mark(nodes[node] for node in region)
    return nodes


def tensor_of(node: Node, tracer: Any) -> Tensor:
    """Return a new tensor for which this node stands."""
    with disable_proxy_modes_tracing(), torch.no_grad():
        value = snapshot_fake(node.meta["val"])
    assert value is not None
    proxy = Proxy(node, tracer)
    found: Tensor = track_tensor_tree(value, proxy, constant=None, tracer=tracer)
    return found


def node_of(tensor: Tensor, tracer: Any) -> Node | None:
    """Return the node that stands for a tensor, or None for one that the graph does not know."""
    slot = tracer.tensor_tracker.get(tensor)
    return None if slot is None or slot.constant is not None else slot.proxy.node


def node_of_number(number: torch.SymFloat, tracer: Any) -> Node | None:
    """Return the node of a number that is an input, or None if it is known by no such node."""
    slot = tracer.symnode_tracker.get(number)
    node: Node | None = None if slot is None else slot.force().node
    return node if node is not None and node.op == "placeholder" else None


def last_node(tracer: Any) -> Node:
    last: Node = next(iter(reversed(tracer.graph.nodes)))
    return last


def _storages(value: Any) -> set[int]:
    return {memory_of(v) for v in pytree.tree_leaves(value) if isinstance(v, Tensor)}


def _values(known: RecordedNodes, given: Mapping[Node, Node]) -> dict[Node, Any]:
    """Return the fake values of copies whose memory is not that of their originals."""
    bases: dict[int | None, Any] = {
        storage_of(n): now.meta.get("val") for n, now in given.items() if not is_size(n)
    }
    seen = {storage_of(leaf) for leaf in known.leaves if isinstance(leaf, Node)}
    values: dict[Node, Any] = {}

    def moved(value: Any) -> Any:
        if not isinstance(value, FakeTensor):
            return value
        storage = memory_of(value)
        if storage not in bases and storage not in known.own:
            return value
        if storage not in bases:
            # nobody computes with what is not seen outside
            room = value.shape if storage in seen else (0,)
            bases[storage] = fake_memory(value.fake_mode, room, value.dtype)
        sizes, strides, offset = value.shape, value.stride(), value.storage_offset()
        return fake_view(value, bases[storage], sizes, strides, offset)

    with disable_proxy_modes_tracing(), torch.no_grad():
        for node in known.nodes:
            value = node.meta.get("val")
            found = _storages(value)
            if not found.isdisjoint(bases) or not found.isdisjoint(known.own):
                values[node] = pytree.tree_map(moved, value)
    return values


def _noted(leaf: Any, nodes: set[Node], tracer: Any) -> Any:
    """Return what stands for a result, or NotImplemented."""
    if not isinstance(leaf, Tensor):
        is_plain = leaf is None or isinstance(leaf, bool | int | float | str | torch.SymInt)
        return leaf if is_plain else NotImplemented
    node = node_of(leaf, tracer)
    return node if node in nodes else NotImplemented


def _own_nodes(nodes: Sequence[Node]) -> tuple[Node, ...]:
    """Leave out sizes and literals, which copies share, but for sizes that are asked of a tensor
    among these."""
    found: dict[Node, None] = {}
    for node in nodes:
        is_asked = any(source in found for source in node.all_input_nodes)
        if is_asked or not (is_size(node) or is_literal(node)):
            found[node] = None
    return tuple(found)


def is_literal(node: Node) -> bool:
    """Tell whether a node is a tensor that code has written out as numbers (``torch.tensor([0,
    4])``): like code writes the same ones."""
    return node.op == "get_attr" and all(user.target in (_LIFT, _LIFT_COPY) for user in node.users)


def is_size(node: Node) -> bool:
    """Tell whether a node is a size or another number."""
    return isinstance(node.meta.get("val"), torch.SymInt | torch.SymFloat | torch.SymBool)


def _numbers_of(node: Node) -> frozenset[int]:
    return numbers_in(node.meta["val"].node.expr)


def _reads_computed(node: Node, numbers: Set[Node], inputs: Set[int]) -> bool:
    """Tell whether a node reads what is computed of these ``inputs``, for which ``numbers``
    stand."""
    if not inputs:
        return False
    others = (s for s in node.all_input_nodes if is_size(s) and s not in numbers)
    return any(not inputs.isdisjoint(_numbers_of(other)) for other in others)


def _may_repeat(node: Node, given: set[int | None]) -> bool:
    """Tell whether a node computes from its arguments alone, and writes to none that is given."""
    if node.op != "call_function" or node.target is _AS_STRIDED or draws(node):
        return False
    return given.isdisjoint(map(storage_of, written_by(node)))


def written_by(node: Node) -> Iterator[Node]:
    """Yield the tensors that a node writes to."""
    schema = getattr(node.target, "_schema", None)
    if schema is None or not schema.is_mutable:
        return
    for place, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            is_by_place = place < len(node.args)
            value = node.args[place] if is_by_place else node.kwargs.get(argument.name)
            yield from (leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Node))


def nodes_behind(last: Node, tracer: Any) -> list[Node]:
    """Return what was added to the graph after ``last``."""
    nodes = []
    for node in reversed(tracer.graph.nodes):
        if node is last:
            break
        nodes.append(node)
    return nodes[::-1]
