"""Small modules that are trained beside an eager twin, with a change in between."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.utils.checkpoint import checkpoint

import strop
from strop.errors import UnsupportedError

pytestmark = [
    pytest.mark.usefixtures("fresh"),
    pytest.mark.filterwarnings("ignore"),  # by Dynamo, of functions that a user has written
]
WAYS: dict[str, Callable[[nn.Module], Any]] = {
    "optimize": lambda net: strop.optimize(net, train=True),
    "compile": lambda net: torch.compile(net, backend="strop"),
}


class Net(nn.Module):
    def __init__(self, body: Callable[..., Any]) -> None:
        super().__init__()
        self.body, self.a, self.b, self.k = body, nn.Linear(4, 4), nn.Linear(4, 4), 1.0
        self.drop, self.rest = nn.Dropout(0.0), nn.ParameterList([nn.Parameter(torch.ones(4))])
        self.register_parameter("scale", None)
        self.register_buffer("n", torch.ones(4))

    def forward(self, x: Tensor) -> Any:
        return self.body(self, x)


class Turned(Function):
    count, factor = 0, 1.0

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        Turned.count += 1
        return g * Turned.factor


def slots(net: Any, x: Tensor) -> Tensor:
    for weight in net.rest:
        x = x * weight
    y = net.b(net.a(x))
    return y if net.scale is None else y * net.scale


def parts(net: Any, x: Tensor) -> Any:
    y = net.a(x)
    return net.b(y), y.mul(0).sqrt(), y[:, :2]


def counted(net: Any, x: Tensor) -> Tensor:
    y = net.a(x)
    net.n += 1
    return y * net.n


def put_anew(net: Any, x: Tensor) -> Tensor:
    net.n = net.n + x.mean(0)
    return net.a(x) * net.n


def written(net: Any, x: Tensor) -> Any:
    y = net.a(x) * x.sum()
    net.n.add_(1)
    return net.b(y), y.mul(0).sqrt(), y.square()


def added(net: Any, x: Tensor) -> Tensor:
    return x + net.a.weight + net.b.weight


def number(net: Any, x: Tensor) -> Tensor:
    return net.a(x) * net.k


def function(net: Any, x: Tensor) -> Tensor:
    return net.b(Turned.apply(net.a(x)))


def dropped(net: Any, x: Tensor) -> Tensor:
    return net.drop(net.a(x))


def fill(net: Any) -> None:
    net.scale = nn.Parameter(torch.full((4,), 2.0))


def empty(net: Any) -> None:
    net.a.bias = None


def wider(net: Any) -> None:
    net.a, net.b = nn.Linear(4, 6), nn.Linear(6, 4)
    nn.init.ones_(net.a.weight), nn.init.ones_(net.b.weight)


def tie(net: Any) -> None:
    net.b.weight = net.a.weight


def untie(net: Any) -> None:
    net.b.weight = nn.Parameter(net.a.weight.detach() * 2)


def grow(net: Any) -> None:
    net.rest.append(nn.Parameter(torch.full((4,), 3.0)))


def turn(net: Any) -> None:
    net.k += 1.5


def reverse(net: Any) -> None:
    Turned.factor -= 1.5


def drop_all(net: Any) -> None:
    net.drop.p = 1.0 - net.drop.p


def same(net: Any) -> None:
    pass


CASES: dict[str, tuple[Callable[..., Any], list[Callable[[Any], None]]]] = {
    "slots": (slots, [fill, empty, tie, untie, grow, wider]),
    "parts": (parts, [same] * 3),
    "counted": (counted, [same]),
    "parts of what writes": (written, [same] * 3),
    "put anew": (put_anew, [same]),
    "number": (number, [turn] * 3),
    "many numbers": (number, [turn] * 20),
    "function": (function, [reverse] * 3),
    "dropout": (dropped, [drop_all] * 3),
}


def steps(body: Any, changes: Any, wrap: Callable[[nn.Module], Any]) -> Iterator[Any]:
    torch.manual_seed(0)
    Turned.count, Turned.factor = 0, 1.0
    net, x = Net(body), torch.randn(3, 4)
    run = wrap(net)
    for number, change in enumerate([same, *changes]):
        change(net)
        net.zero_grad()
        found = run(x)
        result = found[number % 3] if isinstance(found, tuple) else found
        result.sum().backward()
        state = {**dict(net.named_parameters()), **dict(net.named_buffers())}
        yield result.detach(), [t.grad for t in state.values()], net.n.clone(), Turned.count


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("case", CASES)
def test_steps_are_those_of_eager(case: str, way: str) -> None:
    torch._dynamo.reset()
    expected = steps(*CASES[case], lambda net: net)
    for one, other in zip(list(expected), steps(*CASES[case], WAYS[way]), strict=True):
        torch.testing.assert_close(other, one, equal_nan=True, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("look", [Tensor.retain_grad, lambda t: t.register_hook(print)])
def test_a_part_of_a_gradient_is_not_shown_for_the_whole(way: str, look: Any) -> None:
    def body(net: Any, x: Tensor) -> Any:
        y = net.a(x)
        return y, net.b(y).sum()

    run = WAYS[way](Net(body))
    inner, loss = run(torch.randn(3, 4))
    look(inner)
    with pytest.raises(UnsupportedError, match="a part of its gradient"):
        loss.backward()
    inner, loss = run(torch.randn(3, 4))
    look(loss)
    loss.backward()


@pytest.mark.parametrize("way", WAYS)
def test_each_gradient_has_memory_of_its_own(way: str) -> None:
    net, x, given = Net(added), torch.randn(4, 4, requires_grad=True), torch.randn(4, 4)
    run, before = WAYS[way](net), given.clone()
    leaves = x, net.a.weight, net.b.weight
    for _ in range(2):
        run(x).backward(given)
    net.a.weight.grad.zero_()
    for leaf, times in zip(leaves, (2, 0, 2), strict=True):
        torch.testing.assert_close(leaf.grad, times * before)
    torch.testing.assert_close(given, before)


def test_a_checkpoint_around_a_module_with_dropout() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
    run = strop.optimize(net, train=True)
    y = checkpoint(run, torch.ones(9, 4), use_reentrant=False)
    y.sum().backward()
    torch.testing.assert_close(net[0].bias.grad, (y != 0).sum(0) * 2.0)
