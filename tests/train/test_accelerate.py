"""accelerate around the optimizer: its loop gives what AdamW, clip and EMAModel give in it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from strop import train

accelerate = pytest.importorskip("accelerate")
EMAModel = pytest.importorskip("diffusers.training_utils").EMAModel
STEPS, NORM, DECAY = 6, 0.5, 0.9


def trained(precision: str, ours: bool) -> tuple[list[Tensor], list[Tensor]]:
    """Weights and averages after some steps of an accelerate script, accumulation 2."""
    torch.manual_seed(0)
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerator: Any = accelerate.Accelerator(
        mixed_precision=precision, gradient_accumulation_steps=2, cpu=True
    )
    model = nn.Sequential(nn.Linear(4, 8), nn.SiLU(), nn.Linear(8, 2))
    if ours:
        made: Any = train.FusedAdamW(
            model.parameters(),
            lr=0.05,
            max_grad_norm=NORM,
            ema_decay=train.EMASchedule(decay=DECAY),
        )
    else:
        made = torch.optim.AdamW(model.parameters(), lr=0.05)
        theirs = EMAModel(model.parameters(), decay=DECAY)
    prepared, optimizer = accelerator.prepare(model, made)
    for _ in range(2 * STEPS):
        with accelerator.accumulate(prepared):
            accelerator.backward(prepared(torch.randn(3, 4)).square().mean())
            if not ours and accelerator.sync_gradients:
                accelerator.clip_grad_norm_(prepared.parameters(), NORM)
            optimizer.step()
            if not ours and accelerator.sync_gradients:
                theirs.step(prepared.parameters())
            optimizer.zero_grad()
    averages = optimizer.optimizer.ema if ours else theirs
    return [p.detach() for p in model.parameters()], list(averages.shadow_params)


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_an_accelerate_script(precision: str) -> None:
    for ours, theirs in zip(trained(precision, True), trained(precision, False), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
