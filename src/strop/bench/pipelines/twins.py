"""Compare twin pipelines, one in eager and one optimised: the same action is done to both, and what
they draw behind it is compared."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

import strop
from strop.api import dispatchers_of
from strop.bench.pipelines.actions import Action
from strop.bench.pipelines.tiny import TinyPipeline, arguments, drawn, modules_of
from strop.dispatch.dispatcher import Dispatcher
from strop.testing import psnr
from strop.wording import counted

BETWEEN, INSIDE = "between", "inside"  # two pictures, the steps of one
Drawn = list[Tensor] | Exception


SEEN = 90.0  # decibels: a picture that changes more is another one
CLEARLY = 20.0  # decibels that both are nearer to each other than to the picture before
NUDGES = 3


@dataclass(frozen=True, slots=True)
class Outcome:
    """Hold what both have drawn behind an action, and what eager had drawn before it."""

    before: Drawn
    eager: Drawn
    fast: Drawn
    pipe: Any  # the optimised one

    @property
    def decibels(self) -> float:
        """Return how near they are to each other: infinite where equal, or where both raise one
        kind of exception."""
        return nearness(self.fast, self.eager)

    @property
    def is_seen(self) -> bool:
        """Tell whether eager's picture behind the action is visibly another one."""
        return self._change(self.eager) < SEEN

    @property
    def is_told_apart(self) -> bool:
        """Tell whether the optimised one's picture is clearly nearer to eager's than to the one
        before the action: a stale one is not."""
        return self._change(self.eager) + CLEARLY < self.decibels

    def _change(self, found: Drawn) -> float:
        """Compare the first of the two pictures with the one before the action (dB)."""
        return nearness(found[: len(found) // 2] if isinstance(found, list) else found, self.before)

    def __str__(self) -> str:
        if isinstance(self.fast, Exception) or isinstance(self.eager, Exception):
            return f"optimised: {_short(self.fast)}; eager: {_short(self.eager)}"
        changes = self._change(self.eager), self._change(self.fast)
        return (
            f"{self.decibels:.0f} dB from eager's; the action changes eager's picture"
            f" {changes[0]:.0f} dB and this one {changes[1]:.0f} dB"
        )


def _short(found: Drawn) -> str:
    if isinstance(found, Exception):
        return f"{type(found).__name__}: {found}"[:300]
    return counted(len(found), "result")


def nearness(one: Drawn, other: Drawn) -> float:
    """Return the least PSNR of two sets of results (dB); minus infinity where they cannot be
    compared."""
    if isinstance(one, Exception) or isinstance(other, Exception):
        return math.inf if type(one) is type(other) else -math.inf
    if [(t.shape, t.dtype) for t in one] != [(t.shape, t.dtype) for t in other]:
        return -math.inf
    return min(map(_psnr, one, other), default=math.inf)


def _psnr(one: Tensor, other: Tensor) -> float:
    """Divide by the largest number, so that sound and embeddings are judged as pictures are."""
    if torch.equal(one, other):
        return math.inf
    wide = other.double()
    return psnr(one.double() / wide.abs().max(), wide / wide.abs().max())


def outcome(
    case: TinyPipeline,
    action: Action,
    moment: str,
    options: strop.Options,
    *,
    warm: int = 1,
    seen: dict[str, Dispatcher] | None = None,
) -> Outcome | None:
    """Apply an action to both twins and draw. ``warm`` is the number of pictures that both draw
    before. ``seen`` gets the dispatchers, which an action may hide. The result is None where the
    action does not apply."""
    eager, fast = case.made(), case.made()
    if action.target(eager) is None or (moment == INSIDE and not has_callback(eager)):
        return None
    strop.optimize(fast, options=options)
    if seen is not None:
        seen.update(dispatchers_of(fast))
    before = [attempt(partial(drawn, case, pipe)) for pipe in (eager, fast) for _ in range(warm)]
    one, _ = _after(case, eager, action, moment)
    other, pipe = _after(case, fast, action, moment)
    return Outcome(before[0], one, other, pipe)


def rounding(case: TinyPipeline, action: Action, moment: str, *, warm: int = 1) -> float:
    """Return how near eager comes to itself behind the action when its weights move by one unit of
    their last place (dB). A pipeline that enlarges rounding errors comes less near than others."""
    found: list[Drawn] = []
    for seed in range(NUDGES + 1):
        pipe = case.made()
        if seed:
            _nudge(pipe, seed)
        for _ in range(warm):
            attempt(partial(drawn, case, pipe))
        found.append(_after(case, pipe, action, moment)[0])
    return min(nearness(moved, found[0]) for moved in found[1:])


def _nudge(pipe: Any, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for weight in (weight for part in modules_of(pipe) for weight in part.parameters()):
        towards = torch.rand(weight.shape, generator=generator).sub(0.5).mul(math.inf)
        with torch.no_grad():
            weight.copy_(torch.nextafter(weight, towards.to(weight.dtype)))


def has_callback(pipe: Any) -> bool:
    return "callback_on_step_end" in inspect.signature(pipe.__call__).parameters


def attempt(draw: Callable[[], list[Tensor]]) -> Drawn:
    try:
        return draw()
    except Exception as error:
        return error


def _after(case: TinyPipeline, pipe: Any, action: Action, moment: str) -> tuple[Drawn, Any]:
    """Return what a pipeline draws behind an action, twice from two seeds; and the pipeline that
    did."""
    used = [pipe]

    def draw() -> list[Tensor]:
        if moment == INSIDE:
            return drawn(case, pipe, **_callback(case, pipe, action)) + drawn(case, pipe, seed=4)
        told = action.do(action.target(pipe))
        more = dict(told) if isinstance(told, Mapping) else {}
        more = {name: value for name, value in more.items() if not callable(value)}
        around = told if isinstance(told, AbstractContextManager) else nullcontext()
        if hasattr(told, "components"):
            used[0] = told
        with around:
            first = drawn(case, used[0], **more)
        return first + drawn(case, used[0], seed=4)

    return attempt(draw), used[0]


def _callback(case: TinyPipeline, pipe: Any, action: Action) -> dict[str, Any]:
    """Return arguments of a call: the action is done behind the first step."""
    known = getattr(pipe, "_callback_tensor_inputs", ())
    names = [name for name in ("latents", "prompt_embeds") if name in known]

    def after_step(pipe: Any, step: int, timestep: Any, now: dict[str, Any]) -> dict[str, Any]:
        told = action.do(action.target(pipe)) if step == 0 else None
        changes = told if isinstance(told, Mapping) else {}
        return {name: value(now[name]) for name, value in changes.items() if name in now}

    taken: dict[str, Any] = {"callback_on_step_end": after_step}
    if "callback_on_step_end_tensor_inputs" in inspect.signature(pipe.__call__).parameters:
        taken["callback_on_step_end_tensor_inputs"] = names
    return {name: value for name, value in taken.items() if name not in arguments(case, pipe)}
