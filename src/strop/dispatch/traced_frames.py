"""Have Dynamo trace a frame twice at most: once as it is, then for all sizes.

Dynamo takes sizes for constants at first, and when a call brings another one opens that size alone:
batch, height and width would be a trace each, and a square picture one more, as equal sizes are one
symbol to it. Where a graph of a frame is ours, its next trace opens all of them, each for itself.
While it traces for us, no garbage is collected, and texts that nobody reads are left out.

The clock tells how long Dynamo took around our own work.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._dynamo import config as dynamo_config
from torch._dynamo import convert_frame
from torch._dynamo.callback import CallbackArgs, CallbackTrigger, callback_handler
from torch._dynamo.pgo import FrameStateSizeEntry, auto_dynamic, auto_unset, get_code_state
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._dynamo.utils import get_metrics_context
from torch.fx.experimental import _config as shapes_config

from strop.dispatch.gc_pause import collection_paused
from strop.dispatch.quick_dynamo import (
    fixed_sizes_as_they_are,
    print_each_size_once,
    without_function_names,
)
from strop.dispatch.signature import symbolic_dims
from strop.frontend.capture import ONE_AT_A_TIME
from strop.frontend.shape_rules import operator_rules


@dataclass(frozen=True, slots=True)
class FrameTrace:
    """Hold what one trace of Dynamo's took, with and without our work for it."""

    seconds: float
    own_seconds: float  # Strop's part

    @property
    def dynamo_seconds(self) -> float:
        return self.seconds - self.own_seconds


@dataclass
class DynamoClock:
    """Say how often Dynamo traced for us, and the seconds that this took, with and without ours."""

    traces: list[FrameTrace] = field(default_factory=list)

    @property
    def num_traces(self) -> int:
        return len(self.traces)

    @property
    def dynamo_seconds(self) -> float:
        return sum(trace.dynamo_seconds for trace in self.traces)

    @property
    def own_seconds(self) -> float:
        return sum(trace.own_seconds for trace in self.traces)


class TracedFrames:
    """This is told when Dynamo begins and ends a trace, and which traces were for us.
    ``is_ours`` tells our backend from others."""

    def __init__(self, is_ours: Callable[[Any], bool]) -> None:
        self.clock = DynamoClock()
        self._is_ours = is_ours
        self._known: set[str] = set()  # frames by torch's number, as in "3/0"
        self._started_ns, self._own_seconds = 0, 0.0
        self._settings: ExitStack | None = None  # while a frame of ours is traced
        self.listen()

    def listen(self) -> None:
        """Listen to Dynamo. Its reset() forgets who listens, and counts frames anew."""
        if self._begin not in callback_handler.start_callbacks:
            self._known.clear()
            callback_handler.register_start_callback(self._begin)
            callback_handler.register_end_callback(self._end)

    def note(self, seconds: float) -> None:
        """Note that the trace that runs is for us, and how long our part has taken."""
        self.listen()
        self._own_seconds += seconds
        self._started_ns = get_metrics_context()._start_time_ns
        print_each_size_once(InstructionTranslator.current_tx().output)
        number = torch._guards.CompileContext.current_compile_id()
        if number is not None:
            self._known.add(_frame(str(number)))

    def _begin(self, told: CallbackArgs) -> None:
        self._own_seconds = 0.0
        if told.callback_trigger is not CallbackTrigger.DYNAMO:
            return
        if _frame(told.compile_id) in self._known:
            self._settings = _settings_for_all_sizes()
        elif self._is_ours(_backend()):
            self._settings = _settings()

    def _end(self, told: CallbackArgs) -> None:
        settings, self._settings = self._settings, None
        if settings is not None:
            settings.close()
        if self._own_seconds:
            seconds = (time.time_ns() - self._started_ns) / 1e9
            self.clock.traces.append(FrameTrace(seconds, self._own_seconds))
            self._own_seconds = 0.0


def _backend() -> Any:
    """Return the backend that Dynamo is about to trace for, which only its own frame knows."""
    frame = sys._getframe()
    while frame.f_code is not convert_frame._compile.__code__:
        if frame.f_back is None:
            return None
        frame = frame.f_back
    backend: Any = frame.f_locals.get("compiler_fn")
    while hasattr(backend, "_torchdynamo_orig_backend"):
        backend = backend._torchdynamo_orig_backend
    return getattr(backend, "compiler_fn", backend)  # of torch.compile's wrapper


def _settings() -> ExitStack:
    """Spare Dynamo what takes time and changes nothing: each full collection of garbage walks over
    the whole trace."""
    stack = ExitStack()
    stack.enter_context(collection_paused(leaves_much=True))
    stack.enter_context(without_function_names())
    stack.enter_context(fixed_sizes_as_they_are())
    return stack


def _settings_for_all_sizes() -> ExitStack:
    """Set torch so that equal sizes are symbols of their own, and that symbols cost little: by our
    rules for shapes, and without a cache, which looks for them longer than to work them out
    takes."""
    stack = _settings()
    stack.enter_context(ONE_AT_A_TIME)
    shapes: Any = shapes_config  # has a patch at run time
    stack.enter_context(shapes.patch(use_duck_shape=False))
    stack.enter_context(dynamo_config.patch(fake_tensor_cache_enabled=False))
    stack.enter_context(operator_rules())
    return stack


def _frame(compile_id: str) -> str:
    return compile_id.partition("/")[0]


def open_sizes(tensors: Mapping[str, Tensor]) -> None:
    """Have the next trace of the frame that is being traced take the sizes of these tensors, which
    are known by their sources, for symbols. Those that code fixes are fixed in that trace."""
    code = InstructionTranslator.current_tx().output.root_tx.f_code
    named = (code.co_filename, code.co_firstlineno, code.co_name)
    for known, state in get_code_state().items():
        if (known.filename, known.firstlineno, known.name) != named:
            continue
        for source, tensor in tensors.items():
            entry: Any = state.automatic_dynamic.get(source)
            if entry is None or not isinstance(entry.size, tuple):
                continue
            size: list[Any] = [auto_unset] * tensor.dim()
            for dim in symbolic_dims(tensor):
                if tensor.shape[dim] > 1:
                    size[dim] = auto_dynamic
            state.automatic_dynamic[source] |= FrameStateSizeEntry.make_size(tuple(size))
