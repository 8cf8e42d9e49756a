"""Linear recurrences on a real GPU: one graph for all lengths, and replays of CUDA graphs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import strop
from strop.frontend.inlined import scans
from strop.ir.linear_scan import STATES, linear_scan
from strop.options import Options
from strop.testing import assert_as_accurate_as_eager
from tests.frontend.test_linear_scans import product, program_of
from tests.frontend.tracing import Function
from tests.kernels.test_scan import tree

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
SIZES = ((2, 5, 9, 16), (1, 5, 128, 16), (3, 5, 33, 16), (2, 5, 2, 16))


@pytest.mark.parametrize("mode", ["pointwise", "generic"])
@pytest.mark.parametrize("dtype", STATES, ids=str)
def test_one_graph_for_all_lengths(dtype: torch.dtype, mode: str, tmp_path: Path) -> None:
    def states(a: Any, b: Any) -> Any:
        found = scans.associative_scan(product, (a, b), 2, combine_mode=mode)[1]
        return found.transpose(1, 2) * 2

    module: Any = Function(states).eval()
    strop.optimize(module, options=Options(cache_dir=str(tmp_path), strict=True))
    for shape in SIZES:
        torch.manual_seed(shape[2])
        a = torch.rand(shape, device="cuda").to(dtype)
        b = torch.randn(shape, device="cuda").to(dtype)
        exact = (linear_scan(a.double(), b.double()) * 2).transpose(1, 2)
        eager = tree(a, b).transpose(1, 2) * 2
        with torch.no_grad():
            for _ in range(3):  # the third is a replay of a graph
                assert_as_accurate_as_eager(module(a, b), eager, exact)
    assert program_of(module) == ["linear_scan"]
    assert module.forward.counters.eager_calls == 0
    assert module.forward.counters.replays > 0
