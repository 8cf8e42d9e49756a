"""How much memory the plans of models move beside the least, and that no two kernels could be one.

Models have their real widths and two blocks; their plans are those for a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor
from torch.nn import functional as F

from strop.debug.traffic import Traffic, traffic
from strop.fusion.neighbours import neighbours
from strop.fusion.plan import FusionPlan
from strop.fusion.planner import plan
from strop.ir.graph import Graph
from strop.ir.loops import Schedule
from strop.options import Options
from strop.passes import run as run_passes
from strop.runtime.run.shape_plan import plan_shape
from tests.frontend.tracing import trace
from tests.fusion.full_width import planned
from tests.gpus import H100
from tests.runtime.test_choices import Kernels

MOST = 1.25  # times the least

# kernels, and of them those that reduce rows: norms with what is before and behind them. A product
# of the timestep has at most 320 MiB of weights: Flux has three, Qwen-Image two, with a bias each
KERNELS = {
    "flux": (37, 17),
    "wan": (21, 11),
    "sd3": (18, 8),
    "sd35": (23, 13),
    "qwen": (22, 13),
    "z-image": (39, 16),
    "vit": (9, 5),
    "t5": (9, 5),
}
EXCEPTIONS: dict[str, tuple[str, ...]] = {}  # by model: pairs of kernels, and why they are two


@pytest.mark.parametrize("name", KERNELS)
def test_models_move_little_more_than_they_must(name: str) -> None:
    compiled = planned(name)
    found = traffic(compiled.graph, compiled.plan, compiled.graph.hints)
    assert found.kernels >= found.least_of_kernels > 0
    assert found.ratio <= MOST


@pytest.mark.parametrize("name", KERNELS)
def test_no_two_kernels_could_be_one(name: str) -> None:
    found = tuple(map(str, neighbours(planned(name).plan)))
    assert found == EXCEPTIONS.get(name, ())


@pytest.mark.parametrize("name", KERNELS)
def test_norms_are_one_kernel_with_scale_shift_gate_and_sum(name: str) -> None:
    groups = planned(name).plan.groups
    rows = [group for group in groups if group.schedule is Schedule.ROW]
    assert (len(groups), len(rows)) == KERNELS[name]


SIZES = {"b": 2, "d0_2": 128, "d0_3": 128, "d2_1": 333}  # guided, 1024 x 1024 pixels
LARGEST = 2 * 64 * 64 * 3 * 1536 * 2  # bytes of q, k and v of the picture


def test_two_attentions_of_a_block_have_memory_one_after_the_other() -> None:
    """A kernel for the norms of both had q, k and v of both at the same time, 0.34 GB."""
    kernels: Any = Kernels(H100)
    found = plan_shape(planned("sd35").program, SIZES, kernels, None, None, shares=True)
    assert LARGEST < found.memory.arena_bytes < 3.2 * LARGEST


def graph_of(function: Callable[..., Any], *shapes: str) -> Graph:
    return run_passes(trace(function, *shapes, b=4).graph, Options())[0]


def normed_between(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    y = F.linear(x, weight)
    return F.linear(F.layer_norm(y, (8,)), weight), y[:, :4].exp()


def halves_of_a_sum(x: Tensor, y: Tensor) -> Tensor:
    z = x + y
    return (z[:, :4] * 2).softmax(-1)


BYTES = 4
COUNTED: dict[str, tuple[Callable[..., Any], tuple[str, ...], Traffic]] = {
    # two products; a norm, which reads and writes 32 elements, and 16 of 32 that are read again
    "normed_between": (
        normed_between,
        ("b 8", "8 8"),
        Traffic(2 * (32 + 64 + 32) * BYTES, (64 + 32) * BYTES, (32 + 32 + 16) * BYTES),
    ),
    "halves_of_a_sum": (
        halves_of_a_sum,
        ("b 8", "b 8"),
        Traffic(0, (2 * 16 + 16) * BYTES, (2 * 16 + 16) * BYTES),
    ),
}


@pytest.mark.parametrize("name", COUNTED)
def test_bytes_are_those_that_were_counted_by_hand(name: str) -> None:
    function, shapes, wanted = COUNTED[name]
    graph = graph_of(function, *shapes)
    assert traffic(graph, plan(graph), graph.hints) == wanted


def test_neighbours_are_found_with_the_reason() -> None:
    graph = graph_of(lambda x: F.layer_norm(x.exp(), (8,)) * 2, "b 8")
    assert not [*neighbours(plan(graph))]
    apart = frozenset(node for node in graph.nodes if node.op == "exp")
    found = plan(graph, apart)
    (pair,) = neighbours(found)
    assert pair.reasons == ("indices do not divide",)
    (overlooked,) = neighbours(FusionPlan(found.steps, ()))
    assert "overlooked" in str(overlooked)
