"""Compute learning rates as functions of the step: those of ``diffusers.get_scheduler``, without
state."""

from __future__ import annotations

import math
from collections.abc import Callable

from strop.train.settings import Settings

_POLYNOMIAL_END = 1e-7

# name -> factor after the warm-up; arguments: share of the decay that is done, settings
_Shape = Callable[[float, Settings], float]


def _restarts(done: float, settings: Settings) -> float:
    if done >= 1.0:
        return 0.0
    return 0.5 * (1.0 + math.cos(math.pi * (settings.lr_num_cycles * done % 1.0)))


def _polynomial(done: float, settings: Settings) -> float:
    last = _POLYNOMIAL_END / settings.rate if settings.rate else 0.0
    return last if done > 1.0 else (1.0 - last) * (1.0 - done) ** settings.lr_power + last


_SHAPES: dict[str, _Shape] = {
    "constant_with_warmup": lambda done, settings: 1.0,
    "linear": lambda done, settings: max(0.0, 1.0 - done),
    "cosine": lambda done, settings: max(0.0, 0.5 * (1.0 + math.cos(math.pi * done))),
    "cosine_with_restarts": _restarts,
    "polynomial": _polynomial,
}


def learning_rate(settings: Settings, step: int, total: int) -> float:
    """Return the rate of the step with this number, from 0 on, of ``total``."""
    if settings.lr_scheduler == "constant":  # diffusers' one knows no warm-up
        return settings.rate
    warmup = settings.lr_warmup_steps
    if step < warmup:
        return settings.rate * step / max(1, warmup)
    done = (step - warmup) / max(1, total - warmup)
    return settings.rate * _SHAPES[settings.lr_scheduler](done, settings)
