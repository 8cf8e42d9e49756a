"""Attention to few keys by programs that keep them: what the assembler makes of it, and its results
by the machine for PTX."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from strop.ir.source import KernelSource
from strop.kernels.attention.cross import CrossLayout, CrossTile, cross_attention
from strop.kernels.ptx import KINDS
from strop.runtime.build.loader import kernel_loader
from tests.gpus import H100
from tests.kernels.launching import attends, by_tile, launched, refuse
from tests.kernels.ptx_machine import launch
from tests.kernels.test_ptx_kernels import heads, survivors
from tests.kernels.test_tma_attention import judge
from tests.kernels.test_wgmma_attention import judge_assembled, needs_a_gpu

pytest.importorskip("triton")

F16, BF16 = torch.float16, torch.bfloat16
TILES = [
    (head, tile)
    for head in (40, 64, 80, 160)
    for tile in (
        CrossTile(1, 80, 2, 2),
        CrossTile(1, 80, 2, 4),
        CrossTile(2, 80, 2, 2),
        CrossTile(2, 80, 3, 2),
        CrossTile(4, 80, 2),
    )
    if tile.programs * (CrossLayout(head, tile).shared + 1024) <= 227 * 1024
    and (head < 160 or tile.groups * tile.programs < 4)
]


@pytest.mark.parametrize("dtype", KINDS, ids=str)
@pytest.mark.parametrize(("head", "tile"), TILES, ids=str)
def test_assembles(head: int, tile: CrossTile, dtype: torch.dtype, tmp_path: Path) -> None:
    judge_assembled(cross_attention(head, head**-0.5, tile, dtype), tile.programs, tmp_path)


def attended(
    source: KernelSource, tile: CrossTile, given: Sequence[Tensor], share: int, seed: int = 0
) -> Tensor:
    """``share``: tiles of queries of a program."""
    q, k, v = given
    (batch, many, queries, head), keys = q.shape, k.shape[2]
    out = q.new_full((batch, queries, many, head), math.nan).transpose(1, 2)
    programs = -(-queries // (64 * tile.groups * share))
    sizes = (queries, keys, many, batch * many, programs, share)
    launch(source, (q, k, v, out), sizes, seed=seed)
    return out


@pytest.mark.parametrize(
    ("head", "tile", "shape", "share", "dtype"),
    [
        (40, CrossTile(2, 80, 2), (1, 2, 700, 77), 3, F16),
        (64, CrossTile(1, 80, 2), (2, 2, 200, 80), 4, F16),
        (80, CrossTile(2, 80, 3), (1, 3, 129, 65), 1, BF16),
        (160, CrossTile(1, 80, 2), (1, 2, 70, 77), 9, F16),
        (40, CrossTile(3, 64, 2), (1, 1, 400, 50), 2, BF16),
    ],
    ids=str,
)
def test_results(
    head: int, tile: CrossTile, shape: tuple[int, ...], share: int, dtype: torch.dtype
) -> None:
    """Shares leave the queries, stages are used again, keys end within the step."""
    source, given = cross_attention(head, head**-0.5, tile, dtype), heads(shape, head, dtype)
    for seed in range(3):
        judge(attended(source, tile, given, share, seed), *given)


def test_all_that_orders_it_is_needed() -> None:
    head, tile = 80, CrossTile(2, 80, 2)
    given = heads((1, 1, 600, 77), head, F16)

    def call(source: KernelSource, seed: int) -> None:
        judge(attended(source, tile, given, 5, seed), *given)

    # Whether a lane waits for the others of its warp the machine does not judge.
    assert survivors(cross_attention(head, head**-0.5, tile, F16), call) == [
        "bar.warp.sync -1; without"
    ]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_softmax_makes_nan_is_nan(bad: float) -> None:
    q, k, v = (t.clone() for t in heads((2, 1, 64, 77), 40, F16))
    q[:, :, 5, 0], k[0, :, 30, 0] = bad, bad  # of one picture all rows may be NaN
    tile = CrossTile(1, 80, 2)
    found = attended(cross_attention(40, 40**-0.5, tile, F16), tile, (q, k, v), 1)
    exact = (q.double() @ k.double().mT * 40**-0.5).softmax(-1) @ v.double()
    assert torch.equal(found.isnan(), exact.isnan())
    assert exact.isnan().any()
    assert not exact.isnan().all()


def test_shares() -> None:
    """No more programs than run at a time, unless there are more heads."""
    tile = CrossTile(2, 80, 2, 2)
    for many, queries in ((16, 4096), (40, 1024), (16, 256), (16, 16384), (640, 1024), (1, 100)):
        programs, each = tile.shares(many, queries, H100.sms)
        assert programs * each * 128 >= queries > (programs - 1) * each * 128
        assert many * programs <= max(264, many)


def test_parts_of_shared_memory_do_not_meet() -> None:
    for head, tile in TILES:
        layout = CrossLayout(head, tile)
        assert layout.keys_at == tile.stages * layout.stage
        assert layout.values_at - layout.keys_at == layout.block
        assert layout.results_at - layout.values_at == layout.block
        assert layout.keys_full - layout.results_at == layout.stage
        assert layout.stage % 1024 == layout.block % 1024 == 0  # where lines are mixed
        assert re.search(
            rf"mul.lo.u32 %start, %start, {layout.queries};",
            cross_attention(head, 1.0, tile, F16).text,
        )


@pytest.mark.gpu
@needs_a_gpu
@pytest.mark.parametrize("dtype", KINDS, ids=str)
@pytest.mark.parametrize(("head", "tile"), TILES, ids=str)
def test_as_accurate_as_torch(head: int, tile: CrossTile, dtype: torch.dtype) -> None:
    kernels = kernel_loader("cuda", 0, "", 0)
    stream = torch.cuda.current_stream().cuda_stream
    for shape in ((2, 8, 4096, 77), (2, 20, 1024, 77), (1, 3, 1000, 80), (3, 1, 5, 65)):
        given = heads(shape, head, dtype, "cuda")
        call = launched(by_tile(tile, attends(*given)), kernels, stream).allocating(refuse)
        judge(call(given), *given)
