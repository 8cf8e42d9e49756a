"""Kernels that transpose on a CPU: eager's values, by vectors along what they write."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import strop
from strop.options import Options

SIZES = ((2, 5, 7), (1, 16, 16), (3, 33, 2))


class Out(nn.Module):
    """Channels last inside, and pictures of a module's own order outside."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, channels, 3, padding=1)
        self.factor = nn.Parameter(torch.randn(channels, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(self.conv(x) * self.factor + x.mean(1, keepdim=True))


def text_of(module: nn.Module) -> str:
    (variant,) = module.forward.variants.all
    return "".join(source.text for source in variant.program.sources)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("channels", [2, 8, 16, 21, 64])
def test_values(channels: int, dtype: torch.dtype, tmp_path: Path) -> None:
    torch.manual_seed(0)
    plain = Out(channels).eval().to(dtype)
    module = Out(channels).eval().to(dtype)
    module.load_state_dict(plain.state_dict())
    strop.optimize(module, options=Options(cache_dir=str(tmp_path), strict=True))
    for size in SIZES:
        x = torch.randn(size[0], 3, *size[1:], dtype=dtype)
        with torch.no_grad():
            torch.testing.assert_close(module(x), plain(x), rtol=2e-2, atol=2e-2)
            if dtype is torch.float32:
                torch.testing.assert_close(module(x), plain(x), rtol=1e-5, atol=1e-5)
    assert "far" in text_of(module)


class Turned(nn.Module):
    """Writes short rows, of which no vectors can be made."""

    def forward(self, x: Tensor) -> Tensor:
        return (x.reshape(-1, 4, 100) + 1).transpose(1, 2).contiguous() * 2


def test_short_rows_are_walked_by_cols(tmp_path: Path) -> None:
    module = strop.optimize(Turned().eval(), options=Options(cache_dir=str(tmp_path), strict=True))
    for rows in (1, 3):
        x = torch.randn(rows, 400)
        assert torch.equal(module(x), Turned()(x))
    assert "far" not in text_of(module)


class Head(nn.Module):
    """Ends in a convolution of single pixels."""

    def __init__(self, channels: int, results: int) -> None:
        super().__init__()
        self.body, self.head = nn.Conv2d(3, channels, 3), nn.Conv2d(channels, results, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.body(x)))


@pytest.mark.parametrize(
    ("channels", "results", "dtype", "stays"),
    [
        (8, 4, torch.float32, True),
        (128, 1, torch.float32, True),
        (8, 8, torch.float32, False),
        (8, 4, torch.bfloat16, True),
        (64, 4, torch.bfloat16, False),
    ],
)
def test_few_results_stay_a_convolution(
    channels: int, results: int, dtype: torch.dtype, stays: bool, tmp_path: Path
) -> None:
    plain = Head(channels, results).eval().to(dtype)
    module = Head(channels, results).eval().to(dtype)
    module.load_state_dict(plain.state_dict())
    strop.optimize(module, options=Options(cache_dir=str(tmp_path), strict=True))
    x = torch.randn(2, 3, 9, 11, dtype=dtype)
    with torch.no_grad():
        torch.testing.assert_close(module(x), plain(x), rtol=2e-2, atol=2e-2)
    (variant,) = module.forward.variants.all
    calls = [step.op for step in variant.program.call_steps]
    assert calls == ["conv2d", "conv2d" if stays else "linear"]
