"""What a loss closes over is found, and what changes in it is noticed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from strop.train.closure_walk import WatchedModules, reached

NET = nn.Linear(2, 2)


def by_global(x: Tensor) -> Tensor:
    return NET(x)


def by_inner_function(x: Tensor) -> Any:
    return [NET(part) for part in x]


def by_other_function(x: Tensor) -> Tensor:
    return by_global(x)


def by_default(x: Tensor, net: nn.Module = NET) -> Tensor:
    return net(x)


def by_closure() -> Callable[[Tensor], Tensor]:
    net = NET
    return lambda x: net(x)


def by_decorator() -> Callable[..., Any]:
    @wraps(by_global)
    def outer(*args: Any) -> Any:
        return args

    return outer


class Holder:
    def __init__(self) -> None:
        self.parts = {"nets": [NET]}

    def method(self, x: Tensor) -> Tensor:
        return x

    def __call__(self, x: Tensor) -> Tensor:
        return x


WAYS: dict[str, Callable[..., Any]] = {
    "global": by_global,
    "inner function": by_inner_function,
    "other function": by_other_function,
    "default": by_default,
    "closure": by_closure(),
    "decorator": by_decorator(),
    "method": Holder().method,
    "callable": Holder(),
    "partial": partial(lambda net, x: net(x), NET),
    "module": NET,
    "method of a module": NET.forward,
}


@pytest.mark.parametrize("way", WAYS)
def test_modules_are_found(way: str) -> None:
    assert reached(WAYS[way]).modules == [NET]


def test_large_containers_are_not_read_to_their_end() -> None:
    data = [object() for _ in range(10**6)]
    found = reached(lambda x: (data, x))
    assert len(found._seen) < 1000


def replace_part(net: nn.Sequential) -> None:
    net[1][0] = nn.ReLU()


def add_part(net: nn.Sequential) -> None:
    net[1].append(nn.ReLU())


def remove_part(net: nn.Sequential) -> None:
    del net[1][0]


def replace_weight(net: nn.Sequential) -> None:
    net[0].weight = nn.Parameter(torch.ones(2, 2))


def remove_bias(net: nn.Sequential) -> None:
    net[0].bias = None


def move_weight(net: nn.Sequential) -> None:
    net[0].weight.data = net[0].weight.data.clone()


def freeze(net: nn.Sequential) -> None:
    net[0].weight.requires_grad_(False)


def set_mode(net: nn.Sequential) -> None:
    net[1].eval()


def write(net: nn.Sequential) -> None:
    nn.init.ones_(net[0].weight)


CHANGES: dict[Callable[[nn.Sequential], None], str] = {
    replace_part: "list",
    add_part: "list",
    remove_part: "list",
    replace_weight: "list",
    remove_bias: "list",
    move_weight: "places",
    freeze: "modes",
    set_mode: "modes",
    write: "",
}


@pytest.mark.parametrize("change", CHANGES, ids=lambda c: c.__name__)
def test_changes_are_noticed(change: Callable[[nn.Sequential], None]) -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Dropout(0.1)))
    watched = WatchedModules([net])
    places, modes = watched.places(), watched.modes()
    assert watched.still_lists([net])
    change(net)
    found = "" if watched.still_lists([net]) else "list"
    if not found:
        found = "places" * (watched.places() != places) + "modes" * (watched.modes() != modes)
    assert found == CHANGES[change]
    assert not watched.still_lists([net, net])
