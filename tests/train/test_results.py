"""Gradients of results that share memory, and what eager says of each result."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import strop
from tests.e2e import tiny
from tests.train.compiled import options

pytestmark = pytest.mark.usefixtures("fresh")
CLOSE = {"rtol": 1e-4, "atol": 1e-6}  # fp32 sums in another order


class Net(nn.Module):
    def __init__(self, body: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.body, self.layer = body, nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Any:
        y = self.layer(x).sin()
        return self.body(self, y) if self.body.__name__ != "argument" else self.body(x, y)


def slices(net: Any, y: Tensor) -> Any:
    return y[:2], y[2:], y.detach()


def slices_and_sum(net: Any, y: Tensor) -> Any:
    return y[:2], y.detach(), y.sum()


def detached_and_sum(net: Any, y: Tensor) -> Any:
    return y.detach(), y.sum()


def twice(net: Any, y: Tensor) -> Any:
    return y, y, y.detach()


def detached_first(net: Any, y: Tensor) -> Any:
    return {"prediction": y.detach(), "loss": y.square().mean(), "whole": y}


def views(net: Any, y: Tensor) -> Any:
    return y, y.t(), y.view(-1), y.t().detach(), y.t()


def weight(net: Any, y: Tensor) -> Any:
    return net.layer.weight.t(), net.layer.weight.detach(), y


def argument(x: Tensor, y: Tensor) -> Any:
    return x[:2], x.t().detach(), x.detach(), y


def integers(net: Any, y: Tensor) -> Any:
    return y, y.argmax(-1)


BODIES = (
    slices,
    slices_and_sum,
    detached_and_sum,
    twice,
    detached_first,
    views,
    weight,
    argument,
    integers,
)


def optimised(net: nn.Module) -> Any:
    return strop.optimize(net, train=True, options=options(strict=False))


def compiled(net: nn.Module) -> Any:
    return torch.compile(net, backend="strop", options={"cache_dir": tiny.cache_dir()})


def looks(results: list[Tensor]) -> list[Any]:
    """Of each result what autograd says of it, which results it is, and whose memory it is."""
    return [
        (
            r.requires_grad,
            r.grad_fn is not None,
            [r is other for other in results],
            [
                r.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
                for other in results
            ],
        )
        for r in results
    ]


def called(net: nn.Module, x: Tensor) -> tuple[list[Any], list[Tensor], dict[str, Tensor]]:
    """How the results look, their values, and gradients by the argument and the weights."""
    x = x.clone().requires_grad_()
    net.zero_grad()
    found = net(x)
    results = list(found.values()) if isinstance(found, dict) else list(found)
    look, values = looks(results), [r.detach().clone() for r in results]
    torch.stack(
        [r.square().sum() * n for n, r in enumerate(results, 1) if r.requires_grad]
    ).sum().backward()
    grads = {"x": x.grad} | {
        name.removeprefix("_orig_mod."): p.grad for name, p in net.named_parameters()
    }
    return look, values, {name: g for name, g in grads.items() if g is not None}


@pytest.mark.parametrize("way", [compiled, optimised])
@pytest.mark.parametrize("body", BODIES)
def test_results_and_gradients_are_those_of_eager(body: Any, way: Any) -> None:
    eager, x = Net(body), torch.randn(4, 4)
    fast = way(copy.deepcopy(eager))
    for _ in range(2):
        expected, found = called(eager, x), called(fast, x)
        assert found[0] == expected[0]
        torch.testing.assert_close(found[1:], expected[1:], **CLOSE)


@pytest.mark.parametrize("way", [compiled, optimised])
def test_results_that_are_written_to(way: Any) -> None:
    eager, x = Net(detached_and_sum), torch.randn(4, 4)
    fast, found = way(copy.deepcopy(eager)), []
    for net in (eager, fast):
        detached, total = net(x)
        detached.mul_(2)
        try:
            total.backward()
        except RuntimeError as error:
            found.append(str(error)[:60])
        else:
            found.append([p.grad for p in net.parameters()])
    torch.testing.assert_close(found[1], found[0], **CLOSE)
