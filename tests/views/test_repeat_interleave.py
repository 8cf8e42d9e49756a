"""``repeat_interleave`` of a length that is given: torch 2.11 fixes it, a graph for each size."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import strop


class Repeats(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return (
            x.repeat_interleave(3, dim=0, output_size=x.shape[0] * 3),
            torch.repeat_interleave(x, 2, output_size=x.numel() * 2),
            torch.repeat_interleave(input=x, repeats=2, dim=-1, output_size=6),
            x.repeat_interleave(2, 1),
        )


class Wrong(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.repeat_interleave(3, dim=0, output_size=5)


class Chosen(nn.Module):
    """How often each is repeated is data: torch's own call."""

    def forward(self, x: Tensor, counts: Tensor) -> tuple[Tensor, ...]:
        counted = torch.repeat_interleave(counts, output_size=7)
        return x.repeat_interleave(counts, 1, output_size=7), counted


def test_one_graph_for_all_sizes() -> None:
    fast: Any = strop.optimize(Repeats().eval(), options=strop.Options(strict=True))
    for rows in (2, 3, 5):
        x = torch.randn(rows, 3)
        for found, wanted in zip(fast(x), Repeats()(x), strict=True):
            assert torch.equal(found, wanted)
    assert len(fast.forward.variants.all) == 1


def test_a_wrong_length() -> None:
    with pytest.raises(RuntimeError, match="expected 6 but got 5"):
        strop.optimize(Wrong().eval())(torch.randn(2, 3))


def test_counts_that_are_data() -> None:
    fast, counts = strop.optimize(Chosen().eval()), torch.tensor([1, 2, 4])
    for rows in (2, 3):
        x = torch.randn(rows, 3)
        for found, wanted in zip(fast(x, counts), Chosen()(x, counts), strict=True):
            assert torch.equal(found, wanted)
