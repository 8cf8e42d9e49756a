"""Calls that torch runs, where what comes is not what its shape rule has told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from strop.dispatch.dynamo import compile_dynamo
from strop.errors import ShapeError
from strop.options import Options
from strop.runtime.run.library_calls import ALLOCATING


def made(target: str, shape: tuple[int, ...], dtype: torch.dtype, *inputs: Any) -> Any:
    from strop.ir.graph import Ref

    args = tuple(Ref(i) for i in range(len(inputs)))
    attrs = {"target": target, "args": args, "kwargs": (), "outputs": ((shape, dtype),)}
    return ALLOCATING["aten"](attrs)(inputs)


def test_a_result_of_another_type_is_converted() -> None:
    found = made("aten.erf.default", (3,), torch.float32, torch.ones(3).bfloat16())
    assert found.dtype == torch.float32
    assert torch.equal(found, torch.erf(torch.ones(3).bfloat16()).float())


def test_a_result_of_another_size_is_an_error() -> None:
    with pytest.raises(ShapeError, match=r"aten.erf.default gives \(3,\)"):
        made("aten.erf.default", (4,), torch.float32, torch.ones(3))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_running_statistics_keep_their_type(dtype: torch.dtype, tmp_path: Path) -> None:
    """Torch's shape rule says fp32: half as much memory was read as if it were."""
    ours, eager = (nn.BatchNorm1d(3).to(dtype) for _ in range(2))
    options = Options(cache_dir=str(tmp_path))
    compiled = torch.compile(ours, backend=lambda gm, x: compile_dynamo(gm, x, options=options))
    x = torch.randn(7, 3, generator=torch.Generator().manual_seed(0)).to(dtype)
    torch.testing.assert_close(compiled(x), eager(x))
    for name, wanted in eager.state_dict().items():
        found = ours.state_dict()[name]
        assert found.dtype == wanted.dtype
        torch.testing.assert_close(found, wanted)
