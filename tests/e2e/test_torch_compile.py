"""``torch.compile(backend="strop")`` for whole components, and what goes through AOTAutograd."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from strop.dispatch import dynamo as aot
from strop.errors import OptionError
from strop.testing import assert_as_accurate_as_eager
from tests.e2e import tiny
from tests.e2e.test_components import CASES, first


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch):
    torch._dynamo.reset()
    monkeypatch.setattr(aot, "AOT_LOG", aot.AotLog())
    yield
    torch._dynamo.reset()


DEFAULTS = {"cache_dir": tiny.cache_dir(), "strict": True}


def compiled(module: Any, **options: Any) -> Any:
    return torch.compile(module, backend="strop", options=DEFAULTS | options)


@pytest.mark.parametrize("name", CASES)
def test_components_are_as_accurate_as_eager(name: str):
    case = CASES[name]
    eager = case.module()
    exact = copy.deepcopy(eager).double()
    fast = compiled(eager)
    results = []
    with torch.no_grad():
        for size in case.sizes[:3]:
            args = case.args(*size, dtype=torch.float32)
            wide = [a.double() if a.is_floating_point() else a for a in args]
            results.append((first(fast(*args)), first(eager(*args)), first(exact(*wide))))
    assert_as_accurate_as_eager(
        *(torch.cat([t.flatten() for t in column]) for column in zip(*results, strict=True))
    )
    served = [d for graph in aot.AOT_LOG.served for d in graph.dispatchers]
    assert served
    assert not any(d.counters.eager_calls for d in served)
    assert not aot.AOT_LOG.through_aot


class Step(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.norm = nn.Conv2d(4, 16, 3, padding=1), nn.GroupNorm(4, 16)
        self.out = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.nn.functional.silu(self.norm(self.conv(x)))
        return self.out(y.mean((2, 3))).square().mean()


def test_gradients():
    """Smoke test of forward and backward."""
    eager = Step()
    ours = copy.deepcopy(eager)
    x = torch.randn(2, 4, 9, 7, generator=torch.manual_seed(1))
    given, x = x.clone().requires_grad_(), x.requires_grad_()
    eager(x).backward()
    compiled(ours)(given).backward()
    wanted = {name: p.grad for name, p in eager.named_parameters()} | {"x": x.grad}
    found = {name: p.grad for name, p in ours.named_parameters()} | {"x": given.grad}
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6)
    assert len(aot.AOT_LOG.records) == 2
    assert not aot.AOT_LOG.fallbacks


def test_a_mutated_argument_is_written_and_its_old_value_still_read():
    def step(x: Tensor, y: Tensor) -> Tensor:
        before = x * 2
        x.add_(y)
        return before + x

    x, y = torch.arange(6.0), torch.ones(6)
    theirs, ours = x.clone(), x.clone()
    expected = step(theirs, y)
    assert torch.equal(compiled(step)(ours, y), expected)
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("least", [1, 4])
def test_a_number_among_the_arguments_may_be_anything(least: int):
    """Sizes are positive, numbers need not be."""

    def scaled(x: Tensor, n: int) -> Tensor:
        return x * max(n, 1) + x[:, : max(n - least, 1)].sum()

    fast, x = (
        torch.compile(scaled, backend="strop", options=DEFAULTS, dynamic=True),
        torch.ones(4, 6),
    )
    for n in (5, 9, 2, 1, 0, -3):
        torch.testing.assert_close(fast(x, n), scaled(x, n))


def test_unknown_options_are_named():
    fast = torch.compile(nn.Linear(2, 2), backend="strop", options={"speed": 11})
    with pytest.raises(Exception, match="speed") as found:
        fast(torch.ones(1, 2))
    assert isinstance(found.value, OptionError) or "OptionError" in str(found.value)


class Inverse(nn.Module):
    """Torch checks the result by a call that stands in the graph for its effect alone."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.linalg.inv(x + 5 * torch.eye(4)) * 2


@pytest.mark.parametrize("wants_gradient", [False, True])
def test_a_graph_with_effects_runs_in_torch(wants_gradient: bool):
    fast = compiled(Inverse(), strict=False)
    for rows in (3, 5, 3):
        x = torch.randn(rows, 4, 4, requires_grad=wants_gradient)
        found, expected = fast(x), Inverse()(x)
        torch.testing.assert_close(found, expected)
        if wants_gradient:
            grads = [torch.autograd.grad(y.square().sum(), x)[0] for y in (found, expected)]
            torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-5)
    if torch.__version__ >= "2.12":  # before, the check is no call of its own
        assert any("with_effects" in reason for reason in aot.AOT_LOG.fallbacks)
