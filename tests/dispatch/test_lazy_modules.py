"""Modules whose weights learn their sizes from the first call: that call is eager's, the next ones
are compiled."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import strop
from strop.api import dispatchers_of
from strop.options import Options


class Beside(nn.Module):
    """A lazy layer and one with sizes, deeper than the module that is optimised."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 6)
        self.rest = nn.Sequential(nn.ReLU(), nn.LazyLinear(5), nn.LazyBatchNorm1d())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.rest(self.first(x))


# How it is made, what it is given, and how many calls run in eager. A lazy module itself knows
# its sizes before its forward begins.
MODULES: dict[str, tuple[Any, tuple[int, ...], int]] = {
    "linear": (lambda: nn.LazyLinear(7), (3, 8), 0),
    "conv": (
        lambda: nn.Sequential(nn.LazyConv2d(4, 3), nn.Flatten(), nn.LazyLinear(2)),
        (3, 2, 6, 6),
        1,
    ),
    "transposed": (lambda: nn.LazyConvTranspose1d(4, 3), (2, 3, 9), 0),
    "beside": (Beside, (3, 8), 1),
}


@pytest.mark.parametrize("train", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("name", MODULES)
def test_the_first_call_is_eager_and_the_next_compiled(
    name: str, train: bool, tmp_path: Path
) -> None:
    make, shape, in_eager = MODULES[name]
    module = make().train(train)
    fast = strop.optimize(module, train=train, options=Options(cache_dir=str(tmp_path)))
    x, told = torch.randn(shape), next(iter(dispatchers_of(fast).values()))
    with torch.set_grad_enabled(train):
        fast(x)
        assert told.counters.eager_calls == in_eager
        assert ("a lazy layer" in str(strop.explain(fast))) == bool(in_eager)
        eager = copy.deepcopy(strop.restore(copy.deepcopy(fast)))
        for _ in range(2):
            torch.testing.assert_close(fast(x), eager(x))
    assert told.counters.eager_calls == in_eager
    assert strop.explain(fast).num_graphs == (2 if train else 1)
