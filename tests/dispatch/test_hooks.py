"""Hooks around an optimised module and in it run as often as in eager, on the same values."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules import module as of_all

import strop
from tests.e2e import tiny

CLOSE = {"rtol": 1e-4, "atol": 1e-6}  # fp32 sums in another order
pytestmark = pytest.mark.usefixtures("fresh_dynamo")
Log = list[tuple[str, Tensor]]  # the class of a module, and what its hook was given


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).relu())


class Kernels(nn.Module):
    """Calls of it take the short way; its part is not the module that a hook of the root sees."""

    def __init__(self) -> None:
        super().__init__()
        self.act = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.act(x) * 2


def forward_hook(log: Log) -> Callable[..., Any]:
    def hook(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        log.append((type(module).__name__, output.detach().clone()))
        return output + 1

    return hook


def pre_hook(log: Log) -> Callable[..., Any]:
    def hook(module: nn.Module, args: Any) -> Any:
        log.append((type(module).__name__, args[0].detach().clone()))
        return (args[0] + 1,)

    return hook


def backward_hook(log: Log) -> Callable[..., Any]:
    def hook(module: nn.Module, grads: Any, of_results: Any) -> Any:
        log.append((type(module).__name__, of_results[0].clone()))
        return tuple(grad * 2 for grad in grads)

    return hook


def on_root(net: Any, log: Log, kind: str) -> Any:
    return HOOKS[kind][0](net)(HOOKS[kind][1](log))


def on_part(net: Any, log: Log, kind: str) -> Any:
    return HOOKS[kind][0](net.first)(HOOKS[kind][1](log))


def on_all(net: Any, log: Log, kind: str) -> Any:
    return HOOKS[kind][2](HOOKS[kind][1](log))


HOOKS: dict[str, tuple[Callable[[nn.Module], Any], Callable[[Log], Any], Any]] = {
    "forward": (
        lambda m: m.register_forward_hook,
        forward_hook,
        of_all.register_module_forward_hook,
    ),
    "pre": (
        lambda m: m.register_forward_pre_hook,
        pre_hook,
        of_all.register_module_forward_pre_hook,
    ),
    "backward": (
        lambda m: m.register_full_backward_hook,
        backward_hook,
        of_all.register_module_full_backward_hook,
    ),
}


def calls(net: Any, place: Any, kind: str, before: Any) -> tuple[list[Tensor], list[str]]:
    """Two calls with the hook, the gradients that they leave and what the hook has been given; and
    of which modules. ``before`` makes the module fast; else it is so already, and has served
    calls."""
    trains, log = net.training, list[Any]()
    x = torch.ones(3, 4, requires_grad=trains)

    def call(fast: Any) -> Tensor:
        if not trains:
            with torch.no_grad():
                return fast(x)
        found = fast(x)
        found.sum().backward()
        return found.detach()

    fast = net
    if before is None:
        for _ in range(3):
            call(net)
        x.grad = None
    handle = place(net, log, kind)
    try:
        fast = net if before is None else before(net)
        found: list[Any] = [call(fast), call(fast), x.grad]
    finally:
        handle.remove()
    found += [given for _, given in log]
    return [t for t in found if t is not None], [name for name, _ in log]


def optimised(net: nn.Module) -> Any:
    return strop.optimize(net, train=net.training, options=tiny.options())


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("place", [on_root, on_part, on_all])
@pytest.mark.parametrize("kind", HOOKS)
def test_hooks_run_as_in_eager(kind: str, place: Any, train: bool, late: bool) -> None:
    eager = Net().train(train)
    net = copy.deepcopy(eager)
    expected = calls(eager, place, kind, None if late else lambda net: net)
    if late:
        net = optimised(net)
    found = calls(net, place, kind, None if late else optimised)
    assert found[1] == expected[1]
    torch.testing.assert_close(found[0], expected[0], **CLOSE)


def test_a_hook_for_all_modules_on_the_prepared() -> None:
    eager = Kernels().eval()
    ours = optimised(copy.deepcopy(eager))
    expected, found = (calls(net, on_all, "forward", None) for net in (eager, ours))
    assert found[1] == expected[1]
    torch.testing.assert_close(found[0], expected[0], **CLOSE)
    assert any("hooks for all modules" in reason for reason in ours.forward.counters.fallbacks)
