"""Have Dynamo take the sizes of a call's tensors for symbols in the first trace of a frame.

By itself it takes them for constants until a call brings others. What it knows of the sizes of a
tensor is opened just before it asks. A trace that fails with open sizes, or that breaks the graph,
is tried with constants from its beginning. If these fare better, the frame keeps them: nothing
fails because sizes are open. If they break at the same place, sizes are opened again.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch._dynamo import config as dynamo_config
from torch._dynamo import convert_frame, exc
from torch._dynamo.pgo import FrameStateSizeEntry, auto_dynamic
from torch._dynamo.source import GradSource
from torch._dynamo.symbolic_convert import SpeculationEntry, SpeculationLog
from torch._dynamo.variables import builder
from torch._guards import GuardSource

from strop.dispatch.signature import symbolic_dims
from strop.frontend.quick import replaced

# Dynamo begins a trace anew for these whatever its sizes are, and knows then what it has learned.
_ANEW = (
    exc.UnspecializeRestartAnalysis,
    exc.CompileCollectiveRestartAnalysis,
    exc.TensorifyScalarRestartAnalysis,
)
# Dims that a user has said something else of.
_MARKS = (
    "_dynamo_static_indices",
    "_dynamo_unbacked_indices",
    "_dynamo_strict_unbacked_indices",
)
_LONGEST = 200  # of a reason that is told


class _State(enum.Enum):
    OPEN = "sizes are symbols"
    TRIED = "sizes are constants, since the trace has failed with symbols"
    OPEN_AGAIN = "sizes are symbols, since the trace breaks with constants as well"
    CONSTANT = "sizes are constants"


class OpenSizes:
    """Open the sizes of one trace of a frame. ``reason`` says why they are constants after all."""

    def __init__(self) -> None:
        self.reason = ""
        self._state = _State.OPEN
        self._opened: list[tuple[FrameStateSizeEntry, Any]] = []  # and the sizes before
        self._broken: list[SpeculationEntry] = []  # what Dynamo noted up to the break
        self._is_within = False  # a tensor that is made of others

    def enter(self, stack: ExitStack) -> None:
        """Open sizes as long as the stack is."""
        stack.callback(self._close)  # what Dynamo knows is for other backends too
        stack.enter_context(replaced(builder, "_automatic_dynamic", self._opening))
        stack.enter_context(replaced(convert_frame, "trace_frame", self._tried))

    @property
    def _is_open(self) -> bool:
        return self._state in (_State.OPEN, _State.OPEN_AGAIN)

    def _opening(self, usual: Callable[..., Any]) -> Callable[..., Any]:
        def context(
            e: Tensor, tx: Any, source: Any, is_fixed: bool, *more: Any, **named: Any
        ) -> Any:
            outermost, self._is_within = self._is_within, True
            try:
                if self._is_open and not (is_fixed or outermost) and _is_given(e, source):
                    self._open(builder.record_automatic_dynamic(tx, source.name, e), e)
                return usual(e, tx, source, is_fixed, *more, **named)
            finally:
                self._is_within = outermost

        return context

    def _open(self, entry: FrameStateSizeEntry, tensor: Tensor) -> None:
        known: Any = entry.size
        if not isinstance(known, tuple):
            return
        kept = {dim for name in _MARKS for dim in getattr(tensor, name, ())}
        dims = {dim for dim in symbolic_dims(tensor) if tensor.shape[dim] > 1} - kept
        size: Any = tuple(auto_dynamic if dim in dims else s for dim, s in enumerate(known))
        if size != known:
            self._opened.append((entry, known))
            entry.size = size

    def _tried(self, usual: Callable[..., Any]) -> Callable[..., Any]:
        def trace(*given: Any, **named: Any) -> Any:
            log = next(argument for argument in given if isinstance(argument, SpeculationLog))
            try:
                return usual(*given, **named)
            except _ANEW:
                raise
            except Exception as failure:
                self._look_at(failure, log)
                raise

        return trace

    def _look_at(self, failure: Exception, log: SpeculationLog) -> None:
        """Decide how the frame is traced next. Returns if that is as Dynamo would do."""
        if self._is_open and self._opened:
            is_tried = self._state is _State.OPEN
            self._broken = list(log.entries) if _is_break(failure) and is_tried else []
            self._state = _State.TRIED if is_tried else _State.CONSTANT
            self.reason = _reason(failure)
            self._close()
            log.clear()
            _begin_anew(failure)
        if self._state is not _State.TRIED:
            return
        self._state = _State.CONSTANT
        if not _is_break(failure):
            self.reason = ""  # it fails in any case, and the next call may be another one
        elif _place(log.entries) == _place(self._broken):
            self.reason, self._state = "", _State.OPEN_AGAIN
            log.entries[:] = self._broken

    def _close(self) -> None:
        for entry, known in reversed(self._opened):
            entry.size = known
        self._opened.clear()


def _is_given(e: Tensor, source: Any) -> bool:
    """Tell whether a call brings a tensor, whose sizes may be other ones in the next call. What
    modules keep, gradients, and tensors of which Dynamo knows the addresses stay as they are."""
    return (
        bool(dynamo_config.automatic_dynamic_shapes)
        and type(e) is Tensor
        and e.layout is torch.strided
        and not e.is_nested
        and source.guard_source is GuardSource.LOCAL
        and not isinstance(source, GradSource)
        and not hasattr(e, "_dynamo_static_input_type")
    )


def _is_break(failure: Exception) -> bool:
    return isinstance(failure, exc.SpeculationRestartAnalysis)


def _place(entries: list[SpeculationEntry]) -> object:
    """Return where Dynamo breaks the graph: the first entry that has failed, and those before."""
    places = []
    for entry in entries:
        places.append((entry.filename, entry.lineno, entry.instruction_pointer))
        if entry._failed:
            return places
    return None


def _begin_anew(failure: Exception) -> NoReturn:
    """Have Dynamo trace the frame from its beginning."""
    anew: Any = exc.RestartAnalysis(restart_reason=_reason(failure))
    anew._torch_dynamo_tracer_output = getattr(failure, "_torch_dynamo_tracer_output", None)
    raise anew from failure


def _reason(failure: Exception) -> str:
    text = getattr(failure, "restart_reason", None) or f"{type(failure).__name__}: {failure}"
    return str(text).strip().partition("\n")[0][:_LONGEST]
