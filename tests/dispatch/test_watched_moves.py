"""Who moves the weights of an optimised module to elsewhere has the memory that they leave."""

from __future__ import annotations

import gc
import mmap
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import strop
from strop.dispatch import watched_moves
from tests.e2e import tiny

X = torch.randn(3, 8, generator=torch.manual_seed(0))


@pytest.fixture(autouse=True)
def before(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Watch modules of a CPU as on a system with a GPU, and none of other tests. Give the function
    that is there before."""
    monkeypatch.setattr(watched_moves, "is_wanted", lambda: True)
    monkeypatch.setattr(watched_moves, "_WATCHED", weakref.WeakKeyDictionary())
    monkeypatch.setattr(watched_moves, "_own", None)
    own = nn.Module._apply
    yield own
    assert nn.Module._apply is own, "nothing is left behind restore"


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))


def plain() -> Net:
    return Net().eval().requires_grad_(False)


def optimized() -> Any:
    net = strop.optimize(plain(), options=tiny.options(strict=True))
    for _ in range(3):
        check(net)
    return net


def check(net: nn.Module) -> None:
    dtype = next(net.parameters()).dtype
    torch.testing.assert_close(net(X.to(dtype)), plain().to(dtype)(X.to(dtype)))


def counted(weight: Tensor) -> weakref.ref[mmap.mmap]:
    """Have a weight lie in memory of which the caller knows whether anybody refers to it."""
    pages = mmap.mmap(-1, weight.nbytes)
    weight.data = torch.frombuffer(pages, dtype=weight.dtype).view_as(weight).copy_(weight)
    return weakref.ref(pages)


def by_type(net: nn.Module) -> None:
    net.to(torch.float64)


def by_name(net: nn.Module) -> None:
    net.double()


def by_a_module_around(net: nn.Module) -> None:
    nn.Sequential(nn.ReLU(), net).double()


def to_nothing(net: nn.Module) -> None:
    net.to_empty(device="cpu")
    net.load_state_dict(plain().state_dict())


@pytest.mark.parametrize("move", [by_type, by_name, by_a_module_around, to_nothing])
def test_nothing_keeps_memory_that_weights_have_left(move: Callable[[nn.Module], None]) -> None:
    net = optimized()
    memory = counted(net.up.weight)
    for _ in range(3):
        check(net)
    assert memory() is not None
    move(net)
    gc.collect()
    assert memory() is None
    for _ in range(3):
        check(net)
    strop.restore(net)
    check(net)


@pytest.mark.parametrize("move", [lambda net: net.to("cpu"), lambda net: net.float(), len])
def test_what_stays_is_not_bound_anew(move: Callable[[Any], Any]) -> None:
    net = optimized()
    (dispatcher,) = strop.api.dispatchers_of(net).values()
    before = list(dispatcher.shapes.entries)
    if move is not len:
        move(net)
    assert before == list(dispatcher.shapes.entries)
    check(net)
    strop.restore(net)


def test_torch_is_as_it_was_when_the_last_module_is(before: Any) -> None:
    one, two = optimized(), optimized()
    strop.restore(one)
    assert nn.Module._apply is not before
    strop.restore(two)
    assert nn.Module._apply is before


def test_a_function_of_somebody_else_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    net, moved = optimized(), []
    below = nn.Module._apply

    def _apply(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        moved.append(module)
        return below(module, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(nn.Module, "_apply", _apply)
        strop.restore(net)
        net.double()
        assert moved[0] is net
    other = optimized()  # ours is known to be there still
    strop.restore(other)


def test_a_module_that_is_gone_is_not_kept() -> None:
    net = optimized()
    gone = weakref.ref(net)
    del net
    gc.collect()
    assert gone() is None
    strop.restore(optimized())


def test_a_graph_of_dynamos_lets_go_of_the_weights_of_a_users_module() -> None:
    net = plain()
    call = torch.compile(net, backend="strop")
    memory = counted(net.up.weight)
    with torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(call(X), plain()(X))
        net.double()
        gc.collect()
        assert memory() is None
        torch.testing.assert_close(call(X.double()), plain().double()(X.double()))
    torch._dynamo.reset()
    del call, net
    gc.collect()
    strop.restore(optimized())  # unwatches what is gone
