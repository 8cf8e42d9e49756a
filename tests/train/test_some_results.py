"""A loss reads some of a module's results. Parts of one value meet again in the backward pass, with
zeros in the place of those that nobody has read."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import strop
from strop.errors import UnsupportedError
from strop.frontend.absent_gradients import without
from tests.train.test_twins import WAYS

pytestmark = [pytest.mark.usefixtures("fresh"), pytest.mark.filterwarnings("ignore")]


class Parts(nn.Module):
    """Computes results from one linear (B, S, 12), and one of their own."""

    def __init__(self, body: Callable[..., Any]) -> None:
        super().__init__()
        self.body, self.wide, self.own = body, nn.Linear(8, 12), nn.Linear(8, 12)

    def forward(self, x: Tensor, past: Tensor) -> Any:
        return self.body(self.wide(x), self.own(x), past)


def halves(y: Tensor, own: Tensor, past: Tensor) -> Any:
    a, b = y.chunk(2, -1)
    return a.sin(), b.exp()


def moments(y: Tensor, own: Tensor, past: Tensor) -> Any:
    mean, variance = y.chunk(2, -1)
    return mean, variance.clamp(-3, 3), own


def thirds(y: Tensor, own: Tensor, past: Tensor) -> Any:
    q, k, v = y.unflatten(-1, (3, 4)).unbind(-2)
    return q @ k.mT, k, v.cumsum(1)


def pieces(y: Tensor, own: Tensor, past: Tensor) -> Any:
    a, b = y.split([5, 7], -1)
    return F.pad(a, (0, 2)) * b, a, own.flatten(0, 1)


def tokens(y: Tensor, own: Tensor, past: Tensor) -> Any:
    """Sizes of one argument meet those of the other."""
    both = torch.cat([past, y], 1)
    return both[:, : past.shape[1]].sin(), both[:, past.shape[1] :].cos(), torch.cat([both, y], 1)


def cached(y: Tensor, own: Tensor, past: Tensor) -> Any:
    """Keys and values of a cache beside what is computed of them."""
    keys, values = (t.unflatten(-1, (3, 4)).transpose(1, 2) for t in (y, own))
    scores = F.softmax(keys @ keys.mT, -1)
    return (scores @ values).transpose(1, 2).flatten(2), keys, values


def picked(y: Tensor, own: Tensor, past: Tensor) -> Any:
    best, _ = y.max(-1)
    return best, torch.where(y > own, y, own), y[..., 3]


BODIES = (halves, moments, thirds, pieces, tokens, cached, picked)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("body", BODIES)
def test_gradients_are_those_of_eager(body: Callable[..., Any], way: str) -> None:
    torch.manual_seed(0)
    plain, net = Parts(body), Parts(body)
    net.load_state_dict(plain.state_dict())
    fast: Any = WAYS[way](net)
    count = len(body(*(torch.zeros(2, 3, 12) for _ in range(3))))
    choices = [c for n in range(1, count + 1) for c in itertools.combinations(range(count), n)]
    for number, chosen in enumerate([*choices, choices[0]]):
        batch, length = 2 + number % 2, 3 + number % 3
        x, past = torch.randn(batch, length, 8), torch.randn(batch, 4, 12)
        for module, owner in ((plain, plain), (fast, net)):
            owner.zero_grad()
            results = module(x, past)
            sum((results[n] * 0.5).square().sum() for n in chosen).backward()
        for (name, ours), theirs in zip(net.named_parameters(), plain.parameters(), strict=True):
            assert (ours.grad is None) == (theirs.grad is None), (chosen, name)
            if theirs.grad is not None:
                torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-4)


def test_a_size_that_an_absent_result_alone_tells_is_refused() -> None:
    """Zeros of a size that is not known would be of another one."""
    from torch._subclasses import FakeTensorMode
    from torch.fx import Graph, GraphModule
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    graph, mode = Graph(), FakeTensorMode(shape_env=ShapeEnv())
    for name, sizes in (("tangents_1", (5, 4)), ("tangents_2", (7, 4))):
        graph.placeholder(name).meta["val"] = mode.from_tensor(torch.ones(sizes))
    one, other = graph.find_nodes(op="placeholder")
    joined = graph.call_function(torch.ops.aten.cat.default, ([one, other],))
    with mode:
        joined.meta["val"] = torch.ops.aten.cat.default([one.meta["val"], other.meta["val"]])
    graph.output((joined,))
    with pytest.raises(UnsupportedError, match=r"without a gradient \(tangents_2\)"):
        without(GraphModule({}, graph), {"tangents_2"})


def test_the_zoo_found_a_size_that_only_a_number_tells() -> None:
    """Nothing reads the length of the past in the backward of Bloom's logits, but sizes of saved
    tensors are sums with it."""
    from strop.bench.zoo import ZOO

    model = next(model for model in ZOO if model.name == "bloom")
    plain, net = model.made(), model.made()
    given = model.given(model.sizes.some(1)[0])
    args, kwargs = ((), given) if isinstance(given, dict) else (given, {})
    strop.optimize(net.requires_grad_(True), train=True)
    for module in (plain.requires_grad_(True), net):
        first, *_ = torch.utils._pytree.tree_leaves(module(*args, **kwargs))
        first.float().square().sum().backward()
    for (name, ours), theirs in zip(net.named_parameters(), plain.parameters(), strict=True):
        assert (ours.grad is None) == (theirs.grad is None), name
        if theirs.grad is not None:
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-3, atol=1e-4)
