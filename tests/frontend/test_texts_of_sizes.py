"""Code that computes with the text of a size, and calls that put other memory under a tensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import strop
from tests.e2e import tiny


class Computes(nn.Module):
    def __init__(self, body: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.body = nn.Linear(8, 8), body

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self, x)


GAINS = {"2": 3, "5": 7}
TEXTS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "str": lambda m, x: m.linear(x) * len(str(x.shape[0])),
    "repr": lambda m, x: m.linear(x) * len(repr(x.shape[0])),
    "f": lambda m, x: m.linear(x) * len(f"{x.shape[0]}"),
    "f with a form": lambda m, x: m.linear(x) * len(f"{x.shape[0]:4d}"),
    "format": lambda m, x: m.linear(x) * len("{}".format(x.shape[0])),  # noqa: UP032
    "percent": lambda m, x: m.linear(x) * len("%s" % x.shape[0]),  # noqa: UP031
    "all sizes": lambda m, x: m.linear(x) * len(f"{x.shape}"),
    "a quotient": lambda m, x: m.linear(x) * len(str(x.shape[0] / 2)),
    "a name": lambda m, x: m.linear(x) * GAINS.get(str(x.shape[0]), 11),
}


def checked(body: Callable[[Any, Tensor], Tensor], *rows: int) -> Any:
    """Compare with eager, results of all calls at the end. Return the dispatcher."""
    torch.manual_seed(0)
    module = Computes(body).eval().requires_grad_(False)
    given = [torch.randn(n, 8) for n in rows]
    with torch.no_grad():
        expected = [module(x.clone()) for x in given]
        fast = strop.optimize(module, options=tiny.options())
        found = [fast(x.clone()) for x in given]
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    return fast.forward


@pytest.mark.parametrize("name", TEXTS)
def test_the_text_of_a_size_is_its_value(name: str) -> None:
    served = checked(TEXTS[name], 2, 5, 12, 2, 5)
    assert not served.counters.fallbacks
    assert served.variants.num_captures == 3, "each text is a graph of its own"


def test_a_text_in_an_error_that_does_not_come_costs_nothing() -> None:
    def body(module: Any, x: Tensor) -> Tensor:
        if x.dim() != 2:
            raise ValueError(f"{x.shape}")
        return module.linear(x)

    served = checked(body, 2, 5, 12)
    assert served.variants.num_captures == 1


def _sets_data(module: Any, x: Tensor) -> Tensor:
    y: Tensor = module.linear(x)
    y.data = x * 2
    return y


def _sets(module: Any, x: Tensor) -> Tensor:
    y: Tensor = module.linear(x)
    return y.set_(x * 2)  # type: ignore[call-overload]


def _sets_data_of_a_base(module: Any, x: Tensor) -> Tensor:
    y: Tensor = module.linear(x)
    row = y[:1]
    y.data = x
    row.add_(1)
    return y + row


@pytest.mark.parametrize("body", [_sets_data, _sets, _sets_data_of_a_base])
def test_other_memory_under_a_tensor_runs_in_eager(body: Any) -> None:
    served = checked(body, 2, 3, 2)
    (reason,) = served.counters.fallbacks
    assert "of a tensor, which compiled code does not follow" in reason


def test_writes_into_data_are_followed() -> None:
    def body(module: Any, x: Tensor) -> Tensor:
        y: Tensor = module.linear(x)
        y.data.mul_(2)
        return y

    assert not checked(body, 2, 3).counters.fallbacks
