"""A module on a CPU that asks how its arguments lie takes the short way, for such arguments."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

import strop
from strop.options import Options


class Asking(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if x.is_contiguous() else x * 3


def test_the_short_way_is_for_arguments_that_lie_so(tmp_path: Path) -> None:
    module = Asking().eval()
    strop.optimize(module, options=Options(cache_dir=str(tmp_path)))
    dense = torch.arange(12.0).view(3, 4)
    with torch.no_grad():
        for _ in range(3):
            assert torch.equal(module(dense), dense * 2)
        assert module.forward.short((dense,)) is not None
        behind = torch.arange(20.0).view(5, 4)[2:]
        apart = torch.arange(24.0).view(3, 8)[:, ::2]
        turned = torch.arange(12.0).view(4, 3).t()
        for other, factor in ((behind, 2), (apart, 3), (turned, 3)):
            assert (module.forward.short((other,)) is None) == (other is not behind)
            for _ in range(3):
                assert torch.equal(module(other), other * factor)
        assert torch.equal(module(dense), dense * 2)
