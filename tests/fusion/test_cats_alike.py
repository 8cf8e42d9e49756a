"""Keys and values of a cache are put together by one kernel."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import strop
from strop.fusion import planner
from strop.ir.graph import Node
from strop.options import Options
from tests.frontend.tracing import Function, trace


def cached(past_keys: Tensor, past_values: Tensor, made: Tensor) -> tuple[Tensor, Tensor]:
    """One value (B, S, 2 * 4 * 16) has the new keys and values."""
    new = [half.unflatten(-1, (4, 16)).transpose(1, 2) for half in made.chunk(2, -1)]
    return torch.cat([past_keys, new[0]], 2), torch.cat([past_values, new[1]], 2)


def apart(past_keys: Tensor, past_values: Tensor, made: Tensor) -> tuple[Tensor, Tensor]:
    """Nothing of what is put together is of one value."""
    new = made.unflatten(-1, (8, 16)).transpose(1, 2)
    return torch.cat([past_keys, new[:, :4]], 2), torch.cat([past_values, new[:, 4:] * 2], 2)


def behind(past_keys: Tensor, past_values: Tensor, made: Tensor) -> tuple[Tensor, Tensor]:
    """The second is computed from a sum over the first."""
    keys, values = cached(past_keys, past_values, made)
    more = made.unflatten(-1, (8, 16)).transpose(1, 2)[:, :4] + keys.sum((2, 3), keepdim=True)
    return keys, torch.cat([values[:, :, :-1], more], 2)


SHAPES = ("b 4 s 16", "b 4 s 16", "b 1 128")


def attended(past_keys: Tensor, past_values: Tensor, made: Tensor) -> Tensor:
    """Attention has as many values as keys, so the lengths of both pieces are one size."""
    keys, values = cached(past_keys, past_values, made)
    return F.scaled_dot_product_attention(made[..., :64].view(-1, 4, 1, 16), keys, values)


def kernels_of_cats(
    function: Any, shapes: tuple[str, ...] = SHAPES, **sizes: int
) -> list[list[Node]]:
    graph = trace(function, *shapes, **{"b": 2, "s": 9, **sizes}).graph
    found = [[n for n in group.nodes if n.op == "cat"] for group in planner.plan(graph).groups]
    return [cats for cats in found if cats]


def test_two_of_one_value_are_one_kernel() -> None:
    assert list(map(len, kernels_of_cats(cached))) == [2]


def test_keys_and_values_have_one_length() -> None:
    shapes = ("b 4 s 16", "b 4 t 16", "b 1 128")
    assert list(map(len, kernels_of_cats(attended, shapes, t=9))) == [2]
    assert list(map(len, kernels_of_cats(cached, shapes, t=9))) == [1, 1]


def test_two_of_several_values_are_two() -> None:
    assert list(map(len, kernels_of_cats(apart))) == [1, 1]


def test_one_that_waits_for_the_other_is_no_part_of_it() -> None:
    assert all(len(cats) == 1 for cats in kernels_of_cats(behind)[1:])


def test_large_ones_are_two() -> None:
    assert list(map(len, kernels_of_cats(cached, s=10**6))) == [1, 1]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("function", [cached, apart, behind])
def test_values(function: Any, device: str, tmp_path: Path) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU")
    torch.manual_seed(0)
    fast: nn.Module = Function(function).eval()
    strop.optimize(fast, options=Options(cache_dir=str(tmp_path), strict=True))
    with torch.no_grad():
        for length in (9, 3, 40, 9):
            sizes = ((2, 4, length, 16), (2, 4, length, 16), (2, 1, 128))
            given = [torch.randn(size, device=device) for size in sizes]
            for found, wanted in zip(fast(*given), function(*given), strict=True):
                torch.testing.assert_close(found, wanted)
