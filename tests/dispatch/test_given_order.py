"""Convolution weights, which Strop lays out channels-last on a GPU, lie as before once it is
gone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import strop
from strop.dispatch import placed_weights
from tests.e2e import tiny


class Rows(nn.Module):
    """A convolution whose result is viewed as rows, which no channels-last one can be, or copied to
    rows where it has to."""

    def __init__(self, *, is_viewed: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(16, 16, 3, padding=1)
        self.out = nn.Linear(16 * 64, 8)
        self.is_viewed = is_viewed

    def rows(self, x: Tensor) -> Tensor:
        y: Tensor = self.conv(x)
        return y.view(-1, 16 * 64) if self.is_viewed else y.reshape(-1, 16 * 64)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.rows(x))


def test_an_order_is_given_back() -> None:
    weight = nn.Parameter(torch.randn(4, 3, 2, 2))
    values, strides, kept = weight.detach().clone(), weight.stride(), weight
    placed_weights._GIVEN[weight] = strides
    weight.data = weight.data.contiguous(memory_format=torch.channels_last)
    assert weight.stride() != strides
    placed_weights.give_back_order([weight, torch.ones(3)])
    assert weight is kept
    assert weight.stride() == strides
    assert torch.equal(weight, values)
    assert weight not in placed_weights._GIVEN
    placed_weights.give_back_order([weight])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("is_viewed", [True, False], ids=["viewed", "reshaped"])
def test_parts_run_and_a_restored_model_runs_as_before(is_viewed: bool) -> None:
    net = Rows(is_viewed=is_viewed).eval().requires_grad_(False).to("cuda")
    x = torch.randn(2, 16, 8, 8, device="cuda")
    strides = net.conv.weight.stride()
    expected, rows = net(x), net.rows(x)
    strop.optimize(net, options=tiny.options(strict=True))
    for _ in range(3):
        torch.testing.assert_close(net(x), expected, rtol=1e-2, atol=1e-2)
    assert (net.conv.weight.stride() == strides) == is_viewed
    torch.testing.assert_close(net.rows(x), rows, rtol=1e-2, atol=1e-2)
    strop.restore(net)
    assert net.conv.weight.stride() == strides
    torch.testing.assert_close(net(x), expected)
