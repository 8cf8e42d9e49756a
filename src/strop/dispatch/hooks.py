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
_CALL, _CALLED = nn.Module.__call__, nn.Module._call_impl
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


def has_global_hooks() -> bool:
    """Tell whether somebody else than a trace of ours, in another thread, has registered some, or
    has replaced what runs them: torch's tracer would take the function that it knows."""
    if nn.Module.__call__ is not _CALL or nn.Module._call_impl is not _CALLED:
        for call in (nn.Module.__call__, nn.Module._call_impl):
            if not (call.__module__ or "").startswith("torch."):
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
