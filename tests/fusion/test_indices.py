"""Views of all kinds stay inside of kernels: how many there are, and what they compute.

Each pattern runs at sizes other than the traced ones, in C++ and in Triton's interpreter, and its
results are no further from fp64 than eager's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from strop.dispatch.dispatcher import Dispatcher
from strop.ir.dims import parse
from strop.ir.program import KernelStep
from strop.testing import assert_as_accurate_as_eager
from tests.fuzz.interpreted import interpreted
from tests.views.cases import Case
from tests.views.running import optimized

ENVS = ({"b": 2, "s": 6, "h": 4, "w": 6}, {"b": 3, "s": 5, "h": 2, "w": 4})


def normed(x: Tensor, weight: Tensor) -> Tensor:
    scale = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6)
    return (x * scale).to(x.dtype) * weight


def neighbours(x: Tensor) -> Tensor:
    real, imag = x.reshape(*x.shape[:-1], -1, 2).unbind(-1)
    return torch.stack([-imag, real], -1).flatten(-2)


def halves(x: Tensor) -> Tensor:
    real, imag = x.chunk(2, -1)
    return torch.cat([-imag, real], -1)


def rotated(x: Tensor, cos: Tensor, sin: Tensor, turned: Callable[[Tensor], Tensor]) -> Tensor:
    return (x.float() * cos + turned(x).float() * sin).to(x.dtype)


def interleaved_pair(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x[..., 0::2], x[..., 1::2]
    cos, sin = cos[..., 0::2], sin[..., 0::2]
    return torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2)


def joint(text: Tensor, x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    together = torch.cat([normed(text, weight), normed(x, weight)], 1)
    return rotated(together, cos, sin, neighbours)


def shifted_windows(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    b, h, w, c = x.shape
    y = x + 1
    rolled = F.layer_norm(y, (c,), weight).roll((-1, -1), (1, 2))
    cut = rolled.view(b, h // 2, 2, w // 2, 2, c).permute(0, 1, 3, 2, 4, 5)
    return y, cut.reshape(-1, 4, c)


def unshifted(rows: Tensor, x: Tensor) -> Tensor:
    b, h, w, c = x.shape
    y = rows.view(b, h // 2, w // 2, 2, 2, c).permute(0, 1, 3, 2, 4, 5).reshape(b, h, w, c) * 2
    return F.layer_norm(x + y.roll((1, 1), (1, 2)), (c,))


def merged_patches(x: Tensor) -> Tensor:
    x = x * 2
    parts = [x[:, i::2, j::2] for j in (0, 1) for i in (0, 1)]
    merged = torch.cat(parts, -1)
    return F.layer_norm(merged, merged.shape[-1:])


def with_class_token(token: Tensor, x: Tensor, place: Tensor) -> tuple[Tensor, Tensor]:
    rows = (x * 0.5).flatten(2).transpose(1, 2)
    y = torch.cat([token.expand(x.shape[0], -1, -1), rows], 1) + place[:1]
    return y, F.layer_norm(y, (8,))


def patches(x: Tensor) -> Tensor:
    b, c, h, w = x.shape
    cut = (x + 1).view(b, c, h // 2, 2, w // 2, 2)
    return cut.permute(0, 2, 4, 1, 3, 5).reshape(b, h * w // 4, 4 * c) * 2


def unpatched(x: Tensor, like: Tensor) -> Tensor:
    b, c, h, w = like.shape
    put = (x * 2).view(b, h // 2, w // 2, c, 2, 2)
    return put.permute(0, 3, 1, 4, 2, 5).reshape(b, c, h, w) + like


def table(x: Tensor, angles: Tensor) -> Tensor:
    cos = angles.cos().repeat_interleave(2, -1)
    return x * cos[:, None] + neighbours(x) * cos[:, None]


@dataclass(frozen=True)
class Pattern:
    function: Callable[..., Any]
    arguments: tuple[str, ...]
    kernels: int = 1


HEADS, TABLE = "b s 2 8", "s 1 8"
PATTERNS: dict[str, Pattern] = {
    "neighbours": Pattern(
        lambda x, cos, sin: rotated(x + 1, cos, sin, neighbours), (HEADS, TABLE, TABLE)
    ),
    "halves": Pattern(lambda x, cos, sin: rotated(x + 1, cos, sin, halves), (HEADS, TABLE, TABLE)),
    "norm_and_neighbours": Pattern(
        lambda x, w, cos, sin: rotated(normed(x, w), cos, sin, neighbours),
        (HEADS, "8", TABLE, TABLE),
    ),
    "norm_and_halves": Pattern(
        lambda x, w, cos, sin: rotated(normed(x, w), cos, sin, halves), (HEADS, "8", TABLE, TABLE)
    ),
    "norm_and_pairs": Pattern(
        lambda x, w, cos, sin: interleaved_pair(normed(x, w), cos, sin), (HEADS, "8", TABLE, TABLE)
    ),
    "text_and_picture": Pattern(joint, ("b 3 2 8", "b s 2 8", "8", "3+s 1 8", "3+s 1 8"), 2),
    "shifted_windows": Pattern(shifted_windows, ("b 2*h 2*w 8", "8")),
    "unshifted": Pattern(unshifted, ("4*b*h*w 8", "b 2*h 2*w 8")),
    "merged_patches": Pattern(merged_patches, ("b 2*h 2*w 8",)),
    "class_token": Pattern(with_class_token, ("1 1 8", "b 8 3 4", "1 13 8")),
    "patches": Pattern(patches, ("b 3 2*h 2*w",)),
    "unpatched": Pattern(unpatched, ("b h*w 12", "b 3 2*h 2*w")),
    "repeated_angles": Pattern(table, (HEADS, "s 4")),
    "rows_of_another_length": Pattern(lambda x: (x * 2).reshape(-1, 3, 4).exp() + 1, ("b 2 6",)),
    "columns_of_another_length": Pattern(
        lambda x: (x * 2).mT.reshape(-1, 3, 4).roll(1, -1) + 1, ("b 2 6",)
    ),
    "sum_of_a_slice": Pattern(lambda x: ((x * 2)[:, 1:5].reshape(-1, 2, 8)).sum(-1), ("b 6 4",)),
    "flipped_rows": Pattern(lambda x: (x * 2).flip(1).reshape(-1, 2, 6) + 1, ("b 4 3",)),
    "diagonal": Pattern(lambda x: (x * 2).diagonal(0, 1, 2).reshape(-1, 2, 3) + 1, ("b 6 6",)),
}


def arguments_of(pattern: Pattern, env: dict[str, int]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    shapes = [[parse(size).eval(env) for size in text.split()] for text in pattern.arguments]
    return [torch.randn(shape, generator=generator) for shape in shapes]


def kernels_of(dispatcher: Dispatcher) -> int:
    (variant,) = dispatcher.variants.all
    assert not variant.program.call_steps
    return sum(isinstance(step, KernelStep) for step in variant.program.steps)


def judge(name: str, folder: str, close: Callable[[Tensor, Tensor, Tensor], None]) -> None:
    pattern = PATTERNS[name]
    module, dispatcher = optimized(Case(pattern.function, pattern.arguments), ENVS[0], folder)
    for env in ENVS:
        given = arguments_of(pattern, env)
        exact = pattern.function(*(x.double() for x in given))
        results = zip(
            *map(_several, (module(*given), pattern.function(*given), exact)), strict=True
        )
        for mine, eager, reference in results:
            close(mine, eager, reference.double())
    assert not dispatcher.counters.fallbacks
    assert kernels_of(dispatcher) == pattern.kernels


def _several(results: Any) -> tuple[Tensor, ...]:
    return (results,) if isinstance(results, Tensor) else results


def _is_near(found: Tensor, eager: Tensor, exact: Tensor) -> None:
    """numpy, by which Triton's interpreter computes, rounds otherwise than any GPU."""
    torch.testing.assert_close(found.double(), exact, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("name", PATTERNS)
def test_in_cpp(name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    judge(name, str(tmp_path_factory.mktemp("cache")), assert_as_accurate_as_eager)


@pytest.mark.parametrize("name", PATTERNS)
def test_in_triton(name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    pytest.importorskip("triton")
    with interpreted(triton=True):
        judge(name, str(tmp_path_factory.mktemp("cache")), _is_near)
