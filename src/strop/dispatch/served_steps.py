"""Serve a graph that Dynamo has traced with gradients as ``strop.optimize(train=True)`` serves a
module: Strop traces forward and backward itself, and weights are arguments of both."""

from __future__ import annotations

import threading
from collections.abc import Hashable, Sequence
from operator import is_
from typing import Any

from torch import Tensor

from strop.dispatch import dynamo
from strop.dispatch.arguments import as_specified
from strop.dispatch.counters import Counters
from strop.dispatch.fallbacks import Fallbacks
from strop.dispatch.module_state import ModuleState
from strop.dispatch.served_graph import TracedSizesAdapter, getter
from strop.dispatch.signature import flatten, memory_order
from strop.dispatch.training_steps import Step, Steps
from strop.dispatch.variants import REFUSALS
from strop.errors import StropError, UnsupportedError
from strop.frontend.traced_graph import TracedGraph
from strop.options import Options
from strop.patterns import registry

_MOST_LOOKS = 1024  # of calls, whose step is known
Found = tuple[Step, dict[str, int]]


class ServedSteps:
    """This serves all graphs of one text, which compute gradients."""

    def __init__(self, traced: TracedGraph, options: Options, name: str) -> None:
        self.traced, self._options, self.name = traced, options, name
        self.log, self.counters = dynamo.AOT_LOG, Counters()
        self._fallbacks = Fallbacks(name, self.counters)
        self._adapter = TracedSizesAdapter(traced.shapes)
        self._by_key: dict[Hashable, list[Step]] = {}
        self._refused: dict[Hashable, StropError] = {}
        self._found: dict[Hashable, Found] = {}
        self._lock = threading.RLock()

    def run(self, state: Sequence[Tensor], given: Sequence[Tensor], look: Hashable) -> Any:
        """Run a step with these weights, which have this ``look``. Where there is none for such a
        call, the graph runs in eager, which is counted."""
        self.counters.calls += 1
        try:
            step, env = self.find(state, given, look)
        except REFUSALS as refusal:
            if self._options.strict:
                raise
            reason = str(refusal)
        else:
            return step(env, (*state, *self.traced.constants, *as_specified(given, step.specs)))
        self._fallbacks.note_eager(reason)
        return self.traced.with_weights(state)(*given)

    def find(self, state: Sequence[Tensor], given: Sequence[Tensor], look: Hashable) -> Found:
        """Find or make the step for a call. Raises one of REFUSALS."""
        key = (
            look,
            registry.active(),
            *((t.shape, t.dtype, t.device, memory_order(t), t.requires_grad) for t in given),
        )
        with self._lock:
            found = self._found.get(key)
            if found is None:
                if len(self._found) >= _MOST_LOOKS:
                    self._found.clear()
                found = self._found[key] = self._made(state, given)
            return found

    def _made(self, state: Sequence[Tensor], given: Sequence[Tensor]) -> Found:
        """Find the step by its guards, or make it. The module with these weights is not kept."""
        module = self.traced.with_weights(state)
        known = ModuleState(module, self._options, folds_adapters=False)
        if not all(map(is_, known.tensors, (*state, *self.traced.constants))):
            raise UnsupportedError("a weight is among its arguments twice")
        steps = Steps(module, self._options, self.log, self._by_key, self._refused)
        skeleton = flatten((tuple(given), {}), [])
        return steps.get(known, skeleton, given, self._adapter.shapes(given))


class StepCall:
    """This is what Dynamo calls in the place of one graph, with all that the graph reads."""

    def __init__(self, served: ServedSteps, traced: TracedGraph) -> None:
        self.served = served
        self._state_of, self._given_of = getter(traced.state), getter(traced.given)
        self._look: Hashable = ()  # of the weights

    def __call__(self, *arguments: Any) -> Any:
        return self.served.run(self._state_of(arguments), self._given_of(arguments), self._look)

    def make_ready(self, state: Sequence[Tensor], given: Sequence[Tensor], owner: Any) -> None:
        """Have a step for a call. Raises one of REFUSALS where there can be none."""
        self._look = tuple((t.shape, t.stride()) for t in state)  # Dynamo's guards hold it fast
        self.served.find(tuple(state), tuple(given), self._look)
