"""Find which parts of a module act otherwise in training mode, and whether one of them is in it."""

from __future__ import annotations

import dis
import inspect
import itertools
from collections.abc import Container, Iterable, Sequence
from types import CodeType, FunctionType
from weakref import WeakKeyDictionary

from torch import nn

from strop.frontend.module_parts import is_exported

_ASKS: WeakKeyDictionary[type, bool] = WeakKeyDictionary()


def sensitive_parts(modules: Iterable[nn.Module], turned: Container[int] = ()) -> list[nn.Module]:
    """Return the parts whose result depends on their own flag ``training``.

    Dropout without a probability does nothing in either mode; peft leaves such layers in training.
    ``turned`` are the ids of those that get another probability now and then.
    """
    found, known = list(modules), dict[type, bool]()
    asked = {
        id(part)
        for module in found
        if asks_others(type(module))
        for part in module.modules()
        if part is not module
    }
    return [m for m in found if id(m) in asked or id(m) in turned or _acts_on_training(m, known)]


def is_in_training(modules: Sequence[nn.Module], sensitive: Sequence[nn.Module]) -> bool:
    """Tell whether a part is in training mode. ``modules``: all of one model, the outermost first.
    ``sensitive``: its ``sensitive_parts``.

    A wrapper that was made around parts in evaluation is in training mode by name alone.
    """
    if is_exported(modules[0]):
        return False
    if any(part.training for part in sensitive):
        return True
    return modules[0].training and all(part.training for part in modules)


def _acts_on_training(module: nn.Module, known: dict[type, bool]) -> bool:
    if isinstance(module, nn.modules.dropout._DropoutNd):
        return module.p > 0
    kind = type(module)
    if kind not in known:
        known[kind] = isinstance(module, nn.modules.batchnorm._NormBase) or _reads_flag(kind)
    return known[kind]


def _reads_flag(kind: type) -> bool:
    """Tell whether the forward of a class, or a method that it may call, names the flag."""
    reached = set[str]()
    new = {"forward"}
    while new and "training" not in new:
        reached |= new
        new = set().union(*(_names_in(kind, name) for name in new)) - reached
    return bool(new)


def _names_in(kind: type, member: str) -> set[str]:
    """Attributes and global names in the code of a member, in all classes that define it."""
    found = set[str]()
    for base in kind.__mro__:
        function = vars(base).get(member) if base not in (nn.Module, object) else None
        if isinstance(function, property):
            function = function.fget
        if isinstance(function, FunctionType):
            found |= _names_of(inspect.unwrap(function).__code__) | _names_of(function.__code__)
    return found


def asks_others(kind: type) -> bool:
    """Tell whether a method of a class, of the user's or of a library's, asks for the flag of
    something else than ``self``."""
    if kind not in _ASKS:
        members = [m for base in kind.__mro__ if base is not nn.Module for m in vars(base).items()]
        functions = [m for name, m in members if isinstance(m, FunctionType) and name != "train"]
        is_torchs = kind.__module__.startswith("torch.nn")
        _ASKS[kind] = not is_torchs and any(_asks_others(f.__code__) for f in functions)
    return _ASKS[kind]


def _asks_others(code: CodeType) -> bool:
    steps = list(dis.get_instructions(code))
    inner = any(_asks_others(const) for const in code.co_consts if isinstance(const, CodeType))
    return inner or any(
        step.opname == "LOAD_ATTR" and step.argval == "training" and before.argval != "self"
        for before, step in itertools.pairwise(steps)
    )


def _names_of(code: CodeType) -> set[str]:
    inner = [_names_of(const) for const in code.co_consts if isinstance(const, CodeType)]
    return set(code.co_names).union(*inner)
