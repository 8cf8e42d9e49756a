"""``strop.optimize(module, train=True)``: what an inference program cannot serve is compiled too.

Calls without gradients take the dispatcher's way. All others (gradients, training mode, autocast,
hooks) go through Dynamo, AOTAutograd and the same compiler: a forward and a backward graph, with
the weights as arguments, so that nothing is stale after a step of an optimizer.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._dynamo import config as dynamo_config
from torch._dynamo.utils import counters as dynamo_counters
from torch.fx.experimental import _config

from strop.options import Options
from strop.runtime.aot import AotLog, compile_dynamo
from strop.runtime.dispatch import Dispatcher


def _traced_with() -> contextlib.ExitStack:
    """Settings of torch while it may trace: equal sizes are not the same size (square pictures
    would be another graph), and numbers in modules are constants."""
    stack = contextlib.ExitStack()
    shapes: Any = _config  # has a patch at run time
    stack.enter_context(shapes.patch(use_duck_shape=False))
    stack.enter_context(dynamo_config.patch(specialize_float=True))
    return stack


class TrainingDispatcher(Dispatcher):
    """``log`` has the graphs of training steps, ``trained_calls`` how many calls they served."""

    def __init__(self, module: nn.Module, options: Options, **how: Any) -> None:
        super().__init__(module, options, **how)
        self.log, self.trained_calls = AotLog(), 0
        self._compiled = torch.compile(
            self.eager, dynamic=True, fullgraph=options.strict,
            backend=partial(compile_dynamo, record_in=self.log, options=options),
        )  # fmt: skip

    def _run_eager(self, reason: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Not in eager: in graphs that have gradients."""
        known, breaks = len(self.log.records), Counter(dynamo_counters["graph_break"])
        with _traced_with():
            result = self._compiled(*args, **kwargs)
        self.trained_calls += 1
        if len(self.log.records) > known:
            for why in Counter(dynamo_counters["graph_break"]) - breaks:
                self._note_fallback(f"a step is cut in two: {why.splitlines()[0]}")
        return result
