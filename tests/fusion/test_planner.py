"""Which nodes share a kernel: the cases of the design, and what holds for every plan."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from strop.diffusion.components import adapter_for
from strop.fusion.plan import FusionPlan, Group
from strop.fusion.planner import MOST_STREAMS, plan
from strop.ir.affine import base_of
from strop.ir.graph import Graph, Node
from strop.ir.loops import Schedule
from strop.ir.ops import Kind
from strop.options import Options
from strop.passes import run as run_passes
from tests.e2e import tiny
from tests.frontend.tracing import trace, trace_specs

GOLDEN = Path(__file__).parent.parent / "golden" / "plan"

CASES: dict[str, tuple[Callable[..., Any], tuple[str, ...]]] = {
    "layer_norm": (lambda x, w: F.layer_norm(x, (32,), w, w), ("b s 32", "32")),
    "softmax": (lambda x: x.softmax(-1), ("b h s",)),
    "residual_layer_norm": (lambda x, y: (x + y, F.layer_norm(x + y, (32,))), ("b s 32",) * 2),
    "group_norm_silu": (
        lambda x, w, k: F.conv2d(F.silu(F.group_norm(F.conv2d(x, k, padding=1), 4, w, w)), k),
        ("b 16 h w", "16", "16 16 3 3"),
    ),
    "geglu": (lambda x: (lambda a, g: a * F.gelu(g))(*x.chunk(2, -1)), ("b s 64",)),
    "two_reductions": (lambda x: (x.sum(-1), x.amax(-1)), ("b s 32",)),
    "two_column_reductions": (lambda x: (x.sum(1), x.amax(1)), ("b s 32",)),
    "cat_norm": (
        lambda x, y, k: F.conv2d(F.silu(F.group_norm(torch.cat([x, y], 1), 4)), k, padding=1),
        ("b 8 h w", "b 8 h w", "16 16 3 3"),
    ),
    "time_embedding": (
        lambda t, w: F.silu(torch.cat([(t[:, None] * torch.arange(8)).sin()] * 2, -1) @ w),
        ("b", "16 16"),
    ),
}


@cache
def planned(name: str) -> tuple[Graph, FusionPlan]:
    function, shapes = CASES[name]
    graph, _ = run_passes(trace(function, *shapes, b=2, h=8, w=12, s=24).graph, Options())
    return graph, plan(graph)


def schedules(name: str) -> list[str]:
    return [g.schedule.name for g in planned(name)[1].groups]


def test_layer_norm_is_one_row_kernel():
    assert schedules("layer_norm") == ["ROW"]


def test_softmax_is_one_row_kernel():
    assert schedules("softmax") == ["ROW"]


def test_residual_and_layer_norm_are_one_kernel_with_two_stores():
    (group,) = planned("residual_layer_norm")[1].groups
    assert group.schedule is Schedule.ROW
    assert len(group.stores) == 2


def test_group_norm_is_statistics_and_a_pointwise_kernel():
    groups = planned("group_norm_silu")[1].groups
    norm = [g for g in groups if {"var", "silu"} & {n.op for n in g.nodes}]
    assert [g.schedule for g in norm] == [Schedule.COLUMN, Schedule.POINTWISE]
    assert [n.op for n in norm[1].stores] == ["silu"]


def test_geglu_is_one_kernel():
    assert schedules("geglu") == ["POINTWISE"]


@pytest.mark.parametrize("name", ["two_reductions", "two_column_reductions"])
def test_reductions_of_one_input_share_a_kernel(name: str):
    (group,) = planned(name)[1].groups
    assert sum(n.kind is Kind.REDUCTION for n in group.nodes) == 2


@pytest.mark.parametrize("dim", [-1, 1])
def test_a_loop_is_shared_by_as_many_as_leave_a_tile_its_rows(dim: int):
    def sums(*values: torch.Tensor) -> list[torch.Tensor]:
        return [value.sum(dim) for value in values]

    count = 3 * MOST_STREAMS
    graph, _ = run_passes(trace(sums, *["b s 32"] * count, b=2, s=24).graph, Options())
    groups = plan(graph).groups
    assert [sum(n.kind is Kind.REDUCTION for n in g.nodes) for g in groups] == [MOST_STREAMS] * 3


@pytest.mark.parametrize("name", CASES)
def test_golden_plan(request: pytest.FixtureRequest, name: str):
    text = str(planned(name)[1]) + "\n"
    path = GOLDEN / f"{name}.txt"
    if request.config.getoption("--update-golden"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    assert text == path.read_text(), f"{path.name} differs; --update-golden writes it"


@pytest.mark.parametrize("name", CASES)
def test_equal_graphs_have_equal_plans(name: str):
    first = str(planned(name)[1])
    planned.cache_clear()
    assert str(planned(name)[1]) == first


@cache
def unet_plan() -> tuple[Graph, FusionPlan]:
    module = tiny.unet()
    args = tiny.unet_args(2, 8, 8, 7)
    shapes = adapter_for(module).shapes([args[2], args[0], args[1]])
    traced = trace_specs(
        module, lambda e, x, t: module(x, t, e, return_dict=False), list(shapes.specs), shapes.hints
    )
    graph, _ = run_passes(traced.graph, Options())
    return graph, plan(graph)


def all_plans() -> list[tuple[Graph, FusionPlan]]:
    return [*(planned(name) for name in CASES), unet_plan()]


def needed(step: Group | Node, stored: set[Node]) -> set[Node]:
    """The computed values that a step loads."""
    stack = list(step.stores) if isinstance(step, Group) else [step]
    own, seen, loads = set(stack), set(stack), set()
    while stack:
        for base in map(base_of, stack.pop().inputs):
            if base in seen:
                continue
            seen.add(base)
            is_call = base.kind in (Kind.CONTRACTION, Kind.OPAQUE) and base.op != "input"
            if is_call or (base in stored and base not in own):
                loads.add(base)
            else:
                stack.append(base)
    return loads


def test_each_stored_value_has_one_writer_that_runs_before_its_readers():
    for graph, fusion in all_plans():
        stored = [node for group in fusion.groups for node in group.stores]
        assert len(stored) == len(set(stored))
        written: set[Node] = set()
        for step in fusion.steps:
            assert needed(step, set(stored)) <= written
            written |= set(step.stores) if isinstance(step, Group) else {step}
        for output in map(base_of, graph.outputs):
            assert output in written or output.op == "input"


def test_every_group_computes_what_it_stores_and_nothing_else():
    for _, fusion in all_plans():
        for group in fusion.groups:
            assert set(group.stores) <= set(group.nodes)
            reads = {base_of(i) for n in group.nodes for i in n.inputs}
            assert all(n in reads or n in group.stores for n in group.nodes)
            has_reduction = any(n.kind is Kind.REDUCTION for n in group.nodes)
            assert has_reduction == (group.schedule is not Schedule.POINTWISE)


def test_calls_appear_once():
    graph, fusion = unet_plan()
    calls = [s for s in fusion.steps if not isinstance(s, Group)]
    expected = [
        n for n in graph.nodes if n.kind in (Kind.CONTRACTION, Kind.OPAQUE) and n.op != "input"
    ]
    assert sorted(calls, key=id) == sorted(expected, key=id)


def test_refusals_have_reasons():
    _, fusion = unet_plan()
    assert fusion.refusals
    assert all(r.reason and r.consumer is not r.producer for r in fusion.refusals)


def twice_normed(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Two blocks, each with two norms of two thirds of a product."""
    for _ in range(2):
        q, k, v = F.linear(x, w).chunk(3, -1)
        q, k = (F.rms_norm(each, (32,)) for each in (q, k))
        x = F.scaled_dot_product_attention(q, k, v)
    return x


def test_norms_of_each_block_are_one_kernel_as_those_of_the_first() -> None:
    graph, _ = run_passes(trace(twice_normed, "b 2 s 32", "96 32", b=2, s=24).graph, Options())
    rows = [group for group in plan(graph).groups if group.schedule is Schedule.ROW]
    assert [len(group.stores) for group in rows] == [2, 2]


def kept_wide(x: torch.Tensor, y: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """A residual in half precision, which two kernels read in fp32."""
    w = w.bfloat16()
    total = F.linear(x.bfloat16(), w) + y.bfloat16()
    normed = F.layer_norm(total.float(), (32,)).bfloat16()
    return total.float() + F.linear(normed, w).float()


def test_what_is_read_wider_is_stored_as_it_is() -> None:
    graph, _ = run_passes(trace(kept_wide, "b 32", "b 32", "32 32", b=2).graph, Options())
    stored = {node for group in plan(graph).groups for node in group.stores} - {*graph.outputs}
    assert {node.dtype for node in stored} == {torch.bfloat16}
    assert any(node.op == "add" for node in stored)
