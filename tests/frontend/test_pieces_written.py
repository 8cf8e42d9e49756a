"""Writes into pieces that one call has cut: none shows in another piece, all show in the whole."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import strop
from strop.api import dispatchers_of
from strop.options import Options

CUTS: dict[str, Callable[[Tensor], Any]] = {
    "split": lambda y: y.split(4, 1),
    "sizes": lambda y: y.split_with_sizes([4, 4], 1),
    "chunk": lambda y: y.chunk(2, 1),
    "unsafe split": lambda y: y.unsafe_split(4, 1),
    "unsafe chunk": lambda y: y.unsafe_chunk(2, 1),
    "unsafe sizes": lambda y: torch.unsafe_split_with_sizes(y, [4, 4], 1),
    "unbind": lambda y: y.view(-1, 2, 4).unbind(1),
}


def one_after_another(y: Tensor, a: Tensor, b: Tensor) -> Any:
    a.add_(b).sigmoid_()
    b.mul_(a)
    return a - b, b


def views_of_pieces(y: Tensor, a: Tensor, b: Tensor) -> Any:
    first, last = a[:, 1:3], b.transpose(0, 1)
    a.add_(1)
    last.mul_(3)
    return first * 2, b + a


def the_whole(y: Tensor, a: Tensor, b: Tensor) -> Any:
    a.add_(1)
    b.mul_(2)
    return y.sin()


class Written(nn.Module):
    def __init__(self, cut: str, use: Callable[..., Any]) -> None:
        super().__init__()
        self.cut, self.use = cut, use

    def forward(self, x: Tensor) -> Any:
        y = x * 2
        return self.use(y, *CUTS[self.cut](y))


class Overlapping(nn.Module):
    """All pieces of an expanded value are one memory."""

    def forward(self, x: Tensor) -> Any:
        y = (x * 2).expand(2, *x.shape)
        a, b = y.unbind(0)
        a.add_(1)
        return b * 3, a


def check(module: nn.Module, tmp_path: Path, *shape: int) -> Any:
    fast: Any = strop.optimize(copy.deepcopy(module), options=Options(cache_dir=str(tmp_path)))
    for rows in (shape[0], shape[0] + 2, 1):
        x = torch.randn(rows, *shape[1:])
        with torch.no_grad():
            torch.testing.assert_close(fast(x), module(x))
    return fast


@pytest.mark.parametrize("use", [one_after_another, views_of_pieces, the_whole])
@pytest.mark.parametrize("cut", CUTS)
def test_writes(cut: str, use: Callable[..., Any], tmp_path: Path) -> None:
    check(Written(cut, use).eval(), tmp_path, 3, 8)


def test_writes_into_overlapping_pieces(tmp_path: Path) -> None:
    check(Overlapping().eval(), tmp_path, 3, 8)


@pytest.mark.parametrize("kind", [nn.GRUCell, nn.LSTMCell, nn.RNNCell])
@pytest.mark.parametrize("has_batch", [False, True], ids=["one sample", "a batch"])
def test_recurrent_cells(kind: Any, has_batch: bool, tmp_path: Path) -> None:
    """Pieces that lie in their whole's memory are read before another value is written there, in
    programs for training as well."""
    for train in (False, True):
        module = kind(5, 6).train(train)
        options = Options(cache_dir=str(tmp_path))
        fast: Any = strop.optimize(copy.deepcopy(module), train=train, options=options)
        for rows in (3, 1, 2) if has_batch else (0,):
            lead = (rows,) if rows else ()
            x, h = torch.randn(*lead, 5), torch.randn(*lead, 6)
            state = (h, h * 0.5) if kind is nn.LSTMCell else h
            with torch.set_grad_enabled(train):
                torch.testing.assert_close(fast(x, state), module(x, state))
        assert not any(each.counters.eager_calls for each in dispatchers_of(fast).values())
