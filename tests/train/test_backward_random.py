"""Gradients of what draws: the backward has the numbers of its forward, and both are those that
the generator's seed says."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import strop
from strop.testing import assert_as_accurate_together
from tests.e2e.tiny import DEVICES
from tests.train.compiled import options, roles

pytestmark = pytest.mark.usefixtures("fresh")
Drop = Callable[[Tensor, float], Tensor]


def _by_seed(x: Tensor, p: float) -> Tensor:
    """Dropout of the seed that torch's generator gives next, operator by operator."""
    result: Tensor = torch.ops.strop.dropout(x, torch.ops.strop.seed(x, 0), p)
    return result


class Dropped(nn.Module):
    """Kernels, a product between them, and chances of several sizes."""

    def __init__(self, drop: Drop) -> None:
        super().__init__()
        self.drop = drop

    def forward(self, x: Tensor, w: Tensor) -> Tensor:
        y = self.drop(F.silu(x), 0.3) @ w
        return self.drop(y.softmax(-1) * y, 0.7) + self.drop(x, 0.1).sum(-1, keepdim=True)


class Drawn(nn.Module):
    """Numbers of torch's own, in its order."""

    def forward(self, x: Tensor, w: Tensor) -> Tensor:
        kept = torch.bernoulli(torch.full(x.shape, 0.6, device=x.device)).to(x.dtype)
        kept = kept * torch.empty(x.shape[0], 1, 1, device=x.device).bernoulli_(0.8).to(x.dtype)
        noise = torch.randn(x.shape, device=x.device).to(x.dtype)
        y = F.silu(x * kept + noise) @ w
        return y * torch.rand(y.shape, device=y.device).to(y.dtype)


def _args(n: int, device: str) -> tuple[Tensor, Tensor]:
    return torch.randn(3 + n, 5 + 2 * n, 16).to(device), torch.randn(16, 24).to(device)


def _gradients(module: nn.Module, args: tuple[Tensor, ...], seed: int) -> tuple[Tensor, ...]:
    taken = [a.detach().clone().requires_grad_() for a in args]
    torch.manual_seed(seed)
    loss = module(*taken).square().sum()
    return torch.autograd.grad(loss, taken)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["dropout", "torch"])
def test_gradients(name: str, device: str) -> None:
    make = {
        "dropout": lambda ours: Dropped(F.dropout if ours else _by_seed),
        "torch": lambda ours: Drawn(),
    }[name]
    ours, eager = strop.optimize(make(True), train=True, options=options()), make(False)
    found = []
    for n in range(6):
        args = _args(n % 3, device)
        wide = tuple(a.double() for a in args)
        found.append(
            [_gradients(ours, args, n), _gradients(eager, args, n), _gradients(eager, wide, n)]
        )
    for place in range(2):
        assert_as_accurate_together([tuple(each[place] for each in triple) for triple in found])
    assert roles(ours.forward.log) == ["backward", "forward"]
    assert not ours.forward.traced_by_torch
    assert not torch.equal(*(_gradients(ours, _args(0, device), seed)[1] for seed in (1, 2)))


@pytest.mark.parametrize("name", ["dropout", "torch"])
def test_gradcheck(name: str) -> None:
    """The slope is that of the function with the numbers of this seed."""
    module = strop.optimize(
        Dropped(F.dropout) if name == "dropout" else Drawn(), train=True, options=options()
    )

    def seeded(*args: Tensor) -> Tensor:
        torch.manual_seed(3)
        return module(*args)

    wide = [a.double().requires_grad_() for a in _args(0, "cpu")]
    assert torch.autograd.gradcheck(seeded, wide, fast_mode=True)


@pytest.mark.parametrize("device", DEVICES)
def test_what_is_dropped_has_no_gradient(device: str) -> None:
    """Element by element: the mask of the result is that of the gradient."""

    class Alone(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.dropout(x, 0.4)

    module = strop.optimize(Alone(), train=True, options=options())
    for rows in (7, 300):
        x = torch.ones(rows, 33, device=device, requires_grad=True)
        y = module(x)
        (grad,) = torch.autograd.grad(y.sum(), x)
        assert torch.equal(grad, y)
        share = (y == 0).double().mean()
        assert abs(share - 0.4) < 4 * (0.24 / y.numel()) ** 0.5
        assert torch.equal(y[y != 0], torch.full_like(y[y != 0], 1 / 0.6))
