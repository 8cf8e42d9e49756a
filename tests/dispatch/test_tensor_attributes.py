"""Tensors that a module holds as plain attributes: read where they are, as weights are."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import strop
from strop.errors import StropError
from tests.e2e import tiny

CLOSE = {"rtol": 1e-5, "atol": 1e-6}  # fp32 sums of eight


class Scaled(nn.Module):
    """``size`` numbers: a few were once taken for constants, more for none that can be had."""

    def __init__(self, size: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(8, size)
        self.scale, self._shift = torch.arange(size) / 4, torch.ones(size)
        self.phases = torch.polar(torch.ones(size), torch.arange(size) / 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.scale + self._shift + (x.sum() * self.phases).real


CHANGES: dict[str, Callable[[Any, int], Any]] = {
    "in place": lambda m, n: m.scale.fill_(2.0),
    "replaced": lambda m, n: setattr(m, "scale", torch.full((n,), 3.0)),
    "a private one": lambda m, n: setattr(m, "_shift", torch.full((n,), 3.0)),
    "complex": lambda m, n: setattr(m, "phases", m.phases * 2),
    "another type": lambda m, n: setattr(m, "scale", m.scale.double()),
    "a number": lambda m, n: setattr(m, "scale", 0.5),
}


@pytest.mark.parametrize("size", [4, 32])
@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_attribute_is_read(size: int, change: str, tmp_path: Path) -> None:
    module: Any = Scaled(size).eval().requires_grad_(False)
    strop.optimize(module, options=tiny.options(cache_dir=str(tmp_path)))
    for step in range(2):
        for rows in (3, 2, 3):
            x = torch.randn(rows, 8)
            torch.testing.assert_close(module(x), module.forward.eager(x), **CLOSE)
        if not step:
            CHANGES[change](module, size)
    assert module.forward.counters.eager_calls == 0, module.forward.counters.fallbacks
    assert len(module.forward.variants.all) == 1 + (change in ("another type", "a number"))


def test_an_attribute_that_a_forward_replaces_sends_it_to_eager(tmp_path: Path) -> None:
    class Counts(Scaled):
        def forward(self, x: Tensor) -> Tensor:
            self.scale = self.scale + 1
            return super().forward(x)

    module: Any = Counts(4).eval().requires_grad_(False)
    strop.optimize(module, options=tiny.options(cache_dir=str(tmp_path)))
    for _ in range(2):
        module(torch.randn(3, 8))
    torch.testing.assert_close(module.scale, torch.arange(4) / 4 + 2)
    assert module.forward.counters.eager_calls == 2


def test_attributes_in_training(tmp_path: Path) -> None:
    module: Any = Scaled(4)
    strop.optimize(module, train=True, options=tiny.options(cache_dir=str(tmp_path)))
    x = torch.randn(3, 8)
    for scale in (1.0, 2.0):
        module.scale.fill_(scale)
        found, expected = module(x), module.forward.eager(x)
        torch.testing.assert_close(found, expected, **CLOSE)
        weights = list(module.parameters())
        gradients = torch.autograd.grad(found.sum(), weights)
        torch.testing.assert_close(gradients, torch.autograd.grad(expected.sum(), weights), **CLOSE)


class Held(nn.Module):
    """Tensors in containers."""

    def __init__(self, size: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(8, size)
        self.scales, self._shifts = [torch.ones(size)], {"a": (torch.zeros(size),)}

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.scales[0] + self._shifts["a"][0]


@pytest.mark.parametrize("size", [4, 32])
@pytest.mark.parametrize("place", ["scales", "_shifts"])
def test_tensors_in_containers_are_read_in_eager(size: int, place: str, tmp_path: Path) -> None:
    module: Any = Held(size).eval().requires_grad_(False)
    if place == "_shifts":
        module.scales = [1.0]
    strop.optimize(module, options=tiny.options(cache_dir=str(tmp_path)))
    tensor = module.scales[0] if place == "scales" else module._shifts["a"][0]
    for value in (2.0, 3.0):
        x = torch.randn(3, 8)
        torch.testing.assert_close(module(x), module.forward.eager(x), **CLOSE)
        tensor.fill_(value)
    (reason,) = module.forward.counters.fallbacks
    assert f"it reads tensors in {place}: register them as buffers" in reason
    strop.restore(module)
    strop.optimize(module, options=tiny.options(cache_dir=str(tmp_path), strict=True))
    with pytest.raises(StropError, match="register them as buffers"):
        module(x)


@pytest.mark.parametrize("size", [4, 32])
def test_tensors_in_containers_while_training(size: int, tmp_path: Path) -> None:
    """No trace of ours; torch's, which guards them, or eager."""
    module: Any = Held(size)
    twin = copy.deepcopy(module)
    strop.optimize(module, train=True, options=tiny.options(cache_dir=str(tmp_path)))
    for value in (2.0, 3.0):
        x = torch.randn(3, 8)
        for one in (module, twin):
            one.zero_grad()
            one(x).square().sum().backward()
            one.scales[0].fill_(value)
        torch.testing.assert_close(module.linear.weight.grad, twin.linear.weight.grad, **CLOSE)


def test_numbers_in_containers_stay_settings(tmp_path: Path) -> None:
    module: Any = Held(4).eval().requires_grad_(False)
    module.scales, module._shifts = [1.5], {"a": (0.5,)}
    strop.optimize(module, options=tiny.options(cache_dir=str(tmp_path), strict=True))
    x = torch.randn(3, 8)
    torch.testing.assert_close(module(x), module.forward.eager(x), **CLOSE)
    assert module.forward.counters.eager_calls == 0
