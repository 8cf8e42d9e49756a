"""A value that many rows share is stored where computing it again takes longer than a launch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from strop.fusion.planner import plan
from strop.options import Options
from strop.passes import run as run_passes
from tests.frontend.tracing import trace


def num_kernels(
    function: Callable[..., Any], *shapes: str, device: str = "cuda", **env: int
) -> int:
    graph = run_passes(trace(function, *shapes, **env).graph, Options())[0]
    return len(plan(graph, device=device).groups)


def gated(x: Tensor, gate: Tensor) -> Tensor:
    """Gate rows as the blocks of Z-Image and Lumina do."""
    return x * gate.tanh()


def rotated(x: Tensor, rows: Tensor, columns: Tensor, frames: Tensor) -> Tensor:
    """Turn all heads by one table, which is put together of those of three axes, as Wan does."""
    size, last = (len(rows), len(columns), len(frames)), -1
    parts = (
        rows[:, None, None].expand(*size, last),
        columns[None, :, None].expand(*size, last),
        frames[None, None].expand(*size, last),
    )
    return x * torch.cat(parts, -1).reshape(-1, 1, 24)


GATED = ("1 s 256", "1 1 256")
ROTATED = ("(r*c*f) h 24", "r 8", "c 8", "f 8")


@pytest.mark.parametrize(
    ("device", "rows", "kernels"),
    [("cuda", 32, 1), ("cuda", 1 << 15, 2), ("cpu", 32, 1), ("cpu", 1024, 2)],
)
def test_a_gate_of_many_rows_is_computed_once(device: str, rows: int, kernels: int) -> None:
    assert num_kernels(gated, *GATED, device=device, s=rows) == kernels


@pytest.mark.parametrize(("heads", "kernels"), [(2, 1), (40, 2)])
def test_a_table_that_many_heads_share_is_put_together_once(heads: int, kernels: int) -> None:
    found = num_kernels(
        lambda x, *axes: rotated(x.reshape(-1, x.shape[-2], 24), *axes),
        *("r c*f h 24", *ROTATED[1:]),
        r=32,
        c=32,
        f=16,
        h=heads,
    )
    assert found == kernels


def test_what_all_columns_of_a_row_share_is_computed_with_it() -> None:
    """A kernel's tile computes it once a row, whatever it takes."""
    assert num_kernels(lambda x, y: x * y.tanh(), "1 s 4096", "1 s 1", s=1 << 15) == 1


def test_what_hides_behind_loads_is_computed_again() -> None:
    assert num_kernels(lambda x, y: x * (1 + y), "1 s 256", "1 1 256", s=1 << 15) == 1


def test_two_kernels_take_twice_as_long() -> None:
    """Each alone would compute the gate itself."""

    def twice(x: Tensor, y: Tensor, gate: Tensor) -> tuple[Tensor, Tensor]:
        return gated(x, gate), gated(y, gate)

    few = (1 << 26) // (24 * 256) - 8
    assert num_kernels(gated, *GATED, s=few) == 1
    assert num_kernels(twice, "1 s 256", "1 t 256", "1 1 256", s=few, t=few - 1) == 3
