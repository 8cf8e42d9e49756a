"""A kernel computes each of its elements once."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

import strop
from strop.options import Options


class Rotary(nn.Module):
    """Rotated by a table of as many elements as either result, which all heads share."""

    def forward(self, x: Tensor, frequencies: Tensor) -> tuple[Tensor, Tensor]:
        size = depth, height, width = x.shape[1:4]
        parts = [
            frequencies[:depth, :2].view(-1, 1, 1, 2),
            frequencies[:height, 2:4].view(1, -1, 1, 2),
            frequencies[:width, 4:].view(1, 1, -1, 2),
        ]
        table = torch.cat([part.expand(*size, 2) for part in parts], -1).reshape(1, -1, 1, 6)
        heads = x.reshape(1, depth * height * width, 2, 6)
        a, b = heads[..., 0::2], heads[..., 1::2]
        cos, sin = table[..., 0::2], table[..., 1::2]
        return a * cos - b * sin, b * cos + 1


def test_results_that_share_a_table_are_one_sweep(tmp_path: Path) -> None:
    module = strop.optimize(Rotary().eval(), options=Options(cache_dir=str(tmp_path)))
    with torch.no_grad():
        for size in ((4, 5, 6), (2, 3, 7)):
            given = torch.randn(1, *size, 12), torch.randn(9, 6)
            torch.testing.assert_close(module(*given), module.forward.eager(*given))
    for variant in module.forward.variants.all:
        found = [step.ops for step in variant.program.steps]
        assert found == [("cat", "mul", "sub", "add")]
