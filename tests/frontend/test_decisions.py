"""What is decided by a value of half precision is decided by its rounded value, as in eager.

Kernels keep values in fp32 until they are stored. One that computes a value and one that reads it
would decide differently else: what a mask takes out here and adds there would be lost, or be there
twice.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import strop
from strop.options import Options
from tests.frontend.tracing import Function

HALVES = {torch.float16: torch.bfloat16, torch.bfloat16: torch.float16}
DECISIONS = {
    "in its type": lambda y: y >= 1.5,
    "in the other half": lambda y: y.to(HALVES[y.dtype]) >= 1.5,
    "in fp32": lambda y: y.float() >= 1.5,
    "in fp64": lambda y: y.double() >= 1.5,
    "of another sign": lambda y: (-y).float() <= -1.5,
    "of two": lambda y: y.float() >= (y * 0 + 1.5),
}


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("name", DECISIONS)
def test_decisions_are_eagers(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    eager = Function(lambda x, y: DECISIONS[name](x * y))
    module = strop.optimize(
        Function(eager.function).eval(), options=Options(cache_dir=str(tmp_path), strict=True)
    )
    torch.manual_seed(0)
    x, y = (1 + torch.rand(2, 20_000) / 2).to(dtype)
    found, wanted = module(x, y), eager(x, y)
    assert torch.equal(found, wanted)
    assert 0 < wanted.sum() < len(x)
