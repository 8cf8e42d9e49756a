"""Serve ``torch.compile(model, backend="strop")`` by the dispatcher of ``strop.optimize``.

Dynamo's graph becomes a module of its own. Without gradients a dispatcher serves it, with CUDA
graphs, growing memory and derived inputs; with gradients it is traced as a training step. Graphs of
one text share programs, so that a further trace of Dynamo's compiles nothing that is known. What
neither can serve (parts with modes of their own, numbers among the arguments) goes through
AOTAutograd and the same compiler, as does what writes to weights or arguments.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._guards import tracing
from torch.fx import GraphModule

from strop.dispatch import dynamo
from strop.dispatch.served_graph import GraphCall, ServedGraph
from strop.dispatch.served_steps import ServedSteps, StepCall
from strop.dispatch.traced_frames import TracedFrames
from strop.dispatch.variants import REFUSALS
from strop.errors import OptionError, UnsupportedError
from strop.frontend.differentiated import levels_closed
from strop.frontend.traced_graph import TracedGraph, traced_graph
from strop.options import Options
from strop.runtime.build.processors import check_system

log = logging.getLogger("strop")
# mode of torch.compile -> whether calls are replayed from CUDA graphs. None are tuned: kernels are
# chosen by what was measured.
MODES = {
    "default": True,
    "reduce-overhead": True,
    "max-autotune": True,
    "max-autotune-no-cudagraphs": False,
}
FRAMES = TracedFrames(lambda backend: backend is serve_dynamo)
_KNOWN: WeakValueDictionary[Hashable, ServedGraph | ServedSteps] = WeakValueDictionary()


def serve_dynamo(gm: GraphModule, example_inputs: Sequence[Any], **given: Any) -> Any:
    """Compile what Dynamo hands over, as its backend. ``options={...}`` of torch.compile are fields
    of strop.Options. Raises OptionError for other options, and for a mode that nobody knows."""
    options, started = _options(given), time.perf_counter()
    try:
        with levels_closed():
            return _served(gm, example_inputs, options)
    except REFUSALS as refusal:
        reason = str(refusal)
    finally:
        FRAMES.note(time.perf_counter() - started)
    started = time.perf_counter()
    log.info("a graph goes through AOTAutograd: %s", reason)
    through = dynamo.AOT_LOG.through_aot
    through[reason] = through.get(reason, 0) + 1
    try:
        with levels_closed():
            return dynamo.compile_dynamo(gm, example_inputs, options=options)
    finally:
        FRAMES.note(time.perf_counter() - started)


def _options(given: dict[str, Any]) -> Options:
    check_system()
    mode, options = given.pop("mode", None) or "default", given.pop("options", None)
    if mode not in MODES:
        raise OptionError(f"mode={mode!r}: expected one of {', '.join(MODES)}")
    if not isinstance(options, Options):
        options = Options.from_environment(**(options or given))
    if options.weights_budget_bytes:
        raise OptionError(
            f"weights_budget_bytes={options.weights_budget_bytes} is for strop.optimize:"
            ' torch.compile(backend="strop") streams no weights, so call strop.optimize(model,'
            " options=...) instead, or leave the budget out"
        )
    return options if MODES[mode] else replace(options, cuda_graphs=False)


def _served(gm: GraphModule, example_inputs: Sequence[Any], options: Options) -> Callable[..., Any]:
    """Return what serves the graph. Raises one of REFUSALS where that cannot be."""
    if any(map(torch.is_autocast_enabled, ("cpu", "cuda"))):
        raise UnsupportedError("autocast is enabled around it")
    trains = torch.is_grad_enabled() and any(
        t.requires_grad for t in example_inputs if isinstance(t, Tensor)
    )
    traced, state, given = traced_graph(gm, has_blocks=not trains)
    frame = InstructionTranslator.current_tx().output.root_tx
    owner = frame.f_locals.get(traced.owner)
    name = frame.f_code.co_name if owner is None else type(owner).__name__
    kind = ServedSteps if trains else ServedGraph
    key = _key(traced, state, given, options, kind)
    known = _KNOWN.get(key)
    if known is None:
        known = kind(traced, options, name)
    call = StepCall(known, traced) if isinstance(known, ServedSteps) else GraphCall(known, traced)
    with tracing(None):  # what Dynamo keeps while it traces is not for our own traces
        call.make_ready(state, given, owner)
    _KNOWN[key] = known
    dynamo.AOT_LOG.served.add(known)
    return call


def _key(
    traced: TracedGraph,
    state: Sequence[Tensor],
    given: Sequence[Tensor],
    options: Options,
    kind: type,
) -> Hashable:
    """Return what one store of programs is for. How weights look is known by their structure there,
    and how arguments look by the calls."""
    looks = tuple((t.dtype, t.device, t.requires_grad) for t in (*state, *given))
    return kind, options, traced.text, looks, torch.get_default_dtype()
