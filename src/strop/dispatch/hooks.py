"""Hooks on submodules, and hooks that torch runs for every module of the process.

The latter see each submodule as it runs, and compiled code runs no submodules: while there are any,
calls are served by the module's own forward. So they are under ``strict=True``: that is about what
cannot be compiled, and who watches all modules for a while wants to see them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.nn.modules.module import (
    _global_backward_hooks,
    _global_backward_pre_hooks,
    _global_forward_hooks,
    _global_forward_pre_hooks,
)

from strop.frontend.computed_weights import name_computed
from strop.frontend.recording_hooks import MODULE as RECORDING

_GLOBAL = (
    _global_forward_hooks,
    _global_forward_pre_hooks,
    _global_backward_hooks,
    _global_backward_pre_hooks,
)
REASON = (
    "hooks for all modules are registered (torch.nn.modules.module.register_module_*, or another"
    " nn.Module.__call__ or _call_impl), which compiled code would not run"
)


def is_untraced(registered: Mapping[int, Any]) -> bool:
    """Tell whether there are others than those that capture traces like the rest of a forward:
    transformers leaves some on a model, inert unless its own forward collects outputs, and torch's
    make weights (``frontend.computed_weights``)."""
    return not all(map(_is_traced, registered.values()))


def _is_traced(hook: Any) -> bool:
    return getattr(hook, "__module__", "") == RECORDING or bool(name_computed(hook))


def _is_torchs(call: Any) -> bool:
    return (getattr(call, "__module__", None) or "").startswith("torch.")


# None where somebody has replaced one before this file was read
_CALL, _CALLED = (
    call if _is_torchs(call) else None for call in (nn.Module.__call__, nn.Module._call_impl)
)


def has_usual_calls() -> bool:
    """Tell whether what calls all modules is torch's own, as in compiled code. Each call asks: the
    names of modules are read only where it is not what it was at first."""
    call, called = nn.Module.__call__, nn.Module._call_impl
    return (call is _CALL or _is_torchs(call)) and (called is _CALLED or _is_torchs(called))


def has_global_hooks() -> bool:
    """Tell whether somebody else than a trace of ours, in another thread, has registered some, or
    has replaced what runs them: torch's tracer would take the function that it knows."""
    if not has_usual_calls():
        return True
    if not (  # each call asks, and a loop would take longer
        _global_forward_hooks
        or _global_forward_pre_hooks
        or _global_backward_hooks
        or _global_backward_pre_hooks
    ):
        return False
    return not all(
        getattr(hook, "__module__", "").startswith("strop.frontend.")
        for hooks in _GLOBAL
        for hook in list(hooks.values())
    )
