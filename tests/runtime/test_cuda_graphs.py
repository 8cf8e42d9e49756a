"""What leaves a CUDA graph's memory."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import strop
from strop.runtime.run.cuda_graphs import pool_of


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_graphs_are_captured_after_the_last_one_is_gone() -> None:
    """torch takes none into a pool whose graphs are all gone while it still knows the pool."""
    x = torch.randn(8, 64, device="cuda")
    pool_of(x.device).drop()
    for _ in range(3):
        module = nn.Sequential(nn.Linear(64, 64), nn.GELU()).cuda().eval().requires_grad_(False)
        wanted = module(x)
        strop.optimize(module, options=strop.Options(strict=True))
        for _ in range(4):
            torch.testing.assert_close(module(x), wanted)
        counters = module.forward.counters
        assert counters.replays
        assert not counters.fallbacks
        strop.restore(module)
        assert not pool_of(x.device).held_bytes
