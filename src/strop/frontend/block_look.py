"""Look at a block before its forward runs: two that look alike compute alike.

A look holds everything that a block's forward can tell apart: the classes and plain attributes of
its modules, the objects on them, the sizes and types of weights and arguments as expressions, which
of these tensors are one and which share memory, and the modes of torch. Numbers that are inputs of
the trace, such as the scale of an IP-Adapter, are data as tensors are: which of them are one tells
blocks apart. What cannot be compared has no look.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node

from strop.frontend.composed_tensors import traced_make_up, traced_parts, traced_states
from strop.frontend.copied_nodes import node_of, node_of_number
from strop.frontend.functional import memory_of
from strop.frontend.numbers import as_input, numbers_in
from strop.frontend.recording_hooks import HOOK_TABLES, has_hooks

# Attributes that no forward reads; torchao sets a text of its own on each layer.
_NOT_READ = ("extra_repr", *(name for name in vars(nn.Module()) if "state_dict" in name))
# Of classes, and those that are made of them: quanto gives each layer its path for a name.
_NOT_READ_OF = {("optimum.quanto.nn.qmodule", "QModuleMixin"): ("name",)}
_TABLES = ("_parameters", "_buffers", "_modules", "forward", *HOOK_TABLES)
_LEFT_OUT = frozenset((*_TABLES, *_NOT_READ))
_BY_VALUE = (bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.layout)
_BY_IDENTITY = (type, FunctionType, BuiltinFunctionType, Graph)  # a graph is its class's code
_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)
_WITHOUT_TENSORS = (*_BY_IDENTITY, nn.Module, *_SYMBOLIC)
_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE: the class was not made in C
# What a key of a look is made of, in its order.
LOOK_PARTS = (
    "its modules or their settings",
    "how its arguments lie within each other",
    "its plain arguments",
    "sizes, types or layouts of its tensors",
    "which of its tensors are one",
    "which of its numbers are one",
    "a mode of torch",
)
_DEPTH = 6  # of containers and objects within each other
_NUMBER = "a number of the trace"
Settings = Set[tuple[int, str]]  # by the ids of their modules and their names


class _NoLookError(Exception):
    """Something cannot be compared."""


@dataclass(slots=True)
class _Numbers:
    """Hold the numbers that were met on the way: those that are inputs of the trace in order, and
    of which of them others are computed. ``is_known``: whether all are here that code may reach."""

    given: list[torch.SymFloat] = field(default_factory=list)
    computed: set[int] = field(default_factory=set)
    is_known: bool = True
    has_sizes: bool = False  # in what is looked at: arguments have them as they are now

    @property
    def inputs(self) -> tuple[int, ...]:
        return tuple(number for value in self.given for number in numbers_in(value.node.expr))


@dataclass(frozen=True, slots=True)
class ModuleLook:
    """Hold what all modules of a block look like, weights apart, and which numbers of the trace
    they hold."""

    parts: tuple[Any, ...]
    numbers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Look:
    """Hold what a block and its arguments look like: equal ``key``, same graph. ``tensors`` are its
    arguments and then its weights, ``numbers`` those inputs of the trace that it holds or is given;
    ``nodes`` and ``number_nodes`` stand for them in the graph."""

    key: Hashable
    module: ModuleLook
    tensors: tuple[Tensor, ...]
    nodes: tuple[Node, ...]
    numbers: tuple[int, ...]
    number_nodes: tuple[Node, ...]
    leaves: tuple[Any, ...]  # of the arguments
    spec: pytree.TreeSpec
    objects: tuple[tuple[Any, tuple[Any, ...]], ...]  # among the leaves, with what they held

    @property
    def given(self) -> tuple[Node, ...]:
        return (*self.nodes, *self.number_nodes)

    def arguments(self, others: Mapping[int, Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments with ``others`` in the places of tensors, which they name by id."""
        leaves = [others.get(id(leaf), leaf) for leaf in self.leaves]
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        return args, kwargs

    def holds(self, arguments: Any) -> bool:
        """Tell whether its arguments, and objects among them, still hold what they held before a
        forward."""
        then = ((value, items) for value, items in self.objects)
        return holds(arguments, self.leaves) and all(_are(_items(v), items) for v, items in then)


def holds(arguments: Any, leaves: Sequence[Any]) -> bool:
    """Tell whether containers among arguments still hold these leaves, as before a forward."""
    return _are(pytree.tree_leaves(arguments), leaves)


def _are(now: Sequence[Any], then: Sequence[Any]) -> bool:
    return len(now) == len(then) and all(a is b for a, b in zip(now, then, strict=True))


def look_at(block: nn.Module, arguments: Any, tracer: Any, *, is_first: bool) -> Look | None:
    """Return the look of a block that is about to be called, or None if it has none.
    ``is_first``: code has changed nothing so far outside of arguments, so that a block cannot meet
    numbers there."""
    leaves, spec = pytree.tree_flatten(arguments)
    state, met = list(_state(block)), _Numbers(is_known=is_first)
    try:
        given = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        tensors = (*given, *state)
        nodes = tuple(_node(tensor, tracer) for tensor in tensors)
        met.has_sizes = True
        plain = tuple(None if isinstance(leaf, Tensor) else _frozen(leaf, met) for leaf in leaves)
        met.has_sizes = False
        own = _module_look(block, met)
        number_nodes = tuple(_number_node(number, tracer) for number in met.given)
        objects = tuple(pair for leaf in leaves for pair in _objects(leaf))
    except _NoLookError:
        return None
    if not met.computed.isdisjoint(met.inputs):
        return None
    key = (
        own.parts,
        spec,
        plain,
        tuple(map(_tensor_look, tensors)),
        _same(tensors, nodes),
        _first_places(met.inputs) if met.is_known else met.inputs,
        _modes(),
    )
    numbers = met.inputs, number_nodes
    return Look(key, own, tensors, nodes, *numbers, tuple(leaves), spec, objects)


def module_look(block: nn.Module) -> ModuleLook | None:
    """Return the look of a block's modules, or None if something cannot be compared or has
    hooks."""
    try:
        return _module_look(block, _Numbers())
    except _NoLookError:
        return None


def _module_look(block: nn.Module, met: _Numbers) -> ModuleLook:
    before = len(met.given)
    if any(has_hooks(part, is_outermost=part is block) for part in block.modules()):
        raise _NoLookError
    parts = tuple(
        (path, type(part), _attributes(part, met), _named_tensors(part))
        for path, part in block.named_modules(remove_duplicate=False)
    )
    return ModuleLook(parts, met.inputs[before:])


def _named_tensors(part: nn.Module) -> tuple[Any, ...]:
    """Return the names of a module's own tensors, and what those are made of that are composed."""
    tables = (part._parameters.items(), part._buffers.items())
    return tuple(
        tuple((n, "" if t is None else traced_make_up(t)) for n, t in table) for table in tables
    )


def repeated(
    module: nn.Module, least_parts: int, numbers: Settings = frozenset()
) -> list[nn.Module]:
    """Return the modules in ``module`` that are built like another one, but for those with fewer
    parts than that. One inside of another counts only where it repeats in there. ``numbers`` are
    the settings that will be inputs of the trace, whatever they are now."""
    builds, sizes = dict[int, int](), dict[int, int]()
    _build(module, {}, builds, sizes, numbers)
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
        is_large = sizes[id(part)] >= least_parts or isinstance(part, GraphModule)
        return is_large and not is_container

    visit(module)
    return list({id(block): block for block in found}.values())


def _build(
    part: nn.Module,
    seen: dict[Hashable, int],
    builds: dict[int, int],
    sizes: dict[int, int],
    numbers: Settings,
) -> int:
    """Return a number for how a module is built, the same for those built alike."""
    if id(part) not in builds:
        children = [(n, c) for n, c in part._modules.items() if c is not None]
        inner = tuple((n, _build(child, seen, builds, sizes, numbers)) for n, child in children)
        sizes[id(part)] = 1 + sum(sizes[id(child)] for _, child in children)
        state = tuple(
            None if t is None else (t.shape, t.dtype, t.requires_grad)
            for t in (*part._parameters.values(), *part._buffers.values())
        )
        try:
            if any(has_hooks(child) for _, child in children):
                raise _NoLookError
            key: Hashable = (type(part), _attributes(part, _Numbers(), numbers), inner, state)
        except _NoLookError:
            key = id(part)
        builds[id(part)] = seen.setdefault(key, len(seen))
    return builds[id(part)]


def _attributes(part: nn.Module, met: _Numbers, numbers: Settings = frozenset()) -> Hashable:
    left_out = _left_out(type(part))
    return tuple(
        (name, _NUMBER if (id(part), name) in numbers else _frozen(value, met))
        for name, value in vars(part).items()
        if name not in left_out
    )


def _left_out(kind: type) -> Set[str]:
    """Return the attributes of modules of a class that tell nothing of what they compute."""
    own = (_NOT_READ_OF.get((each.__module__, each.__qualname__)) for each in kind.__mro__)
    return _LEFT_OUT.union(*filter(None, own))


def _frozen(value: Any, met: _Numbers, depth: int = _DEPTH) -> Hashable:
    """Return what is equal for values that code cannot tell apart, but by their identity."""
    if type(value) in _SYMBOLIC:
        return _frozen_number(value, met)
    if value is None or isinstance(value, _BY_VALUE):
        return type(value), repr(value) if isinstance(value, float | complex) else value
    if isinstance(value, _BY_IDENTITY):
        met.is_known &= not (isinstance(value, FunctionType) and _may_hold(value))
        return value
    if isinstance(value, Tensor):
        return "tensor"  # is among the weights
    if isinstance(value, nn.Module) or not depth:
        raise _NoLookError
    return _frozen_parts(value, met, depth)


def _frozen_parts(value: Any, met: _Numbers, depth: int) -> Hashable:
    def inner(item: Any) -> Hashable:
        return _frozen(item, met, depth - 1)

    own = tuple((k, inner(v)) for k, v in getattr(value, "__dict__", {}).items())
    if isinstance(value, list | tuple):
        return type(value), own, tuple(map(inner, value))
    if isinstance(value, set | frozenset):
        return type(value), own, _frozen_set(value, depth)
    if isinstance(value, dict):
        return type(value), own, tuple((inner(k), inner(v)) for k, v in value.items())
    if not all(kind is object or _is_plain_class(kind) for kind in type(value).__mro__):
        raise _NoLookError
    return type(value), own


def _frozen_number(value: Any, met: _Numbers) -> Hashable:
    if type(value) is not torch.SymFloat or as_input(value) is None:
        if not met.has_sizes:
            raise _NoLookError
        met.computed |= numbers_in(value.node.expr)
        return type(value), value.node.expr
    met.given.append(value)
    return _NUMBER, torch.SymFloat


def _frozen_set(values: Any, depth: int) -> Hashable:
    met = _Numbers()
    found = frozenset(_frozen(item, met, depth - 1) for item in values)
    if met.given or not met.is_known:  # in an order of its own
        raise _NoLookError
    return found


def _objects(value: Any, depth: int = _DEPTH) -> Iterator[tuple[Any, tuple[Any, ...]]]:
    """Yield an object of an argument, and those in it, with what they hold. A container of a class
    that torch does not know is one. Raises _NoLookError for one that holds a tensor: a block may
    have been given another one by it."""
    if value is None or isinstance(value, (Tensor, *_BY_VALUE, *_BY_IDENTITY, *_SYMBOLIC)):
        return
    items = _items(value)
    if any(isinstance(item, Tensor) for item in items):
        raise _NoLookError
    yield value, items
    for item in items if depth else ():
        yield from _objects(item, depth - 1)


def _items(value: Any) -> tuple[Any, ...]:
    """Return what an object holds. Names and keys that are equal are one, or count as a change."""
    own = getattr(value, "__dict__", {})
    inner = (*value, *value.values()) if isinstance(value, dict) else ()
    if isinstance(value, list | tuple):
        inner = tuple(value)
    elif isinstance(value, set | frozenset):
        inner = tuple(sorted(value, key=id))
    return (*own, *own.values(), *inner)


def _may_hold(function: FunctionType) -> bool:
    """Tell whether a function may hold numbers that were not there before the trace."""
    defaults = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
    are_plain = all(value is None or isinstance(value, _BY_VALUE) for value in defaults)
    return bool(function.__closure__ or vars(function)) or not are_plain


def _is_plain_class(kind: type) -> bool:
    """Tell whether a class is written in Python, and its objects hold nothing but attributes."""
    return bool(kind.__flags__ & _HEAP_TYPE) and not vars(kind).get("__slots__")


def _state(block: nn.Module) -> Iterator[Tensor]:
    """Yield all weights, and tensors that are attributes of modules or of objects on them."""
    for _, part in block.named_modules(remove_duplicate=False):
        for table in (part._parameters, part._buffers):
            for tensor in table.values():
                yield from traced_parts(tensor) if tensor is not None else ()
        of_weights = {n for weight in part._parameters.values() for n in traced_states(weight)}
        for name, value in vars(part).items():
            if name not in _TABLES and name not in of_weights:
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
    elif depth and hasattr(value, "__dict__") and not isinstance(value, _WITHOUT_TENSORS):
        yield from _tensors(vars(value), depth - 1)


def _node(tensor: Tensor, tracer: Any) -> Node:
    if (node := node_of(tensor, tracer)) is None:
        raise _NoLookError
    return node


def _number_node(number: torch.SymFloat, tracer: Any) -> Node:
    if (node := node_of_number(number, tracer)) is None:
        raise _NoLookError
    return node


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
    return tuple(map(_first_places, (map(id, tensors), nodes, map(memory_of, tensors))))


def _first_places(keys: Iterable[Hashable]) -> tuple[int, ...]:
    first: dict[Hashable, int] = {}
    return tuple(first.setdefault(key, place) for place, key in enumerate(keys))


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
