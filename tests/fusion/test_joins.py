"""Pieces that are normed apart are stored where their cat has them: kernels, and what they compute.

Each pattern runs at sizes other than the traced ones, in C++ and in Triton's interpreter.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import strop
from strop.api import dispatchers_of
from strop.dispatch.dispatcher import Dispatcher
from strop.ir.dims import parse
from tests.fusion.test_indices import halves, neighbours, normed, rotated
from tests.fuzz.interpreted import interpreted
from tests.views.cases import Case
from tests.views.running import optimized

ENVS = ({"b": 2, "s": 6, "t": 3}, {"b": 3, "s": 5, "t": 1}, {"b": 1, "s": 3, "t": 4})


def rotated_pair(text: Tensor, x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor) -> Any:
    """Texts of 3 tokens and pictures, as queries and keys."""
    together = [torch.cat([normed(text, w), normed(x, w)], 1) for w in (weight, weight + 1)]
    return tuple(rotated(each, cos, sin, neighbours) for each in together)


def attended(text: Tensor, x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    q, k = rotated_pair(text, x, weight, cos, sin)
    v = torch.cat([text, x], 1)
    return F.scaled_dot_product_attention(*(each.transpose(1, 2) for each in (q, k, v)))


def rotated_before(text: Tensor, x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotated apart, joined, and laid out by heads."""
    pieces = [
        rotated(normed(text, weight), cos[:3], sin[:3], halves),
        rotated(normed(x, weight), cos[3:], sin[3:], halves),
    ]
    return torch.cat(pieces, 1).transpose(1, 2).contiguous()


def twice(x: Tensor, weight: Tensor) -> Tensor:
    y = normed(x, weight)
    return torch.cat([y, y], 1) * 2


def read_elsewhere(text: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    a, b = normed(text, weight), normed(x, weight)
    y = torch.cat([a, b], 1)
    return y * 2, y, a, b.exp(), torch.softmax(y + 1, -1)


def one_after_the_other(text: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    a = normed(text, weight)
    b = normed(x + a.mean(1, keepdim=True), weight)
    first = torch.cat([a, b], 1).exp()
    return torch.cat([normed(first, weight), normed(text * 2, weight)], 1) + 1


def of_given(text: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """A piece that nothing computes, and one that is half of the cat."""
    return torch.cat([text, normed(x, weight), normed(x + 1, weight)], 1).abs()


def cut_apart(x: Tensor, weight: Tensor) -> Tensor:
    """Of three rows the second piece has none."""
    return torch.cat([normed(x[:, :3], weight), normed(x[:, 3:], weight)], 1) * 2


def by_batches(text: Tensor, x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    return torch.cat([normed(text, weight), normed(x, weight)], 0) * scale


def side_by_side(x: Tensor, y: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    return torch.cat([normed(x, weight), normed(y, weight)], -1) * scale


def of_two_types(x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
    return torch.cat([normed(x, weight).double(), normed(y, weight)], 1) + 1


def flipped(text: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Along the cat itself nothing is cut: what is turned round there is not moved."""
    y = torch.cat([normed(text, weight), normed(x, weight)], 1)
    return y.flip(1) * y, y.cumsum(1)


def by_heads(text: Tensor, x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    y = torch.cat([normed(text, weight), normed(x, weight)], 1)
    return (y.reshape(*y.shape[:2], 16) * scale).reshape(*y.shape).transpose(1, 2).exp()


@dataclass(frozen=True)
class Joined:
    function: Callable[..., Any]
    arguments: tuple[str, ...]
    kernels: int
    calls: int = 0


HEADS, TABLES = ("b 3 2 8", "b s 2 8", "8"), ("3+s 1 8", "3+s 1 8")
PATTERNS: dict[str, Joined] = {
    "rotated_pair": Joined(rotated_pair, (*HEADS, *TABLES), 2),
    "attended": Joined(attended, (*HEADS, *TABLES), 4, 1),
    "rotated_before": Joined(rotated_before, (*HEADS, *TABLES), 2),
    "twice": Joined(twice, ("b s 8", "8"), 1),
    "read_elsewhere": Joined(read_elsewhere, ("b t 8", "b s 8", "8"), 3),
    "one_after_the_other": Joined(one_after_the_other, ("b t 8", "b s 8", "8"), 5),
    "of_given": Joined(of_given, ("b t 8", "b s 8", "8"), 3),
    "cut_apart": Joined(cut_apart, ("b s 8", "8"), 2),
    "by_batches": Joined(by_batches, ("t 4 8", "s 4 8", "8", "t+s 1 1"), 2),
    "side_by_side": Joined(side_by_side, ("b s 8", "b s 8", "8", "16"), 1),
    "of_two_types": Joined(of_two_types, ("b s 8", "b s 8", "8"), 1),
    "flipped": Joined(flipped, ("b t 8", "b s 8", "8"), 3, 1),
    "by_heads": Joined(by_heads, ("b t 2 8", "b s 2 8", "8", "b 1 16"), 2),
}


def arguments_of(pattern: Joined, env: dict[str, int]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    shapes = [[parse(size).eval(env) for size in text.split()] for text in pattern.arguments]
    return [torch.randn(shape, generator=generator) for shape in shapes]


def judge(name: str, folder: str) -> Dispatcher:
    pattern = PATTERNS[name]
    module, dispatcher = optimized(Case(pattern.function, pattern.arguments), ENVS[0], folder)
    for env in ENVS:
        given = arguments_of(pattern, env)
        exact = pattern.function(*(x.double() for x in given))
        for _ in range(2):
            for found, wanted in zip(_several(module(*given)), _several(exact), strict=True):
                torch.testing.assert_close(found.double(), wanted, rtol=4e-6, atol=4e-6)
    assert not dispatcher.counters.fallbacks
    return dispatcher


def _several(results: Any) -> tuple[Tensor, ...]:
    return (results,) if isinstance(results, Tensor) else results


@pytest.mark.parametrize("name", PATTERNS)
def test_in_cpp(name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = str(tmp_path_factory.mktemp("cache"))
    dispatcher = judge(name, folder)
    (variant,) = dispatcher.variants.all
    found = len(variant.program.kernel_steps), len(variant.program.call_steps)
    assert found == (PATTERNS[name].kernels, PATTERNS[name].calls)


@pytest.mark.parametrize("name", PATTERNS)
def test_in_triton(name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    pytest.importorskip("triton")
    with interpreted(triton=True):
        judge(name, str(tmp_path_factory.mktemp("cache")))


class Joint(nn.Module):
    """Queries of texts and pictures, rotated, that attend to themselves."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.text, self.picture = nn.Linear(8, 16), nn.Linear(8, 16)
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, 8))

    def forward(self, text: Tensor, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        heads = (
            layer(value).unflatten(-1, (2, 8))
            for layer, value in ((self.text, text), (self.picture, x))
        )
        q = rotated(torch.cat([normed(h, self.weight) for h in heads], 1), cos, sin, halves)
        return F.scaled_dot_product_attention(*[q.transpose(1, 2)] * 3).transpose(1, 2).flatten(2)


def joint_arguments() -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    sizes = ((2, 3, 8), (2, 6, 8), (9, 1, 8), (9, 1, 8))
    return [torch.randn(size, generator=generator) for size in sizes]


def test_steps_are_judged_part_by_part(tmp_path: Path) -> None:
    module = Joint().eval()
    strop.optimize(module, options=strop.Options(check=True, cache_dir=str(tmp_path)))
    with torch.no_grad():
        module(*joint_arguments())
    (dispatcher,) = dispatchers_of(module).values()
    (variant,) = dispatcher.variants.all
    assert sum(bool(step.parts) for step in variant.program.kernel_steps) == 2
    assert dispatcher.counters.findings == []
    assert dispatcher.counters.eager_calls == 0


def test_gradients(tmp_path: Path) -> None:
    eager, fast = Joint().double(), Joint()
    fast.load_state_dict(eager.state_dict())
    strop.optimize(fast.train(), train=True, options=strop.Options(cache_dir=str(tmp_path)))
    given = joint_arguments()
    for module, dtype in ((eager, torch.float64), (fast, torch.float32)):
        module(*(x.to(dtype) for x in given)).square().sum().backward()
    for (name, mine), (_, theirs) in zip(
        fast.named_parameters(), eager.named_parameters(), strict=True
    ):
        assert mine.grad is not None, name
        torch.testing.assert_close(mine.grad.double(), theirs.grad, rtol=1e-3, atol=1e-4)
    (dispatcher,) = dispatchers_of(fast).values()
    assert dispatcher.counters.eager_calls == 0
