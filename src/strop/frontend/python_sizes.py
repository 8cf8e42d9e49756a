"""Let Python's int, len, min and max take symbolic sizes, and isinstance and type know them.

``int(x.shape[2])``, ``len(x)`` and ``min(height, width)`` in a module's forward would fix the sizes
or plant a guard on which is larger. While a module is traced, the files that its classes come from
see these names as torch's symbolic functions, and so do the files of a user's own whose functions
these name. On everything else they do what Python's do.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import nn

from strop.frontend.numbers import is_number
from strop.frontend.python_classes import (
    OfStandIn,
    OfType,
    Type,
    asking_for_class,
    classes_of_values,
    is_instance,
)

_SYMBOLIC = (torch.SymInt, torch.SymFloat)
_TORCHS = ("torch", "builtins")
# They ask for classes of parts alone.
_FRAMEWORKS = ("diffusers", "transformers", "peft", "accelerate")


class _IntType(OfStandIn):
    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and isinstance(args[0], _SYMBOLIC) and not is_number(args[0]):
            return torch.sym_int(args[0])
        return int(*args, **kwargs)


class _Int(int, metaclass=_IntType):
    """Act as ``int`` to those who ask for its attributes or instances."""

    stands_for = int


class _OfType(OfType):
    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        found = super().__call__(*args, **kwargs)
        # where ``type`` is another, ``int`` is, and may be what this is compared with
        return _Int if found is int and len(args) == 1 else found


class _Type(Type, metaclass=_OfType):
    """Act as ``type`` where ``int`` is the one above."""


def _extreme(plain: Callable[..., Any], symbolic: Callable[..., Any]) -> Callable[..., Any]:
    def extreme(*args: Any, **kwargs: Any) -> Any:
        if len(args) == 1:
            args = (list(args[0]),)  # it may be an iterator
        values = args[0] if len(args) == 1 else args
        is_open = any(isinstance(v, _SYMBOLIC) for v in values) and not any(map(is_number, values))
        if not kwargs and is_open:
            return functools.reduce(symbolic, values)
        return plain(*args, **kwargs)

    return extreme


def _len(value: Any, /) -> Any:
    """Return the rows of a tensor as a size; Python's own ``len`` takes nothing but a number."""
    return value.shape[0] if isinstance(value, torch.Tensor) and value.dim() else len(value)


_NAMES: dict[str, Any] = {
    "int": _Int,
    "len": _len,
    "min": _extreme(min, torch.sym_min),
    "max": _extreme(max, torch.sym_max),
    "isinstance": is_instance,
    "type": _Type,
}
# Where code compares ``x.__class__`` with ``int``, that is Python's own.
_NAMES_BESIDE_CLASSES = {n: v for n, v in _NAMES.items() if n != "int"} | {"type": Type}
_users: Counter[tuple[str, str]] = Counter()  # traces in several threads share a file
_lock = threading.Lock()


@contextmanager
def symbolic_builtins(module: nn.Module) -> Iterator[None]:
    files = _files(module)
    asked = asking_for_class(n for n in files if n.partition(".")[0] not in _FRAMEWORKS)
    names = _NAMES if not asked else _NAMES_BESIDE_CLASSES
    places = [(file, name) for file in files for name in names]
    with _lock:
        taken = [p for p in places if _users[p] or p[1] not in vars(sys.modules[p[0]])]
        for file, name in taken:
            vars(sys.modules[file])[name] = names[name]
        _users.update(taken)
    try:
        with classes_of_values() if asked else nullcontext():
            yield
    finally:
        with _lock:
            _users.subtract(taken)
            for file, name in taken:
                if not _users[file, name]:
                    vars(sys.modules[file]).pop(name, None)


def _files(module: nn.Module) -> set[str]:
    """Return the files of the classes of all parts and their bases, and those of a user's own that
    these reach by their names; torch's own are left alone."""
    kinds = {kind for part in module.modules() for kind in type(part).__mro__}
    names = {kind.__module__ for kind in kinds}
    new = {n for n in names if n in sys.modules and n.partition(".")[0] not in _TORCHS}
    found = set[str]()
    while new:
        found |= new
        new = {name for file in new for name in _named_in(file) if _is_users(name)} - found
    return found


def _named_in(file: str) -> set[str]:
    """Return the modules whose functions a module names."""
    values = list(vars(sys.modules[file]).values())
    functions = {value.__module__ for value in values if isinstance(value, FunctionType)}
    functions.discard(None)  # of code that was made without a module, as by ``exec``
    return functions | {value.__name__ for value in values if isinstance(value, ModuleType)}


def _is_users(name: str) -> bool:
    """Tell whether a module is a file of a user's own, and no library."""
    root, place = name.partition(".")[0], getattr(sys.modules.get(name), "__file__", None)
    is_library = root in sys.stdlib_module_names or root in (*_TORCHS, "strop")
    return bool(place) and not is_library and "-packages" not in str(place)
