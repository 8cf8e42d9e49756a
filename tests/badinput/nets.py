"""Small modules that tests of bad input share."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import strop
from tests.e2e import tiny

X = torch.randn(3, 8, generator=torch.manual_seed(0))


class Net(nn.Module):
    """A linear layer and a fused activation; ``scale`` is a keyword."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.lin = nn.Linear(8, 8)

    def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        return F.silu(self.lin(x)) * scale


def optimized(module: nn.Module, **changes: Any) -> Any:
    return strop.optimize(module.eval().requires_grad_(False), options=tiny.options(**changes))
