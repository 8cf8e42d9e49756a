"""Products whose columns are normalised where they end, by the machine for PTX."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.fitting import linear_normed as sweep
from strop.ir.contractions import RELU, SILU, ColumnNorm
from strop.ir.source import KernelSource
from strop.kernels.gemm.tile import NORMED, GemmTile, Product
from strop.kernels.gemm.wgmma_gemm import wgmma_gemm
from strop.kernels.library import select
from strop.kernels.tuned import tuned
from strop.runtime.build.loader import kernel_loader
from tests.gpus import H100
from tests.kernels.ptx_machine import launch
from tests.kernels.ptx_text import PtxError
from tests.kernels.test_ptx_kernels import survivors
from tests.kernels.test_wgmma_gemm import BF16, BOUND, F16, assert_assembled

Run = Callable[[KernelSource, int], None]
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "": lambda x: x,
    RELU: torch.relu,
    SILU: F.silu,
}


@dataclass(frozen=True)
class Case:
    tile: GemmTile
    rows: int
    depth: int
    columns: int
    dtype: torch.dtype = F16
    activation: str = RELU
    adds: bool = False


CASES = (
    Case(GemmTile(1, 64, 3), 100, 128, 64),
    Case(GemmTile(1, 64, 3), 100, 128, 96, adds=True),  # columns that two tiles have
    Case(GemmTile(1, 160, 3), 70, 136, 168, BF16, SILU, True),  # more columns than threads
    Case(GemmTile(2, 80, 3, 1, True), 300, 128, 160, adds=True),
    Case(GemmTile(2, 64, 3, 1, True), 200, 64, 128, BF16, ""),
    Case(GemmTile(3, 160, 3), 250, 64, 160, activation="", adds=True),
    Case(GemmTile(2, 80, 3, 1, True, True), 300, 320, 160, adds=True),
    Case(GemmTile(2, 80, 3, 1, True, True), 200, 128, 88, BF16, SILU),
    Case(GemmTile(1, 80, 3, 2), 100, 328, 160, adds=True),
    Case(GemmTile(1, 32, 8, 3), 49, 640, 32, BF16, SILU),
    Case(GemmTile(2, 80, 3, 4), 130, 320, 88, BF16, "", True),
)


def prepared(case: Case) -> tuple[KernelSource, Run]:
    """The kernel, and what runs it or another and asserts that results are right."""
    norm = ColumnNorm(1e-3, case.activation, case.adds)
    product = Product(case.tile, 1, NORMED, norm=norm)
    torch.manual_seed(case.rows + case.depth)
    x = torch.randn(case.rows, case.depth).to(case.dtype)
    w = (torch.randn(case.columns, case.depth) * case.depth**-0.5).to(case.dtype)
    vectors = [torch.randn(case.columns).to(case.dtype) for _ in range(4)]
    vectors[1].abs_()
    addend = torch.randn(case.rows, case.columns).to(case.dtype)
    mean, variance, factor, shift = (v.double() for v in vectors)
    wanted = (x.double() @ w.double().t() - mean) / (variance + 1e-3).sqrt() * factor + shift
    wanted = ACTIVATIONS[case.activation](wanted + addend.double() if case.adds else wanted)
    right, across = -(-case.rows // product.rows), -(-case.columns // product.width)
    total = across * right
    at_work = min(total, 2) if case.tile.keeps_on else total
    box = (1, 1, product.rows)
    views = [(x[None, None].shape, x[None, None].stride(), (*box, product.line))]
    views += [(w.shape, w.stride())]
    if product.leaves_by_boxes:
        result = (1, 1, case.rows, case.columns)
        views.append((result, torch.empty(result).stride(), (*box, product.unit)))
    beside = [*vectors, *([addend] if case.adds else [])]

    def call(source: KernelSource, seed: int) -> None:
        out = torch.full(wanted.shape, math.nan).to(case.dtype)
        scalars = [across, right, 1, 1, case.depth, at_work, seed % 2, min(right, 2)]
        launch(source, [x, w, out, *beside], scalars, seed=seed, views=views, allow_rewrites=True)
        assert float((out.double() - wanted).norm() / wanted.norm()) < BOUND[case.dtype]

    return wgmma_gemm(product, case.dtype), call


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_columns_are_normalised(case: Case, seed: int) -> None:
    source, call = prepared(case)
    call(source, seed)


@pytest.mark.parametrize(
    "case",
    [
        Case(GemmTile(2, 80, 2, 1, True), 300, 128, 160, adds=True),
        Case(GemmTile(2, 80, 2, 1, True, True), 400, 128, 160),
        Case(GemmTile(2, 80, 2, 2), 128, 1000, 88, adds=True),
    ],
    ids=str,
)
def test_all_that_orders_it_is_needed(case: Case) -> None:
    found = survivors(*prepared(case))
    assert not [what for what in found if "setmaxnreg" not in what]


@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
def test_all_tiles_assemble(dtype: torch.dtype, adds: bool, tmp_path: Path) -> None:
    known = tuned(H100).gemm.tiles[NORMED]
    tiles = dict.fromkeys((*known, *(GemmTile(*each) for each in sweep.MORE)))
    assert len(tiles) > len(known) > 5
    norm = ColumnNorm(1e-5, SILU, adds)
    assert_assembled([Product(tile, 1, NORMED, norm=norm) for tile in tiles], dtype, tmp_path)


def test_a_row_behind_the_last_one_reads_nothing_behind_what_is_added() -> None:
    """The machine refuses reads behind the end of a tensor, which rows of a tile would need."""
    case = Case(GemmTile(1, 64, 3), 65, 64, 64, adds=True)
    source, call = prepared(case)
    bounded = source.text.replace("    min.u32 %n0, %n0, %n2;\n", "    add.u32 %n0, %n0, 0;\n")
    assert bounded != source.text
    with pytest.raises(PtxError):
        call(replace(source, text=bounded), 0)
    call(source, 0)


def test_each_shape_of_the_sweep_has_a_tile() -> None:
    for shape in sweep.SHAPES:
        asked = sweep.problem_of(shape)
        assert select(asked.call, asked, H100).kernel == "wgmma_gemm"
        assert len(sweep.forms_of(shape)) >= 3


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="multiplies by WGMMA",
)
@pytest.mark.parametrize("shape", [(196, 1024, 256, True), (49, 512, 2048, False)], ids=str)
def test_all_tiles_on_a_gpu(shape: tuple[int, ...]) -> None:
    library = kernel_loader("cuda", 0, "", 0)
    library.build(list(dict.fromkeys(sweep.sources(shape))))
    errors = sweep.measure(shape, library)["errors"]
    assert len(errors) == len(sweep.forms_of(shape)) + 1
    del errors["cublas"]  # which rounds more often
    assert max(errors.values()) < BOUND[F16], errors
