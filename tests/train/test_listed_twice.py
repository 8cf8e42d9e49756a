"""A parameter that a group lists more than once: torch warns, and steps as often."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from strop.errors import UnsupportedError
from strop.train import FusedAdam, FusedAdamW, FusedSGD

pytestmark = pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with dup")
CLOSE = {"rtol": 1e-5, "atol": 1e-6}  # the update in another order
KINDS: dict[Any, tuple[Any, dict[str, Any]]] = {
    FusedAdamW: (torch.optim.AdamW, {"lr": 0.1}),
    FusedAdam: (torch.optim.Adam, {"lr": 0.1, "weight_decay": 0.1}),
    FusedSGD: (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.5}),
}


def weights(device: str) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(5, generator=generator).to(device)) for _ in range(3)]


@pytest.mark.parametrize("ours", KINDS)
def test_it_is_stepped_as_often_as_by_torch(ours: Any, device: str) -> None:
    theirs, options = KINDS[ours]
    results = []
    for make, more in ((ours, {}), (theirs, {"foreach": False})):
        a, b, c = weights(device)
        optimizer = make([{"params": [a, b, a, a]}, {"params": [c]}], **options, **more)
        for step in range(3):
            optimizer.zero_grad()
            loss = (a * b).sum() + c.square().sum()
            loss = loss + a.pow(2).sum() if step else loss
            loss.backward()
            b.grad = b.grad if step != 1 else None  # one that is left out once
            optimizer.step()
        results.append([p.detach() for p in (a, b, c)])
    torch.testing.assert_close(results[0], results[1], **CLOSE)


@pytest.mark.parametrize("ours", KINDS)
def test_torch_warns_within_a_group_and_refuses_another(ours: Any) -> None:
    a, b, _ = weights("cpu")
    with pytest.warns(UserWarning, match="duplicate parameters"):
        optimizer = ours([{"params": [a, b, a]}], **KINDS[ours][1])
    with pytest.raises(ValueError, match="more than one parameter group"):
        optimizer.add_param_group({"params": [b]})


@pytest.mark.parametrize("extra", [{"max_grad_norm": 1.0}, {"ema_decay": 0.9}])
def test_what_would_count_it_twice_is_refused(extra: dict[str, Any]) -> None:
    a, b, _ = weights("cpu")
    optimizer = FusedAdamW([{"params": [a, b, a]}], lr=0.1, **extra)
    (a * b).sum().backward()
    with pytest.raises(UnsupportedError, match="listed twice"):
        optimizer.step()


def test_a_scaled_loss_is_refused() -> None:
    a, b, _ = weights("cpu")
    optimizer = FusedAdamW([{"params": [a, b, a]}], lr=0.1)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale((a * b).sum()).backward()
    with pytest.raises(UnsupportedError, match="listed twice"):
        scaler.step(optimizer)
