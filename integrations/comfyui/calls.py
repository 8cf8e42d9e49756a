"""Say what a call of a diffusion model is made of, and whether it can be compiled."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from strop import extensions

from .origins import origin_of

# The sampler puts these into every call, for code of other nodes. They change in every step, and
# compiled code does without: a model that reads one of them is not compiled (``TracedOptions``).
OF_SAMPLER = ("cond_or_uncond", "uuids", "sigmas", "sample_sigmas", "wrappers", "callbacks")
# Numbers that say how long the encoded text is. Each text would be a graph of its own.
LENGTHS = ("num_tokens",)
# What nodes put into a model by name: functions, in lists or by the block that they belong to.
OF_NODES = ("patches", "patches_replace")


@dataclass(frozen=True, slots=True)
class Call:
    """Describe one call. ``given`` are its arguments by their names, without the options and
    without ``lengths``, which are names of numbers: each is the length of ``context``. ``reason``
    says why it cannot be compiled. All calls of one ``sampling`` have it in common."""

    given: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    lengths: tuple[str, ...] = ()
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
        reason = extensions.reason_in(kept, extensions.NAME, origin_of)
        reason = reason or extensions.reason_in(given, "", origin_of)
        lengths = _lengths_in(given)
        given = {name: value for name, value in given.items() if name not in lengths}
        return Call(given, kept, lengths, reason, options.get("sample_sigmas"))


def _lengths_in(given: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the numbers among arguments that say the length of their encoded text, and nothing
    else: where a mask leaves some of it out, they are numbers as others."""
    context = given.get("context")
    if not isinstance(context, Tensor) or context.dim() < 2:
        return ()
    length = context.shape[1]
    return tuple(n for n in LENGTHS if type(given.get(n)) is int and given[n] == length)


def functions_in(value: Any) -> list[Any]:
    """Return all that lies in nested dicts, lists and tuples."""
    if isinstance(value, Mapping):
        return [found for part in value.values() for found in functions_in(part)]
    if isinstance(value, list | tuple):
        return [found for part in value for found in functions_in(part)]
    return [value]


class TracedOptions(extensions.TracedOptions):
    """Hold the options of a call while it is traced, without those of the sampler."""

    left_out = OF_SAMPLER
