"""Trace a block that repeats once: later ones get copies of the first one's nodes.

A diffusion transformer is some fifty blocks of one class. Of two whose modules, settings and
arguments are alike (``block_look.py`` says what that is), the second computes what the first does,
from other weights. While a block runs under the tracer its nodes are noted; where a block is like a
noted one, its forward does not run: the nodes are copied, with its own weights and arguments in
their places. The graph is the one that a whole trace gives, so fusion crosses the borders of
blocks as ever.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.fx import Node, Proxy
from torch.fx.experimental.proxy_tensor import (
    disable_proxy_modes_tracing,
    get_proxy_mode,
    track_tensor_tree,
)

from strop.frontend.block_look import Look, look_at, module_look
from strop.frontend.layout_reads import LayoutReads

if TYPE_CHECKING:
    from strop.frontend.capture import Watch

_LEAST_PARTS = 3  # modules in a block, with itself: to look at a smaller one takes as long


@dataclass(frozen=True, slots=True)
class _Given:
    """Stand for a result that is argument or weight ``number`` itself."""

    number: int


@dataclass(frozen=True, slots=True)
class RecordedBlock:
    """Hold what a block has added to the graph. ``given`` are the nodes of its tensors, arguments
    before weights. ``leaves`` of its result are nodes, ``_Given``, or plain values."""

    path: str
    given: tuple[Node, ...]
    nodes: tuple[Node, ...]
    leaves: tuple[Any, ...]
    spec: pytree.TreeSpec
    own_storages: frozenset[int]  # of results; all other memory that is not given is the block's
    kept: object  # what the look at the block named by its id


class RepeatedBlocks:
    """Copy the nodes of blocks that are like earlier ones."""

    def __init__(
        self, module: nn.Module, origins: dict[str, str], reads: LayoutReads, watch: Watch
    ) -> None:
        self._origins, self._reads, self._watch = origins, reads, watch
        self._paths = {id(part): path for path, part in module.named_modules()}
        self._blocks = list(_candidates(module))
        self._known: dict[Hashable, RecordedBlock | None] = {}  # None: has to run
        self.num_copied = 0

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Stand before the forwards of blocks within the body."""
        for block in self._blocks:
            forward = functools.partial(self._run, block, block.forward)
            block.__dict__["forward"] = functools.update_wrapper(forward, block.forward)
        try:
            yield
        finally:
            for block in self._blocks:
                block.__dict__.pop("forward", None)

    def _run(
        self, block: nn.Module, forward: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Any:
        mode, surroundings = get_proxy_mode(), self._watch.surroundings
        if mode is None:  # another thread's call
            return forward(*args, **kwargs)
        with _unwatched():
            look = look_at(block, (args, kwargs), mode.tracer)
        if look is None:
            return forward(*args, **kwargs)
        with _unwatched():
            key = (look.key, tuple(map(self._reads.is_own, look.tensors)), surroundings())
            if (known := self._known.get(key)) is not None:
                self.num_copied += 1
                return self._copied(known, block, look, mode.tracer)
        last, num_asked = _last_node(mode.tracer), self._reads.num_asked
        result = forward(*args, **kwargs)
        if key in self._known:
            return result
        with _unwatched():
            self._known[key] = None
            is_same = module_look(block) == look.module and key[-1] == surroundings()
            # where a value came from may decide what a question about its memory gives
            is_same = is_same and self._reads.num_asked == num_asked
            if is_same and look.holds((args, kwargs)):
                path = self._paths[id(block)]
                self._known[key] = _recorded(path, last, look, result, mode.tracer)
        return result

    def _copied(self, known: RecordedBlock, block: nn.Module, look: Look, tracer: Any) -> Any:
        """Add copies of the known nodes to the graph, and return the block's result."""
        path, nodes = self._paths[id(block)], dict(zip(known.given, look.nodes, strict=True))
        values = _values(known, look.tensors)
        for node in known.nodes:
            copy = nodes[node] = tracer.graph.node_copy(node, lambda n: nodes.get(n, n))
            origin = self._origins.get(node.name, known.path)
            self._origins[copy.name] = path + origin.removeprefix(known.path)
            if node in values:
                copy.meta["val"] = values[node]
        for part in block.modules():
            self._watch.entered(part)
        leaves = [_leaf(leaf, nodes, values, look, tracer) for leaf in known.leaves]
        return pytree.tree_unflatten(leaves, known.spec)


_unwatched = torch._C.DisableTorchFunction  # the questions are ours, not the forward's


def _candidates(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules in ``module`` of which there are several of one class, but for small
    ones."""
    parts = [part for part in module.modules() if part is not module]
    counts = Counter(map(type, parts))
    for part in parts:
        is_container = type(part).forward in (nn.Module.forward, nn.ModuleList.forward)
        is_small = sum(1 for _ in part.modules()) < _LEAST_PARTS
        if counts[type(part)] > 1 and not is_small and not is_container:
            yield part


def _leaf(
    leaf: Any, nodes: Mapping[Node, Node], values: Mapping[Node, Any], look: Look, tracer: Any
) -> Any:
    """Return a leaf of a copied block's result."""
    if isinstance(leaf, _Given):
        return look.tensors[leaf.number]
    if not isinstance(leaf, Node):
        return leaf
    value, proxy = values[leaf], Proxy(nodes[leaf], tracer)
    return track_tensor_tree(value, proxy, constant=None, tracer=tracer)


def _values(known: RecordedBlock, tensors: Sequence[Tensor]) -> dict[Node, Any]:
    """Return fake values for the copies of nodes whose memory others see: that of arguments and
    results. What lies in a block's own memory keeps the values of the first block: nobody compares
    that with anything outside."""
    bases = {_storage(n.meta["val"]): t for n, t in zip(known.given, tensors, strict=True)}
    values: dict[Node, Any] = {}

    def moved(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        base = bases.get(_storage(value))
        if base is None:
            base = bases[_storage(value)] = torch.empty_strided(
                value.shape, value.stride(), dtype=value.dtype, device=value.device
            )
            return base
        if base.dtype != value.dtype:
            base = base.view(value.dtype)
        return base.as_strided(value.shape, value.stride(), value.storage_offset())

    with disable_proxy_modes_tracing(), torch.no_grad():
        for node in known.nodes:
            value = node.meta["val"]
            found = {_storage(v) for v in pytree.tree_leaves(value) if isinstance(v, Tensor)}
            if not found.isdisjoint(bases) or not found.isdisjoint(known.own_storages):
                values[node] = pytree.tree_map(moved, value)
    return values


def _recorded(path: str, last: Node, look: Look, result: Any, tracer: Any) -> RecordedBlock | None:
    """Return what a block has added behind ``last``, or None if it cannot be copied: it reads what
    is neither an argument nor a weight of its own, draws random numbers, writes into what it was
    given, or returns a part of that."""
    nodes = _nodes_behind(last, tracer)
    copied = tuple(node for node in nodes if not _is_size(node))
    inside, given = set(copied), set(look.nodes)
    storages = {_storage(node.meta["val"]) for node in look.nodes}
    for node in copied:
        sources = node.all_input_nodes
        if not all(s in inside or s in given or _is_size(s) for s in sources):
            return None
        if not _may_repeat(node, storages):
            return None
    leaves, spec = pytree.tree_flatten(result)
    found = [_known_leaf(leaf, look, inside, storages, tracer) for leaf in leaves]
    if any(leaf is NotImplemented for leaf in found):
        return None
    own = frozenset(_storage(leaf.meta["val"]) for leaf in found if isinstance(leaf, Node))
    return RecordedBlock(path, look.nodes, copied, tuple(found), spec, own, look)


def _known_leaf(leaf: Any, look: Look, inside: set[Node], storages: set[int], tracer: Any) -> Any:
    """Return what stands for a leaf of a block's result, or NotImplemented."""
    if not isinstance(leaf, Tensor):
        is_plain = leaf is None or isinstance(leaf, bool | int | float | str | torch.SymInt)
        return leaf if is_plain else NotImplemented
    for number, tensor in enumerate(look.tensors):
        if tensor is leaf:
            return _Given(number)
    slot = tracer.tensor_tracker.get(leaf)
    node = None if slot is None or slot.constant is not None else slot.proxy.node
    if node not in inside or leaf.requires_grad or _storage(leaf) in storages:
        return NotImplemented
    return node


def _may_repeat(node: Node, given: set[int]) -> bool:
    """Tell whether a node computes from its arguments alone, and writes to none that is given."""
    if node.op != "call_function":
        return False
    tags = getattr(node.target, "tags", ())
    if torch.Tag.nondeterministic_seeded in tags:
        return False
    schema = getattr(node.target, "_schema", None)
    if schema is None or not schema.is_mutable:
        return True
    written = [value for value in node.args if isinstance(value, Node)]
    return given.isdisjoint(_storage(value.meta["val"]) for value in written if not _is_size(value))


def _nodes_behind(last: Node, tracer: Any) -> list[Node]:
    nodes = []
    for node in reversed(tracer.graph.nodes):
        if node is last:
            break
        nodes.append(node)
    return nodes[::-1]


def _last_node(tracer: Any) -> Node:
    last: Node = next(iter(reversed(tracer.graph.nodes)))
    return last


def _is_size(node: Node) -> bool:
    return isinstance(node.meta.get("val"), torch.SymInt | torch.SymFloat | torch.SymBool)


def _storage(value: Any) -> int:
    """Return which memory a traced tensor lies in; 0 for several."""
    return int(value.untyped_storage()._cdata) if isinstance(value, Tensor) else 0
