"""Autocast that a forward switches on itself: types and values of eager, compiled."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import strop
from strop.frontend import autocast
from strop.options import Options


class Cast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.conv, self.row = nn.Linear(8, 8), nn.Conv2d(3, 4, 3), nn.Conv1d(3, 4, 3)
        self.norm = nn.GroupNorm(2, 4)

    def forward(self, x: Tensor, pixels: Tensor, heads: Tensor) -> tuple[Tensor, ...]:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            inside = (
                self.linear(x),
                self.conv(pixels),
                self.row(pixels[:, :, 0]),
                F.scaled_dot_product_attention(heads, heads, heads),
                heads @ heads.mT,
                self.norm(pixels.repeat(1, 2, 1, 1)[:, :4]),
                x.double() @ x.double().t(),
            )
        return *inside, self.linear(x)


@pytest.mark.parametrize("is_dynamo", [False, True])
def test_types_are_those_of_eager(is_dynamo: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    module = Cast().eval().requires_grad_(False)
    args = torch.randn(4, 8), torch.randn(2, 3, 8, 8), torch.randn(2, 2, 6, 8)
    with torch.no_grad():
        wanted = module(*args)
        options = Options(cache_dir=str(tmp_path), strict=True)
        if is_dynamo:
            torch._dynamo.reset()
            found = torch.compile(module, backend="strop", options={"strict": True})(*args)
        else:
            found = strop.optimize(module, options=options)(*args)
    assert [t.dtype for t in found] == [t.dtype for t in wanted]
    assert {torch.float32, torch.bfloat16, torch.float64} == {t.dtype for t in found}
    for ours, eager in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, eager, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_each_rule_is_torchs(kind: str) -> None:
    """A norm has a rule on GPUs alone, and it is fp32."""
    assert autocast._has_rule("linear", kind)
    assert autocast._has_rule("group_norm", kind) is (kind == "cuda")
    assert not autocast._has_rule("relu", kind)
    seen: list[torch.dtype] = []

    def call(x: Tensor) -> Tensor:
        seen.append(x.dtype)
        return x

    with torch.autocast("cpu", dtype=torch.bfloat16):
        for name in ("linear", "group_norm", "relu"):
            autocast.as_autocast(name, call)(torch.ones(2))
        autocast.as_autocast("linear", call)(torch.ones(2, dtype=torch.float64))
    assert seen == [torch.bfloat16, torch.float32, torch.float32, torch.float64]
