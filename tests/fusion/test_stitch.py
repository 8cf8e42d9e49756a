"""Two kernels that are one where a row fits on chip: the same values, and only where legal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from strop.backend import compile_graph
from strop.codegen.assemble import Signature
from strop.codegen.triton import stitched
from strop.codegen.triton_interpreter import interpret
from strop.fusion.plan import FusionPlan, Stitch
from strop.fusion.planner import plan
from strop.fusion.stitch import stitches
from strop.ir.dims import Env
from strop.ir.graph import Graph, Ref
from strop.ir.loops import LoopKernel, Schedule
from strop.options import Options
from strop.passes import run as run_passes
from tests.frontend.tracing import trace
from tests.lowering.run_plan import run_plan

HINTS = {"b": 2, "h": 4, "w": 6}
ENVS = ({"b": 2, "h": 3, "w": 5}, {"b": 1, "h": 8, "w": 1})


def norm(x: Tensor, w: Tensor) -> Tensor:
    return F.silu(F.group_norm(x.permute(0, 3, 1, 2), 4, w, w))


def norm_of_sum(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    y = x + w
    return norm(y, w), y


def norm_beside_a_call(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """The sum is needed by a call that runs before the norm is asked for."""
    y = x + w
    z = torch.matmul(y, w)
    return z, norm(y, w) + z[:, None]


CASES: dict[str, tuple[Callable[..., Any], int]] = {
    "norm": (norm, 1),
    "norm_of_sum": (norm_of_sum, 1),
    "norm_beside_a_call": (norm_beside_a_call, 0),
    "statistics_are_a_result": (lambda x, w: (norm(x, w), x.mean((1, 2))), 1),
    "statistics_of_others": (lambda x, w: x - x.mean((1, 2))[:, None, None].flip(3), 1),
    "statistics_looked_up": (lambda x, w: x - x.mean((1, 2))[:, w.long()][:, None, None], 0),
    "nothing_normalised": (lambda x, w: x.mean((1, 2)) * w, 0),
}


def planned(name: str) -> tuple[Graph, FusionPlan, list[Stitch]]:
    graph, _ = run_passes(trace(CASES[name][0], "b h w 16", "16", **HINTS).graph, Options())
    fusion = plan(graph)
    return graph, fusion, list(stitches(graph, fusion))


def arguments(env: Env, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [
        torch.randn(s, generator=generator, dtype=torch.float64).to(dtype)
        for s in ((env["b"], env["h"], env["w"], 16), (16,))
    ]


def with_wholes(fusion: FusionPlan, found: Sequence[Stitch]) -> FusionPlan:
    steps: list[Any] = list(fusion.steps)
    for stitch in found:
        steps[steps.index(stitch.host)] = stitch.whole
        steps.remove(stitch.reader if stitch.host is stitch.statistics else stitch.statistics)
    return FusionPlan(tuple(steps), fusion.refusals)


@pytest.mark.parametrize("name", CASES)
def test_stitches_of_a_plan(name: str):
    _, _, found = planned(name)
    assert len(found) == CASES[name][1]
    assert all(s.whole.schedule is Schedule.ROW for s in found)


def test_late_where_early_would_be_too_early():
    def between(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        y = norm(x, w)
        z = torch.matmul(x, w.expand(16, 16))
        return z, y + z.permute(0, 3, 1, 2)

    graph, _ = run_passes(trace(between, "b h w 16", "16", **HINTS).graph, Options())
    (found,) = stitches(graph, plan(graph))
    assert found.host is found.reader


@pytest.mark.parametrize("name", [n for n, (_, count) in CASES.items() if count])
@pytest.mark.parametrize("env", ENVS, ids=str)
def test_meaning_of_the_whole(name: str, env: Env):
    graph, fusion, found = planned(name)
    args = arguments(env, torch.float64)
    ours = run_plan(graph, with_wholes(fusion, found), args, env)
    wanted = CASES[name][0](*args)
    for own, theirs in zip(ours, [wanted] if isinstance(wanted, Tensor) else wanted, strict=True):
        torch.testing.assert_close(own, theirs, rtol=1e-9, atol=1e-9)


def interpreted(kernel: LoopKernel, tensors: Sequence[Tensor], env: Env, most: int) -> None:
    from strop.codegen.triton import emit

    variants = stitched(kernel) if kernel.schedule is Schedule.ROW else ()
    form = next((v for v in variants if v.most == most), None) or emit(kernel)
    sizes = {f"s{i}": size.eval(env) for i, size in enumerate(form.scalars)}
    flat = [
        t.as_strided((t.untyped_storage().nbytes() // t.element_size(),), (1,)) for t in tensors
    ]
    interpret(form.source, flat, sizes | {"splits": 2})


@pytest.mark.parametrize("most", [64, 256])
@pytest.mark.parametrize("name", ["norm", "norm_of_sum", "statistics_of_others"])
def test_triton(name: str, most: int):
    graph, fusion, found = planned(name)
    args = arguments(ENVS[0], torch.float32)
    execute = partial(interpreted, most=most)
    ours = run_plan(graph, with_wholes(fusion, found), args, ENVS[0], execute, exact=False)
    wanted = CASES[name][0](*args)
    for own, theirs in zip(ours, [wanted] if isinstance(wanted, Tensor) else wanted, strict=True):
        torch.testing.assert_close(own, theirs, rtol=2e-5, atol=2e-5)


def test_the_program_says_which_step_does_the_work():
    graph, _, _ = planned("norm")
    returned = [Ref(i) for i in range(len(graph.outputs))]
    program = compile_graph(graph, Signature(returned, ()), "cuda", Options()).program
    first, second = program.kernel_steps
    assert first.variants
    assert second.absorbed == first.variants
    assert [v.most for v in first.variants] == sorted(v.most for v in first.variants)
    assert set(second.writes) <= set(first.variants[0].writes)
    assert (
        not compile_graph(graph, Signature(returned, ()), "cpu", Options())
        .program.steps[0]
        .variants
    )
