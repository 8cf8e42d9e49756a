"""What a forward does besides computing: such a call stays in eager, and is counted."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import strop
from strop.errors import StropError
from strop.options import Options

CALLS = 3


class Effects(nn.Module):
    def __init__(self, act: Callable[..., Tensor]) -> None:
        super().__init__()
        self.act, self.number, self.seen, self.table = act, 0, [1.0], {}
        self.register_buffer("total", torch.zeros(4))

    def forward(self, x: Tensor, *rest: Any) -> Tensor:
        return self.act(self, x, *rest)


def counts(self: Effects, x: Tensor) -> Tensor:
    self.number += 1
    return x * self.number


def appends(self: Effects, x: Tensor) -> Tensor:
    self.seen.append(2.0)
    return x * sum(self.seen)


def keeps(self: Effects, x: Tensor) -> Tensor:
    self.table["last"] = x
    return x * 2


def replaces(self: Effects, x: Tensor) -> Tensor:
    self.total = self.total + x
    return x * self.total


def draws(self: Effects, x: Tensor) -> Tensor:
    return x * random.random()


def draws_with_numpy(self: Effects, x: Tensor) -> Tensor:
    return x * float(np.random.rand())


def seeds(self: Effects, x: Tensor) -> Tensor:
    torch.manual_seed(5)
    return x * torch.rand(4)


def seeds_and_restores(self: Effects, x: Tensor) -> Tensor:
    """As torch's own tests do; what was drawn stays, the generator is as it was."""
    with torch.random.fork_rng():
        torch.manual_seed(5)
        return x * torch.rand(4)


def sets_the_state(self: Effects, x: Tensor) -> Tensor:
    state = torch.get_rng_state()
    first = torch.rand(4)
    torch.set_rng_state(state)
    return x * first - torch.rand(4)


def seeds_the_generator(self: Effects, x: Tensor) -> Tensor:
    torch.default_generator.manual_seed(6)
    return x * torch.rand(4)


WHY = {
    counts: "it sets number of a Effects",
    appends: "it sets seen of a Effects",
    keeps: "it sets table of a Effects",
    replaces: "it replaces total",
    draws: "random numbers",
    draws_with_numpy: "random numbers",
    seeds: "it seeds",
    seeds_and_restores: "it seeds",
    sets_the_state: "it seeds",
    seeds_the_generator: "it seeds",
}


def runs(module: nn.Module, *rest: Any) -> tuple[list[Tensor], dict[str, Any]]:
    """The results of some calls, and what they leave behind."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    with torch.no_grad():
        results = [module(torch.arange(4.0) + n, *rest) for n in range(CALLS)]
    names = ("number", "seen", "table", "total")
    return results, {name: getattr(module, name) for name in names}


@pytest.mark.parametrize("act", WHY, ids=lambda act: act.__name__)
def test_every_call_has_its_effects(act: Callable[..., Tensor], tmp_path: Path) -> None:
    module = Effects(act).eval()
    strop.optimize(module, options=Options(cache_dir=str(tmp_path)))
    (results, left), (wanted, left_by_eager) = runs(module), runs(Effects(act).eval())
    torch.testing.assert_close(results, wanted, rtol=0, atol=0)
    torch.testing.assert_close(left.pop("table"), left_by_eager.pop("table"))
    torch.testing.assert_close(left.pop("total"), left_by_eager.pop("total"))
    assert left == left_by_eager
    drawn = torch.rand(1)
    runs(Effects(act).eval())
    assert torch.equal(drawn, torch.rand(1)), "torch's generator has another state"
    ((reason, count),) = module.forward.counters.fallbacks.items()
    assert WHY[act] in reason
    assert count == CALLS
    strop.optimize(module, options=Options(cache_dir=str(tmp_path), strict=True))
    with pytest.raises(StropError, match=WHY[act]):
        runs(module)


def test_a_list_among_the_arguments_grows_at_every_call(tmp_path: Path) -> None:
    def collects(self: Effects, x: Tensor, found: list[Tensor]) -> Tensor:
        found.append(x)
        return x + len(found)

    module, found = Effects(collects).eval(), list[Tensor]()
    strop.optimize(module, options=Options(cache_dir=str(tmp_path)))
    results, _ = runs(module, found)
    assert len(found) == CALLS
    torch.testing.assert_close(results, [x + n for n, x in enumerate(found, 1)])
    assert "changes a list among its arguments" in next(iter(module.forward.counters.fallbacks))


class Windowed(nn.Module):
    """Sets its window and its shift where a picture is no larger, as Swin does."""

    def __init__(self) -> None:
        super().__init__()
        self.window, self.shift = 4, 2

    def forward(self, x: Tensor) -> Tensor:
        if min(x.shape[1:]) <= self.window:
            self.shift, self.window = 0, min(x.shape[1:])
        rows, columns = (size // self.window for size in x.shape[1:])
        x = x.roll(-self.shift, 1)[:, : rows * self.window, : columns * self.window]
        return x.reshape(-1, rows, self.window, columns, self.window).transpose(2, 3).exp()


def test_an_attribute_is_set_to_the_number_that_it_is(tmp_path: Path) -> None:
    """The first small picture changes the module and stays in eager; the next have graphs."""
    module, eager = Windowed().eval(), Windowed().eval()
    strop.optimize(module, options=Options(cache_dir=str(tmp_path)))
    sizes = (
        (2, 8, 8),
        (2, 4, 4),
        (3, 4, 4),
        (1, 4, 8),
        (5, 12, 8),
        (2, 3, 9),
        (1, 3, 9),
        (3, 4, 4),
    )
    for size in sizes:
        x = torch.randn(*size)
        torch.testing.assert_close(module(x), eager(x))
        assert (module.window, module.shift) == (eager.window, eager.shift), size
    assert module.forward.counters.fallbacks == {
        "it sets shift of a Windowed": 1,
        "it sets window of a Windowed": 1,
    }


def test_a_call_that_changes_nothing_any_more_is_traced_again(tmp_path: Path) -> None:
    """But once, as a call that leaves all as it was may have another reason to be refused."""
    module, eager = Windowed().eval(), Windowed().eval()
    strop.optimize(module, options=Options(cache_dir=str(tmp_path)))
    for _ in range(5):
        x = torch.randn(2, 4, 4)
        torch.testing.assert_close(module(x), eager(x))
    counts = strop.explain(module).summary()
    assert counts["fallbacks"] == {"Windowed: it sets shift of a Windowed": 2}
    assert (counts["num_graphs"], counts["num_captures"]) == (1, 2)

    def keeps_number(self: Effects, x: Tensor) -> Tensor:
        self.number, self.table = 7, {"last": 1}
        return x * 2

    other = Effects(keeps_number).eval()
    strop.optimize(other, options=Options(cache_dir=str(tmp_path)))
    for _ in range(6):
        other(torch.ones(4))
    counts = strop.explain(other).summary()
    assert sum(counts["fallbacks"].values()) == 6
    assert counts["num_captures"] <= 2


class CallsDynamo(nn.Module):
    """Dynamo puts the state of torch's generator back after it has looked at a function."""

    def forward(self, x: Tensor) -> Tensor:
        return x + dynamos(x)


def dynamos(x: Tensor) -> Tensor:
    """As ``torch._dynamo.convert_frame.preserve_global_state`` does."""
    state = torch.random.get_rng_state()
    code = "def put_back(set_state, state):\n    set_state(state)"
    names: dict[str, Any] = {"__name__": "torch._dynamo.convert_frame"}
    exec(code, names)
    names["put_back"](torch.random.set_rng_state, state)
    return x * 2


def test_dynamo_may_put_the_generators_state_back(tmp_path: Path) -> None:
    module = CallsDynamo().eval()
    strop.optimize(module, options=Options(cache_dir=str(tmp_path), strict=True))
    with torch.no_grad():
        assert torch.equal(module(torch.ones(3)), torch.full((3,), 3.0))
    assert not module.forward.counters.fallbacks
