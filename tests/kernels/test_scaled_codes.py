"""Products of e4m3 codes in PTX, by the machine for PTX."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch

from strop.ir.source import KernelSource
from strop.kernels.gemm.tile import GemmTile, Product
from strop.kernels.gemm.wgmma_gemm import wgmma_gemm
from tests.kernels.ptx_machine import launch
from tests.kernels.test_ptx_kernels import survivors
from tests.kernels.test_wgmma_gemm import BF16, BOUND, F16

APART = GemmTile(2, 80, 3, 1, keeps_on=True, apart=True)


@dataclass(frozen=True)
class Case:
    tile: GemmTile
    rows: int
    depth: int
    columns: int
    dtype: torch.dtype = F16
    has_biases: bool = True


CASES = (
    Case(APART, 300, 320, 160),
    Case(APART, 300, 1040, 160, BF16, has_biases=False),  # more steps than stages, the last short
    Case(APART, 100, 128, 80),  # a single tile
    Case(GemmTile(2, 128, 4, 1, True, True), 200, 272, 200, BF16),  # columns that two tiles have
    Case(GemmTile(2, 80, 3, 1, True), 300, 208, 160),
    Case(GemmTile(1, 160, 4), 100, 640, 320, BF16),
    Case(GemmTile(2, 160, 5), 300, 144, 328, has_biases=False),
)


def prepared(case: Case) -> tuple[KernelSource, Callable[[KernelSource, int], None]]:
    """The kernel, and what runs it or another and asserts that results are right."""
    product = Product(case.tile, 1, has_biases=case.has_biases, codes=True)
    torch.manual_seed(case.rows + case.depth)
    x, w = (
        (8 * torch.randn(n, case.depth)).to(torch.float8_e4m3fn) for n in (case.rows, case.columns)
    )
    by_row, by_column = torch.rand(case.rows) + 0.5, (torch.rand(case.columns) + 0.5) / case.depth
    bias = torch.randn(case.columns).to(case.dtype)
    wanted = (x.double() @ w.double().t()) * by_row.double()[:, None] * by_column.double()
    wanted += bias.double() if case.has_biases else 0.0
    right, across = -(-case.rows // product.rows), -(-case.columns // product.width)
    total = across * right
    at_work = min(total, 2) if case.tile.keeps_on else total
    box = (1, 1, product.rows)
    result = (1, 1, case.rows, case.columns)
    views = [
        (x[None, None].shape, x[None, None].stride(), (*box, product.line)),
        (w.shape, w.stride()),
        (result, torch.empty(result).stride(), (*box, product.unit)),
    ]
    codes = [each.view(torch.uint8) for each in (x, w)]

    def call(source: KernelSource, seed: int) -> None:
        out = torch.full((case.rows, case.columns), torch.nan, dtype=case.dtype)
        launch(
            source,
            [*codes, out, by_row, by_column, bias],
            [across, right, 1, 1, case.depth, at_work, seed % 2, min(right, 2)],
            seed=seed,
            views=views,
            allow_rewrites=True,
        )
        error = float((out.double() - wanted).norm() / wanted.norm())
        assert error < BOUND[case.dtype]

    return wgmma_gemm(product, case.dtype), call


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_results(case: Case, seed: int) -> None:
    source, call = prepared(case)
    call(source, seed)


@pytest.mark.parametrize("case", [Case(APART, 300, 640, 160)], ids=str)
def test_all_that_orders_it_is_needed(case: Case) -> None:
    found = survivors(*prepared(case))
    assert not [what for what in found if "setmaxnreg" not in what]  # which the assembler judges
