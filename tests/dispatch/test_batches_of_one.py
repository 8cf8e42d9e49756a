"""A batch of one is traced as any batch, where others are not broadcast to it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import strop
from tests.e2e import tiny


class Function(nn.Module):
    def __init__(self, act: Callable[..., Any]) -> None:
        super().__init__()
        self.act = act

    def forward(self, *args: Tensor) -> Any:
        return self.act(*args)


def attends(x: Tensor, scale: Tensor, places: Tensor) -> Tensor:
    return (x + places.sum(-1)[:, None]) * scale[:, None, None]


CASES: dict[str, tuple[Callable[..., Any], list[tuple[tuple[int, ...], ...]], int]] = {
    # act, the shapes of calls, how many graphs
    "places beside a batch": (
        attends,
        [((1, 9, 4), (1,), (9, 3)), ((2, 9, 4), (2,), (9, 3)), ((3, 5, 4), (3,), (5, 3))],
        1,
    ),
    "broadcast": (lambda x, y: x + y, [((1, 3), (5, 3)), ((1, 3), (4, 3))], 1),
    "broadcast at times": (lambda x, y: x * y, [((1, 3), (5, 3)), ((5, 3), (5, 3))], 2),
    "squeezed": (lambda x, y: x.squeeze(0) @ y, [((1, 3), (3, 5)), ((2, 3), (3, 5))], 2),
}


@pytest.mark.parametrize("name", CASES)
def test_batches_of_one(name: str) -> None:
    act, calls, count = CASES[name]
    module = strop.optimize(Function(act).eval(), options=tiny.options())
    with torch.no_grad():
        for shapes in calls:
            args = [torch.randn(shape) for shape in shapes]
            torch.testing.assert_close(module(*args), act(*args))
    assert module.forward.counters.eager_calls == 0
    assert len(module.forward.variants.all) == count


def one_for_each_layer(x: Tensor, scales: Tensor) -> Tensor:
    if len(scales) != 1:
        raise ValueError(f"1 scale expected, got {len(scales)}")
    return x * scales[0]


def test_a_size_of_one_that_the_code_asks_for() -> None:
    """It is traced as a batch of two first, which this code refuses."""
    module = strop.optimize(Function(one_for_each_layer).eval(), options=tiny.options())
    with torch.no_grad():
        for width in (3, 5):
            x, scales = torch.randn(1, width, 4), torch.randn(1)
            assert torch.equal(module(x, scales), x * scales[0])
        with pytest.raises(ValueError, match="1 scale expected, got 2"):
            module(torch.randn(2, 3, 4), torch.randn(2))
    assert module.forward.counters.eager_calls == 0
    assert len(module.forward.variants.all) == 1
