"""Numbers that code computes from sizes: operands of arithmetic are computed anew at each size."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import strop
from strop.backend import compile_graph
from strop.codegen.assemble import Signature
from strop.options import Options
from strop.testing import assert_as_accurate_as_eager
from tests.e2e import tiny
from tests.frontend.tracing import trace

Function = Callable[[Tensor], Tensor]
FUNCTIONS: dict[str, Function] = {
    "a ratio": lambda x: x / (x.shape[0] / 3),
    "of two sizes": lambda x: x + x.shape[0] / x.shape[1],
    "its inverse": lambda x: x * (1 / x.shape[1]),
    "a root": lambda x: x * x.shape[1] ** 0.5 - 1.5 * x.shape[0] ** 0.5,
    "from the other side": lambda x: (x.shape[0] / 7) - x,
    "positions up to a size": lambda x: x * torch.linspace(0.5, x.shape[1] - 1, x.shape[1]),
    "positions": lambda x: x + torch.arange(x.shape[1]) / (x.shape[1] / 5) / 1.25,
}


class Of(nn.Module):
    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64], ids=str)
def test_one_graph(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    module: Any = Of(FUNCTIONS[name]).eval()
    strop.optimize(module, options=tiny.options(cache_dir=str(tmp_path), strict=True))
    torch.manual_seed(0)
    for sizes in ((5, 7), (4, 6), (6, 31), (11, 3)):
        x = torch.randn(sizes).to(dtype)
        with torch.no_grad():
            assert_as_accurate_as_eager(module(x), FUNCTIONS[name](x), FUNCTIONS[name](x.double()))
    assert len(module.forward.variants.all) == 1


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_gpu_can_have_them(name: str) -> None:
    pytest.importorskip("triton")
    from tests.codegen.test_triton_compile import compiled

    traced = trace(Of(FUNCTIONS[name]), "a b", dtype=torch.float16, a=5, b=7)
    program = compile_graph(traced.graph, Signature(traced.returned, ()), "cuda", Options()).program
    assert program.sources
    for source in program.sources:
        assert compiled(source, 90).early


def test_other_uses_fix_the_size(tmp_path: Path) -> None:
    """A slope is part of the kernel."""
    module: Any = Of(lambda x: nn.functional.leaky_relu(x, 1 / x.shape[0])).eval()
    strop.optimize(module, options=tiny.options(cache_dir=str(tmp_path), strict=True))
    for rows in (5, 4):
        x = torch.randn(rows, 7)
        with torch.no_grad():
            assert torch.equal(module(x), module.forward.eager(x))
    assert len(module.forward.variants.all) == 2
