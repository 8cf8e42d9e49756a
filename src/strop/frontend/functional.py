"""Turn in-place calls of a traced graph into calls that return a new value.

``y.add_(1)`` becomes ``y = y + 1`` where only the mutated value itself is read afterwards. Where
the tensor, or another view of it, is read later, what is read is made anew from the whole
(``view_writes.py``). Where that is not known how, ``capture`` asks torch to take the writes out. A
module that writes into its arguments or its state is not captured, but for a training step that
writes whole buffers, as batch norms do; it runs in eager.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from strop.errors import CaptureError
from strop.frontend.view_writes import can_repeat, can_undo, unviewed, viewed_again

_NAMED_OTHERWISE = {
    torch.ops.aten.normal_.default: torch.ops.aten.normal_functional.default,
    torch.ops.aten.bernoulli_.float: torch.ops.aten.bernoulli.p,
    torch.ops.aten.pow_.Tensor: torch.ops.aten.pow.Tensor_Tensor,
    torch.ops.aten.floor_divide_.Tensor: torch.ops.aten.floor_divide.default,
}


_CUTS = {  # calls whose results are parts of one value, without an element in two of them
    torch.ops.aten.split.Tensor,
    torch.ops.aten.split_with_sizes.default,
    torch.ops.aten.unbind.int,
    torch.ops.aten.unsafe_split.Tensor,
    torch.ops.aten.unsafe_split_with_sizes.default,
}


_COPIES = (torch.ops.aten.clone.default, torch.ops.aten._to_copy.default)


class WriteThroughViewError(CaptureError):
    """A tensor is written through one view and read through another."""


def make_functional(gm: GraphModule, writable: Collection[Node] = ()) -> dict[Node, Node]:
    """Return what is in each of the ``writable`` placeholders in the end, of those that are
    written. Raises CaptureError for a mutation that cannot be taken out."""
    mutable = [
        node
        for node in gm.graph.nodes
        if isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable
    ]
    if not mutable:
        return {}
    writes = _Writes(gm.graph, writable)
    writes.guard_copies(mutable)
    for node in mutable:
        writes.take_out(node)
    gm.recompile()
    return writes.in_the_end


class OutsideWriteError(CaptureError):
    """A forward writes into what was there before the call. Dynamo's graphs may, ours not."""


class _Writes:
    """Take writes out of a graph, the first one first."""

    def __init__(self, graph: Graph, writable: Collection[Node]) -> None:
        self._graph = graph
        self._writable = {storage_of(fx): fx for fx in writable}
        self.in_the_end: dict[Node, Node] = {}  # placeholders that are written, and by what
        self._over: dict[Node, Node] = {}  # what was written -> what it was written over
        # What stands for a write has the write's place.
        self._places = {node: place for place, node in enumerate(graph.nodes)}
        outer = (fx for fx in graph.nodes if fx.op in ("placeholder", "get_attr"))
        self._outer = {storage_of(fx) for fx in outer}
        self._lying: defaultdict[int | None, list[Node]] = defaultdict(list)  # by their memory
        for fx in graph.nodes:
            self._lying[storage_of(fx)].append(fx)

    def guard_copies(self, writes: Sequence[Node]) -> None:
        """Guard that no size is 1 of a value that ``contiguous`` and its like copy, where the copy
        or the value is written and the other one is read. With a size of 1 a value may have the
        order that is asked for, and torch copies nothing: the write shows in both."""
        for copy, source in _copies_for_order(self._graph):
            memory, other = storage_of(copy), storage_of(source)
            if any(
                self._places[write] > self._places[copy]
                and (
                    (storage_of(write) == memory and self._may_show(other, write))
                    or (storage_of(write) == other and self._may_show(memory, write))
                )
                for write in writes
            ):
                for size in source.meta["val"].shape:
                    bool(size == 1)  # a guard

    def _may_show(self, memory: int | None, write: Node) -> bool:
        """Tell whether memory is read behind a write, or is the caller's."""
        place = self._places[write]
        lying = self._lying[memory]
        return memory in self._outer or any(self._later_users(fx, place) for fx in lying)

    def take_out(self, write: Node) -> None:
        target, overload = write.args[0], _functional_overload(write.target)
        if overload is None or not isinstance(target, Node):
            raise CaptureError(f"{write.target} has no form without mutation")
        whole = self._writable.get(storage_of(target))
        if whole is not None and self._overwritten(target) is not whole:
            raise OutsideWriteError(f"{write.target} writes into a part of a buffer")
        if whole is None and storage_of(target) in self._outer:  # itself, or a view of it
            raise OutsideWriteError(f"{write.target} writes into an argument or a weight")
        place, lying = self._places[write], self._lying[storage_of(write)]
        lying.remove(write)
        earlier = [fx for fx in lying if self._places[fx] < place and fx is not target]
        read = [
            fx for fx in earlier if self._later_users(fx, place) and not self._are_apart(fx, target)
        ]
        with self._graph.inserting_after(write):
            kwargs = {**_defaults(write, overload), **write.kwargs}
            value = self._graph.call_function(overload, write.args, kwargs)
        self._add(value, write.meta, place)
        self._over[value] = target
        if whole is not None:
            self.in_the_end[whole] = value
        write.replace_all_uses_with(value)
        value.name = write.name
        self._graph.erase_node(write)
        if read:
            self._write_through(target, value, read, place)
        else:
            self._read_instead(target, value, place)

    def _write_through(self, target: Node, value: Node, read: Sequence[Node], place: int) -> None:
        """Let later readers of the tensor that ``target`` is a view of see ``value`` in it."""
        chains = {fx: views_to(fx) for fx in (target, *read)}
        root, views = chains[target]
        if not can_undo(views) or not all(
            of is root and can_repeat(chain) for of, chain in chains.values()
        ):
            raise WriteThroughViewError("a tensor is written through a view that has no inverse")
        users = {fx: self._later_users(fx, place) for fx in chains}
        users[target] += [user for user in value.users if user not in users[target]]
        with self._graph.inserting_before(value.next):
            whole = value
            for view in reversed(views):
                whole = unviewed(self._graph, view, whole)
                self._add(whole, view.args[0].meta, place)  # type: ignore[union-attr]
                for asked in whole.all_input_nodes:  # for sizes
                    self._places.setdefault(asked, place)
            for fx, (_, chain) in chains.items():
                shown = whole
                for view in chain:
                    shown = viewed_again(self._graph, view, shown)
                    self._add(shown, view.meta, place)
                for user in users[fx]:
                    user.replace_input_with(value if fx is target else fx, shown)
                    user.replace_input_with(fx, shown)

    def _read_instead(self, target: Node, value: Node, place: int) -> None:
        for user in self._later_users(target, place):
            user.replace_input_with(target, value)

    def _are_apart(self, one: Node, other: Node) -> bool:
        """Tell whether two values lie in different pieces of what one call has cut."""
        pieces = dict(_pieces(self._overwritten(one)))
        return any(
            pieces.get(cut, number) != number for cut, number in _pieces(self._overwritten(other))
        )

    def _overwritten(self, fx: Node) -> Node:
        """Return the value in whose memory ``fx`` has been written, itself if it was not."""
        while fx in self._over:
            fx = self._over[fx]
        return fx

    def _later_users(self, fx: Node, place: int) -> list[Node]:
        return [user for user in fx.users if self._places[user] > place]

    def _add(self, node: Node, meta: dict[str, Any], place: int) -> None:
        node.meta = dict(meta)
        self._places[node] = place
        self._lying[storage_of(node)].append(node)


def _copies_for_order(graph: Graph) -> Iterator[tuple[Node, Node]]:
    """Yield values that torch has copied to have them in an order that it names, and of what."""
    for fx in graph.nodes:
        if fx.target in _COPIES and "memory_format" in fx.kwargs:
            (source,) = fx.all_input_nodes
            if source.meta["val"].dtype is fx.meta["val"].dtype:
                yield fx, source


def _functional_overload(overload: Any) -> Any:
    """Turn aten.add_.Tensor into aten.add.Tensor; None when there is none or more than self is
    written."""
    if overload in _NAMED_OTHERWISE:
        return _NAMED_OTHERWISE[overload]
    schema = overload._schema
    written = [a for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    name = schema.name.removeprefix("aten::")
    if written != schema.arguments[:1] or not name.endswith("_") or "::" in name:
        return None
    plain = f"__{name[3:]}" if name.startswith("__i") else name[:-1]  # __ilshift__
    packet = getattr(torch.ops.aten, plain, None)
    return getattr(packet, overload._overloadname, None)


def _defaults(node: Node, overload: Any) -> dict[str, Any]:
    """Return arguments that the trace has left out because they are the defaults of the call in
    place, where ``overload`` has another default or none: 0.5 of ``bernoulli_``."""
    others = {a.name: a for a in overload._schema.arguments}
    return {
        a.name: a.default_value
        for a in node.target._schema.arguments[len(node.args) :]  # type: ignore[union-attr]
        if a.has_default_value()
        and a.name in others
        and a.name not in node.kwargs
        and not (
            others[a.name].has_default_value() and others[a.name].default_value == a.default_value
        )
    }


def storage_of(node: Node) -> int | None:
    """Return which memory a traced value lies in; views share it."""
    value = node.meta.get("val")
    return memory_of(value) if isinstance(value, torch.Tensor) else None


def memory_of(tensor: torch.Tensor) -> int:
    """Return a number for the memory that a tensor lies in."""
    return int(tensor.untyped_storage()._cdata)


def view_root(fx: Node) -> Node:
    """Follow views from ``fx`` to the value that all of them look at; ``fx`` if it is no view."""
    return views_to(fx)[0]


def _pieces(fx: Node) -> Iterator[tuple[Node, int]]:
    """Yield the calls that have cut what ``fx`` looks at, and the number of its piece. Pieces of a
    view may be the same memory, as those of an expanded one are: nothing is said of them."""
    root, views = views_to(fx)
    for view in (root, *views):
        cut = view.args[0] if view.target is operator.getitem else None
        if isinstance(cut, Node) and cut.target in _CUTS and not views_to(cut.args[0])[1]:  # type: ignore[arg-type]
            yield cut, view.args[1]  # type: ignore[misc]


def views_to(fx: Node) -> tuple[Node, list[Node]]:
    """Return the value that ``fx`` looks at, and the views on the way from there to it."""
    views: list[Node] = []
    while (whole := _viewed(fx)) is not None:
        views.insert(0, fx)
        fx = whole
    return fx, views


def _viewed(fx: Node) -> Node | None:
    """Return what ``fx`` is a view of; None for what an operator computes, though torch's has
    written that into the memory of its argument."""
    made = fx.args[0] if fx.target is operator.getitem else fx  # by split, unbind
    schema = getattr(made.target, "_schema", None) if isinstance(made, Node) else None
    if schema is None or schema.is_mutable:
        return None
    if all(returned.alias_info is None for returned in schema.returns):
        return None
    source = made.args[0]  # type: ignore[union-attr]
    is_view = isinstance(source, Node) and storage_of(source) == storage_of(fx)
    return source if is_view else None  # type: ignore[return-value]
