"""Handle arguments and results that hold tensors in plain objects: the key-value caches of
transformers, and dataclasses of a user's own among the results.

``as_tree`` puts a node of ours where such an object stands; when torch's pytree builds the result
of a run, that node becomes an object of the class that eager would return. A cache that was given
is written to, as in eager: a run then returns ``WithObjects``, and ``given_back`` does the writing.
Lists and dicts that a forward changes, such as the residuals that a UNet pops and the frames that
the VAE of a video model keeps, are the same: ``Contents`` says what is in them behind the call.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, is_dataclass
from types import MemberDescriptorType
from typing import Any

import torch
import torch.utils._pytree as pytree

from strop.errors import CaptureError, UnsupportedError

_MODULE = "transformers.cache_utils"
# what a result may hold beside tensors: a plan on disk can say it
_LEAVES = {
    type(None),
    bool,
    int,
    float,
    complex,
    str,
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
    torch.SymInt,
    torch.SymFloat,
    torch.SymBool,
}


@dataclass(frozen=True)
class ObjectState:
    """Hold the attributes of an object of ``kind``, a class in transformers.cache_utils."""

    kind: str
    attributes: dict[str, Any]


@dataclass(frozen=True)
class Record:
    """Hold the attributes of a dataclass of a user's own. (Those of libraries know pytree.)"""

    kind: type
    attributes: dict[str, Any]


@dataclass(frozen=True)
class ShapeState:
    """Hold the sizes of a ``torch.Size``, of which torch's pytree makes a tuple."""

    sizes: list[Any]


@dataclass(frozen=True)
class ClassName:
    """Name a class of transformers.cache_utils itself."""

    kind: str


@dataclass(frozen=True)
class CacheArgument:
    """Stand for the cache that was this argument, counted from 0."""

    number: int


@dataclass(frozen=True)
class Left:
    """Hold what a call leaves in list or dict number ``number`` of its arguments: for each item its
    place before, counted from 0, or -1 - n for ``items[n]``, which is new; of a dict the keys."""

    number: int
    keys: list[Any] | None
    sources: list[int]
    items: list[Any]


@dataclass(frozen=True)
class WithObjects:
    """Hold a result, and what a call leaves in its arguments: the attributes of the caches among
    them, and what is in lists and dicts that it has changed."""

    result: Any
    attributes: list[dict[str, Any]]
    left: list[Left]


class Contents:
    """Hold the lists and dicts among the arguments of a call, and what they hold before it."""

    def __init__(self, arguments: Any) -> None:
        self._held = [(container, _items_of(container)) for container in containers_of(arguments)]

    def left(self) -> list[Left]:
        """Return what is in those that have changed. Raises CaptureError for one that has grown (it
        would grow at every call, and each would be another graph), and for an object."""
        found, given = [], {id(container) for container, _ in self._held}
        for number, (container, before) in enumerate(self._held):
            now = _items_of(container)
            if _is_same(before, now):
                continue
            left = _left(number, before, now, not isinstance(container, list))
            is_nested = any(id(inner) in given for inner in containers_of(left.items))
            if is_lazy(container) and _is_filled(before, now):
                continue
            has_class = is_record(container) or is_registered(type(container))
            if len(now) > len(before) or is_nested or has_class:
                raise CaptureError(f"it changes a {type(container).__name__} among its arguments")
            found.append(left)
        return found


_Items = list[tuple[Any, Any]]


def containers_of(value: Any) -> Iterator[Any]:
    """Yield the lists, dicts and dataclasses' objects in arguments, outer ones first."""
    if type(value) in (list, dict):
        yield value
    if type(value) is list or isinstance(value, tuple):
        for item in value:
            yield from containers_of(item)
    elif type(value) is dict:
        for item in value.values():
            yield from containers_of(item)
    elif is_record(value) or is_registered(type(value)):
        yield value
        for _, item in _items_of(value):
            yield from containers_of(item)


def _items_of(container: Any) -> _Items:
    """Pair each item of a dict with its key, of a list with its place, of an object with its
    name; of a registered class, what is no part is a text."""
    if isinstance(container, list):
        return list(enumerate(container))
    if is_registered(type(container)) and not is_record(container):
        parts, context = parts_of(container)
        return [*enumerate(parts), (repr(context), None)]
    return list((container if isinstance(container, dict) else attributes_of(container)).items())


def _is_same(before: _Items, now: _Items) -> bool:
    return len(before) == len(now) and all(
        a == c and b is d for (a, b), (c, d) in zip(before, now, strict=True)
    )


def _left(number: int, before: _Items, now: _Items, is_dict: bool) -> Left:
    places = {id(item): place for place, (_, item) in enumerate(before)}
    sources, items = [], list[Any]()
    for _, item in now:
        if id(item) not in places:
            items.append(item)
        sources.append(places.get(id(item), -len(items)))
    return Left(number, [key for key, _ in now] if is_dict else None, sources, items)


def with_objects(result: Any, arguments: Any, contents: Contents) -> Any:
    """Return ``result`` as it is, or WithObjects where the call leaves something in its
    arguments."""
    given, left = _caches_of(arguments), contents.left()
    if not given and not left:
        return result

    def marked(value: Any) -> Any:
        return next((CacheArgument(i) for i, cache in enumerate(given) if cache is value), value)

    found = pytree.tree_map(marked, result, is_leaf=is_cache)
    return WithObjects(found, [dict(vars(cache)) for cache in given], left)


def given_back(found: WithObjects, arguments: Any) -> Any:
    """Write to the caches, lists and dicts among the arguments, and return the result proper.

    Raises UnsupportedError, and writes nothing, where two arguments are one list: it has been
    traced as two."""
    given = _caches_of(arguments)
    containers = list(containers_of(arguments)) if found.left else []
    if len({id(container) for container in containers}) < len(containers):
        raise UnsupportedError("its forward changes a list that is given to it twice")
    for left in found.left:
        _fill(containers[left.number], left)
    for cache, attributes in zip(given, found.attributes, strict=True):
        vars(cache).update(attributes)
    return pytree.tree_map(
        lambda leaf: given[leaf.number] if isinstance(leaf, CacheArgument) else leaf,
        found.result,
        is_leaf=lambda leaf: isinstance(leaf, CacheArgument),
    )


def _fill(container: Any, left: Left) -> None:
    before = [item for _, item in _items_of(container)]
    now = [before[n] if n >= 0 else left.items[-1 - n] for n in left.sources]
    if left.keys is None:
        container[:] = now
    else:
        container.clear()
        container.update(zip(left.keys, now, strict=True))


def _caches_of(value: Any) -> list[Any]:
    return [leaf for leaf in pytree.tree_leaves(value, is_leaf=is_cache) if is_cache(leaf)]


def as_tree(value: Any) -> Any:
    """Replace caches and their layers in ``value`` by ObjectStates, dataclasses by Records, and
    shapes by ShapeState."""
    return pytree.tree_map(_state, value, is_leaf=_is_replaced)


def _is_replaced(value: Any) -> bool:
    return is_cache(value) or type(value) is torch.Size


def check_leaves(leaves: Iterable[Any]) -> None:
    """Raises CaptureError for a result that a program cannot hold."""
    for leaf in leaves:
        if not isinstance(leaf, torch.Tensor) and type(leaf) not in _LEAVES:
            raise CaptureError(f"it returns a {type(leaf).__name__}, which no program can hold")


def _state(value: Any) -> Any:
    if type(value) is torch.Size:
        return ShapeState(list(value))
    if is_cache_class(value):
        return ClassName(value.__name__)
    if is_dataclass(value) and not isinstance(value, type) and not is_cache(value):
        return Record(type(value), as_tree(attributes_of(value)))
    if not is_cache(value):
        return value
    return ObjectState(type(value).__name__, as_tree(dict(vars(value))))


def is_record(value: Any) -> bool:
    """Tell whether a value is an object of a dataclass that holds its attributes and nothing else,
    as a dict of a class of its own does."""
    kind = type(value)
    return is_dataclass(kind) and kind.__new__ is object.__new__ and not is_cache(value)


def is_registered(kind: type) -> bool:
    """Tell whether torch's pytree was told how to take objects of a class apart, as torchrec tells
    it of its jagged tensors. Which of them are plain containers is asked before."""
    is_known = kind in _CONTAINERS or kind.__module__ in (__name__, _MODULE)
    return kind in pytree.SUPPORTED_NODES and not is_known


_CONTAINERS = (tuple, list, dict, torch.Size)
# These note what they have computed of what they were given, which nobody else sees.
_LAZY = ("torchrec.sparse.jagged_tensor", ("KeyedJaggedTensor", "JaggedTensor"))


def is_lazy(value: Any) -> bool:
    """Tell whether an object's empty parts are filled when somebody asks for them."""
    module, names = _LAZY
    return type(value).__module__ == module and type(value).__name__ in names


def _is_filled(before: _Items, now: _Items) -> bool:
    return len(before) == len(now) and all(
        name == other and (was is None or was is found)
        for (name, was), (other, found) in zip(before, now, strict=True)
    )


def parts_of(value: Any) -> tuple[list[Any], Any]:
    """Return the parts of an object of a registered class, and what else makes it."""
    parts, context = pytree.SUPPORTED_NODES[type(value)].flatten_fn(value)
    return list(parts), context


def made_registered(kind: type, parts: list[Any], context: Any) -> Any:
    """Return an object of a registered class."""
    return pytree.SUPPORTED_NODES[kind].unflatten_fn(parts, context)


def attributes_of(value: Any) -> dict[str, Any]:
    """Return what an object of a dataclass holds, its fields in slots first."""
    own = getattr(value, "__dict__", {})
    slots = [f.name for f in fields(value) if f.name not in own and _is_slot(value, f.name)]
    return {name: getattr(value, name) for name in slots} | own


def _is_slot(value: Any, name: str) -> bool:
    return isinstance(getattr(type(value), name, None), MemberDescriptorType) and hasattr(
        value, name
    )


def is_cache(value: Any) -> bool:
    return type(value).__module__ == _MODULE


def is_cache_class(value: Any) -> bool:
    return isinstance(value, type) and value.__module__ == _MODULE


def _flatten(state: ObjectState) -> tuple[list[Any], list[Any]]:
    return list(state.attributes.values()), [state.kind, list(state.attributes)]


def class_named(kind: str) -> Any:
    cls = getattr(sys.modules[_MODULE], kind)
    if not isinstance(cls, type) or cls.__module__ != _MODULE:
        raise TypeError(f"{kind} is no class of {_MODULE}")
    return cls


def made(kind: str, attributes: dict[str, Any]) -> Any:
    """Return the object itself."""
    found: Any = object.__new__(class_named(kind))
    vars(found).update(attributes)
    return found


def made_shape(sizes: Any) -> Any:
    """Return a ``torch.Size``; a tuple where something stands for the sizes."""
    sizes = tuple(sizes)
    return torch.Size(sizes) if all(isinstance(size, int) for size in sizes) else sizes


def _unflatten(values: Any, context: list[Any]) -> Any:
    kind, names = context
    return made(kind, dict(zip(names, values, strict=True)))


def _flatten_record(record: Record) -> tuple[list[Any], list[Any]]:
    return list(record.attributes.values()), [record.kind, list(record.attributes)]


def _unflatten_record(values: Any, context: list[Any]) -> Any:
    kind, names = context
    return made_record(kind, dict(zip(names, values, strict=True)))


def made_record(kind: type, attributes: dict[str, Any]) -> Any:
    """Return an object of a dataclass as it was, for which nothing of its own is run: that may
    compute its fields from what it is given."""
    found: Any = object.__new__(kind)
    for name, value in attributes.items():
        object.__setattr__(found, name, value)  # frozen ones too
    return found


def _described(context: list[Any]) -> list[Any]:
    """Describe a class by a name that another process finds; NotImplementedError where there is
    none."""
    kind, names = context
    if "<locals>" in kind.__qualname__:
        raise NotImplementedError(f"it returns a {kind.__qualname__}, which has no name on disk")
    return [kind.__module__, kind.__qualname__, names]


def _found(description: list[Any]) -> list[Any]:
    """Find the class of a stored result, which its module has imported already."""
    module, path, names = description
    kind: Any = sys.modules[module]
    for name in path.split("."):
        kind = getattr(kind, name)
    if not (isinstance(kind, type) and is_dataclass(kind)):
        raise TypeError(f"{path} of {module} is no dataclass")
    return [kind, names]


pytree.register_pytree_node(
    Record,
    _flatten_record,
    _unflatten_record,
    serialized_type_name="strop.frontend.objects.Record",
    to_dumpable_context=_described,
    from_dumpable_context=_found,
)
for _kind, _parts, _whole in (
    (ObjectState, _flatten, _unflatten),
    (ShapeState, lambda shape: (shape.sizes, []), lambda sizes, _: made_shape(sizes)),
    (ClassName, lambda name: ([], [name.kind]), lambda _, context: class_named(context[0])),
    (
        CacheArgument,
        lambda given: ([], [given.number]),
        lambda _, context: CacheArgument(context[0]),
    ),
    (
        WithObjects,
        lambda found: ([found.result, found.attributes, found.left], []),
        lambda values, _: WithObjects(*values),
    ),
    (
        Left,
        lambda left: (left.items, [left.number, left.keys, left.sources]),
        lambda items, context: Left(context[0], context[1], context[2], list(items)),
    ),
):
    pytree.register_pytree_node(
        _kind,
        _parts,
        _whole,
        serialized_type_name=f"strop.frontend.objects.{_kind.__name__}",
        to_dumpable_context=lambda context: context,
        from_dumpable_context=lambda context: context,
    )
