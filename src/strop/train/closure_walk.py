"""Find what a function can reach without being handed it: modules and random generators."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from operator import getitem, is_
from types import CodeType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

_MOST_DEPTH = 4  # a method, its object, a list in it, a module in that
_MOST_ITEMS = 256  # of a container: a data set is none of a model's parts
_PLAIN = (
    str,
    bytes,
    int,
    float,
    complex,
    type(None),
    type,
    torch.dtype,
    torch.device,
    Tensor,
    Optimizer,
)


@dataclass
class Reached:
    """Hold what is found through closures, the names of a module, bound objects and containers."""

    modules: list[nn.Module] = field(default_factory=list)
    generators: list[torch.Generator] = field(default_factory=list)
    _seen: set[int] = field(default_factory=set)

    def look(self, value: Any, depth: int = 0) -> None:
        if isinstance(value, _PLAIN) or depth > _MOST_DEPTH or id(value) in self._seen:
            return
        if getattr(type(value), "leads_nowhere", False):
            return
        self._seen.add(id(value))
        if isinstance(value, nn.Module):
            self.modules.append(value)
        elif isinstance(value, torch.Generator):
            self.generators.append(value)
        else:
            for part in _parts(value):
                self.look(part, depth + 1)


def reached(function: Callable[..., Any]) -> Reached:
    found = Reached()
    found.look(function)
    return found


def _parts(value: Any) -> Iterable[Any]:
    """Return what an object that is neither module nor generator leads to."""
    if isinstance(value, FunctionType):
        return _of_function(value)
    if isinstance(value, MethodType):
        return (value.__func__, value.__self__)
    if isinstance(value, partial):
        return (value.func, *value.args, *value.keywords.values())
    if isinstance(value, list | tuple | set | dict):
        items = value.values() if isinstance(value, dict) else value
        return islice(items, _MOST_ITEMS)
    if type(value).__module__.partition(".")[0] in ("torch", "builtins", "numpy"):
        return ()
    own = getattr(value, "__dict__", {})
    call = getattr(type(value), "__call__", None)  # noqa: B004  what it is, not whether
    return (*own.values(), *([call] if isinstance(call, FunctionType) else ()))


def _of_function(function: FunctionType) -> list[Any]:
    found = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    for cell in function.__closure__ or ():
        try:
            found.append(cell.cell_contents)
        except ValueError:  # assigned later
            continue
    if function.__module__.partition(".")[0] not in ("torch", "strop"):
        names = _names(function.__code__)
        found += [function.__globals__[name] for name in names if name in function.__globals__]
    wrapped = getattr(function, "__wrapped__", None)
    return found if wrapped is None else [*found, wrapped]


def _names(code: CodeType) -> list[str]:
    """Return global names that it, or a function in it, reads."""
    inner = [
        name for const in code.co_consts if isinstance(const, CodeType) for name in _names(const)
    ]
    return [*code.co_names, *inner]


class WatchedModules:
    """Hold modules with all parts and tensors, listed once: looking again takes no walk."""

    def __init__(self, roots: Sequence[nn.Module]) -> None:
        self.roots = list(roots)
        self._parts = list(dict.fromkeys(part for root in roots for part in root.modules()))
        self._tables: list[dict[str, Any]] = [
            table for m in self._parts for table in (m._modules, m._parameters, m._buffers)
        ]
        places = [(table, name) for table in self._tables for name in table]
        self._owners, self._names = [table for table, _ in places], [name for _, name in places]
        self._values = [table[name] for table, name in places]
        self._tensors = [value for value in self._values if isinstance(value, Tensor)]

    def still_lists(self, roots: Sequence[nn.Module]) -> bool:
        """Tell whether these are the modules, and nothing in them was replaced, added or
        removed."""
        if len(roots) != len(self.roots) or not all(map(is_, roots, self.roots)):
            return False
        if sum(map(len, self._tables)) != len(self._values):
            return False
        try:
            return all(map(is_, map(getitem, self._owners, self._names), self._values))
        except KeyError:
            return False

    def has_kind(self, kind: type[nn.Module]) -> bool:
        return any(isinstance(part, kind) for part in self._parts)

    def modes(self) -> bytes:
        """Return which parts are in training mode, which tensors require a gradient."""
        training = bytes(part.training for part in self._parts)
        return training + bytes(tensor.requires_grad for tensor in self._tensors)

    def places(self) -> list[int]:
        return list(map(Tensor.data_ptr, self._tensors))
