"""A look that finds the same graph and the same tensors keeps what is bound, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import strop
from tests.e2e import tiny

X = torch.linspace(-2, 3, 12).reshape(3, 4)


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.factor = nn.Linear(4, 4), nn.Linear(4, 4), 2.0

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.relu(self.first(x))) * self.factor


def pairs() -> tuple[Any, Any]:
    torch.manual_seed(0)
    plain, fast = Pair().eval(), Pair().eval()
    fast.load_state_dict(plain.state_dict())
    strop.optimize(fast, options=tiny.options())
    return plain, fast


def assert_alike(plain: Any, fast: Any) -> None:
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(fast(X), plain(X))


def note(module: Any) -> None:
    """Add an attribute that no code of the module reads."""
    module._note = "fused with a scale of 1.0"


def test_an_attribute_that_nothing_reads_costs_a_look() -> None:
    plain, fast = pairs()
    assert_alike(plain, fast)
    (entry,) = fast.forward.shapes.entries
    note(fast)
    assert_alike(plain, fast)
    assert list(fast.forward.shapes.entries) == [entry]
    assert fast.forward.counters.rebinds == 0


def transposed(module: Any) -> None:
    with torch.no_grad():
        module.first.weight.t_()  # the same Parameter, at the same address


def doubled(module: Any) -> None:
    module.second.weight.data = module.second.weight.data * 2


def renewed(module: Any) -> None:
    module.first.bias = nn.Parameter(module.first.bias.detach() + 1)


def swapped(module: Any) -> None:
    first, second = module.first.weight, module.second.weight
    module.first.weight, module.second.weight = second, first


def turned(module: Any) -> None:
    module.factor = 3.0


def negating(module: Any) -> None:
    part = module.second
    part.forward = lambda x: -type(part).forward(part, x)


def hooked(module: Any) -> None:
    module.first.register_forward_hook(lambda part, args, result: result + 1)


@pytest.mark.parametrize(
    "change", [transposed, doubled, renewed, swapped, turned, negating, hooked]
)
def test_what_matters_is_seen_beside_it(change: Callable[[Any], None]) -> None:
    plain, fast = pairs()
    assert_alike(plain, fast)
    before = plain(X).detach()
    for module in (plain, fast):
        note(module)
        change(module)
    assert not torch.allclose(plain(X), before)
    assert_alike(plain, fast)
