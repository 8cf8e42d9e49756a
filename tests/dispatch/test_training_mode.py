"""Training mode counts where it changes what is computed, or where somebody has asked for it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import strop
from strop.dispatch.training_mode import is_in_training, sensitive_parts
from strop.options import Options

X = torch.linspace(-1, 1, 6)


class Wrapper(nn.Module):
    """Does not ask for its mode."""

    def __init__(self, *parts: nn.Module) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = part(x)
        return x


class Asks(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return self._halved(x) if self.training else x

    def _halved(self, x: Tensor) -> Tensor:
        return x / 2


class AsksElsewhere(nn.Module):
    """In a method that its forward calls."""

    def forward(self, x: Tensor) -> Tensor:
        return self.scaled(x)

    def scaled(self, x: Tensor) -> Tensor:
        return x * (3 if self.training else 1)


class AsksBelow(AsksElsewhere):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 1


def test_who_is_sensitive() -> None:
    parts = [
        Asks(),
        AsksElsewhere(),
        AsksBelow(),
        nn.Dropout(0.5),
        nn.BatchNorm1d(3),
        nn.LSTM(3, 3, 2, dropout=0.1),
        nn.MultiheadAttention(4, 2),
        nn.RReLU(),
    ]
    others = [Wrapper(), nn.Linear(3, 3), nn.Dropout(0.0), nn.Conv2d(1, 1, 1), nn.SiLU()]
    assert sensitive_parts([*parts, *others]) == parts


@pytest.mark.parametrize("kind", [Asks, AsksElsewhere, AsksBelow])
def test_a_part_that_asks_is_never_stale(kind: type[nn.Module], tmp_path: Path) -> None:
    """Its flag is looked at in each call, wherever it lies."""
    module = Wrapper(nn.Identity(), kind()).eval()
    strop.optimize(module, options=Options(cache_dir=str(tmp_path)))
    with torch.no_grad():
        for flag in (False, False, True, False, True):
            module.parts[1].train(flag)
            assert torch.equal(module(X), module.forward.eager(X)), flag
    assert module.forward.counters.eager_calls == 2
    assert "in training mode" in next(iter(module.forward.counters.fallbacks))


def test_a_wrapper_around_parts_in_evaluation_is_compiled(tmp_path: Path) -> None:
    module = Wrapper(nn.Linear(6, 6).eval(), nn.SiLU().eval())
    assert module.training
    strop.optimize(module, options=Options(cache_dir=str(tmp_path), strict=True))
    with torch.no_grad():
        torch.testing.assert_close(module(X), module.forward.eager(X))
    module.train()
    assert is_in_training(list(module.modules()), [])


class AsksAnother(nn.Module):
    """Asks for the mode of a layer to which it makes no difference."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * (3 if self.layer.training else 1)

    def train(self, mode: bool = True) -> AsksAnother:
        self.layer.training = mode
        return super().train(mode)


def test_a_layer_whose_mode_another_asks_for_is_never_stale(tmp_path: Path) -> None:
    module = Wrapper(AsksAnother(), nn.Linear(6, 6)).eval()
    assert sensitive_parts(module.modules()) == [module.parts[0], module.parts[0].layer]
    strop.optimize(module, options=Options(cache_dir=str(tmp_path)))
    with torch.no_grad():
        for flag in (False, True, False):
            module.parts[0].layer.train(flag)
            assert torch.allclose(module(X), module.forward.eager(X), atol=1e-6), flag
        module.parts[1].train()
        module(X)
    assert module.forward.counters.eager_calls == 1
