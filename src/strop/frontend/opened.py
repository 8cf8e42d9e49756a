"""Copy torch.nn.functional with other functions inside.

A mode is off while its own handler runs, so that it never sees what a functional made of others
(``multi_head_attention_forward``) calls. Here each of them has a twin: the same code, whose names
stand for the twins of the others and for the functions of a table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import FunctionType
from typing import Any

import torch.nn.functional as F

Function = Callable[..., Any]


_AT_IMPORT = dict(vars(F))


def twins(table: Mapping[Function, Function]) -> dict[Function, Function]:
    """Map each Python function of torch.nn.functional to its twin."""
    names = _Names(vars(F))
    found: dict[Function, Function] = {}
    for name, value in vars(F).items():
        if isinstance(value, FunctionType) and value.__globals__ is vars(F):
            names[name] = found[value] = _twin(value, names)
        elif callable(value):
            names[name] = table.get(value, value)
    for function, own in table.items():
        if function in found:
            names[function.__name__] = own
    for asks in ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic"):
        names[asks] = _never
    return found


class _Names(dict[str, Any]):
    """Look up the names that twins see: what somebody has since put in the place of a function of
    torch's is what its callers call, in eager too."""

    def __getitem__(self, name: str) -> Any:
        now = vars(F).get(name)
        return super().__getitem__(name) if now is _AT_IMPORT.get(name) else now


def _twin(function: FunctionType, names: dict[str, Any]) -> Function:
    twin = FunctionType(
        function.__code__, names, function.__name__, function.__defaults__, function.__closure__
    )
    twin.__kwdefaults__ = function.__kwdefaults__
    return twin


def _never(*_: Any) -> bool:
    """Tell that no argument wants to handle the call itself: the mode has been asked already."""
    return False
