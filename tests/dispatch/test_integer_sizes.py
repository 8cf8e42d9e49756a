"""Whole numbers of a call that are sizes: one graph for all of them, and constants where it must
be so."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import strop
from strop import Options
from strop.api import dispatchers_of
from tests.e2e.tiny import DEVICES

WIDTH = 12
Forward = Callable[..., Tensor]


def positions(x: Tensor, frames: int, height: int, width: int) -> Tensor:
    """As LTX's: where each token lies in the video."""
    axes = [torch.arange(n, device=x.device, dtype=x.dtype) for n in (frames, height, width)]
    grid = torch.stack(torch.meshgrid(*axes, indexing="ij"), dim=-1)
    return grid.flatten(0, 2).unsqueeze(0)  # (1, tokens, 3)


class Video(nn.Module):
    """``work`` gets tokens (b, frames * height * width, WIDTH) and the three numbers."""

    def __init__(self, work: Forward) -> None:
        super().__init__()
        self.project, self.work = nn.Linear(3, WIDTH), work

    def forward(self, x: Tensor, frames: int, height: int, *, width: int) -> Tensor:
        return self.work(x + self.project(positions(x, frames, height, width)), frames, height)


def plain(x: Tensor, frames: int, height: int) -> Tensor:
    return x.softmax(1).sin()


def apart(x: Tensor, frames: int, height: int) -> Tensor:
    """Frames in a dim of their own; what is an int to Python."""
    scale = 1.0 / frames if height > 1 else 2.0
    return x.unflatten(1, (frames, -1)).mean(2) * scale


def one_by_one(x: Tensor, frames: int, height: int) -> Tensor:
    """Its code fixes the number of frames; where it has one, it cannot be traced with symbols, and
    from then on all are constants."""
    return torch.stack([part.sum(1) for part in x.chunk(frames, 1)[:frames]])


def as_a_key(x: Tensor, frames: int, height: int) -> Tensor:
    """Needs the number itself, which cannot be traced."""
    return x * {2: 1.0, 3: 0.5}.get(int.__index__(frames), 3.0)


VIDEOS = ((2, 3, 4), (3, 3, 4), (2, 5, 4), (1, 3, 7), (4, 2, 2))


def calls(device: str) -> list[tuple[Tensor, int, int, int]]:
    return [(torch.randn(2, f * h * w, WIDTH, device=device), f, h, w) for f, h, w in VIDEOS]


def graphs(model: nn.Module) -> int:
    (found,) = dispatchers_of(model).values()
    return len(found.variants.all)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("work", "at_most"), [(plain, 1), (apart, 2), (one_by_one, 8), (as_a_key, 5)]
)
def test_values_for_every_video(work: Forward, at_most: int, device: str, tmp_path: Path) -> None:
    model = Video(work).to(device).eval()
    given = calls(device)
    with torch.no_grad():
        wanted = [model(x, f, h, width=w) for x, f, h, w in given]
        strop.optimize(model, options=Options(cache_dir=str(tmp_path)))
        for _ in range(3):  # a GPU's third is a replay
            for (x, f, h, w), right in zip(given, wanted, strict=True):
                torch.testing.assert_close(model(x, f, h, width=w), right)
    assert graphs(model) <= at_most


def test_a_number_that_is_no_size_is_a_constant(tmp_path: Path) -> None:
    class Repeated(nn.Module):
        def forward(self, x: Tensor, times: int, size: int) -> Tensor:
            for _ in range(times):
                x = x.sin() + size
            return x

    model = strop.optimize(Repeated().eval(), options=Options(cache_dir=str(tmp_path)))
    x = torch.randn(2, 6, 5)
    with torch.no_grad():
        for times, size in ((1, 5), (2, 5), (2, 6), (1, 7)):
            right = x
            for _ in range(times):
                right = right.sin() + size
            torch.testing.assert_close(model(x, times, size), right)


def test_numbers_that_are_sizes_by_chance(tmp_path: Path) -> None:
    """2 x 3 = 6 tokens, at first."""

    class Scaled(nn.Module):
        def forward(self, x: Tensor, a: int, b: int) -> Any:
            return x * a + b, x.shape[1] * a

    eager = Scaled().eval()
    model = strop.optimize(Scaled().eval(), options=Options(cache_dir=str(tmp_path)))
    with torch.no_grad():
        for tokens, a, b in ((6, 2, 3), (8, 2, 3), (6, 1, 6), (6, 0, 3), (6, -2, -3), (6, 2, 3)):
            x = torch.randn(2, tokens, 5)
            ours, count = model(x, a, b)
            right, wanted = eager(x, a, b)
            torch.testing.assert_close(ours, right)
            assert (count, type(count)) == (wanted, int)


class Pictures(nn.Module):
    """Gets frames, height and width in a list for each picture, as Qwen-Image does."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(3, WIDTH)

    def forward(self, x: Tensor, shapes: list[list[tuple[int, int, int]]]) -> Tensor:
        first = shapes[0][0]
        if not all(one == first for (one,) in shapes):
            raise ValueError("the pictures differ in size")
        return (x + self.project(positions(x, *first))).softmax(1).sin()


@pytest.mark.parametrize("batch", [1, 2])
def test_sizes_in_lists_of_an_argument(batch: int, tmp_path: Path) -> None:
    eager = Pictures().eval()
    model = strop.optimize(copy.deepcopy(eager), options=Options(cache_dir=str(tmp_path)))
    with torch.no_grad():
        for size in VIDEOS:
            x, shapes = torch.randn(batch, math.prod(size), WIDTH), [[size] for _ in range(batch)]
            torch.testing.assert_close(model(x, shapes), eager(x, shapes))
        with pytest.raises(ValueError, match="differ in size"):
            model(torch.randn(2, 24, WIDTH), [[(2, 3, 4)], [(2, 4, 3)]])
    assert graphs(model) == 1


def test_numbers_in_lists_that_are_no_sizes(tmp_path: Path) -> None:
    """They are constants, also where those of two lists together multiply to a size; and what is a
    size in one list is a constant in another."""

    class Weighted(nn.Module):
        def forward(self, x: Tensor, pairs: list[tuple[int, ...]], *, more: Any = ()) -> Tensor:
            for a, b in pairs:
                x = x * a + b
            return x + sum(more)

    eager = Weighted().eval()
    model = strop.optimize(Weighted().eval(), options=Options(cache_dir=str(tmp_path)))
    with torch.no_grad():
        for tokens, pairs, more in (
            (6, [(2, 5), (3, 5)], ()),
            (6, [(2, 3), (3, 5)], (2, 3)),
            (8, [(2, 4), (3, 5)], (2, 4)),
            (8, [(2, 4), (2, 4)], (3, 4)),
            (6, [(2, 3), (2, 4)], ()),
            (6, [(0, 3), (-2, -3)], (6, 1)),
            (6, [(1, 6), (2, 3)], (6, 1)),
        ):
            x = torch.randn(2, tokens, 5)
            torch.testing.assert_close(model(x, pairs, more=more), eager(x, pairs, more=more))
