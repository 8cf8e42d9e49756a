"""Have Dynamo trace a frame once for all sizes.

Dynamo takes sizes for constants at first, and when a call brings another one opens that size alone:
batch, height and width would be a trace each, and a square picture one more, as equal sizes are one
symbol to it. Where a frame's backend is ours, its first trace opens all of them, each for itself.
While it traces for us, no garbage is collected, and texts that nobody reads are left out.

The clock tells how long Dynamo took around our own work.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from torch._dynamo import config as dynamo_config
from torch._dynamo import convert_frame
from torch._dynamo.callback import CallbackArgs, CallbackTrigger, callback_handler
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._dynamo.utils import get_metrics_context
from torch.fx.experimental import _config as shapes_config

from strop.dispatch.gc_pause import collection_paused
from strop.dispatch.open_sizes import OpenSizes
from strop.dispatch.quick_dynamo import (
    fixed_sizes_as_they_are,
    print_each_size_once,
    without_function_names,
)
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
    ``is_ours`` tells our backend from others. ``constant`` says of which functions the sizes are
    constants, and why they cannot be symbols."""

    def __init__(self, is_ours: Callable[[Any], bool]) -> None:
        self.clock = DynamoClock()
        self.constant: dict[str, str] = {}
        self._is_ours = is_ours
        self._constant: set[str] = set()  # frames of them by torch's number, as in "3/0"
        self._started_ns, self._own_seconds, self._name = 0, 0.0, ""
        self._settings: ExitStack | None = None  # while a frame of ours is traced
        self._sizes: OpenSizes | None = None  # of the frame that is traced
        callback_handler.clear = self._forget  # type: ignore[method-assign]
        self._listen()

    def _listen(self) -> None:
        callback_handler.register_start_callback(self._begin)
        callback_handler.register_end_callback(self._end)

    def _forget(self) -> None:
        """Go on listening where Dynamo's reset() has all listeners forgotten: the first trace after
        it is for all sizes too. It counts frames anew."""
        type(callback_handler).clear(callback_handler)
        self._constant.clear()
        self._listen()

    def note(self, seconds: float) -> None:
        """Note that the trace that runs is for us, and how long our part has taken."""
        self._own_seconds += seconds
        self._started_ns = get_metrics_context()._start_time_ns
        output = InstructionTranslator.current_tx().output
        self._name = output.root_tx.f_code.co_qualname
        print_each_size_once(output)

    def _begin(self, told: CallbackArgs) -> None:
        self._own_seconds = 0.0
        if told.callback_trigger is not CallbackTrigger.DYNAMO or not self._is_ours(_backend()):
            return
        self._sizes, self._settings = None, _settings()
        if _has_symbols() and _frame(told.compile_id) not in self._constant:
            self._sizes = OpenSizes()
            _add_settings_for_all_sizes(self._settings)
            self._sizes.enter(self._settings)

    def _end(self, told: CallbackArgs) -> None:
        settings, self._settings = self._settings, None
        if settings is not None:
            settings.close()
        sizes, self._sizes = self._sizes, None
        if sizes is not None and sizes.reason:
            self._constant.add(_frame(told.compile_id))
            if self._own_seconds:
                self.constant[self._name] = sizes.reason
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


def _has_symbols() -> bool:
    """Tell whether Dynamo may take sizes for symbols, which ``dynamic=False`` forbids."""
    is_automatic = bool(dynamo_config.automatic_dynamic_shapes)
    return is_automatic or not dynamo_config.assume_static_by_default


def _add_settings_for_all_sizes(stack: ExitStack) -> None:
    """Set torch so that equal sizes are symbols of their own, and that symbols cost little: by our
    rules for shapes, and without a cache, which looks for them longer than to work them out
    takes."""
    stack.enter_context(ONE_AT_A_TIME)
    shapes: Any = shapes_config  # has a patch at run time
    stack.enter_context(shapes.patch(use_duck_shape=False))
    stack.enter_context(dynamo_config.patch(fake_tensor_cache_enabled=False))
    stack.enter_context(operator_rules())


def _frame(compile_id: str) -> str:
    return compile_id.partition("/")[0]
