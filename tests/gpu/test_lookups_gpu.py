"""Lookups on a real GPU: one launch for embeddings, faults reported by the next call."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from strop.api import optimize_module
from strop.options import Options
from strop.testing import assert_as_accurate_as_eager
from tests.lookups.test_lookups import MODES, Calls, Embeddings, launches, optimized

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_embeddings(dtype: torch.dtype, tmp_path: Path) -> None:
    model, exact = Embeddings().cuda().to(dtype), Embeddings().cuda().double()
    exact.load_state_dict(model.state_dict())
    ids, segments = (torch.randint(0, n, (4, 32), device="cuda") for n in (99, 2))
    with torch.no_grad():
        eager, reference = model(ids, segments), exact(ids, segments)
        module, dispatcher = optimized(model, str(tmp_path))
        for _ in range(3):  # the third is a replay of a graph
            assert_as_accurate_as_eager(module(ids, segments), eager, reference)
    assert launches(dispatcher) == (1, 0)


@pytest.mark.parametrize("cuda_graphs", [True, False])
def test_the_next_call_reports_a_fault(cuda_graphs: bool, tmp_path: Path) -> None:
    module: nn.Module = Calls(lambda x, i: F.embedding(i, x) * 2).eval()
    options = Options(cache_dir=str(tmp_path), strict=True, cuda_graphs=cuda_graphs)
    optimize_module(module, options)
    table, index = torch.randn(50, 64, device="cuda"), torch.arange(40, device="cuda")
    for _ in range(3):
        torch.testing.assert_close(module(table, index), table[index] * 2)
    index[7] = 50
    found = module(table, index)
    torch.cuda.synchronize()
    torch.testing.assert_close(found[7], table[0] * 2)  # nothing outside of the table was read
    index[7] = 7
    with pytest.raises(IndexError, match="of an earlier call"):
        module(table, index)
    torch.testing.assert_close(module(table, index), table[index] * 2)


@pytest.mark.parametrize("mode", MODES)
def test_resizing(mode: str, tmp_path: Path) -> None:
    x = torch.randn(2, 8, 9, 7, device="cuda").to(memory_format=torch.channels_last)
    module, dispatcher = optimized(
        Calls(lambda x: F.interpolate(x, **MODES[mode])), f"{tmp_path}/{mode}"
    )
    wanted, exact = F.interpolate(x, **MODES[mode]), F.interpolate(x.double(), **MODES[mode])
    assert_as_accurate_as_eager(module(x), wanted, exact)
    assert not launches(dispatcher)[1]
