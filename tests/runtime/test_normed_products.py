"""Products that normalise their columns in the place of library calls: operands as programs have
them, run by the machine for PTX."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from strop.ir.contractions import NORMED, ColumnNorm
from strop.ir.normed_linear import normed_linear
from strop.kernels.gemm import rows as products
from strop.kernels.gemm.rows import form
from strop.kernels.gemm.tile import GemmTile
from tests.gpus import H100
from tests.kernels.launching import by_form, launched, problem, refuse
from tests.runtime.test_wgmma_gemm import BOUND, HALF, Machine, error, weights

HOW = {"eps": 1e-3, "activation": "relu"}
WHOLE, PARTS = GemmTile(1, 64, 3), GemmTile(1, 64, 3, 2)


def operands(op: str, *, gap: int = 0, at: int = 0) -> list[Tensor]:
    """``gap``: elements between rows of the input; ``at``: where the norm's vectors begin."""
    torch.manual_seed(gap + at)
    x, weight = torch.randn(100, 136 + gap).to(HALF)[:, :136], weights(96, 136)
    added = [torch.randn(100, 96).to(HALF)] * (op == NORMED[1])
    vectors = [(torch.rand(104) + 0.5).to(HALF)[at : at + 96] for _ in range(4)]
    return [x, weight, *added, *vectors]


def run(op: str, inputs: Sequence[Tensor], tile: GemmTile) -> tuple[Tensor, Machine]:
    given = problem(op, *(t.shape for t in inputs), dtype=HALF, **HOW)
    out = torch.full((100, 96), math.nan, dtype=HALF)
    machine = Machine(*inputs, out)
    found = form(tile, products.picture_of(given), products.OPS[op], sms=H100.sms)
    launches = by_form(found, given)
    assert launches is not None
    launched(launches, machine, is_early=True, is_steady=True).writing(refuse)(inputs, out)
    return out, machine


@pytest.mark.parametrize("op", NORMED)
@pytest.mark.parametrize("tile", [WHOLE, PARTS], ids=["whole", "parts"])
@pytest.mark.parametrize(("gap", "at"), [(0, 0), (24, 1), (0, 3)])
def test_operands_as_they_lie(op: str, tile: GemmTile, gap: int, at: int) -> None:
    """Vectors may begin anywhere, as slices of a larger one."""
    inputs = operands(op, gap=gap, at=at)
    out, machine = run(op, inputs, tile)
    wanted = normed_linear([t.double() for t in inputs], ColumnNorm.of(op, HOW))
    assert error(out, wanted) < BOUND
    assert len(machine.launched) == 1
    assert machine.launched[0][2]  # it begins early


@pytest.mark.parametrize("place", [0, 1, 2, 3, 4, 5])
def test_the_next_run_sees_what_was_written(place: int) -> None:
    inputs = operands(NORMED[0])
    before, _ = run(NORMED[0], inputs, WHOLE)
    inputs[place].mul_(1.5)
    after, _ = run(NORMED[0], inputs, WHOLE)
    wanted = normed_linear([t.double() for t in inputs], ColumnNorm.of(NORMED[0], HOW))
    assert error(after, wanted) < BOUND
    assert error(before, wanted) > 10 * BOUND


def test_what_is_no_number_stays_so() -> None:
    """A ReLU keeps NaN, as torch's does."""
    inputs = operands(NORMED[1])
    inputs[2][7, 9] = math.nan
    out, _ = run(NORMED[1], inputs, WHOLE)
    assert torch.isnan(out).nonzero().tolist() == [[7, 9]]
