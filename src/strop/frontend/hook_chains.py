"""diffusers keeps the hooks around a module's forward as a chain of functions, of which each calls
the next one inside."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from types import FunctionType
from typing import Any

from torch import nn

_REGISTRY, _CALLS = "diffusers.hooks.hooks", "function_reference"  # a cell of its closures


def links(module: nn.Module) -> Iterator[tuple[Any, Any]]:
    """Yield each hook of diffusers around a module's forward, from the outside, and the forward
    that it runs."""
    forward = vars(module).get("forward")
    while (calls := _calls(forward, module)) is not None:
        hook = getattr(calls.pre_forward, "__self__", None)
        if hook is None or vars(hook).get("fn_ref") is not calls:
            return
        forward = calls.original_forward or calls.forward
        yield hook, forward


def watched(hook: Any) -> Iterator[tuple[Mapping[str, Any], str]]:
    """Yield where it is held what the chain calls for a hook."""
    calls = vars(vars(hook)["fn_ref"])
    yield from ((calls, name) for name in calls)


def is_own(forward: Any, module: nn.Module) -> bool:
    """Tell whether this is the forward of the module's class, bound to the module."""
    is_bound = getattr(forward, "__self__", None) is module
    return is_bound and getattr(forward, "__func__", None) is type(module).forward


def _calls(forward: Any, module: nn.Module) -> Any:
    """Return what a function that diffusers has put around a forward calls, or None."""
    if not isinstance(forward, functools.partial) or forward.args != (module,):
        return None
    function = forward.func
    if not isinstance(function, FunctionType) or function.__module__ != _REGISTRY:
        return None
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    return next((cell.cell_contents for name, cell in cells if name == _CALLS), None)
