"""What a step has compiled under autocast, called again for a validation picture."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import strop


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(4, 4, 3, padding=1), nn.GroupNorm(2, 4)
        self.query, self.out = nn.Linear(8, 12), nn.Linear(4, 8)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.query(self.norm(self.conv(x))).chunk(3, -1)
        return self.out(nn.functional.scaled_dot_product_attention(q, k, v) + x[..., :4])


WAYS: dict[str, Callable[[nn.Module], Any]] = {
    "optimize": lambda module: strop.optimize(module, train=True),
    "torch.compile": lambda module: torch.compile(module, backend="strop"),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("trains_first", [True, False])
def test_types_and_values_are_eagers(way: str, trains_first: bool) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    plain, net = Net(), Net()
    net.load_state_dict(plain.state_dict())
    fast = WAYS[way](net)
    for size in (8, 8, 6):
        x = torch.randn(2, 4, size, 8)
        with torch.autocast("cpu", torch.bfloat16):
            if trains_first:
                fast(x).float().sum().backward()
            with torch.no_grad():
                found, wanted = fast(x), plain(x)
        assert found.dtype == wanted.dtype == torch.bfloat16
        torch.testing.assert_close(found, wanted, rtol=0.02, atol=0.02)
    if way == "optimize":
        assert not strop.explain(net).fallbacks
