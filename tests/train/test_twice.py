"""Gradients of gradients, which Strop does not compute, and everything that looks like them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.autograd.functional import hessian, jacobian

import strop
from strop.errors import UnsupportedError
from tests.e2e import tiny
from tests.train.compiled import options

pytestmark = [
    pytest.mark.usefixtures("fresh"),
    # of torch: its rules of forward-mode AD, and Dynamo in the middle of a jacobian
    pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]
CLOSE = {"rtol": 1e-4, "atol": 1e-6}  # fp32 sums in another order
REFUSED = "no gradients of gradients"


class Curved(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).tanh() * 1.5


class Exponential(nn.Module):
    """Its backward keeps nothing that requires a gradient."""

    def forward(self, x: Tensor) -> Tensor:
        return x.exp() * 2


class AllKernels(nn.Module):
    """Its gradient is a constant."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 2


def optimised(net: nn.Module) -> Any:
    return strop.optimize(net.train(), train=True, options=options(strict=False))


def compiled(net: nn.Module) -> Any:
    return torch.compile(net, backend="strop", options={"cache_dir": tiny.cache_dir()})


WAYS = pytest.mark.parametrize("way", [optimised, compiled])


def argument() -> Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(3))


def penalty(net: Any, x: Tensor) -> Any:
    x.requires_grad_()
    y = net(x)
    (grad,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    (y.mean() + grad.square().sum()).backward()


def penalty_by_inputs(net: Any, x: Tensor) -> Any:
    """The engine then runs only what leads to x."""
    x.requires_grad_()
    y = net(x)
    (grad,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    torch.autograd.grad(y.mean() + grad.square().sum(), x)


def curvature(net: Any, x: Tensor) -> Any:
    """torch takes a gradient that is not there for zeros."""
    hessian(lambda x: net(x).sum(), x)


@WAYS
@pytest.mark.parametrize("loss", [penalty, penalty_by_inputs, curvature])
@pytest.mark.parametrize("make", [Curved, Exponential])
def test_second_derivatives_are_refused(make: Any, loss: Callable[..., Any], way: Any) -> None:
    loss(make(), argument())  # in eager
    net = way(make())
    with pytest.raises(RuntimeError, match=REFUSED):
        loss(net, argument())


def test_a_graph_of_gradients_that_nobody_differentiates() -> None:
    eager = Curved()
    found = []
    for net in (eager, optimised(copy.deepcopy(eager))):
        x = argument().requires_grad_()
        y = net(x)
        (grad,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        y.mean().backward()
        found.append([grad.detach(), x.grad, *(p.grad for p in net.parameters())])
    torch.testing.assert_close(found[1], found[0], **CLOSE)


def test_a_constant_gradient_has_none_itself() -> None:
    found = []
    for net in (AllKernels(), optimised(AllKernels())):
        x = argument().requires_grad_()
        y = net(x)
        (grad,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        (y.mean() + grad.square().sum()).backward()
        found.append((grad.requires_grad, x.grad))
    assert found[1][0] == found[0][0]
    torch.testing.assert_close(found[1], found[0], **CLOSE)


def penalised_inside(net: Any, x: Tensor) -> Tensor:
    y = Curved.forward(net, x)
    (grad,) = torch.autograd.grad(y.sum(), net.layer.weight, create_graph=True)
    return y.mean() + grad.square().sum()


class Penalised(Curved):
    forward = penalised_inside


def test_a_penalty_inside_of_the_forward() -> None:
    """The trace of the step sees both derivatives."""
    eager = Penalised().train()
    ours = optimised(copy.deepcopy(eager))
    for net in (eager, ours):
        net(argument()).backward()
    assert ours.forward.traced_by_torch == {}
    grads = [[p.grad for p in net.parameters()] for net in (eager, ours)]
    torch.testing.assert_close(grads[1], grads[0], **CLOSE)


@WAYS
def test_gradients_of_many_kinds(way: Any) -> None:
    """Twice with the graph kept, of some inputs only, with hooks, and by torch.autograd."""
    eager = Curved()
    found: list[Any] = []
    for net in (eager, way(copy.deepcopy(eager))):
        x, seen = argument().requires_grad_(), list[Tensor]()
        y = net(x)
        y.retain_grad()
        y.register_hook(lambda gradient: gradient * 2)
        x.register_hook(seen.append)
        some = torch.autograd.grad(y.sum(), [*net.parameters()][:1], retain_graph=True)
        y.sum().backward(retain_graph=True)
        y.square().sum().backward()
        grads = [x.grad, y.grad, *(p.grad for p in net.parameters())]
        found.append([some, seen, grads, jacobian(net, argument()[:1])])
        with pytest.raises(RuntimeError, match="second time"):
            y.sum().backward()
    torch.testing.assert_close(found[1], found[0], **CLOSE)


@WAYS
def test_many_gradients_at_once_are_refused(way: Any) -> None:
    x = argument().requires_grad_()
    y = way(Curved())(x)
    many = torch.eye(y.numel()).view(-1, *y.shape)
    with pytest.raises(UnsupportedError, match="is_grads_batched"):
        torch.autograd.grad(y, x, many, is_grads_batched=True)


@pytest.mark.parametrize("train", [False, True])
def test_tangents_through_a_module(train: bool) -> None:
    """Long way and short way."""

    def tangent(net: Any, x: Tensor) -> Tensor:
        with forward_ad.dual_level(), torch.no_grad():
            found = net(forward_ad.make_dual(x, torch.ones_like(x)))
            return forward_ad.unpack_dual(found).tangent

    eager = Exponential().train(train)
    ours = strop.optimize(Exponential().train(train), train=train, options=tiny.options())
    with torch.no_grad():
        for _ in range(3):  # then the short way is ready
            ours(argument())
    torch.testing.assert_close(tangent(ours, argument()), tangent(eager, argument()), **CLOSE)
