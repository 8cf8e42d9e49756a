"""Whole numbers of a call that are sizes: one graph for all of them, and constants where it must
be so."""

from __future__ import annotations

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
