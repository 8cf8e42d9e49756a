"""Say what a call of a diffusion model is made of, and whether it can be compiled."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from .origins import origin_of

# The sampler puts these into every call, for code of other nodes. They change in every step, and
# compiled code does without: a model that reads one of them is not compiled (``TracedOptions``).
OF_SAMPLER = ("cond_or_uncond", "uuids", "sigmas", "sample_sigmas", "wrappers", "callbacks")
# What nodes put into a model by name: functions, in lists or by the block that they belong to.
OF_NODES = ("patches", "patches_replace")
PLAIN_DATA = (bool, int, float, str, torch.Tensor, torch.dtype, torch.device, type(None))


@dataclass(frozen=True, slots=True)
class Call:
    """Describe one call. ``given`` are its arguments by their names, without the options.
    ``reason`` says why it cannot be compiled. All calls of one ``sampling`` have it in common."""

    given: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    reason: str = ""
    sampling: Any = None

    @staticmethod
    def of(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Call:
        """Describe a call of ``function``."""
        bound = inspect.signature(function).bind(*args, **kwargs)
        if any(p.kind is p.VAR_POSITIONAL for p in bound.signature.parameters.values()):
            return Call(reason="its forward takes arguments without names (*args)")
        given: dict[str, Any] = {}
        for name, value in bound.arguments.items():
            is_rest = bound.signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD
            given.update(value if is_rest else {name: value})
        options = given.pop("transformer_options", None) or {}
        kept = {
            name: value
            for name, value in options.items()
            if name not in OF_SAMPLER and not (name in OF_NODES and not any(functions_in(value)))
        }
        reason = reason_in(kept, "transformer_options") or reason_in(given, "")
        return Call(given, kept, reason, options.get("sample_sigmas"))


def functions_in(value: Any) -> list[Any]:
    """Return all that lies in nested dicts, lists and tuples."""
    if isinstance(value, Mapping):
        return [found for part in value.values() for found in functions_in(part)]
    if isinstance(value, list | tuple):
        return [found for part in value for found in functions_in(part)]
    return [value]


def dense(value: Any) -> Any:
    """Return the same with tensors that lie in their usual order. A ControlNet's and a VAE's lie
    now in this order and now in that, by the size of the picture, and each would be a graph."""
    if isinstance(value, torch.Tensor):
        return value.contiguous()
    if type(value) is dict:
        return {key: dense(part) for key, part in value.items()}
    return type(value)(map(dense, value)) if type(value) in (list, tuple) else value


def reason_in(value: Any, place: str) -> str:
    """Say what in nested containers is no plain data, and who has put it there, or nothing."""
    if isinstance(value, PLAIN_DATA):
        return ""
    if type(value) is dict:
        parts = [(part, f"{place}[{key!r}]" if place else str(key)) for key, part in value.items()]
    elif type(value) in (list, tuple):
        parts = [(part, place) for part in value]
    else:
        return f"{place} holds {origin_of(value)}"
    return next(filter(None, (reason_in(part, name) for part, name in parts)), "")


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
