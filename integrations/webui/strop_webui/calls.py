"""Say what a call of a UNet is made of, and whether it can be compiled."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

# Forge puts these into every call, for code of other extensions. They change in every step, and
# compiled code does without: a model that reads one of them is not compiled (``TracedOptions``).
OF_SAMPLER = ("cond_or_uncond", "sigmas", "cond_mark", "cond_indices", "uncond_indices")
# Forge hands the ControlNet itself to the UNet, beside what it gave. Compiled code does without.
OF_CALL = ("control_model",)
PLAIN_DATA = (bool, int, float, str, torch.Tensor, torch.dtype, torch.device, type(None))


@dataclass(frozen=True, slots=True)
class Call:
    """Describe one call. ``given`` are its arguments by their names, without the options of Forge.
    ``reason`` says why it cannot be compiled."""

    given: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    reason: str = ""

    @staticmethod
    def of(names: tuple[str, ...], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Call:
        """Describe a call, in which ``names`` are those of the first arguments."""
        if len(args) > len(names):
            return Call(reason="the call has arguments without names")
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        options = given.pop("transformer_options", None) or {}
        kept = {
            name: value
            for name, value in options.items()
            if name not in OF_SAMPLER and not _is_empty(value)
        }
        given.update({name: True for name in OF_CALL if given.get(name) is not None})
        reason = reason_in(kept, "transformer_options") or reason_in(given, "")
        return Call(given, kept, reason)


def _is_empty(value: Any) -> bool:
    """Say whether nothing lies in nested dicts and lists, as where an extension has been before."""
    if isinstance(value, Mapping):
        return all(map(_is_empty, value.values()))
    return isinstance(value, list | tuple) and all(map(_is_empty, value))


def dense(value: Any) -> Any:
    """Return the same with tensors that lie in their usual order. A ControlNet's lie now in this
    order and now in that, by the size of the picture, and each would be a graph."""
    if isinstance(value, torch.Tensor):
        return value.contiguous()
    if type(value) is dict:
        return {key: dense(part) for key, part in value.items()}
    return type(value)(map(dense, value)) if type(value) in (list, tuple) else value


def reason_in(value: Any, place: str) -> str:
    """Say what in nested containers is no plain data, and whose it is, or nothing."""
    if isinstance(value, PLAIN_DATA):
        return ""
    if type(value) is dict:
        parts = [(part, f"{place}[{key!r}]" if place else str(key)) for key, part in value.items()]
    elif type(value) in (list, tuple):
        parts = [(part, place) for part in value]
    else:
        return f"{place} holds {origin_of(value)}"
    return next(filter(None, (reason_in(part, name) for part, name in parts)), "")


def origin_of(value: Any) -> str:
    """Describe a function or an object by its name and the file or module of its code."""
    while isinstance(value, functools.partial):
        value = value.func
    named = value if hasattr(value, "__qualname__") else type(value)
    kind = "the function" if callable(value) else "an object,"
    code = getattr(value, "__code__", None)
    place = code.co_filename if code is not None else named.__module__
    return f"{kind} {named.__qualname__} of {place}"


class Unread:
    """Stand for an argument while a call is traced. Using it raises LookupError: what it holds in
    the traced call would be taken for that of all later ones."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, key: str) -> Any:
        raise LookupError(f"it reads {self._name}, which is no plain data")


class TracedOptions(dict[str, Any]):
    """Hold the options of a call while it is traced. Reading what was left out raises LookupError:
    the value of the traced call would be taken for that of all later ones."""

    def _check(self, key: object) -> None:
        if key in OF_SAMPLER and not super().__contains__(key):
            raise LookupError(f"it reads transformer_options[{key!r}], another one in each step")

    def __contains__(self, key: object) -> bool:
        self._check(key)
        return super().__contains__(key)

    def __missing__(self, key: str) -> Any:
        self._check(key)
        raise KeyError(key)

    def get(self, key: str, default: Any = None) -> Any:
        self._check(key)
        return super().get(key, default)

    def pop(self, key: str, *default: Any) -> Any:
        self._check(key)
        return super().pop(key, *default)

    def setdefault(self, key: str, default: Any = None) -> Any:
        self._check(key)
        return super().setdefault(key, default)

    def copy(self) -> TracedOptions:
        return TracedOptions(self)
