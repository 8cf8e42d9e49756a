"""Leave the search for NaN and inf to a fused optimizer, behind the interface of
``torch.amp.GradScaler``."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import Optimizer

from strop.train.optimizer import FusedOptimizer


class GradScaler(torch.amp.GradScaler):
    """Scale for a fused optimizer, with one sweep over the gradients less in every step.

    Its first sweep, which measures the norm, looks for NaN and inf as well. With other optimizers,
    and after ``unscale_``, this is torch's scaler.
    """

    def _check_inf_per_device(self, optimizer: Optimizer) -> dict[str, Any]:
        if not isinstance(optimizer, FusedOptimizer):
            return super()._check_inf_per_device(optimizer)
        found: dict[Any, Any] = optimizer.take_over_check()
        self._per_optimizer_states[id(optimizer)]["found_inf_per_device"] = found
        return found


def update(optimizer: Optimizer, scaler: torch.amp.GradScaler | None) -> None:
    """Step, through the scaler if there is one, and clear the gradients."""
    if scaler is None:
        optimizer.step()
    else:
        scaler.step(optimizer)
        scaler.update()
    optimizer.zero_grad()
