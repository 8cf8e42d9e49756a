"""What a kernel computes of a panel of sums has the bits that it computes row by row: norms, GELU
and codes behind products of int8 codes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import strop
from strop.options import Options

INT8 = torch.int8


def coded(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise rows, as torchao does."""
    scale = (x.abs().amax(-1, keepdim=True).float() / 127.5).clamp_min(1e-7).to(x.dtype)
    codes = (x.float() * (1 / scale.float())).round().clamp(-128, 127).to(INT8)
    return codes, scale


def with_norm(x: Tensor, beside: Tensor) -> Tensor:
    return F.layer_norm(x + beside, x.shape[-1:])


def with_gelu(x: Tensor, beside: Tensor) -> Tensor:
    return F.gelu(x)


def with_softmax(x: Tensor, beside: Tensor) -> Tensor:
    return (x * 0.1).softmax(-1) + beside


class Layer(nn.Module):
    """Multiplies codes, scales the sums, and gives codes of what ``behind`` makes of them."""

    def __init__(self, behind: Callable[[Tensor, Tensor], Tensor], columns: int, depth: int):
        super().__init__()
        self.behind = behind
        self.register_buffer("codes", torch.randint(-128, 128, (columns, depth), dtype=INT8))
        self.register_buffer("scales", torch.rand(columns) * 1e-3)
        self.register_buffer("bias", torch.randn(columns).bfloat16())

    def forward(self, x: Tensor, beside: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        codes, scale = coded(x)
        sums = torch._int_mm(codes, self.codes.t()).float() * scale * self.scales
        y = self.behind(sums.to(x.dtype) + self.bias, beside)
        return y, *coded(y)


@pytest.mark.parametrize(
    ("behind", "columns"),
    [(with_norm, 256), (with_norm, 1500), (with_gelu, 48), (with_gelu, 1500), (with_softmax, 48)],
)
def test_bits_are_those_of_rows(
    behind: Callable[[Tensor, Tensor], Tensor], columns: int, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    layer = Layer(behind, columns, 40).eval()
    by_panels, by_rows = (
        strop.optimize(made, options=Options(cache_dir=str(tmp_path), strict=True, kernels_off=off))
        for made, off in ((layer, ()), (Layer(behind, columns, 40).eval(), ("code_sums",)))
    )
    by_rows.load_state_dict(layer.state_dict())
    for rows in (3, 23, 24, 25, 50, 1):
        given = (torch.randn(rows, 40) * 3).bfloat16(), torch.randn(rows, columns).bfloat16()
        for found, wanted in zip(by_panels(*given), by_rows(*given), strict=True):
            assert torch.equal(found, wanted), rows
    names = [kernel.name for kernel in strop.explain(by_panels).components[0].latest.kernels]
    assert any(name.startswith("codes_") for name in names)
    assert not strop.explain(by_panels).calls


def test_what_is_not_finite_stays_in_its_row(tmp_path: Path) -> None:
    torch.manual_seed(0)
    layer = Layer(with_norm, 64, 40).eval()
    strop.optimize(layer, options=Options(cache_dir=str(tmp_path), strict=True))
    x, beside = torch.randn(30, 40).bfloat16(), torch.randn(30, 64).bfloat16()
    whole = [result.clone() for result in layer(x, beside)]
    beside[7, 3] = float("nan")
    for found, before in zip(layer(x, beside), whole, strict=True):
        others = [row for row in range(30) if row != 7]
        assert torch.equal(found[others], before[others])
    assert layer(x, beside)[0][7].isnan().all()
