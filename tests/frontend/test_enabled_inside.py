"""Forwards that turn gradients on themselves: results require a gradient exactly as in eager."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import strop
from tests.e2e import tiny

CLOSE = {"rtol": 1e-4, "atol": 1e-5}  # fp32 sums in another order
pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def loss(layer: nn.Module, x: Tensor) -> Tensor:
    with torch.enable_grad():
        return layer(x).square().sum()


def no_inference_mode(layer: nn.Module, x: Tensor) -> Tensor:
    with torch.inference_mode(False):  # which turns gradients on, as torch has it
        found: Tensor = layer(x)
    return found


def turned_off_again(layer: nn.Module, x: Tensor) -> Tensor:
    with torch.set_grad_enabled(True):
        found: Tensor = layer(x)
    return found * 2


def marked(layer: nn.Module, x: Tensor) -> Tensor:
    return layer(x).requires_grad_()  # type: ignore[no-any-return]


def own_leaf(layer: nn.Module, x: Tensor) -> Tensor:
    return (torch.ones(4, requires_grad=True) * layer(x)).sum()


def by_weights(layer: Any, x: Tensor) -> Tensor:
    with torch.enable_grad():
        return torch.autograd.grad(layer(x).square().sum(), layer.weight)[0]


def backward(layer: nn.Module, x: Tensor) -> Tensor | None:
    with torch.enable_grad():
        q = x.detach().clone().requires_grad_()
        layer(q).square().sum().backward()
    return q.grad


def guidance(layer: nn.Module, x: Tensor) -> Tensor:
    with torch.enable_grad():
        q = x.detach().requires_grad_()
        (found,) = torch.autograd.grad(layer(q).square().sum(), q)
    return x - 0.1 * found


class Net(nn.Module):
    def __init__(self, body: Callable[..., Any], frozen: bool) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.body, self.layer = body, nn.Linear(4, 4)
        self.requires_grad_(not frozen)

    def forward(self, x: Tensor) -> Any:
        return self.body(self.layer, x)


BODIES = (
    loss,
    no_inference_mode,
    turned_off_again,
    marked,
    own_leaf,
    by_weights,
    backward,
    guidance,
)
Mode = Callable[[], AbstractContextManager[Any]]


def called(net: nn.Module, x: Tensor, mode: Mode) -> Any:
    """The value, what autograd says of it, and what it left in the weights; or eager's error."""
    net.zero_grad()
    with mode():
        try:
            found = net(x)
        except RuntimeError as error:
            return str(error)[:60]
    grads = [p.grad for p in net.parameters()]
    return found.detach().clone(), found.requires_grad, found.grad_fn is not None, grads


def assert_alike(fast: nn.Module, eager: nn.Module, x: Tensor, mode: Mode) -> None:
    expected, found = called(eager, x, mode), called(fast, x, mode)
    if isinstance(expected, str):
        assert found == expected
        return
    assert found[1:3] == expected[1:3]
    torch.testing.assert_close(present(found), present(expected), **CLOSE)


def present(call: Any) -> list[Tensor]:
    value, _, _, grads = call
    return [value, *(grad for grad in grads if grad is not None)]


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("body", BODIES)
def test_optimize(body: Callable[..., Any], frozen: bool) -> None:
    """In each mode of the caller, then with the weights' wish turned round, and the argument's."""
    eager, x = Net(body, frozen).eval(), torch.randn(3, 4)
    fast = strop.optimize(copy.deepcopy(eager), options=tiny.options())
    modes: list[Mode] = [torch.no_grad, torch.inference_mode, torch.no_grad]
    for mode in [*modes, torch.enable_grad] if frozen else modes:
        assert_alike(fast, eager, x, mode)
    for net in (eager, fast):
        net.requires_grad_(frozen)
    assert_alike(fast, eager, x, torch.no_grad)
    assert_alike(fast, eager, x.requires_grad_(), torch.no_grad)


@pytest.mark.parametrize("body", [loss, no_inference_mode, marked, by_weights, backward])
def test_compile(body: Callable[..., Any]) -> None:
    eager, x = Net(body, frozen=False).eval(), torch.randn(3, 4)
    fast: Any = torch.compile(
        copy.deepcopy(eager), backend="strop", options={"cache_dir": tiny.cache_dir()}
    )
    for _ in range(2):
        assert_alike(fast, eager, x, torch.no_grad)


@pytest.mark.parametrize(("body", "word"), [(loss, "require gradients"), (backward, "backward()")])
def test_the_reason_is_said(body: Callable[..., Any], word: str) -> None:
    fast: Any = strop.optimize(Net(body, frozen=False).eval(), options=tiny.options())
    with torch.no_grad():
        fast(torch.randn(3, 4))
    (reason,) = fast.forward.counters.fallbacks
    assert word in reason


def test_guidance_with_weights_that_require_gradients_is_compiled() -> None:
    fast: Any = strop.optimize(Net(guidance, frozen=False).eval(), options=tiny.options())
    with torch.no_grad():
        fast(torch.randn(3, 4))
    assert not fast.forward.counters.fallbacks
