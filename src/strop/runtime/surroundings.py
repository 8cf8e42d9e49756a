"""What the code of a module reads besides arguments, weights and settings: module-level names,
class attributes and closures. A trace keeps their values, so another value is another graph.

Code is followed as far as it is the user's: through functions, classes, objects and modules that it
names. Of diffusers and the like only plain values that a forward names are watched, of torch and
the standard library nothing. Names are taken from the byte code, too many rather than too few.
Numbers, texts and containers of them count by value, functions by their code, the rest by identity.
"""

from __future__ import annotations

import copy
import dis
import functools
import sys
from collections.abc import Iterator, Set
from operator import getitem, is_
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from strop.runtime.texts import is_plain, text_of

UNWATCHED = {"torch", "torchvision", "numpy", "triton", "strop", *sys.stdlib_module_names} - {
    "__main__"
}
FRAMEWORKS = {"diffusers", "transformers", "peft", "accelerate"}
_CONSTANTS = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)
_BY_TEXT = (*_CONSTANTS, FunctionType, BuiltinFunctionType, type)
_CONTAINERS = (list, dict, set)


class Surroundings:
    """The names that the code of one module reads, and their values when last looked at."""

    def __init__(self, module: nn.Module, ignored: frozenset[str] = frozenset()) -> None:
        found = [name for name in _Walk(module).found.values() if name.label not in ignored]
        self._labels = [name.label for name in found]
        self._tables = [name.table for name in found]
        self._keys = [name.key for name in found]
        self._values = list(map(getitem, self._tables, self._keys))
        # what can change without being bound anew
        self._contents = [(value, _snapshot(value)) for value in self._values
                          if isinstance(value, _CONTAINERS)]  # fmt: skip

    def __bool__(self) -> bool:
        """Whether there are any."""
        return bool(self._tables)

    def have_changed(self) -> bool:
        if not self._tables:
            return False
        try:
            same = all(map(is_, map(getitem, self._tables, self._keys), self._values))
            same = same or self._are_equal()
        except (KeyError, ValueError):  # deleted; a cell without a value
            return True
        return not same or any(_snapshot(value) != known for value, known in self._contents)

    def _are_equal(self) -> bool:
        """Bound anew to equal numbers and texts, which are taken over."""
        now = list(map(getitem, self._tables, self._keys))
        others = [(a, b) for a, b in zip(now, self._values, strict=True) if a is not b]
        if not all(isinstance(a, _CONSTANTS) and text_of(a) == text_of(b) for a, b in others):
            return False
        self._values = now
        return True

    def changed(self) -> frozenset[str]:
        """The labels of those that differ."""
        stale = {id(value) for value, known in self._contents if _snapshot(value) != known}
        found = set()
        for label, table, key, value in zip(
            self._labels, self._tables, self._keys, self._values, strict=True
        ):
            try:
                now = table[key]
            except (KeyError, ValueError):
                found.add(label)
                continue
            if id(value) in stale or (now is not value and text_of(now) != text_of(value)):
                found.add(label)
        return frozenset(found)

    def put_back(self, labels: Set[str]) -> None:
        """Bind those names again to what they were bound to; not class attributes and closures."""
        for label, table, key, value in zip(
            self._labels, self._tables, self._keys, self._values, strict=True
        ):
            if label in labels and isinstance(table, dict):
                table[key] = value

    @property
    def text(self) -> list[str]:
        """A line for each name, the same in every process."""
        pairs = zip(self._labels, self._values, strict=True)
        return sorted(f"{label}={text_of(value)}" for label, value in pairs)

    @property
    def objects(self) -> list[Any]:
        """Values of which the text does not tell everything: compared by identity."""
        return [v for v in self._values if not isinstance(v, _BY_TEXT) and not is_plain(v)]


def is_private(label: str) -> bool:
    """Whether a name is a cache by custom."""
    return label.rpartition(".")[2].startswith("_")


def _snapshot(value: Any) -> Any:
    """To compare with later: plain containers by value, others by what they hold."""
    if is_plain(value):
        return copy.deepcopy(value)
    return list(map(id, (*value, *value.values()) if isinstance(value, dict) else value))


class _Cell:
    """A variable of an enclosing function, as a table of one entry."""

    def __init__(self, cell: CellType) -> None:
        self._cell = cell

    def __getitem__(self, key: str) -> Any:
        return self._cell.cell_contents


class _Name:
    __slots__ = ("key", "label", "owner", "table")

    def __init__(self, label: str, owner: Any, table: Any, key: str) -> None:
        self.label, self.table, self.key = f"{label}.{key}", table, key
        self.owner = owner  # kept, so that its id stays its own


class _Walk:
    """Collects names by following code from the forwards of a module and of its parts."""

    def __init__(self, module: nn.Module) -> None:
        self.found: dict[tuple[int, str], _Name] = {}
        self._members_of: dict[tuple[type, str], frozenset[str]] = {}
        self._functions: dict[int, FunctionType] = {}
        for part in module.modules():
            reached = self._members(type(part), frozenset({"forward"}))
            for name, value in vars(part).items():
                if not isinstance(value, type | ModuleType):
                    calls = {"__call__"} if name == "processor" else set()
                    self._value(f"{type(part).__qualname__}.{name}", value, reached | calls)

    def _watch(self, label: str, owner: Any, table: Any, key: str) -> bool:
        """Whether it is a new one."""
        place = (id(owner), key)
        if place in self.found:
            return False
        self.found[place] = _Name(label, owner, table, key)
        return True

    def _members(self, kind: type, names: frozenset[str]) -> frozenset[str]:
        """Look at these members of a class, and at those that they name; all the names."""
        reached, new = names, names
        while new:
            named = [self._member(kind, name) for name in sorted(new)]
            new = frozenset().union(*named) - reached
            reached |= new
        return reached

    def _member(self, kind: type, name: str) -> frozenset[str]:
        """Look at a member; the names that it reads."""
        if (kind, name) in self._members_of:
            return self._members_of[kind, name]
        found = set[str]()
        for base in kind.__mro__:
            root = _root(base.__module__)
            if root in UNWATCHED or name not in vars(base):
                continue
            member = vars(base)[name]
            function = _function_of(member)
            if function is not None:
                found |= self._function(function)
            if root not in FRAMEWORKS and (function is not None or is_plain(member)):
                label = f"{base.__module__}.{base.__qualname__}"
                self._watch(label, base, vars(base), name)
        self._members_of[kind, name] = frozenset(found)
        return self._members_of[kind, name]

    def _function(self, function: FunctionType) -> frozenset[str]:
        """Look at what a function reads; the names in it."""
        names = frozenset(_names(function.__code__))
        if id(function) in self._functions:
            return names
        self._functions[id(function)] = function
        wrapped = getattr(function, "__wrapped__", None)
        if isinstance(wrapped, FunctionType):
            names |= self._function(wrapped)
        table = function.__globals__
        module = table.get("__name__", "")
        root = _root(module)
        if root in UNWATCHED:
            return names
        for name in sorted(names & table.keys() & _globals(function.__code__)):
            self._name(module, table, table, name, names, plain_only=root in FRAMEWORKS)
        if root not in FRAMEWORKS:
            self._closure(f"{module}.{function.__qualname__}", function, names)
        return names

    def _closure(self, label: str, function: FunctionType, names: frozenset[str]) -> None:
        cells = function.__closure__ or ()
        for name, cell in zip(function.__code__.co_freevars, cells, strict=True):
            if name != "__class__" and not _is_empty(cell):
                self._name(label, cell, _Cell(cell), name, names)

    def _name(self, label: str, owner: Any, table: Any, name: str, names: frozenset[str],
              *, plain_only: bool = False) -> None:  # fmt: skip
        value = table[name]
        if plain_only and not isinstance(value, _CONSTANTS):
            return
        self._watch(label, owner, table, name)
        self._value(f"{label}.{name}", value, names)

    def _value(self, label: str, value: Any, names: frozenset[str]) -> None:
        """Follow what a name stands for. ``names``: what is read of it, and more."""
        if isinstance(value, FunctionType):
            self._function(value)
        elif isinstance(value, type):
            self._members(value, names | _SPECIAL)
        elif isinstance(value, functools.partial):
            self._value(label, value.func, names)
        elif isinstance(value, MethodType):
            self._value(label, value.__self__, names | {value.__name__})
        elif isinstance(value, ModuleType):
            if _root(value.__name__) not in UNWATCHED | FRAMEWORKS:
                for name in sorted(names & vars(value).keys()):
                    if (id(vars(value)), name) not in self.found:
                        self._name(value.__name__, vars(value), vars(value), name, names)
        elif not isinstance(value, nn.Module | Tensor):
            self._object(label, value, names)

    def _object(self, label: str, value: Any, names: frozenset[str]) -> None:
        """An object of a class of the user's, and what of it is read."""
        kind = type(value)
        if _root(kind.__module__) in UNWATCHED:
            return
        special = {name for base in kind.__mro__ for name in vars(base) if name.startswith("__")}
        reached = self._members(kind, names | special if _root(kind.__module__) not in FRAMEWORKS
                                else names & {"__call__"})  # fmt: skip
        held = getattr(value, "__dict__", {})
        for name in sorted(reached & held.keys()):
            if self._watch(label, value, held, name):
                self._value(f"{label}.{name}", held[name], reached)


_LOADS = ("LOAD_GLOBAL", "LOAD_NAME")
_SPECIAL = frozenset({"__new__", "__init__", "__post_init__", "__call__"})


def _root(module: str) -> str:
    return module.partition(".")[0]


def _function_of(member: Any) -> FunctionType | None:
    if isinstance(member, staticmethod | classmethod):
        member = member.__func__
    elif isinstance(member, property):
        member = member.fget
    return member if isinstance(member, FunctionType) else None


def _names(code: CodeType) -> Iterator[str]:
    """Global names and attributes that a function, and those inside of it, may read."""
    yield from code.co_names
    for const in code.co_consts:
        if isinstance(const, CodeType):
            yield from _names(const)


@functools.lru_cache(maxsize=4096)
def _globals(code: CodeType) -> frozenset[str]:
    """Without attributes: the ``x`` of a script's loop is not that of ``self.x``."""
    inner = [_globals(const) for const in code.co_consts if isinstance(const, CodeType)]
    own = (i.argval for i in dis.get_instructions(code) if i.opname in _LOADS)
    return frozenset(own).union(*inner)


def _is_empty(cell: CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return True
    return False
