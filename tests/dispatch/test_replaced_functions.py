"""Functions of torch that a user has replaced by their own, as SageAttention's users do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import strop
from strop.options import Options

own_attention = F.scaled_dot_product_attention


def steeper(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Keywords only, and another value than torch's, by way of torch's own."""
    return own_attention(
        query * 1.5,
        key,
        value,
        attn_mask=attn_mask,
        dropout_p=dropout_p,
        is_causal=is_causal,
        scale=scale,
    )


def by_hand(q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> Tensor:
    """None of torch's attention in it."""
    return (q @ k.transpose(-1, -2) * 0.3).softmax(-1) @ v


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        q = self.project(x).unflatten(-1, (2, 4)).transpose(1, 2)
        return F.scaled_dot_product_attention(q, q, q)


class Heads(nn.Module):
    """torch's own function of functions calls the replaced one, by position."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.heads(x, x, x, need_weights=False)[0]
        return found


@pytest.mark.parametrize("way", ["optimize", "compile"])
@pytest.mark.parametrize(
    ("replacement", "module"), [(steeper, Attention), (by_hand, Attention), (by_hand, Heads)]
)
def test_the_replacement_runs(
    replacement: Callable[..., Tensor],
    module: type[nn.Module],
    way: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain, x = module().eval().requires_grad_(False), torch.randn(2, 5, 8)
    unlike = plain(x)
    monkeypatch.setattr(F, "scaled_dot_product_attention", replacement)
    wanted = plain.requires_grad_(True)(x).detach()  # not by the fast path of C++
    plain.requires_grad_(False)
    assert not torch.allclose(wanted, unlike)
    options = Options(cache_dir=str(tmp_path))
    torch._dynamo.reset()
    compiled: Any = (
        strop.optimize(plain, options=options)
        if way == "optimize"
        else torch.compile(plain, backend="strop", options=options)
    )
    with torch.enable_grad():  # for the same reason
        torch.testing.assert_close(compiled(x), wanted)
