"""Results that hold tensors in plain objects: the key-value caches of transformers.

``as_tree`` puts a node of ours where such an object stands; when torch's pytree builds the result
of a run, that node becomes an object of the class that eager would return.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import torch.utils._pytree as pytree

_MODULE = "transformers.cache_utils"


@dataclass(frozen=True)
class ObjectState:
    """The attributes of an object of ``kind``, a class in transformers.cache_utils."""

    kind: str
    attributes: dict[str, Any]


def as_tree(value: Any) -> Any:
    """``value`` with every cache and cache layer as its ObjectState."""
    return pytree.tree_map(_state, value, is_leaf=_is_cache)


def _state(value: Any) -> Any:
    if not _is_cache(value):
        return value
    return ObjectState(type(value).__name__, as_tree(dict(vars(value))))


def _is_cache(value: Any) -> bool:
    return type(value).__module__ == _MODULE


def _flatten(state: ObjectState) -> tuple[list[Any], list[Any]]:
    return list(state.attributes.values()), [state.kind, list(state.attributes)]


def _unflatten(values: Any, context: list[Any]) -> Any:
    """The object itself."""
    kind, names = context
    module = sys.modules[_MODULE]
    cls = getattr(module, kind)
    if not isinstance(cls, type) or cls.__module__ != _MODULE:
        raise TypeError(f"{kind} is no class of {_MODULE}")
    made: Any = object.__new__(cls)
    vars(made).update(zip(names, values, strict=True))
    return made


pytree.register_pytree_node(
    ObjectState,
    _flatten,
    _unflatten,
    serialized_type_name="strop.frontend.objects.ObjectState",
    to_dumpable_context=lambda context: context,
    from_dumpable_context=lambda context: context,
)
