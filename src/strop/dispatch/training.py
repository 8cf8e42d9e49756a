"""Compile also what an inference program cannot serve: ``strop.optimize(module, train=True)``.

Calls without gradients take the dispatcher's way. Of all others Strop traces a step itself: a
forward and a backward graph, with the weights as arguments, so that nothing is stale after a step
of an optimizer. What that trace cannot say (writes into buffers, hooks) goes through Dynamo,
AOTAutograd and the same compiler.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo import config as dynamo_config
from torch._dynamo.exc import TorchDynamoException
from torch._dynamo.utils import counters as dynamo_counters
from torch.fx.experimental import _config

from strop.dispatch import hooks
from strop.dispatch.arguments import as_specified
from strop.dispatch.dispatcher import Dispatcher
from strop.dispatch.dynamo import AotLog, compile_dynamo
from strop.dispatch.signature import flatten
from strop.dispatch.training_steps import Steps
from strop.dispatch.unsupported_calls import unfit_weights
from strop.dispatch.variants import REFUSALS
from strop.errors import EagerOnlyError, UnsupportedError
from strop.frontend.capture import without_reports
from strop.options import Options
from strop.wording import counted

log = logging.getLogger("strop")
# Of one function. Torch's own limit is 8, and its count goes over all modules whose forward is the
# same function: with diffusers that is one for most kinds of models.
MOST_TRACES = 64


def _traced_with() -> contextlib.ExitStack:
    """Settings of torch while it may trace: equal sizes are not the same size (square pictures
    would be another graph), numbers in modules are constants, and a step is one graph, whatever
    the buckets of a DistributedDataParallel around it."""
    stack = contextlib.ExitStack()
    shapes: Any = _config  # has a patch at run time
    stack.enter_context(shapes.patch(use_duck_shape=False))
    stack.enter_context(without_reports())
    stack.enter_context(
        dynamo_config.patch(specialize_float=True, optimize_ddp=False, recompile_limit=MOST_TRACES)
    )
    return stack


class TrainingDispatcher(Dispatcher):
    """``log`` has the graphs of training steps, ``trained_calls`` how many calls they served."""

    folds_adapters = False  # the factors are what is trained
    streams = False  # an update wants all weights where they are

    def __init__(self, module: nn.Module, options: Options, **how: Any) -> None:
        super().__init__(module, options, **how)
        self.log, self.trained_calls = AotLog(), 0
        self._compiled: tuple[Any, Callable[..., Any]] = (None, self.eager)
        self.steps = Steps(module, options, self.log)
        self.traced_by_torch: dict[str, int] = {}  # calls, by the reason

    def _run_eager(self, reason: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run, instead of eager, graphs that have gradients."""
        if hooks.has_global_hooks():  # of which Dynamo asks nothing
            return super()._run_eager(hooks.REASON, args, kwargs)
        if refusal := unfit_weights(self.state):
            return super()._run_eager(refusal, args, kwargs)
        try:
            result = self._run_step(args, kwargs)
        except EagerOnlyError as error:
            return super()._run_eager(str(error), args, kwargs)
        except REFUSALS as error:
            refusal = str(error)
        if refusal and self.state.exchanges_with:  # torch would cut it where it likes
            return super()._run_eager(refusal, args, kwargs)
        if refusal:  # out of the handler: what is raised now does not come from there
            try:
                result = self._run_traced_by_torch(refusal, args, kwargs)
            except Exception:
                self.steps.forget_refusal()
                raise
        self.trained_calls += 1
        return result

    def _run_step(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Raises one of REFUSALS where Strop has no graphs of its own."""
        registered, replaced = self.state.hooks, self.state.replaced or self._replaced
        if replaced or (any(registered) and any(map(hooks.is_untraced, registered))):
            raise UnsupportedError(replaced or "a submodule has forward hooks")
        if any(self.state.backward_hooks):
            raise UnsupportedError("a submodule has backward hooks")
        args, kwargs = self.adapter.normalise(args, kwargs)
        tensors: list[Tensor] = []
        skeleton = flatten((args, kwargs), tensors)
        with self._lock:
            self._check_state()
            told = self.state.told_apart
            if reason := told.misfit(tensors) or self.state.attribute_asked_for:
                raise EagerOnlyError(reason)
            skeleton, tensors = told.joined(skeleton, tensors)
            given = itertools.chain(self.state.tensors, tensors)
            if not torch.is_grad_enabled() or not any(t.requires_grad for t in given):
                raise UnsupportedError("nothing in it has a gradient")
            shapes = self.adapter.shapes(tensors, skeleton)
            shapes = shapes.otherwise or shapes
            step, env = self.steps.get(self.state, skeleton, tensors, shapes)
        return step(env, (*self.state.tensors, *as_specified(tensors, step.specs)))

    def _run_traced_by_torch(
        self, reason: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        reason = reason.splitlines()[0]
        if reason not in self.traced_by_torch:
            log.info("%s: torch traces it: %s", self.name, reason)
        self.traced_by_torch[reason] = self.traced_by_torch.get(reason, 0) + 1
        known, breaks = len(self.log.records), Counter(dynamo_counters["graph_break"])
        before, failure = self._num_runs(), None
        try:
            with _traced_with():
                result = self._compiled_forward()(*args, **kwargs)
        except TorchDynamoException as error:
            failure = error
        if failure is not None:
            return self._run_untraced(failure, self._num_runs() > before, args, kwargs)
        if self._num_runs() == before and not self.log.fallbacks:
            self._fallbacks.note("torch does not trace it again, and runs it in eager")
        pieces = sum(record.role != "backward" for record in self.log.records[known:])
        whys = Counter(dynamo_counters["graph_break"]) - breaks  # torch does not note all of them
        if pieces > 1 or (pieces and whys):
            why = next(iter(whys), reason).splitlines()[0]
            self._fallbacks.note(f"a step is cut into {counted(pieces, 'graph')}: {why}")
        return result

    def _compiled_forward(self) -> Callable[..., Any]:
        """Compile the function that is the module's forward now, once for each."""
        forward = self.eager
        function = getattr(forward, "__func__", forward)
        if self._compiled[0] is not function:
            compiled = torch.compile(
                forward,
                dynamic=True,
                fullgraph=self.options.strict,
                backend=partial(compile_dynamo, record_in=self.log, options=self.options),
            )
            self._compiled = function, compiled
        return self._compiled[1]

    def _run_untraced(
        self,
        failure: TorchDynamoException,
        has_begun: bool,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Run in eager, whose own exception comes first: it says more than that tracing failed."""
        if has_begun:  # effects of its first graphs would happen twice
            raise failure
        result = self.eager(*args, **kwargs)
        if self.options.strict:
            raise failure
        cause = getattr(failure, "inner_exception", failure)
        self._fallbacks.note(f"torch cannot trace it: {str(cause).splitlines()[0]}")
        self.counters.eager_calls += 1
        return result

    def _num_runs(self) -> int:
        """Count the runs of compiled graphs."""
        runners = [record.runner for record in self.log.records]
        return sum(runner.num_calls for runner in runners if runner is not None)
