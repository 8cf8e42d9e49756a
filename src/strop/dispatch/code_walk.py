"""Find what the forward of a module reaches: names, functions, and objects that can change.

Code is followed through byte code: through methods, functions, classes, objects and modules that
it names. Names are taken too many rather than too few. What is found is plain data; who compares
it with later is ``global_guards``.
"""

from __future__ import annotations

import copyreg
import dis
import functools
import sys
from argparse import Namespace
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import (
    BuiltinFunctionType,
    CellType,
    CodeType,
    FunctionType,
    MethodType,
    ModuleType,
    SimpleNamespace,
)
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd import Function

from strop.dispatch.asked_values import ENVIRONMENT, OF_ENVIRONMENT, questions_of, variables
from strop.dispatch.drawn_from import gives_others
from strop.dispatch.identities import CONSTANTS
from strop.dispatch.told_apart import compares_identity
from strop.dispatch.watched_tables import Cell, Slots, Unbound
from strop.frontend.adapted_layers import is_left_over
from strop.frontend.module_parts import OF_EVERY_MODULE, named_parts, own_attributes
from strop.frontend.stable_text import is_plain

# Packages whose code is not followed: of torch only the layers and functions that a forward names.
_OF_TORCH = {"torch", "torchvision", "functorch", "tensordict", "fbgemm_gpu"}
UNWATCHED = _OF_TORCH | {"numpy", "triton", "strop", *sys.stdlib_module_names} - {"__main__"}
FRAMEWORKS = {"diffusers", "transformers", "peft", "accelerate"}
LIBRARIES = UNWATCHED | FRAMEWORKS
CONTAINERS = (list, tuple, dict, set, frozenset, deque, np.ndarray)
_MEMO = type(functools.lru_cache(abs))
# objects of the standard library that hold a user's values
_NAMESPACES = (SimpleNamespace, Namespace)
_CALLABLES = (FunctionType, BuiltinFunctionType, type)
# of every module: hooks, weights; what diffusers and we put there; and how adapters were
# configured, which their layers do not ask
_OWN = OF_EVERY_MODULE | {"forward", "_compiled_call_impl", "peft_config"}
_MAKING = frozenset({"__new__", "__init__", "__post_init__"})  # of an object, which is there
# No operator of Python's reads these; ``__slotnames__`` is written when an object is copied.
_UNREAD = _MAKING | {"__doc__", "__module__", "__slotnames__"}
_SPECIAL = _MAKING | {"__call__"}
_ENTRY = frozenset({"forward", "__call__"})
# code that may ask for any attribute
_DYNAMIC = frozenset({"getattr", "setattr", "hasattr", "vars", "__dict__", "attrgetter"})


@dataclass(frozen=True, slots=True, eq=False)
class Binding:
    """A name: an entry ``key`` of ``table``, which ``owner`` has. ``is_own``: of the user's code;
    others count by identity alone. ``is_setting``: a plain attribute of a module."""

    label: str
    owner: Any  # kept, so that its id stays its own
    table: Any
    key: str
    is_own: bool = True
    is_setting: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Content:
    """A container whose items count."""

    label: str
    value: Any
    is_own: bool = True


class Originals:
    """Names of a framework, where a stand-in of ours counts as the function for which it stands:
    it answers alike, and comes and goes with the pipelines that are optimised."""

    def __init__(self, table: dict[str, Any]) -> None:
        self.table = table

    def __getitem__(self, key: str) -> Any:
        return original_of(self.table[key])


def original_of(value: Any) -> Any:
    """Return the function for which a stand-in of ours stands, or the value itself."""
    is_ours = _root(type(value).__module__) == "strop"
    return getattr(value, "__wrapped__", value) if is_ours else value


class CodeWalk:
    """Walk over what code reaches. It collects ``places``, ``contents``, and ``owners``: (label,
    object, its dictionary) for all whose number of attributes counts. ``consulted``: names that
    code reads, but to count on."""

    def __init__(self, parts: Iterable[tuple[str, nn.Module]]) -> None:
        self.places: dict[tuple[int, str], Binding] = {}
        self.contents: dict[int, Content] = {}
        self.owners: dict[int, tuple[str, Any, Any]] = {}
        self.memos: dict[int, Any] = {}  # functions that keep their results
        self.modules: list[nn.Module] = []
        self.drawn_from: dict[int, tuple[str, Any]] = {}  # what gives something else each time
        self.consulted: set[str] = set()
        self._member_names: dict[tuple[type, str], frozenset[str]] = {}
        self._class_names: dict[tuple[type, frozenset[str]], frozenset[str]] = {}
        self._functions: dict[int, FunctionType] = {}
        self.names: set[str] = set()  # that any code here reads or writes
        self.own_names: set[str] = set()  # that a user's code does
        self.asks_same = False  # whether a user's code asks if two values are one object
        self.read_names: set[str] = set()  # that code names which computes something
        self._words: set[str] = set()  # texts in code here: names that it may ask for
        self._unreached: list[tuple[str, nn.Module, str]] = []  # private attributes of a user's
        self._held: list[tuple[str, Any]] = []  # objects that are no modules
        found = list(parts)
        self._parts = {id(part) for _, part in found}
        for path, part in found:
            self._part(path or type(part).__qualname__, part)
        while self._grow():
            pass
        self._leave_out_unread()
        self._functional()

    def _functional(self) -> None:
        """Watch the type of tensors that are made without one, and functions of
        torch.nn.functional, which libraries call out of tables of their own, such as that of
        transformers' attentions: no module's code names them."""
        table = vars(nn.functional)
        for name, value in table.items():
            if isinstance(value, _CALLABLES) and name.islower() and not name.startswith("_"):
                self._watch(f"torch.nn.functional.{name}", table, table, name, is_own=False)
        self._asks("torch.get_default_dtype", torch.get_default_dtype, frozenset(), is_own=False)

    def _leave_out_unread(self) -> None:
        """Drop settings that a layer of a library has from its ``__init__``, and that no code here
        names, such as ``in_features``: nearly half of a UNet's names."""
        read = self.names | self._words
        for place, known in list(self.places.items()):
            is_asked = known.is_own or not known.is_setting or known.key in read
            if not is_asked and known.key in _made_names(type(known.owner).__mro__):
                del self.places[place]

    @property
    def asks_any(self) -> bool:
        """Tell whether a user's code may ask for attributes by any name."""
        return not (_DYNAMIC - {"setattr"}).isdisjoint(self.own_names)

    def _grow(self) -> bool:
        """Look at attributes of objects whose names are known by now; whether there are more."""
        before = len(self.places), len(self.names), len(self._held)
        names = frozenset(self.names)
        for label, value in list(self._held):
            self._attributes(label, value, names)
        for path, part, name in self._unreached:  # by its own class; a function may be given it
            is_new = name in self.own_names and self._watch(
                f"{path}.{name}", part, vars(part), name
            )
            if is_new:
                self._value(f"{path}.{name}", vars(part)[name], names, True)
        return before != (len(self.places), len(self.names), len(self._held))

    def _part(self, path: str, part: nn.Module, *, is_registered: bool = True) -> None:
        """Walk over a module: its class, and its attributes. Plain ones of a registered module have
        a place of their own in keys."""
        self.modules.append(part)
        reached = self._members(type(part), _ENTRY)
        is_own = _root(type(part).__module__) not in LIBRARIES
        for name, value in own_attributes(part):
            if name in _OWN or isinstance(value, Tensor):
                continue
            is_private = name.startswith("_")
            if (is_private or is_left_over(part, name)) and name not in reached:
                if is_own and is_private:
                    self._unreached.append((path, part, name))
                continue
            is_setting = is_registered and not is_private and is_plain(value)
            self._watch(f"{path}.{name}", part, vars(part), name, is_own, is_setting)
            if not isinstance(value, type | ModuleType):
                calls = {"__call__"} if name == "processor" else set()
                self._value(f"{path}.{name}", value, reached | calls, is_own)

    def _watch(
        self,
        label: str,
        owner: Any,
        table: Any,
        key: str,
        is_own: bool = True,
        is_setting: bool = False,
    ) -> bool:
        """Watch a place, and tell whether it is a new one."""
        place = (id(owner), key)
        if place in self.places:
            return False
        self.places[place] = Binding(label, owner, table, key, is_own, is_setting)
        return True

    # classes and functions

    def _members(self, kind: type, names: frozenset[str]) -> frozenset[str]:
        """Look at these members of a class, and at those that they name; all the names."""
        found = self._class_names.get((kind, names))
        if found is not None:
            return found
        reached, new = names, names
        while new:
            named = [self._member(kind, name) for name in sorted(new)]
            new = frozenset().union(*named) - reached
            reached |= new
        self._class_names[kind, names] = reached
        for base in kind.__mro__[:-1]:
            if _root(base.__module__) not in UNWATCHED:
                # copying an object, as for a trace, notes them in the class: do so before counting
                copyreg._slotnames(base)  # type: ignore[attr-defined]
                self.owners[id(base)] = (base.__qualname__, base, vars(base))
        return reached

    def _member(self, kind: type, name: str) -> frozenset[str]:
        """Look at a member; the names that it reads."""
        if (kind, name) in self._member_names:
            return self._member_names[kind, name]
        found = set[str]()
        for base in kind.__mro__[:-1]:
            root = _root(base.__module__)
            is_layer = base.__module__.startswith("torch.nn")
            if base is nn.Module:  # what each call of a module runs: ``hooks`` looks there
                continue
            if name not in vars(base) or (root in UNWATCHED and not is_layer):
                continue
            member = vars(base)[name]
            function = _function_of(member)
            if function is not None:
                found |= self._function(function)
            if function is not None or is_plain(member) or isinstance(member, CONTAINERS):
                label = f"{base.__module__}.{base.__qualname__}"
                is_own = root not in LIBRARIES
                self._watch(f"{label}.{name}", base, vars(base), name, is_own)
                if isinstance(member, CONTAINERS):
                    self._value(f"{label}.{name}", member, frozenset({name}), is_own)
        self._member_names[kind, name] = frozenset(found)
        return self._member_names[kind, name]

    def _function(self, function: FunctionType) -> frozenset[str]:
        """Look at what a function reads; the names in it."""
        names = frozenset(_names(function.__code__))
        if id(function) in self._functions:
            return names
        self._functions[id(function)] = function
        words = _texts(function.__code__)
        self.names |= names
        self._words |= words
        self.read_names |= set() if _checks_settings(function) else names | words
        self.consulted |= _consulted(function.__code__)
        wrapped = getattr(function, "__wrapped__", None)
        if isinstance(wrapped, FunctionType):
            names |= self._function(wrapped)
        table = function.__globals__
        module = table.get("__name__", "")
        root = _root(module)
        if root in UNWATCHED and not module.startswith("torch.nn"):
            return names
        is_own = root not in LIBRARIES
        self.own_names |= names if is_own else set()
        self.asks_same |= is_own and compares_identity(function.__code__)
        self._elsewhere(function.__code__, names, is_own)
        for name in sorted(names & table.keys() & _globals(function.__code__)):
            self._name(module, table, table, name, names, is_own)
        if is_own:
            label = f"{module}.{function.__qualname__}"
            for name in sorted(_bound(function.__code__) - table.keys()):
                self._watch(f"{module}.{name}", table, Unbound(table), name)
            self._closure(label, function, names)
            defaults = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
            for value in defaults:
                if not isinstance(value, CONSTANTS):
                    self._value(f"{label}'s default", value, names, is_own)
        return names

    def _elsewhere(self, code: CodeType, names: frozenset[str], is_own: bool) -> None:
        """Watch variables of the environment, and look at modules that the code itself imports."""
        if not OF_ENVIRONMENT.isdisjoint(names):
            for each in variables(_texts(code)):
                self._watch(f"os.environ{each.label}", ENVIRONMENT, each.table, each.key, is_own)
        for name in sorted(_imported(code) & sys.modules.keys()) if is_own else ():
            self._value(name, sys.modules[name], names, is_own)

    def _closure(self, label: str, function: FunctionType, names: frozenset[str]) -> None:
        cells = function.__closure__ or ()
        for name, cell in zip(function.__code__.co_freevars, cells, strict=True):
            if name != "__class__" and not _is_empty(cell):
                self._name(label, cell, Cell(cell), name, names, is_own=True)

    def _name(
        self, label: str, owner: Any, table: Any, name: str, names: frozenset[str], is_own: bool
    ) -> None:
        value = original_of(table[name])
        if value is not table[name]:
            table = Originals(table)
        if not is_own and not isinstance(value, CONSTANTS + _CALLABLES + (ModuleType,)):
            return
        is_new = is_own or not isinstance(value, ModuleType)
        is_flag = isinstance(value, CONSTANTS) and not name.startswith("_")
        is_told = is_own or (is_flag and _root(label) in FRAMEWORKS)
        if is_new and not self._watch(f"{label}.{name}", owner, table, name, is_told):
            return
        home = value.__name__ if isinstance(value, ModuleType) else value.__class__.__module__
        home = getattr(value, "__module__", None) or home
        if is_own or not _is_installed(home):
            self._value(f"{label}.{name}", value, names, is_own)

    # values

    def _value(self, label: str, value: Any, names: frozenset[str], is_own: bool) -> None:
        """Follow what a name stands for. ``names``: what is read of it, and more."""
        if isinstance(value, CONSTANTS) or self._asks(label, value, names, is_own):
            return
        if isinstance(value, FunctionType):
            self._function(value)
        elif isinstance(value, type):
            own = _STEPS_OF_FUNCTION if issubclass(value, Function) else frozenset[str]()
            self._members(value, names | _SPECIAL | own)
        elif isinstance(value, functools.partial):
            self._value(label, value.func, names, is_own)
            self._value(label, (value.args, value.keywords), names, is_own)
        elif isinstance(value, MethodType):
            self._value(label, value.__func__, names, is_own)
            self._value(label, value.__self__, names | _called(value), is_own)
        elif isinstance(value, _MEMO):
            self.memos[id(value)] = value
            self._value(label, getattr(value, "__wrapped__", None), names, is_own)
        elif isinstance(value, ModuleType):
            self._of_module(value, names)
        elif isinstance(value, CONTAINERS):
            self._container(label, value, names, is_own)
        elif not isinstance(value, Tensor):
            self._other(label, value, names, is_own)

    def _other(self, label: str, value: Any, names: frozenset[str], is_own: bool) -> None:
        if gives_others(value):
            self.drawn_from[id(value)] = label, value
        elif not isinstance(value, nn.Module):
            self._object(label, value, names)
        elif is_own:
            self._unregistered(label, value)

    def _unregistered(self, label: str, module: nn.Module) -> None:
        """Walk over a module that is no part of those that run, but that code has by a name, and
        over its parts."""
        for path, part in named_parts(module):
            if id(part) in self._parts:
                continue
            self._parts.add(id(part))
            where = f"{label}.{path}" if path else label
            self._part(where, part, is_registered=False)
            self._watch(f"{where}.forward", part, Unbound(vars(part)), "forward")
            tables = part._modules, part._forward_hooks, part._forward_pre_hooks
            for table in tables:
                self.contents[id(table)] = Content(f"{where}.{type(part).__name__}", table)

    def _asks(self, label: str, value: Any, names: frozenset[str], is_own: bool) -> bool:
        """Watch what code asks of a value by a call, and tell whether that is all there is to
        it."""
        found = questions_of(value, names)
        for each in found:
            self._watch(label + each.label, value, each.table, each.key, is_own)
        return bool(found)

    def _of_module(self, value: ModuleType, names: frozenset[str]) -> None:
        """Return what is named of a module; of torch and the like functions alone."""
        root, table = _root(value.__name__), vars(value)
        if root in UNWATCHED and root != "torch":
            return
        for name in sorted(names & table.keys()):
            found = original_of(table[name])
            if root in LIBRARIES and not isinstance(found, (*_CALLABLES, ModuleType, *CONSTANTS)):
                self._asks(f"{value.__name__}.{name}", found, names, is_own=False)
                continue
            if isinstance(found, ModuleType) and _root(found.__name__) != root:
                continue
            if (id(table), name) not in self.places:
                seen = table if found is table[name] else Originals(table)
                self._watch(f"{value.__name__}.{name}", table, seen, name, root not in LIBRARIES)
                is_torchs = root == "torch" and not isinstance(found, ModuleType)
                if is_torchs:
                    self._asks(f"{value.__name__}.{name}", found, names, is_own=False)
                else:
                    self._value(f"{value.__name__}.{name}", found, names, root not in LIBRARIES)

    def _container(self, label: str, value: Any, names: frozenset[str], is_own: bool) -> None:
        is_simple = type(value) is tuple and all(isinstance(item, CONSTANTS) for item in value)
        if id(value) in self.contents or is_simple:
            return
        self.contents[id(value)] = Content(label, value, is_own)
        if isinstance(value, dict):
            items: Iterator[tuple[Any, Any]] = iter(list(value.items()))
        else:
            items = enumerate(() if isinstance(value, np.ndarray) else list(value))
        for key, item in items:
            is_note = isinstance(key, str) and key.startswith("_") and is_fixed(value)
            if not isinstance(item, CONSTANTS) and not is_note:  # such as which values are defaults
                self._value(f"{label}[{key!r}]", item, names, is_own)

    def _object(self, label: str, value: Any, names: frozenset[str]) -> None:
        """Walk over an object of a class of the user's or of a framework's."""
        kind, root = type(value), _root(type(value).__module__)
        if id(value) in self.owners or (root in UNWATCHED and not isinstance(value, _NAMESPACES)):
            return
        self.owners[id(value)] = (label, value, getattr(value, "__dict__", {}))
        special = {
            name
            for base in kind.__mro__
            for name in vars(base)
            if name.startswith("__") and name not in _UNREAD
        }
        called = special if root not in FRAMEWORKS else {"__call__"}
        self._members(kind, names | called)
        self._held.append((label, value))

    def _attributes(self, label: str, value: Any, names: frozenset[str]) -> None:
        """Walk over the attributes of an object that are read."""
        kind, held = type(value), getattr(value, "__dict__", {})
        is_own = _root(kind.__module__) not in FRAMEWORKS
        reached = self._members(kind, names) | frozenset(getattr(kind, "attribute_map", None) or ())
        asks_all = is_own and any(
            not _DYNAMIC.isdisjoint(self._member_names.get((kind, name), ())) for name in reached
        )
        slots = {name for base in kind.__mro__ for name in _slots(base)}
        for name in sorted(held if asks_all else reached & held.keys()):
            if self._watch(f"{label}.{name}", value, held, name, is_own):
                self._value(f"{label}.{name}", held[name], reached, is_own)
        for name in sorted(slots if asks_all else reached & slots):
            if self._watch(f"{label}.{name}", value, Slots(value), name, is_own):
                self._value(f"{label}.{name}", getattr(value, name, None), reached, is_own)


_MODELS = ("bench", "models", "testing")
# what ``apply`` of a user's function of autograd calls, which its caller does not name
_STEPS_OF_FUNCTION = frozenset({"forward", "backward", "setup_context", "vjp", "jvp", "vmap"})
_LOADS = ("LOAD_GLOBAL", "LOAD_NAME")
_STORES = ("STORE_GLOBAL", "DELETE_GLOBAL")


def is_fixed(value: Any) -> bool:
    """Tell whether a container takes no other items: diffusers' configurations do not either."""
    kind = type(value)
    is_config = kind.__name__ == "FrozenDict" and _root(kind.__module__) in FRAMEWORKS
    return is_config or isinstance(value, tuple | frozenset)


def _root(module: str) -> str:
    """The package; of ours, models are no part of the compiler."""
    root, _, rest = module.partition(".")
    return module if root == "strop" and rest.startswith(_MODELS) else root


@functools.lru_cache(maxsize=1024)
def _is_installed(module: str) -> bool:
    """Tell whether it belongs to a package that is neither the user's own nor one of FRAMEWORKS."""
    root = _root(module)
    place = getattr(sys.modules.get(root), "__file__", None) or ""
    return root not in FRAMEWORKS and root != "torch" and "-packages" in place


def _slots(base: type) -> tuple[str, ...]:
    slots = vars(base).get("__slots__", ())
    return (slots,) if isinstance(slots, str) else tuple(slots)


def _checks_settings(function: FunctionType) -> bool:
    """Tell whether a function makes or checks configurations of transformers: nothing that is
    computed depends on what it reads."""
    root, _, rest = str(function.__globals__.get("__name__")).partition(".")
    is_of_configurations = rest.rpartition(".")[2].startswith("configuration_")
    is_check = function.__name__.startswith(("__", "validate"))
    return root == "transformers" and is_of_configurations and is_check


def _called(method: MethodType) -> frozenset[str]:
    return frozenset({getattr(method.__func__, "__name__", "__call__")})


def _function_of(member: Any) -> FunctionType | None:
    if isinstance(member, staticmethod | classmethod):
        member = member.__func__
    elif isinstance(member, property):
        member = member.fget
    elif isinstance(member, functools.cached_property):
        member = member.func
    return member if isinstance(member, FunctionType) else None


def _names(code: CodeType) -> Iterator[str]:
    """Global names and attributes that a function, and those inside of it, may read."""
    yield from code.co_names
    is_dynamic = not _DYNAMIC.isdisjoint(code.co_names)
    for const in code.co_consts:
        if isinstance(const, CodeType):
            yield from _names(const)
        elif is_dynamic and isinstance(const, str) and const.isidentifier():
            yield const


@functools.lru_cache(maxsize=4096)
def _texts(code: CodeType) -> frozenset[str]:
    """Texts that a function holds, in tuples too."""
    found, values = set[str](), list(code.co_consts)
    for value in values:
        if isinstance(value, str):
            found.add(value)
        elif isinstance(value, tuple | frozenset):
            values += value
        elif isinstance(value, CodeType):
            found |= _texts(value)
    return frozenset(found)


@functools.lru_cache(maxsize=1024)
def _made_names(classes: tuple[type, ...]) -> frozenset[str]:
    """Attributes that the ``__init__`` of these classes name."""
    made = [vars(kind).get("__init__") for kind in classes]
    return frozenset().union(*(_names(f.__code__) for f in made if isinstance(f, FunctionType)))


@functools.lru_cache(maxsize=4096)
def _globals(code: CodeType) -> frozenset[str]:
    """Return the global names that code reads, without attributes: the ``x`` of a script's loop is
    not that of ``self.x``."""
    return _named_by(code, _LOADS)


@functools.lru_cache(maxsize=4096)
def _imported(code: CodeType) -> frozenset[str]:
    """Return the modules that a function imports itself."""
    return _named_by(code, ("IMPORT_NAME",))


@functools.lru_cache(maxsize=4096)
def _bound(code: CodeType) -> frozenset[str]:
    """Global names that a function writes."""
    return _named_by(code, _STORES)


def _named_by(code: CodeType, operations: tuple[str, ...]) -> frozenset[str]:
    inner = [
        _named_by(const, operations) for const in code.co_consts if isinstance(const, CodeType)
    ]
    own = (i.argval for i in dis.get_instructions(code) if i.opname in operations)
    return frozenset(own).union(*inner)


@functools.lru_cache(maxsize=4096)
def _consulted(code: CodeType) -> frozenset[str]:
    """Names whose values a function reads, but for those that it only counts on (``n += 1``)."""
    found = set[str]()
    inner = [_consulted(const) for const in code.co_consts if isinstance(const, CodeType)]
    steps = [i for i in dis.get_instructions(code) if i.opname not in ("COPY", "SWAP", "CACHE")]
    for place, step in enumerate(steps):
        if step.opname.startswith("LOAD_") and isinstance(step.argval, str):
            following = steps[place + 1 : place + 5]
            if not _counts_on(step.argval, following):
                found.add(step.argval)
    return frozenset(found).union(*inner)


def _counts_on(name: str, steps: list[dis.Instruction]) -> bool:
    """Tell whether a constant is added, and the sum goes back to the same name."""
    if len(steps) < 3 or steps[0].opname not in ("LOAD_CONST", "LOAD_SMALL_INT"):
        return False
    is_stored = steps[2].opname.startswith("STORE_") and steps[2].argval == name
    return steps[1].opname == "BINARY_OP" and is_stored


def _is_empty(cell: CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return True
    return False
