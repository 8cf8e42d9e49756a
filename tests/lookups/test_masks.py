"""Conditions that are places: g++ 12 took them for the masks that they are in vectors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import strop
from tests.e2e import tiny


class Looks(nn.Module):
    def __init__(self, body: Callable[[Any, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.body = body
        self.linear, self.embedding = nn.Linear(8, 8), nn.Embedding(4, 8)

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        return self.body(self, x, table)


BODIES: dict[str, Callable[[Any, Tensor, Tensor], Tensor]] = {
    "gather": lambda m, x, t: m.linear(x).gather(1, (x > 0).long()),
    "gather of 32 bits": lambda m, x, t: m.linear(x).gather(1, (x > 0).int().long()),
    "gather from the first dim": lambda m, x, t: m.linear(x).gather(0, (x > 0).long()),
    "take_along_dim": lambda m, x, t: torch.take_along_dim(m.linear(x), (x > 0).long(), 1),
    "index": lambda m, x, t: t[(x > 0).long()] * 2,
    "two indices": lambda m, x, t: m.linear(x)[(x > 0).long(), (x < 0.5).long()],
    "wrapped": lambda m, x, t: t[-(x > 0).long()],
    "where": lambda m, x, t: t[torch.where(x > 0, 1, 0)],
    "where of others": lambda m, x, t: t[torch.where(x > 0, 3, 1)],
    "sum of two": lambda m, x, t: t[(x > 0).long() + (x > 1)],
    "negation": lambda m, x, t: t[(~(x > 0)).long()],
    "both": lambda m, x, t: t[((x > 0) & (x < 1)).long()],
    "embedding": lambda m, x, t: m.embedding((x > 0).long()).sum(-1),
    "embedding of a row": lambda m, x, t: m.embedding((x[:, 0] > 0).long()) + x,
    "index_select": lambda m, x, t: t.index_select(0, (x[:, 0] > 0).long()) + x[:, 0],
    "row sum": lambda m, x, t: t[(x > 0).long()].sum(-1),
    "column sum": lambda m, x, t: t[(x > 0).long()].sum(0),
    "scatter": lambda m, x, t: m.linear(x).scatter(1, (x[:, :1] > 0).long(), x[:, :1]),
    "index_add": lambda m, x, t: x.new_zeros(2, 8).index_add(0, (x[:, 0] > 0).long(), x),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", BODIES)
def test_a_condition_is_a_place(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    module = Looks(BODIES[name]).to(dtype).eval().requires_grad_(False)
    source = torch.Generator().manual_seed(1)
    table = torch.arange(1, 5, dtype=dtype)
    with torch.no_grad():
        pairs = []
        for rows in (2, 37):
            x = torch.randn(rows, 8, generator=source).to(dtype)
            pairs.append((x, module(x, table)))
        fast = strop.optimize(module, options=tiny.options())
        for x, expected in pairs:
            atol = 2e-2 if dtype is torch.bfloat16 else 1e-5
            torch.testing.assert_close(fast(x, table), expected, rtol=1e-2, atol=atol)
    assert not strop.explain(fast).fallbacks
