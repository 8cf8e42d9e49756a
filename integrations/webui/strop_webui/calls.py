"""Say what a call of a UNet is made of, and whether it can be compiled."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from strop import extensions

# Forge puts these into every call, for code of other extensions. They change in every step, and
# compiled code does without: a model that reads one of them is not compiled (``TracedOptions``).
OF_SAMPLER = ("cond_or_uncond", "sigmas", "cond_mark", "cond_indices", "uncond_indices")
# Forge hands the ControlNet itself to the UNet, beside what it gave. Compiled code does without.
OF_CALL = ("control_model",)


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
        reason = extensions.reason_in(kept, extensions.NAME, origin_of)
        reason = reason or extensions.reason_in(given, "", origin_of)
        return Call(given, kept, reason)


def _is_empty(value: Any) -> bool:
    """Say whether nothing lies in nested dicts and lists, as where an extension has been before."""
    if isinstance(value, Mapping):
        return all(map(_is_empty, value.values()))
    return isinstance(value, list | tuple) and all(map(_is_empty, value))


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


class TracedOptions(extensions.TracedOptions):
    """Hold the options of a call while it is traced, without those of the sampler."""

    left_out = OF_SAMPLER
