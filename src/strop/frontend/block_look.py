"""Look at a block before its forward runs: two that look alike compute alike.

A look holds everything that a block's forward can tell apart: the classes and plain attributes of
its modules, the objects on them, the sizes and types of weights and arguments as expressions, which
of these tensors are one and which share memory, and the modes of torch. What cannot be compared has
no look.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.fx import Node

from strop.frontend.copied_nodes import node_of
from strop.frontend.functional import memory_of

_RUN_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_LOAD_HOOKS = tuple(name for name in vars(nn.Module()) if "state_dict" in name)
_TABLES = ("_parameters", "_buffers", "_modules", "forward")
_BY_VALUE = (bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.layout)
_BY_IDENTITY = (type, FunctionType, BuiltinFunctionType)
_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE: the class was not made in C
# What a key of a look is made of, in its order.
LOOK_PARTS = (
    "its modules or their settings",
    "how its arguments lie within each other",
    "its plain arguments",
    "sizes, types or layouts of its tensors",
    "which of its tensors are one",
    "a mode of torch",
)
_DEPTH = 6  # of containers and objects within each other


class _NoLookError(Exception):
    """Something cannot be compared."""


@dataclass(frozen=True, slots=True)
class Look:
    """Hold what a block and its arguments look like: equal ``key``, same graph. ``tensors`` are its
    arguments and then its weights; ``nodes`` stand for them in the graph."""

    key: Hashable
    module: Hashable
    tensors: tuple[Tensor, ...]
    nodes: tuple[Node, ...]
    leaves: tuple[Any, ...]  # of the arguments
    spec: pytree.TreeSpec

    def arguments(self, others: Mapping[int, Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments with ``others`` in the places of tensors, which they name by id."""
        leaves = [others.get(id(leaf), leaf) for leaf in self.leaves]
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        return args, kwargs


def holds(arguments: Any, leaves: Sequence[Any]) -> bool:
    """Tell whether containers among arguments still hold these leaves, as before a forward."""
    now = pytree.tree_leaves(arguments)
    return len(now) == len(leaves) and all(a is b for a, b in zip(now, leaves, strict=True))


def look_at(block: nn.Module, arguments: Any, tracer: Any) -> Look | None:
    """Return the look of a block that is about to be called, or None if it has none."""
    leaves, spec = pytree.tree_flatten(arguments)
    state = list(_state(block))
    try:
        own = module_look(block)
        given = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        tensors = (*given, *state)
        nodes = tuple(_node(tensor, tracer) for tensor in tensors)
        plain = tuple(None if isinstance(leaf, Tensor) else _sized(leaf) for leaf in leaves)
    except _NoLookError:
        return None
    if own is None:
        return None
    key = (own, spec, plain, tuple(map(_tensor_look, tensors)), _same(tensors, nodes), _modes())
    return Look(key, own, tensors, nodes, tuple(leaves), spec)


def module_look(block: nn.Module) -> Hashable:
    """Return what all modules of a block look like, weights apart, or None if something cannot be
    compared or has hooks."""
    try:
        return tuple(
            (path, type(part), _attributes(part), tuple(part._parameters), tuple(part._buffers))
            for path, part in block.named_modules(remove_duplicate=False)
        )
    except _NoLookError:
        return None


def repeated(module: nn.Module, least_parts: int) -> list[nn.Module]:
    """Return the modules in ``module`` that are built like another one, but for those with fewer
    parts than that. One inside of another counts only where it repeats in there."""
    builds, sizes = dict[int, int](), dict[int, int]()
    _build(module, {}, builds, sizes)
    found: list[nn.Module] = []

    def visit(whole: nn.Module) -> None:
        inside = [part for part in whole.modules() if part is not whole]
        counts = Counter(builds[id(part)] for part in inside)
        blocks = [part for part in inside if counts[builds[id(part)]] > 1 and may_be(part)]
        within = {id(p) for block in blocks for p in block.modules() if p is not block}
        for block in blocks:
            if id(block) not in within:
                found.append(block)
                visit(block)

    def may_be(part: nn.Module) -> bool:
        is_container = type(part).forward is nn.Module.forward
        return sizes[id(part)] >= least_parts and not is_container

    visit(module)
    return list({id(block): block for block in found}.values())


def _build(
    part: nn.Module, seen: dict[Hashable, int], builds: dict[int, int], sizes: dict[int, int]
) -> int:
    """Return a number for how a module is built, the same for those built alike."""
    if id(part) not in builds:
        children = [(n, c) for n, c in part._modules.items() if c is not None]
        inner = tuple((name, _build(child, seen, builds, sizes)) for name, child in children)
        sizes[id(part)] = 1 + sum(sizes[id(child)] for _, child in children)
        state = tuple(
            None if t is None else (t.shape, t.dtype, t.requires_grad)
            for t in (*part._parameters.values(), *part._buffers.values())
        )
        try:
            key: Hashable = (type(part), _attributes(part), inner, state)
        except _NoLookError:
            key = id(part)
        builds[id(part)] = seen.setdefault(key, len(seen))
    return builds[id(part)]


def _attributes(part: nn.Module) -> Hashable:
    own = vars(part)
    if any(own.get(name) for name in _RUN_HOOKS):
        raise _NoLookError
    return tuple(
        (name, _frozen(value))
        for name, value in own.items()
        if name not in _TABLES and name not in _LOAD_HOOKS
    )


def _frozen(value: Any, depth: int = _DEPTH) -> Hashable:
    """Return what is equal for values that code cannot tell apart, but by their identity."""
    if value is None or isinstance(value, _BY_VALUE):
        return type(value), repr(value) if isinstance(value, float | complex) else value
    if isinstance(value, _BY_IDENTITY):
        return value
    if isinstance(value, Tensor):
        return "tensor"  # is among the weights
    if isinstance(value, nn.Module) or not depth:
        raise _NoLookError
    own = tuple((k, _frozen(v, depth - 1)) for k, v in getattr(value, "__dict__", {}).items())
    if isinstance(value, list | tuple):
        return type(value), own, tuple(_frozen(item, depth - 1) for item in value)
    if isinstance(value, set | frozenset):
        return type(value), own, frozenset(_frozen(item, depth - 1) for item in value)
    if isinstance(value, dict):
        items = ((_frozen(k, depth - 1), _frozen(v, depth - 1)) for k, v in value.items())
        return type(value), own, tuple(items)
    if not all(kind is object or _is_plain_class(kind) for kind in type(value).__mro__):
        raise _NoLookError
    return type(value), own


def _is_plain_class(kind: type) -> bool:
    """Tell whether a class is written in Python, and its objects hold nothing but attributes."""
    return bool(kind.__flags__ & _HEAP_TYPE) and not vars(kind).get("__slots__")


def _state(block: nn.Module) -> Iterator[Tensor]:
    """Yield all weights, and tensors that are attributes of modules or of objects on them."""
    for _, part in block.named_modules(remove_duplicate=False):
        for table in (part._parameters, part._buffers):
            yield from (tensor for tensor in table.values() if tensor is not None)
        for name, value in vars(part).items():
            if name not in _TABLES:
                yield from _tensors(value)


def _tensors(value: Any, depth: int = _DEPTH) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple | set | frozenset) and depth:
        for item in value:
            yield from _tensors(item, depth - 1)
    elif isinstance(value, dict) and depth:
        for item in value.values():
            yield from _tensors(item, depth - 1)
    elif depth and hasattr(value, "__dict__") and not isinstance(value, (*_BY_IDENTITY, nn.Module)):
        yield from _tensors(vars(value), depth - 1)


def _node(tensor: Tensor, tracer: Any) -> Node:
    if (node := node_of(tensor, tracer)) is None:
        raise _NoLookError
    return node


def _sized(leaf: Any) -> Hashable:
    if isinstance(leaf, torch.SymInt | torch.SymFloat | torch.SymBool):
        return type(leaf), leaf.node.expr
    return _frozen(leaf)


def _tensor_look(tensor: Tensor) -> Hashable:
    sizes = (*tensor.shape, *tensor.stride(), tensor.storage_offset())
    return (
        type(tensor),
        tensor.dtype,
        tensor.device,
        tensor.dim(),
        tuple(s.node.expr if isinstance(s, torch.SymInt) else s for s in sizes),
        tensor.requires_grad,
        tensor.is_leaf,
    )


def _same(tensors: tuple[Tensor, ...], nodes: tuple[Node, ...]) -> Hashable:
    """Return which tensors, nodes and memories are those of an earlier tensor."""
    found = []
    for keys in (map(id, tensors), nodes, map(memory_of, tensors)):
        first: dict[Any, int] = {}
        found.append(tuple(first.setdefault(key, place) for place, key in enumerate(keys)))
    return tuple(found)


def _modes() -> Hashable:
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.get_default_dtype(),
        *(
            (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
            for kind in ("cpu", "cuda")
        ),
    )
