"""Tables that a library makes when they are wanted first: compiled code makes them itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import strop
from strop.errors import StropError
from strop.options import Options


class Rotary:
    """As Z-Image's embedder of positions, which is no module."""

    __module__ = "diffusers.models.lazily"

    def __init__(self) -> None:
        self.base, self.tables = 100.0, None

    def made(self, x: Tensor) -> Any:
        return [self.base ** (torch.arange(8.0, device=x.device) / 8), torch.ones(8)]

    def __call__(self, x: Tensor) -> Tensor:
        if self.tables is None:
            self.tables = self.made(x)
        first, *others = self.tables if isinstance(self.tables, list) else [self.tables]
        return x * first + sum(others)


class OneTensor(Rotary):
    __module__ = "diffusers.models.lazily"

    def made(self, x: Tensor) -> Any:
        return torch.arange(8.0) / self.base


class OfOwnCode(Rotary):
    """The same in a user's code, who may look at it."""

    __module__ = __name__


class OfArguments(Rotary):
    __module__ = "diffusers.models.lazily"

    def made(self, x: Tensor) -> Any:
        return [x[0] * 2, torch.ones(8)]


class OfSizes(Rotary):
    __module__ = "diffusers.models.lazily"

    def made(self, x: Tensor) -> Any:
        return [torch.ones(x.shape[0], 8), torch.ones(8)]


class Numbers(Rotary):
    __module__ = "diffusers.models.lazily"

    def __call__(self, x: Tensor) -> Tensor:
        if self.tables is None:
            self.tables = 3.0
        return x * self.tables


class Net(nn.Module):
    def __init__(self, kind: type[Rotary]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.rotary = nn.Linear(8, 8), kind()

    def forward(self, x: Tensor) -> Tensor:
        return self.rotary(self.inner(x))


def agree(net: Any, twin: nn.Module) -> None:
    for rows in (3, 5):
        x = torch.randn(rows, 8)
        with torch.no_grad():
            torch.testing.assert_close(net(x), twin(x), rtol=1e-5, atol=1e-5)  # fp32 sums


@pytest.mark.parametrize("kind", [Rotary, OneTensor])
def test_they_are_compiled(kind: type[Rotary], tmp_path: Path) -> None:
    net, twin = Net(kind).eval(), Net(kind).eval()
    strop.optimize(net, options=Options(cache_dir=str(tmp_path), strict=True))
    agree(net, twin)
    assert net.rotary.tables is None, "a trace leaves nothing behind"
    net.rotary.base = 7.0
    twin.rotary = kind()
    twin.rotary.base = 7.0
    agree(net, twin)
    assert net.forward.variants.num_captures == 2  # type: ignore[attr-defined]


def test_a_call_in_eager_may_fill_them(tmp_path: Path) -> None:
    net, twin = Net(Rotary).eval(), Net(Rotary).eval()
    strop.optimize(net, options=Options(cache_dir=str(tmp_path)))
    agree(net, twin)
    net(torch.randn(3, 8))  # gradients are enabled
    assert net.rotary.tables is not None
    agree(net, twin)
    counters: Any = net.forward.counters  # type: ignore[attr-defined]
    assert (counters.eager_calls, counters.rebinds) == (1, 0)


def test_where_eager_has_made_them_before_it_stays_so_with_a_reason(tmp_path: Path) -> None:
    net, twin = Net(Rotary).eval(), Net(Rotary).eval()
    net(torch.randn(3, 8))
    strop.optimize(net, options=Options(cache_dir=str(tmp_path)))
    agree(net, twin)
    (reason,) = net.forward.counters.fallbacks  # type: ignore[attr-defined]
    assert "it reads tensors in rotary" in reason


@pytest.mark.parametrize("kind", [OfOwnCode, OfArguments, OfSizes, Numbers])
def test_others_are_effects(kind: type[Rotary], tmp_path: Path) -> None:
    net = Net(kind).eval()
    strop.optimize(net, options=Options(cache_dir=str(tmp_path), strict=True))
    with pytest.raises(StropError, match=r"it writes Net\.rotary\.tables"), torch.no_grad():
        net(torch.randn(3, 8))
