"""Rows of computed tables are computed where they are looked up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import strop
from strop.errors import OutOfRangeError
from strop.options import Options
from strop.passes import run
from tests.frontend.tracing import Function, trace


def test_it_fires_for_codes_and_scales() -> None:
    def function(codes: Tensor, scales: Tensor) -> Tensor:
        ids = torch.arange(7)
        return F.embedding(ids, codes.abs() * scales)

    traced = trace(function, "1000 8", "1000 1", b=2).graph
    ops = [n.op for n in run(traced, Options(), "cpu")[0].nodes if n.op != "input"]
    assert ops.count("take") == 2
    assert ops.index("abs") > ops.index("take")


class Coded(nn.Module):
    """Rows in int8, each with a scale and an offset."""

    def __init__(self, look_up: Callable[[Tensor, Tensor], Tensor], rows: int = 500) -> None:
        super().__init__()
        self.register_buffer("codes", torch.randint(-128, 128, (rows, 32), dtype=torch.int8))
        self.register_buffer("scales", torch.rand(rows))
        self.register_buffer("shift", torch.randn(32))
        self.look_up = look_up

    def forward(self, ids: Tensor) -> Tensor:
        table = self.codes.float() * self.scales[:, None] + self.shift
        return self.look_up(ids, table).view(-1, 5, 32) * 2


LOOKUPS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "embedding": F.embedding,
    "index": lambda ids, table: table[ids],
    "several": lambda ids, table: F.embedding(ids, table) + table[(ids + 1) % 500],
    "read as a whole": lambda ids, table: F.embedding(ids, table) + table.sum(0),
}


@pytest.mark.parametrize("name", LOOKUPS)
def test_results_are_eagers(name: str, tmp_path: Any) -> None:
    module: Any = Coded(LOOKUPS[name]).eval()
    calls = [torch.randint(0, 500, shape) for shape in ((2, 5), (1, 5), (7, 10), (40, 5))]
    with torch.no_grad():
        wanted = [module(ids) for ids in calls]
        strop.optimize(module, options=Options(cache_dir=str(tmp_path), strict=True))
        for ids, right in zip(calls, wanted, strict=True):
            torch.testing.assert_close(module(ids), right, rtol=1e-4, atol=1e-3)  # sums of 500
        with pytest.raises(OutOfRangeError):
            module(calls[0] + 500) if name != "several" else module(calls[0] - 600)
    (variant,) = module.forward.variants.all
    kernels = len(variant.program.kernel_steps)
    assert kernels == 1 or name in ("several", "read as a whole"), variant.program.kernel_steps


def test_a_table_of_fewer_rows_than_ids_is_computed_once(tmp_path: Any) -> None:
    module = Function(lambda codes, ids: F.embedding(ids, codes.float() * 2)).eval()
    strop.optimize(module, options=Options(cache_dir=str(tmp_path), strict=True))
    codes, ids = torch.randint(-9, 9, (3, 8), dtype=torch.int8), torch.randint(0, 3, (50,))
    with torch.no_grad():
        torch.testing.assert_close(module(codes, ids), F.embedding(ids, codes.float() * 2))
