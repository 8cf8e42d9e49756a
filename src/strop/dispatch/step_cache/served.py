"""Serve the calls of a denoiser, some steps of a loop from a cache.

Each piece of a step is a program of the module's own dispatcher, which looks at the module as it
does for any call. Where it finds another module, other weights or other adapters than those of the
last full step, what came from the cache is thrown away, and the step is computed in full.
"""

from __future__ import annotations

import inspect
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from strop.dispatch.dispatcher import Dispatcher
from strop.dispatch.signature import is_looked_into
from strop.dispatch.step_cache.lanes import RULES, CacheLane, Rule, advance, lane_for
from strop.dispatch.step_cache.structures import (
    FULL,
    HEAD,
    LAST,
    REST,
    SHALLOW,
    STEP,
    Structure,
    UNetStructure,
    piece_of,
    structure_of,
)
from strop.dispatch.varying_numbers import GivenCall
from strop.errors import OptionError, StropError
from strop.options import Options
from strop.runtime.derived.sources import versions_of
from strop.wording import counted

Piece = Callable[..., Any]  # takes the name of a piece and what it is given


@dataclass(frozen=True, slots=True)
class _NotServed:
    """There is no program for a piece."""

    reason: str


class _NotServedError(Exception):
    """There is no program for a piece."""


class StepCacheDispatcher(Dispatcher):
    """This stands for the forward of a denoiser, and has a step cache."""

    def __init__(self, module: nn.Module, options: Options, **how: Any) -> None:
        """Raises OptionError for a module of which nobody knows where it can be divided."""
        self.structure, self.rule = self.check(module, options), RULES[options.step_cache]
        super().__init__(module, options, **how)
        structure = self.structure  # what traces may outlive this
        self.variants.forward_of = lambda clone, asked: structure.forward_of(
            clone, piece_of(asked.skeleton)
        )
        self._names = [*inspect.signature(type(module).forward).parameters][1:]
        self._turn = threading.RLock()
        self.num_full, self.num_cached = 0, 0
        self.left_out = Counter[str]()  # calls without a cache, by reason

    @staticmethod
    def check(module: nn.Module, options: Options) -> Structure:
        """Return how a module is divided. Raises OptionError where nobody knows, and for options
        that cannot be together with a step cache."""
        if options.weights_budget_bytes:
            raise OptionError(
                "numerics='step_cache' and weights_budget_bytes: weights are streamed in the order"
                " of whole steps: leave one of the two out"
            )
        return structure_of(module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.has_left or is_looked_into() or not self.loop.is_running:
            return super().__call__(*args, **kwargs)
        call = dict(zip(self._names, args, strict=False)) | kwargs
        on_gpu = any(tensor.is_cuda for tensor in self.state.tensors[:1])
        if on_gpu and torch.cuda.is_current_stream_capturing():
            return self._whole(call, "the caller captures a CUDA graph")
        with self._turn:
            lane = lane_for(self.loop, id(self), call, self.state.tensors)
        if isinstance(lane, str):
            return self._whole(call, lane)
        try:
            return self._step(lane, lambda piece, *given: self._run_piece(call, piece, given))
        except _NotServedError as error:
            lane.forget()
            return self._whole(call, str(error))

    def _whole(self, call: Mapping[str, Any], reason: str) -> Any:
        self.left_out[reason] += 1
        return super().__call__(**call)

    def _run_piece(self, call: Mapping[str, Any], piece: str, given: tuple[Any, ...]) -> Any:
        result = super().__call__(**call, **{STEP: (piece, *given)})
        if isinstance(result, _NotServed):
            raise _NotServedError(result.reason)
        return result

    def _step(self, lane: CacheLane, run: Piece) -> Any:
        """Compute a step by its lane, and note it."""
        take = _unet_step if isinstance(self.structure, UNetStructure) else _transformer_step
        before, number = self._known(), self.loop.number
        may_reuse = not lane.must_be_full(self.loop, self.rule) and before == lane.known
        result, is_full = take(lane, run, self.rule, may_reuse=may_reuse)
        if self._known() != before:  # a piece of it, or what was kept, is of another module
            result, is_full = take(lane, run, self.rule, may_reuse=False)
        with self._turn:
            if is_full:
                lane.known = self._known()
            self.num_full += is_full
            self.num_cached += not is_full
            if self.loop.number == number:
                advance(self.loop, lane, is_full=is_full)
        return result

    def _known(self) -> Any:
        """Return what changes whenever the module, its weights or its adapters do. Between two
        steps without code of a user's, nobody writes to weights."""
        state = self.state
        return (
            state.num_scans,
            state.effective.num_writes,
            state.turned.values,
            id(state.effective.rows),
            versions_of(state.tensors) if self.loop.has_user_code else None,
        )

    @property
    def how(self) -> Mapping[str, Any]:
        return {"kind": type(self)}

    @property
    def texts(self) -> list[str]:
        """Say how many calls were computed in full and how many were not, in lines."""
        total, word = self.num_full + self.num_cached, self.options.step_cache
        found = [
            f"step cache ({word}): {self.num_cached} of {counted(total, 'call')} from the cache,"
            f" {self.num_full} in full"
        ]
        return found + [f"without the cache {n}x: {why}" for why, n in self.left_out.items()]

    def _run_eager(self, reason: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return _NotServed(reason) if STEP in kwargs else super()._run_eager(reason, args, kwargs)

    def _run_refused(
        self, refusal: StropError, call: GivenCall, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if STEP in kwargs:
            return _NotServed(str(refusal))
        return super()._run_refused(refusal, call, args, kwargs)


def _unet_step(lane: CacheLane, run: Piece, rule: Rule, *, may_reuse: bool) -> tuple[Any, bool]:
    """Return the result of a step, and whether it was computed in full."""
    if may_reuse and lane.since_full < rule.interval - 1:
        return run(SHALLOW, *lane.kept), False
    result, deep = run(FULL)
    lane.kept = (deep,)
    return result, True


def _transformer_step(
    lane: CacheLane, run: Piece, rule: Rule, *, may_reuse: bool
) -> tuple[Any, bool]:
    """Return the result of a step, and whether it was computed in full. What is kept is what the
    first block has added at the last full step, and the others. The host waits for the change."""
    if not may_reuse:
        picture, text, added, _ = run(HEAD)
    else:
        before, *more = lane.kept
        picture, text, added, change = run(HEAD, before)
        if change.item() < rule.threshold:
            return run(LAST, picture, text, *more), False
    result, more_picture, more_text = run(REST, picture, text)
    lane.kept = added, more_picture, more_text
    return result, True
