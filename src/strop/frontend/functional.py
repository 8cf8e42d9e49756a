"""Turn in-place calls of a traced graph into calls that return a new value.

``y.add_(1)`` becomes ``y = y + 1`` where nobody can see the difference: only the mutated value
itself is read afterwards. Where another view still reads the tensor, ``capture`` asks torch to take
the writes out. A module that writes into its arguments or its state is not captured; it runs in
eager.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from strop.errors import CaptureError

_NAMED_OTHERWISE = {
    torch.ops.aten.normal_.default: torch.ops.aten.normal_functional.default,
    torch.ops.aten.bernoulli_.float: torch.ops.aten.bernoulli.p,
}


class WriteThroughViewError(CaptureError):
    """A tensor is written through one view and read through another."""


def make_functional(gm: GraphModule) -> None:
    """Raises CaptureError for a mutation that cannot be taken out."""
    changed = False
    for node in list(gm.graph.nodes):
        if isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable:
            _replace(gm.graph, node)
            changed = True
    if changed:
        gm.recompile()


def _replace(graph: Graph, node: Node) -> None:
    target, overload = node.args[0], _functional_overload(node.target)
    if overload is None or not isinstance(target, Node):
        raise CaptureError(f"{node.target} has no form without mutation")
    outer = {storage_of(fx) for fx in graph.nodes if fx.op in ("placeholder", "get_attr")}
    if storage_of(target) in outer:  # itself, or a view of it
        raise CaptureError(f"{node.target} writes into an argument or a weight")
    nodes = list(graph.nodes)
    position = nodes.index(node)
    later = set(nodes[position + 1 :])
    for other in nodes[:position]:
        is_alias = other is not target and storage_of(other) == storage_of(node)
        if is_alias and not later.isdisjoint(other.users):
            raise WriteThroughViewError(
                f"{node.target} writes into a tensor that another view reads later"
            )
    with graph.inserting_after(node):
        kwargs = {**_defaults(node, overload), **node.kwargs}
        value = graph.call_function(overload, node.args, kwargs)
    value.name, value.meta = node.name, node.meta
    node.replace_all_uses_with(value)
    target.replace_all_uses_with(value, delete_user_cb=lambda user: user in later)
    graph.erase_node(node)


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
    return value.untyped_storage()._cdata if isinstance(value, torch.Tensor) else None


def view_root(fx: Node) -> Node:
    """Follow views from ``fx`` to the value that all of them look at; ``fx`` if it is no view."""
    while (whole := _viewed(fx)) is not None:
        fx = whole
    return fx


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
