"""Reductions over nothing, and of nothing: what torch says, at run time."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import strop
from strop.fusion.planner import plan
from strop.options import Options
from strop.passes import run as run_passes
from tests.frontend.tracing import Function, trace
from tests.fusion.test_reference_cases import interpreted
from tests.lowering.run_plan import run_plan

pytestmark = pytest.mark.filterwarnings("ignore:.*degrees of freedom")

FUNCTIONS: dict[str, Callable[..., Tensor]] = {
    "sum": torch.sum,
    "mean": torch.mean,
    "var": torch.var,
    "any": lambda x, *dim: torch.any(x > 0, *dim),
    "all": lambda x, *dim: torch.all(x > 0, *dim),
    "prod": torch.prod,
}
SHAPES = ((2, 3, 4), (0, 3, 4), (2, 0, 4), (2, 3, 0), (1, 1, 1))


def every_dim(function: Callable[..., Tensor]) -> Callable[[Tensor], list[Tensor]]:
    def call(x: Tensor) -> list[Tensor]:
        return [function(x, 0), function(x, 1), function(x, 2), function(x), x.softmax(1)]

    return call


@pytest.mark.parametrize("name", FUNCTIONS)
def test_triton(name: str):
    function = every_dim(FUNCTIONS[name])
    graph, _ = run_passes(trace(function, "b r c", b=2, r=3, c=4).graph, Options())
    fusion = plan(graph)
    for shape in SHAPES:
        x, env = torch.randn(shape), dict(zip("brc", shape, strict=True))
        found = run_plan(graph, fusion, [x], env, interpreted, exact=False)
        for ours, theirs in zip(found, function(x), strict=True):
            torch.testing.assert_close(ours, theirs, equal_nan=True)


@pytest.mark.parametrize("name", ["sum", "var", "any"])
def test_cpp(name: str):
    module = Function(every_dim(FUNCTIONS[name])).eval()
    with torch.no_grad():
        strop.optimize(module, options=Options(strict=True))
        for shape in (s for s in SHAPES if s[-1]):  # the last size is no symbol there
            x = torch.randn(shape)
            for ours, theirs in zip(module(x), module.function(x), strict=True):
                torch.testing.assert_close(ours, theirs, equal_nan=True)
