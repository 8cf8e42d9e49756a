"""Queries, keys and values may begin anywhere: what a library cannot read is copied for it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import strop
from strop.options import Options
from strop.runtime.run.library_calls import _aligned


def test_rows_that_begin_at_16_bytes_stay_where_they_are() -> None:
    whole = torch.randn(2, 5, 3, 8)
    for x in (whole, whole.transpose(1, 2), whole[:, :, 1:], whole[:1].expand(4, 5, 3, 8)):
        assert _aligned(x) is x


@pytest.mark.parametrize("first", [0, 1, 4])
def test_others_are_copied(first: int) -> None:
    x = torch.randn(2, 5, 29)[..., first : first + 8]
    copied = _aligned(x)
    assert copied.is_contiguous()
    assert torch.equal(copied, x)


def test_one_that_is_dense_but_begins_anywhere_is_copied_too() -> None:
    """As an argument may that is a piece of a caller's buffer."""
    x = torch.randn(81)[1:].view(2, 5, 8)
    copied = _aligned(x)
    assert copied.data_ptr() % 16 == 0
    assert torch.equal(copied, x)


class Sliced(nn.Module):
    """Attends to slices of one product whose rows have an odd number of elements."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(16, 3 * 8 * 4 + 5)

    def forward(self, x: Tensor) -> Tensor:
        wide = self.wide(x)
        q, k, v = (
            wide[..., n * 32 + 1 : n * 32 + 33].unflatten(-1, (4, 8)).transpose(1, 2)
            for n in range(3)
        )
        return F.scaled_dot_product_attention(q, k, v)

    def exact(self, x: Tensor) -> Tensor:
        wide = F.linear(x.double(), self.wide.weight.double(), self.wide.bias.double())
        q, k, v = (
            wide[..., n * 32 + 1 : n * 32 + 33].unflatten(-1, (4, 8)).transpose(1, 2)
            for n in range(3)
        )
        return (q @ k.transpose(-1, -2) * 8**-0.5).softmax(-1) @ v


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_slices_of_an_odd_product(dtype: torch.dtype, tmp_path: Path) -> None:
    """Torch's own kernels raise for some of these."""
    torch.manual_seed(0)
    module = Sliced().to("cuda", dtype).eval().requires_grad_(False)
    strop.optimize(module, options=Options(cache_dir=str(tmp_path), strict=True))
    for batch, length in ((2, 7), (1, 64), (3, 33)):
        x = torch.randn(batch, length, 16, device="cuda", dtype=dtype)
        for _ in range(3):
            close = 1e-5 if dtype is torch.float32 else 2e-2
            torch.testing.assert_close(module(x).double(), module.exact(x), rtol=close, atol=close)
