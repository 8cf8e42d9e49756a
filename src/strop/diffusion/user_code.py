"""Tell whether a user's code runs between two steps of a denoise loop, and could change a model
there.

Looking for changes takes the host up to a millisecond a step. Where nothing runs in a loop but
diffusers and compiled components, they are looked for with its first step alone.
"""

from __future__ import annotations

import sys
import threading
from types import FrameType
from typing import Any

from torch import nn

_LIBRARIES = ("diffusers", "transformers", "torch", "peft", "strop")
_NO_CALLBACKS = {"callback_on_step_end_tensor_inputs", "callback_steps"}
_DEPTH = 8  # frames between a loop and the beginning of its bar


def runs_user_code(pipe: Any) -> bool:
    """Tell, where a loop of ``pipe`` begins, whether user code runs between its steps, by what its
    progress bar calls.

    A user's code may run in a callback, a pipeline, scheduler or model of a class of the user's or
    with functions of its own, in a hook of a model, or in a thread that the interpreter waits for.
    """
    frame = _caller(sys._getframe(1))
    if frame is None or not _is_library(frame.f_globals.get("__name__", "")):
        return True
    callbacks = [
        value
        for name, value in frame.f_locals.items()
        if name.startswith("callback") and name not in _NO_CALLBACKS
    ]
    held = [pipe, *vars(pipe).values()]
    return (
        any(value is not None for value in callbacks)
        or any(_is_of_user(value) for value in held if _runs(value))
        or any(not t.daemon and t is not threading.current_thread() for t in threading.enumerate())
    )


def _caller(frame: FrameType | None) -> FrameType | None:
    """Return the function whose loop it is: the first one that is neither ours nor of the library
    that makes context managers."""
    for _ in range(_DEPTH):
        if frame is None:
            return None
        name = frame.f_globals.get("__name__", "")
        if name.partition(".")[0] not in ("strop", "contextlib", "functools"):
            return frame
        frame = frame.f_back
    return None


def _runs(value: Any) -> bool:
    """Tell whether a step may run code of it: the pipeline itself, models, schedulers and the
    like."""
    return isinstance(value, nn.Module) or hasattr(value, "config") or callable(value)


def _is_of_user(value: Any) -> bool:
    kind = type(value)
    if not _is_library(kind.__module__) or (callable(value) and not hasattr(value, "__dict__")):
        return True
    own = vars(value)
    if isinstance(value, nn.Module) and (value._forward_hooks or value._forward_pre_hooks):
        return True
    return any(
        callable(v) and not isinstance(v, type | nn.Module) and _is_foreign(v) for v in own.values()
    )


def _is_foreign(function: Any) -> bool:
    return not _is_library(getattr(function, "__module__", None) or type(function).__module__)


def _is_library(module: str) -> bool:
    return module.partition(".")[0] in _LIBRARIES
