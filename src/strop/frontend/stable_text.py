"""Write plain Python values as text that is the same in every process: parts of keys."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from types import BuiltinFunctionType, CodeType, FunctionType
from typing import Any

import torch

_PLAIN = (
    type(None),
    bool,
    int,
    float,
    str,
    torch.dtype,
    type,
    FunctionType,
    BuiltinFunctionType,
)
# where a model was read from, and what wrote it: frameworks name it in messages, and other weights
# of the same architecture lie elsewhere
WHENCE = frozenset({"_name_or_path", "name_or_path", "transformers_version"})
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


def is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple | set | frozenset):
        return all(map(is_plain, value))
    if isinstance(value, dict):
        return all(map(is_plain, value.values()))
    return isinstance(value, _PLAIN)


def text_of(value: Any, outer: frozenset[int] = frozenset()) -> str:
    """Write a value as text. A function counts by its name and code, an object without a text of
    its own by its class. ``outer`` are the functions that it is a part of."""
    if isinstance(value, list | tuple):
        return f"{type(value).__name__}{[text_of(v, outer) for v in value]}"
    if isinstance(value, set | frozenset):
        return f"{type(value).__name__}{sorted(text_of(v, outer) for v in value)}"
    if isinstance(value, dict):
        return f"dict{[(text_of(k, outer), text_of(v, outer)) for k, v in value.items()]}"
    if isinstance(value, type):
        return qualified(value)
    if isinstance(value, functools.partial):
        return f"partial{text_of((value.func, value.args, value.keywords), outer)}"
    if isinstance(value, FunctionType):
        return _text_of_function(value, outer)
    return getattr(value, "__qualname__", "") or _ADDRESS.sub("", repr(value))


def text_of_config(config: Mapping[str, Any], write: Callable[[Any], str] = text_of) -> str:
    """Leave private keys out: diffusers lists there which values are defaults, in random order."""
    return repr(sorted((k, write(v)) for k, v in config.items() if not k.startswith("_")))


def text_as_lists(value: Any) -> str:
    """Write a value with lists in the place of tuples. A configuration that was read from JSON has
    lists where diffusers' own defaults are tuples, and no forward of diffusers asks for either."""
    return text_of(_as_lists(value))


def _as_lists(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_as_lists(v) for v in value]
    return {k: _as_lists(v) for k, v in value.items()} if isinstance(value, dict) else value


def qualified(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _text_of_function(function: FunctionType, outer: frozenset[int]) -> str:
    name = f"{function.__module__}.{function.__qualname__}"
    if id(function) in outer:  # it calls itself
        return name
    inner = outer | {id(function)}
    cells = []
    for cell in function.__closure__ or ():
        try:
            cells.append(text_of(cell.cell_contents, inner))
        except ValueError:  # not bound yet
            cells.append("empty")
    defaults = text_of((function.__defaults__, function.__kwdefaults__), inner)
    return repr((name, _text_of_code(function.__code__), defaults, cells))


def _text_of_code(code: CodeType) -> str:
    consts = [_text_of_code(c) if isinstance(c, CodeType) else text_of(c) for c in code.co_consts]
    return repr((code.co_code.hex(), code.co_names, consts))
