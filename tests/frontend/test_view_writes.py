"""Writes through views, in every order of reads and writes."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from unittest import mock

import pytest
import torch
from torch import Tensor

import strop
from strop.frontend import capture
from tests.frontend.tracing import Function

Views = {
    "slice": lambda y: y[:, 1:3],
    "step": lambda y: y[..., 0::2],
    "negative": lambda y: y[:, -2:],
    "select": lambda y: y[:, 2],
    "transpose": lambda y: y.transpose(1, 2),
    "permute": lambda y: y.permute(2, 0, 1),
    "unsqueeze": lambda y: y.unsqueeze(1),
    "flatten": lambda y: y.view(y.shape[0], -1),
    "parts": lambda y: y.view(-1, y.shape[1], 2, 3)[:, 1:].transpose(2, 3),
    "chain": lambda y: y.transpose(1, 2)[..., 1:4].permute(1, 2, 0)[1::2].unsqueeze(0)[:, :, 1],
}

FOLDER = tempfile.TemporaryDirectory()  # of caches: each test traces


def _write_and_read_whole(view: Callable[[Tensor], Tensor], y: Tensor) -> Tensor:
    view(y).mul_(2)
    return y + 1


def _write_and_read_other(view: Callable[[Tensor], Tensor], y: Tensor) -> Tensor:
    part, other = view(y), y[:, ::2]
    part.copy_(part.exp())
    return other * 3 + part.sum()


def _write_whole_and_read_view(view: Callable[[Tensor], Tensor], y: Tensor) -> Tensor:
    part = view(y)
    y.add_(1)
    return part * 2 + y.sum()


def _write_twice(view: Callable[[Tensor], Tensor], y: Tensor) -> Tensor:
    first, second = view(y), y[:, 1:]
    first.add_(1)
    second.mul_(first.mean())
    first.sub_(second.sum())
    return torch.cat([y.flatten(), first.flatten(), second.flatten()])


def _write_returned(view: Callable[[Tensor], Tensor], y: Tensor) -> Tensor:
    again = view(y).mul_(3)
    y.add_(1)
    return again + y.mean()


@pytest.mark.parametrize("view", Views)
@pytest.mark.parametrize(
    "write",
    [
        _write_and_read_whole,
        _write_and_read_other,
        _write_whole_and_read_view,
        _write_twice,
        _write_returned,
    ],
)
def test_all_readers_see_it(view: str, write: Callable[..., Tensor]):
    module = Function(lambda x: write(Views[view], x * 2)).eval()
    x = torch.randn(3, 5, 6)
    wanted = module(x)
    with mock.patch.object(capture, "functionalize", side_effect=AssertionError("traced twice")):
        strop.optimize(module, options=strop.Options(cache_dir=tempfile.mkdtemp(dir=FOLDER.name)))
        found = module(x)
    assert not strop.explain(module).fallbacks
    torch.testing.assert_close(found, wanted)


def test_a_view_without_an_inverse_is_left_to_torch():
    def forward(x: Tensor) -> Tensor:
        y = x * 2
        first, second = y.split(2, 1)
        first.mul_(2)
        return y + second.sum()

    module = Function(forward).eval()
    x = torch.randn(3, 4)
    wanted = module(x)
    strop.optimize(module, options=strop.Options(cache_dir=tempfile.mkdtemp(dir=FOLDER.name)))
    torch.testing.assert_close(module(x), wanted)
    assert not strop.explain(module).fallbacks
