"""A generator among the arguments: torch draws by it, with eager's numbers, and it goes on as in
eager."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Generator, Tensor, nn

import strop
from tests.e2e import tiny


class Draws(nn.Module):
    def __init__(self, act: Callable[..., Any]) -> None:
        super().__init__()
        self.act = act

    def forward(self, x: Tensor, generator: Any) -> Any:
        return self.act(x, generator)


ACTS: dict[str, Callable[..., Any]] = {
    "randn": lambda x, g: x + torch.randn(x.shape, generator=g) * 2,
    "rand": lambda x, g: x * torch.rand(x.shape, generator=g, dtype=x.dtype),
    "twice": lambda x, g: torch.rand(3, generator=g) - torch.rand(3, generator=g),
    "normal": lambda x, g: torch.normal(x, torch.normal(0.5, 0.1, (6,), generator=g), generator=g),
    "randint": lambda x, g: x[torch.randint(0, 2, (5,), generator=g)],
    "randperm": lambda x, g: x[:, torch.randperm(6, generator=g)],
    "bernoulli": lambda x, g: x * torch.bernoulli(x.sigmoid(), generator=g),
    "multinomial": lambda x, g: torch.multinomial(x.softmax(-1), 2, generator=g),
}


def generator(seed: int) -> Generator:
    return Generator().manual_seed(seed)


@pytest.mark.parametrize("name", ACTS)
def test_numbers_are_eagers(name: str) -> None:
    module = strop.optimize(Draws(ACTS[name]).eval(), options=tiny.options())
    x = torch.linspace(-1, 1, 12).reshape(2, 6)
    with torch.no_grad():
        for seed in (1, 2):
            ours, theirs = generator(seed), generator(seed)
            for _ in range(3):
                found, wanted = module(x, ours), module.forward.eager(x, theirs)
                torch.testing.assert_close(found, wanted)
                assert torch.equal(ours.get_state(), theirs.get_state())
    assert module.forward.counters.eager_calls == 0
    assert len(module.forward.variants.all) == 1


def test_several_generators_and_none() -> None:
    def act(x: Tensor, given: list[Generator | None]) -> Tensor:
        return sum(torch.rand(3, generator=g) * n for n, g in enumerate(given, 1)) + x

    module = strop.optimize(Draws(act).eval(), options=tiny.options())
    x = torch.zeros(3)
    with torch.no_grad():
        for seeds in ((1, 2), (2, 1), (3, 3)):
            found = module(x, [generator(seed) for seed in seeds])
            torch.testing.assert_close(found, act(x, [generator(seed) for seed in seeds]))
        one, other = generator(5), generator(5)
        torch.testing.assert_close(module(x, [one, one]), act(x, [other, other]))
        torch.manual_seed(7)
        found = module(x, [None, generator(5)])
        torch.manual_seed(7)
        torch.testing.assert_close(found, act(x, [None, generator(5)]))
    assert len(module.forward.variants.all) == 3  # two, one twice, one and torch's own
    assert module.forward.counters.eager_calls == 0
