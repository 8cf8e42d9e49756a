"""Places that are affine over axes and always inside their dim are no lookups."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import strop
from strop.fusion.planner import plan
from strop.ir.loops import Load, LoopKernel, has_places
from strop.lowering.lower import lower
from strop.options import Options
from strop.passes import run
from tests.frontend.tracing import Function, trace

Of = Callable[[Tensor], Tensor]


def all_positions(x: Tensor) -> Tensor:
    """As transformers index a mask of attention."""
    return x[torch.arange(x.shape[0])[:, None], torch.arange(x.shape[1])[None]] * 2


INSIDE: dict[str, Of] = {
    "all_positions": all_positions,
    "moved": lambda x: x[:, torch.arange(x.shape[1] - 3) + 3] * 2,
    "every_second": lambda x: x[torch.arange(0, 4, 2)] * 2,
    "known": lambda x: x[torch.arange(4)] * 2,
}
# outside at some size, or by a place that is not affine
CHECKED: dict[str, Of] = {
    "one_too_far": lambda x: x[:, torch.arange(x.shape[1]) + 1] * 2,
    "of_another_dim": lambda x: x[:, torch.arange(x.shape[0])] * 2,
    "from_the_end": lambda x: x[:, torch.arange(x.shape[1]) - 1] * 2,
    "squared": lambda x: x[torch.arange(4) * torch.arange(4) % 5] * 2,
}


def kernels(function: Of) -> list[LoopKernel]:
    graph, _ = run(trace(function, "r c", r=6, c=9).graph, Options())
    fusion = plan(graph)
    stored = {node for group in fusion.groups for node in group.stores}
    return [lower(group, stored, graph.hints).kernel for group in fusion.groups]


@pytest.mark.parametrize("name", CHECKED)
def test_what_may_be_outside_is_checked(name: str) -> None:
    assert any(has_places(kernel) for kernel in kernels(CHECKED[name]))


@pytest.mark.parametrize("name", ["all_positions", "moved"])
def test_what_is_inside_is_read_at_an_offset(name: str) -> None:
    found = kernels(INSIDE[name])
    assert not any(has_places(kernel) for kernel in found)
    loads = [stmt for kernel in found for stmt in kernel.body if isinstance(stmt, Load)]
    assert len(loads) == 1
    assert not loads[0].lookups


@pytest.mark.parametrize("name", INSIDE)
def test_values(name: str) -> None:
    module = Function(INSIDE[name]).eval()
    strop.optimize(module, options=Options(strict=True))
    for rows, cols in ((6, 9), (4, 5), (7, 12)):
        x = torch.randn(rows, cols)
        assert torch.equal(module(x), INSIDE[name](x))


def test_a_place_outside_is_an_error() -> None:
    module = Function(CHECKED["of_another_dim"]).eval()
    strop.optimize(module)
    assert torch.equal(module(torch.ones(3, 5)), torch.full((3, 3), 2.0))
    with pytest.raises((IndexError, RuntimeError)):
        module(torch.ones(6, 5))
