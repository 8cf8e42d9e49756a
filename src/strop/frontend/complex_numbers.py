"""Take complex numbers apart into real and imaginary parts, in a traced graph without writes.

Kernels read no complex numbers, so that a rotary embedding in complex numbers would be three calls
into torch for each query and key. Here each complex value becomes two real ones, by the rules of
``complex_rules``, and the importer sees real arithmetic. Complex arguments and weights become
arguments of pairs of real numbers, which they are in memory. One call of ``torch.complex`` makes
what leaves the graph, or what a call without a rule reads. What eager gives back as a view of
something complex stays the view that it is.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch._subclasses import FakeTensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from strop.frontend.complex_rules import OF_REAL, REAL_OF, RULES
from strop.frontend.fake_tensors import fake_empty
from strop.frontend.functional import storage_of, views_to

aten = torch.ops.aten
Parts = tuple[Any, Any]


def without_complex(gm: GraphModule, origins: Mapping[str, str]) -> tuple[Graph, Mapping[str, str]]:
    """Return a graph of real arithmetic, and where its nodes come from; ``gm``'s own graph if there
    is nothing to take apart. Arguments that are complex numbers may be pairs of real ones in it."""
    if not any(map(is_complex, gm.graph.nodes)):
        return gm.graph, origins
    apart = Apart(gm, origins)
    apart.read_pairs()
    return apart.graph, apart.origins


def take_apart(gm: GraphModule) -> None:
    """Make the graph of ``gm`` one of real arithmetic, with the same arguments."""
    if any(map(is_complex, gm.graph.nodes)):
        gm.graph = Apart(gm, {}).graph


def is_complex(node: Node) -> bool:
    """Tell whether all that a node gives is complex numbers that can be taken apart."""
    leaves = pytree.tree_leaves(node.meta.get("val"))
    return bool(leaves) and all(isinstance(v, Tensor) and v.dtype in REAL_OF for v in leaves)


class Apart:
    """Make a graph with the same results as that of ``gm``: rules call its methods."""

    def __init__(self, gm: GraphModule, origins: Mapping[str, str]) -> None:
        self.graph, self.origins = Graph(), dict(origins)
        self._module, self._now = gm, next(iter(gm.graph.nodes))
        self._whole: dict[Node, Node] = {}
        self._parts: dict[Node, Parts] = {}
        kept = set(_kept(gm.graph))
        for node in gm.graph.nodes:
            self._now = node
            made = self._taken(node)
            if made is None or node in kept:
                self._whole[node] = self.graph.node_copy(node, self.whole)
            if isinstance(made, tuple):
                self._parts[node] = made
            elif made is not None and node not in kept:
                made.meta["val"] = node.meta["val"]
                self._whole[node] = made
        self._drop_unread()

    def read_pairs(self) -> None:
        """Let arguments be real numbers where they are read as pairs of them alone."""
        for node in self.graph.nodes:
            self._seen_as_pairs(node)

    def _taken(self, node: Node) -> Any:
        """Return the parts of a complex value, or a real one that is made of parts; else None."""
        if node.op != "call_function":
            return None
        if node.target is operator.getitem:
            source = self._parts.get(node.args[0])  # type: ignore[arg-type]
            return source and tuple(self.call(operator.getitem, p, node.args[1]) for p in source)
        rule = RULES.get(node.target)
        is_about_complex = is_complex(node) or any(map(is_complex, node.all_input_nodes))
        return rule(self, node) if rule and (is_about_complex or node.target in OF_REAL) else None

    def _drop_unread(self) -> None:
        """Drop what was made and nobody reads: each rule makes both parts."""
        for node in reversed(self.graph.nodes):
            is_new = node.meta.get("apart") or is_complex(node)
            if is_new and node.op == "call_function" and not node.users and not _writes(node):
                self.graph.erase_node(node)

    def _seen_as_pairs(self, node: Node) -> None:
        readers = [r for r in node.users if isinstance(r.meta.get("val"), Tensor)]  # not its sizes
        if node.op not in ("placeholder", "get_attr") or not readers:
            return
        if all(r.target is aten.view_as_real.default and r.meta.get("apart") for r in readers):
            value = self._value_of(node)
            strides = (*(2 * step for step in value.stride()), 1)
            dtype = REAL_OF[value.dtype]
            node.meta["val"] = fake_of(value, dtype, (*value.shape, 2), strides)
            node.meta["pairs"] = True
            for reader in readers:
                reader.replace_all_uses_with(node)
                self.graph.erase_node(reader)

    def whole(self, node: Node) -> Node:
        """Return what stands for a node of the old graph, parts joined."""
        if node not in self._whole:
            real, imaginary = self._parts[node]
            self._whole[node] = self.call(aten.complex.default, real, imaginary)
            self._whole[node].meta["val"] = node.meta["val"]
        return self._whole[node]

    def is_apart(self, value: Any) -> bool:
        """Tell whether a value of the old graph is computed as two real ones."""
        return isinstance(value, Node) and value in self._parts

    def parts(self, value: Any, dtype: torch.dtype) -> Parts:
        """Return real and imaginary part of a node of the old graph, or a number. ``dtype`` is that
        of the parts."""
        if not isinstance(value, Node):
            return (value.real, value.imag) if isinstance(value, complex) else (value, 0.0)
        if not is_complex(value):
            real = self.cast(self.whole(value), dtype)
            return real, self.call_like(real, aten.zeros_like.default, real)
        if value not in self._parts:
            self._parts[value] = self._looked_at(value)
        real, imaginary = (self.cast(part, dtype) for part in self._parts[value])
        return real, imaginary

    def _looked_at(self, value: Node) -> Parts:
        """Look at a complex value in memory as at real ones."""
        whole, given = self.whole(value), self._value_of(value)
        if given.is_conj():
            whole = self.call(aten.resolve_conj.default, whole)
            whole.meta["val"] = fake_of(given, given.dtype, given.shape, given.stride())
        pair = self.call(aten.view_as_real.default, whole)
        pair.meta["val"] = fake_of(given, REAL_OF[given.dtype], (*given.shape, 2), _dense(given))
        parts = tuple(self.call(aten.select.int, pair, -1, place) for place in (0, 1))
        for part in parts:
            part.meta["val"] = _like(given)
        return parts  # type: ignore[return-value]

    def _value_of(self, node: Node) -> Tensor:
        given = node.meta.get("val")
        value: Tensor = getattr(self._module, str(node.target)) if given is None else given
        return value

    def cast(self, node: Any, dtype: torch.dtype) -> Any:
        if not isinstance(node, Node) or not isinstance(node.meta["val"], Tensor):
            return node
        if node.meta["val"].dtype == dtype:
            return node
        made = self.call(aten._to_copy.default, node, dtype=dtype)
        given = node.meta["val"]
        made.meta["val"] = fake_of(given, dtype, given.shape, given.stride())
        return made

    def call(self, target: Any, *args: Any, **kwargs: Any) -> Node:
        """Add a call, which gives real numbers in the sizes of the node that is taken apart."""
        name = f"{self._now.name}_part"
        node = self.graph.create_node("call_function", target, args, kwargs, name)
        node.meta = {k: v for k, v in self._now.meta.items() if k != "val"} | {"apart": True}
        node.meta["val"] = pytree.tree_map(_like, self._now.meta.get("val"))
        if self._now.name in self.origins:
            self.origins[node.name] = self.origins[self._now.name]
        return node

    def call_like(self, like: Node, target: Any, *args: Any) -> Node:
        """Add a call that gives numbers in the sizes and of the type of another node."""
        node = self.call(target, *args)
        node.meta["val"] = like.meta["val"]
        return node

    def mapped(self, argument: Any, place: int, dtype: torch.dtype) -> Any:
        """Return an argument in which each tensor is its part at ``place``."""
        if isinstance(argument, complex | float | int) and not isinstance(argument, bool):
            return self.parts(argument, dtype)[place]
        return map_arg(argument, lambda node: self.parts(node, dtype)[place])

    def copied(self, argument: Any) -> Any:
        return map_arg(argument, self.whole)


def _writes(node: Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def _kept(graph: Graph) -> Iterator[Node]:
    """Yield views on the way to a result that has to lie in the memory of something complex."""
    returned = [item for item in _output(graph) if isinstance(item, Node)]
    outside = {storage_of(n) for n in graph.nodes if n.op in ("placeholder", "get_attr")}
    outside |= {storage_of(item) for item in returned if is_complex(item)}
    for item in returned:
        root, views = views_to(item)
        if not any(map(is_complex, (root, *views))):
            continue
        if storage_of(item) in outside or not is_complex(root):
            yield from views
            yield from (v.args[0] for v in views if v.target is operator.getitem)  # type: ignore[misc]


def _output(graph: Graph) -> list[Any]:
    (output,) = graph.find_nodes(op="output")
    return pytree.tree_leaves(output.args[0])


def _like(value: Any) -> Any:
    """Return what stands for a part of a complex tensor, or for a real one like this."""
    if not isinstance(value, Tensor):
        return value
    return fake_of(value, REAL_OF.get(value.dtype, value.dtype), value.shape, value.stride())


def _dense(value: Tensor) -> list[Any]:
    """Return the strides of a tensor of pairs, of which each is a number of ``value``."""
    strides: list[Any] = [1]
    step: Any = 2
    for size in reversed(value.shape):
        strides.insert(0, step)
        step = step * size
    return strides


def fake_of(value: Tensor, dtype: torch.dtype, shape: Sequence[Any], strides: Any) -> Tensor:
    """Return what stands for another tensor on the device of ``value``, in memory of its own."""
    if isinstance(value, FakeTensor):
        return fake_empty(value.fake_mode, shape, strides, dtype, value.device)
    return torch.empty_strided(shape, strides, dtype=dtype, device=value.device)
