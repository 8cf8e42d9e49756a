"""Buckets of sizes: how often a training step is traced."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn
from torch._dynamo.utils import counters

import strop
from strop.options import Options

BUCKETS = [(2, 16, 24), (2, 24, 16), (4, 32, 16), (2, 16, 16), (8, 24, 24)]  # batch, height, width


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.SiLU(), nn.Conv2d(8, 3, 3, padding=1)
    )


def gradients(model: nn.Module, buckets: list[tuple[int, int, int]]) -> list[torch.Tensor]:
    found = []
    for batch, height, width in buckets:
        x = torch.linspace(-1, 1, batch * 3 * height * width).reshape(batch, 3, height, width)
        model(x).square().mean().backward()
        found += [p.grad.clone() for p in model.parameters() if p.grad is not None]
        model.zero_grad()
    return found


def test_optimize_traces_once(tmp_path: Path) -> None:
    model, buckets = network(), [*BUCKETS, (1, 16, 24)]
    wanted = gradients(model, buckets)
    strop.optimize(model, train=True, options=Options(cache_dir=str(tmp_path), strict=True))
    torch.testing.assert_close(gradients(model, buckets), wanted)
    assert [record.role for record in model.forward.log.records] == ["forward", "backward"]
    assert model.forward.trained_calls == len(buckets)


def test_a_dynamic_torch_compile_traces_once_and_again_for_a_batch_of_one() -> None:
    torch._dynamo.reset()
    counters.clear()
    model = network()
    fast = torch.compile(model, backend="strop", dynamic=True)
    torch.testing.assert_close(gradients(fast, BUCKETS), gradients(model, BUCKETS))
    assert counters["stats"]["unique_graphs"] == 1
    gradients(fast, [(1, 16, 24), (1, 24, 24)])
    assert counters["stats"]["unique_graphs"] == 2
