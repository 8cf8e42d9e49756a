"""Let what stands for a value in a trace be of the class of that value to a module's code.

A size is a ``torch.SymInt`` in a trace, a tensor a ``FakeTensor``. A forward that asks for the
class of a value, by ``isinstance``, ``type`` or ``__class__``, gets the answer that it would get
in eager. For most modules two names in the files of their classes are enough. Attributes of each
size and tensor are looked up in Python only where code names ``__class__``: that takes a third of
the time of a trace.
"""

from __future__ import annotations

import builtins
import dis
import functools
import itertools
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor

from strop.frontend.numbers import attributes_of_class, is_asked_by_torch

# What stands for a number -> such a number. A relation between sizes is a SymBool.
_NUMBERS: dict[type, Any] = {torch.SymInt: 0, torch.SymFloat: 0.5, torch.SymBool: True}
_TENSORS = (FakeTensor, FunctionalTensor)


def class_of(value: Any) -> Any:
    """Return the class that a value has in eager."""
    kind = builtins.type(value)
    if kind in _NUMBERS:
        return builtins.type(_NUMBERS[kind])
    if kind in _TENSORS:
        return nn.Parameter if getattr(value, "_is_param", False) else Tensor
    return kind


def is_instance(value: Any, kinds: Any, /) -> bool:
    """Answer as ``isinstance`` does in eager. What asks for the classes of a trace gets them."""
    if builtins.isinstance(value, kinds):
        return True
    stands_for = _NUMBERS.get(builtins.type(value))
    return stands_for is not None and builtins.isinstance(stands_for, kinds)


class OfStandIn(type):
    """Let a class be another one, ``stands_for``, to those who compare it or ask for instances."""

    stands_for: type

    def __instancecheck__(cls, value: Any) -> bool:
        return is_instance(value, cls.stands_for)

    def __subclasscheck__(cls, kind: type) -> bool:
        return issubclass(kind, cls.stands_for)

    def __eq__(cls, other: object) -> bool:
        return other is cls.stands_for or other is cls

    def __hash__(cls) -> int:
        return hash(cls.stands_for)


class OfType(OfStandIn):
    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        return class_of(args[0]) if len(args) == 1 else type(*args, **kwargs)


class Type(type, metaclass=OfType):
    """Act as ``type`` to those who ask for its attributes or instances."""

    stands_for = type


def mark_parameters(stand_ins: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Have what stands for a Parameter be one to torch's ``isinstance``. Takes pairs of what stands
    for a tensor and the tensor."""
    for stand_in, tensor in stand_ins:
        if builtins.isinstance(tensor, nn.Parameter):
            mark_parameter(stand_in)


def mark_parameter(value: Tensor) -> None:
    """Have a tensor be a Parameter to torch's ``isinstance``, if it is one of a trace."""
    if builtins.isinstance(value, _TENSORS):
        value._is_param = True


def asking_for_class(files: Iterable[str]) -> bool:
    """Tell whether the code of one of these modules asks for ``x.__class__``, or for a class in a
    ``match``."""
    return any(map(_asks_for_class, _functions(files)))


@contextmanager
def classes_of_values() -> Iterator[None]:
    """Let ``x.__class__`` and ``match`` see the classes of eager in the body."""
    with attributes_of_class((*_NUMBERS, *_TENSORS), attribute_as_in_eager):
        yield


def attribute_as_in_eager(value: Any, name: str) -> Any:
    """Look up an attribute of what stands for a value."""
    if name == "__class__" and not is_asked_by_torch(sys._getframe(1)):
        return class_of(value)
    return object.__getattribute__(value, name)


def _functions(files: Iterable[str]) -> Iterator[CodeType]:
    for file in files:
        for value in list(vars(sys.modules[file]).values()):
            if getattr(value, "__module__", None) != file:
                continue
            members = vars(value).values() if builtins.isinstance(value, type) else (value,)
            yield from (m.__code__ for m in members if builtins.isinstance(m, FunctionType))


@functools.lru_cache(maxsize=8192)
def _asks_for_class(code: CodeType) -> bool:
    """Tell whether code asks for the class of anything but ``self`` in one of these ways."""
    inner = (const for const in code.co_consts if builtins.isinstance(const, CodeType))
    if any(map(_asks_for_class, inner)):
        return True
    if "__class__" not in code.co_names and "MATCH_CLASS" not in _operations(code):
        return False
    return any(
        step.opname == "MATCH_CLASS"
        or (step.argval == "__class__" and step.opname == "LOAD_ATTR" and before.argval != "self")
        for before, step in itertools.pairwise(dis.get_instructions(code))
    )


def _operations(code: CodeType) -> set[str]:
    """Return the names of a code's instructions, of which every second byte is the number."""
    return {dis.opname[number] for number in set(code.co_code[::2])}
