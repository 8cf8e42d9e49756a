"""Values that are copied for their order in memory, but at sizes where they have it already, beside
writes: eager's results at all sizes, those of 1 among them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import strop
from strop.options import Options


def flattened(x: Tensor) -> Any:
    b = (x * 2)[:, 4:]
    whole = b.flatten()
    whole.mul_(3)
    return b + 0, whole


def reshaped(x: Tensor) -> Any:
    y = x * 2
    b = y.transpose(0, 1).reshape(-1, 4)
    y.add_(1)
    return b + 0, y


def contiguous(x: Tensor) -> Any:
    y = x * 2
    y.transpose(0, 1).contiguous().mul_(3)
    return y + 0


def in_another_order(x: Tensor) -> Any:
    y = (x * 2).reshape(2, 4, x.shape[0], 1)
    last = y.to(memory_format=torch.channels_last)
    last.relu_()
    return y + 0, last


def of_the_argument(x: Tensor) -> Any:
    y = x.transpose(0, 1).contiguous()
    y.mul_(3)
    return y + 0, x + 0


def a_copy_of_its_own(x: Tensor) -> Any:
    y = x * 2
    z = y.transpose(0, 1).clone()
    z.mul_(3)
    return y + z.transpose(0, 1)


def unread(x: Tensor) -> Any:
    return (x * 2).transpose(0, 1).contiguous().mul_(3)


GRAPHS = {  # and how many there are for all sizes
    flattened: 2,
    reshaped: 2,
    contiguous: 2,
    in_another_order: 2,
    of_the_argument: 2,  # of one row, the write is into the argument
    a_copy_of_its_own: 1,
    unread: 1,
}


class Function(nn.Module):
    def __init__(self, act: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.act = act

    def forward(self, x: Tensor) -> Any:
        return self.act(x)


@pytest.mark.parametrize("rows", [(3, 1, 5), (1, 3, 1)], ids=["many first", "one first"])
@pytest.mark.parametrize("act", GRAPHS, ids=lambda act: act.__name__)
def test_all_sizes(act: Callable[[Tensor], Any], rows: tuple[int, ...], tmp_path: Path) -> None:
    module = Function(act).eval()
    fast: Any = strop.optimize(copy.deepcopy(module), options=Options(cache_dir=str(tmp_path)))
    for number in rows:
        x = torch.randn(number, 8)
        given = x.clone()
        with torch.no_grad():
            torch.testing.assert_close(fast(given), module(x))
        torch.testing.assert_close(given, x)
    assert strop.explain(fast).num_graphs == GRAPHS[act]
