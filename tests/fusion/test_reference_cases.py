"""How many kernels the cases that every fusing compiler is judged by become, and what they compute.

Each case is planned, and its plan is run with interpreted kernels in fp64, with Triton's text in
Triton's interpreter and with C++, at other sizes than those it was traced with.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from strop.codegen import cpp
from strop.codegen.triton import emit
from strop.codegen.triton_interpreter import interpret
from strop.fusion.plan import FusionPlan
from strop.fusion.planner import plan
from strop.ir.dims import Env
from strop.ir.graph import Graph
from strop.ir.loops import LoopKernel, Schedule
from strop.ir.source import Emitted, KernelForm
from strop.lowering.lower import Lowered, lower
from strop.options import Options
from strop.passes import run as run_passes
from strop.runtime.build.cache import DiskCache
from strop.runtime.build.native import NativeFunction, NativeKernels
from tests.codegen.cpp_launch import launch
from tests.frontend.tracing import trace
from tests.lowering.run_plan import Execute, run_plan, with_offsets

pytestmark = pytest.mark.filterwarnings("ignore:.*degrees of freedom")

HINTS = {"b": 4, "r": 6, "c": 96}
ENVS = ({"b": 2, "r": 5, "c": 7}, {"b": 1, "r": 1, "c": 1}, {"b": 3, "r": 9, "c": 130})
EXACT = {"rtol": 1e-9, "atol": 1e-9}
Built = dict[LoopKernel, tuple[Emitted, NativeFunction]]
ROW, COLUMN, POINTWISE = Schedule.ROW, Schedule.COLUMN, Schedule.POINTWISE


def rms_norm(x: Tensor, w: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6) * w


def two_outputs(x: Tensor, y: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    z = x * y + b
    total = z.sum(-1, keepdim=True)
    return z / (total.abs() + 1), total.tanh()


def several_outputs(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    z = x + y
    return z, z.sin(), z.mean(-1), z.amax(-1), z - z.mean(-1, keepdim=True)


def glu_of_norm(x: Tensor, w: Tensor) -> Tensor:
    y = F.layer_norm(x, (32,), w, w)
    return y * torch.sigmoid(y)


def standardised(x: Tensor) -> Tensor:
    return (x - x.mean(1, keepdim=True)) / x.std(1, keepdim=True)


def statistics_of_looked_up(table: Tensor, x: Tensor) -> tuple[Tensor, ...]:
    y = table[(x * 3).abs().long() % 7] + 1
    return *torch.var_mean(y), y.amax()


def clamped_where_infinite(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """As T5's blocks keep fp16 finite, and what normalises their result."""
    x = x + y
    limit = torch.where(torch.isinf(x).any(), 1.0, 2.0)
    x = torch.clamp(x, min=-limit, max=limit)
    return x, x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


@dataclass(frozen=True)
class Case:
    function: Callable[..., Any]
    shapes: tuple[str, ...]
    schedules: tuple[Schedule, ...]
    empty: bool = True  # torch has an answer when b is 0


ROWS = ("r c",)
CASES: dict[str, Case] = {
    "two_outputs": Case(two_outputs, ("r c", "r c", "c"), (ROW,)),
    "two_outputs_of_known_rows": Case(two_outputs, ("r 48", "r 48", "48"), (ROW,)),
    "several_outputs": Case(several_outputs, ("b r c", "c"), (ROW,)),
    "softmax": Case(lambda x: x.softmax(-1), ROWS, (ROW,)),
    "softmax_of_40960": Case(lambda x: x.softmax(-1), ("b 40960",), (ROW,)),
    "log_softmax": Case(lambda x: x.log_softmax(-1), ROWS, (ROW,)),
    "softmax_of_all": Case(lambda x: x.softmax(0), ("b*r*c",), (COLUMN, COLUMN, POINTWISE)),
    "softmax_across": Case(lambda x: x.softmax(1), ("b 24 r*c",), (ROW,)),
    "log_softmax_first": Case(lambda x: x.log_softmax(0), ("12 b*c",), (ROW,)),
    "layer_norm": Case(lambda x, w: F.layer_norm(x, (48,), w, w), ("b r 48", "48"), (ROW,)),
    "layer_norm_of_12345": Case(lambda x: F.layer_norm(x, (12345,)), ("b 12345",), (ROW,)),
    "layer_norm_of_two_dims": Case(lambda x: F.layer_norm(x, x.shape[1:]), ("b 6 8",), (ROW,)),
    "layer_norm_then_gate": Case(glu_of_norm, ("b r 32", "32"), (ROW,)),
    "rms_norm": Case(rms_norm, ("r c", "c"), (ROW,)),
    "group_norm_silu": Case(
        lambda x, w: F.silu(F.group_norm(x, 4, w, w)), ("b 16 r c", "16"), (ROW, POINTWISE)
    ),
    "group_norm_silu_channels_last": Case(
        lambda x, w: F.silu(F.group_norm(x.permute(0, 3, 1, 2), 4, w, w)),
        ("b r c 16", "16"),
        (COLUMN, POINTWISE),
    ),
    "instance_norm": Case(F.instance_norm, ("b 4 r 6",), (ROW,)),
    "batch_norm": Case(
        lambda x, w: F.batch_norm(x, w, w.abs(), w, w), ("b 8 r", "8"), (POINTWISE,)
    ),
    "max_pool_of_batch_norm": Case(
        lambda x, w: F.max_pool2d(F.relu(F.batch_norm(x, w, w.abs(), w, w)), 3, 2, 1),
        ("b 8 2*r c+8", "8"),
        (POINTWISE,),
    ),
    "mean_pool_of_batch_norm": Case(
        lambda x, w: F.avg_pool2d(F.gelu(F.batch_norm(x, w, w.abs(), w, w)), 3, 2, 1),
        ("b 8 2*r c+8", "8"),
        (POINTWISE,),
    ),
    "two_sums_of_one_shape": Case(lambda x, y: (x.sum(-1), y.amax(-1)), ("r c",) * 2, (ROW,)),
    "two_sums_of_what_is_computed": Case(
        lambda x, y: ((x * y).sum(-1), (x - y).abs().sum(-1)), ("r c",) * 2, (ROW,)
    ),
    "three_reductions_of_one": Case(
        lambda x: ((x * 2).sum(-1), (x + 1).amax(-1), x.exp().sum(-1)), ("r c",), (ROW,)
    ),
    "two_layer_norms": Case(
        lambda x, y: (F.layer_norm(x, (24,)), F.layer_norm(y, (24,))), ("b r 24",) * 2, (ROW,)
    ),
    "two_columns_of_one_shape": Case(lambda x, y: (x.sum(0), y.amax(0)), ("r c",) * 2, (COLUMN,)),
    "softmax_of_layer_norm": Case(
        lambda x, w: F.layer_norm(x, (48,), w, w).softmax(-1), ("b r 48", "48"), (ROW,)
    ),
    "transposed_before_row": Case(
        lambda x, y: (y + x.transpose(1, 2)).softmax(-1), ("b r c", "b c r"), (ROW,)
    ),
    "transposed_after_row": Case(lambda x: x.softmax(-1).transpose(1, 2) * 2, ("b r c",), (ROW,)),
    "transposed_pointwise": Case(
        lambda x, y: (x.t() + y).exp() * x.t(), ("r c", "c r"), (POINTWISE,)
    ),
    "sum_of_1": Case(lambda x: x.sum(-1), ("b*r 1",), (ROW,)),
    "sum_of_123": Case(lambda x: x.sum(-1), ("b*r 123",), (ROW,)),
    "sum_of_12345": Case(lambda x: x.sum(-1), ("b 12345",), (ROW,)),
    "sum_of_40960": Case(lambda x: x.sum(-1), ("b 40960",), (ROW,)),
    "column_sum": Case(lambda x: x.sum(0), ("r c",), (COLUMN,)),
    "middle_sum": Case(lambda x: (x * 2).sum(1), ("b r c",), (COLUMN,)),
    "sum_of_expanded": Case(
        lambda x: x[:, None].expand(x.shape[0], 5, x.shape[1]).sum(1), ROWS, (ROW,)
    ),
    "sum_of_all": Case(lambda x: x.sum(), ("b r c",), (COLUMN,)),
    "var_mean_of_all": Case(torch.var_mean, ("b r c",), (COLUMN,)),
    "norm_of_all": Case(lambda x: x.norm(), ("b r c",), (COLUMN,)),
    "mean_square_error": Case(lambda x, y: ((x - y) * (x - y)).mean(), ("b r c",) * 2, (COLUMN,)),
    "argmax": Case(lambda x: x.argmax(-1), ROWS, (ROW,), empty=False),
    "max_with_indices": Case(lambda x: torch.max(x, 1), ROWS, (ROW,), empty=False),
    "argmax_of_all": Case(lambda x: x.argmax(), ROWS, (COLUMN, COLUMN), empty=False),
    "standardised": Case(standardised, ("r c",), (ROW,)),
    # kept dims between reduced ones
    "sum_on_both_sides": Case(lambda x: (x * 2).sum((0, 3)) + 1, ("b 4 r r",), (ROW, COLUMN)),
    "sum_on_both_sides_again": Case(
        lambda x: x.sum((1, 3), keepdim=True), ("b r 4 c",), (ROW, COLUMN)
    ),
    "sum_between_and_inside": Case(
        lambda x: x.permute(0, 2, 1).sum((0, 1)), ("b 3 c",), (ROW, COLUMN)
    ),
    "sum_of_known_lanes": Case(lambda x: x.sum((0, 2)), ("b 4 8",), (COLUMN,)),
    "sum_of_many_known_lanes": Case(lambda x: x.sum((0, 2)), ("b 64 80",), (ROW, COLUMN)),
    "var_mean_on_both_sides": Case(
        lambda x: torch.var_mean(x, (0, 2)), ("b 4 r*c",), (ROW, COLUMN)
    ),
    "spread_on_both_sides": Case(
        lambda x: (x.std((0, 3)), x.var((0, 3), correction=0)), ("b 4 r r",), (ROW, COLUMN)
    ),
    "extremes_on_both_sides": Case(
        lambda x: (x.amax((0, 2)), x.amin((0, 2)), (x > 2).any(2).any(0)),
        ("b 4 c",),
        (ROW, COLUMN, COLUMN),
        empty=False,
    ),
    "norm_on_both_sides": Case(
        lambda x: torch.linalg.vector_norm(x, dim=(0, 3)), ("b 4 r r",), (ROW, COLUMN)
    ),
    "log_sum_on_both_sides": Case(
        lambda x: x.logsumexp((0, 2)), ("b 4 c",), (ROW, COLUMN, ROW, COLUMN), empty=False
    ),
    "batch_norm_of_this_batch": Case(
        lambda x, w: F.silu(F.batch_norm(x, None, None, w, w, True)),
        ("b 8 2*r*c", "8"),
        (ROW, COLUMN, POINTWISE),
        empty=False,
    ),
    "argmax_of_a_flattened_transpose": Case(
        lambda x: x.transpose(0, 1).flatten(1).argmax(1), ("b 4 c",), (ROW, COLUMN), empty=False
    ),
    # a row's statistics beside other values of its length
    "times_the_mean_of_another": Case(
        lambda x, y: y * x.mean(-1, keepdim=True), ("b r c", "b r c"), (ROW,)
    ),
    "times_the_mean_of_another_reshaped": Case(
        lambda x, y: (y * x.mean(-1, keepdim=True).expand(-1, 6 * 4)).view(-1, 6, 4).sin(),
        ("b 24", "b 24"),
        (ROW,),
    ),
    "plus_softmax_of_a_transpose": Case(
        lambda x, y: y + x.transpose(1, 2).softmax(-1),
        ("b c r", "b r c"),
        (COLUMN, COLUMN, POINTWISE),
    ),
    "norm_of_a_slice": Case(
        lambda x, y: F.layer_norm(x[:, 2:], (48,)) * y[:, None], ("b r+2 48", "b 48"), (ROW,)
    ),
    # too few rows to have a program each
    "clamped_where_infinite": Case(
        clamped_where_infinite, ("b r c", "b r c"), (COLUMN, ROW), empty=False
    ),
    "scaled_by_the_norm_of_all": Case(lambda x: x / x.norm(), ("b r c",), (COLUMN, POINTWISE)),
    "standardised_over_all": Case(
        lambda x: (x - x.mean()) / x.std(), ("b r c",), (COLUMN, POINTWISE), empty=False
    ),
    # inner axes are lanes, some of them idle, or only a part of the innermost one
    "statistics_of_all_with_bias": Case(
        lambda x, w: (*torch.var_mean(x + w), (x + w).amax()),
        ("b r 96", "96"),
        (COLUMN,),
        empty=False,
    ),
    "statistics_of_all_looked_up": Case(statistics_of_looked_up, ("7 4096", "r"), (COLUMN,)),
    "statistics_of_all_looked_up_by_two": Case(
        statistics_of_looked_up, ("7 72", "b r"), (COLUMN,), empty=False
    ),
    "largest_of_all_marked": Case(
        lambda x, y: torch.where(x == x.amax(), y, x), ("r c", "r c"), (COLUMN, POINTWISE)
    ),
    "softmax_of_three_rows": Case(lambda x: x.softmax(1), ("3 r*c",), (COLUMN, COLUMN, POINTWISE)),
    "moments_of_three_rows": Case(
        lambda x, w: F.layer_norm(x, x.shape[1:]) * w, ("3 c r", "c r"), (COLUMN, POINTWISE)
    ),
    "products_of_three_rows": Case(
        lambda x, y: ((x * y).sum((1, 2)), (x * y).amax((1, 2))), ("3 c r",) * 2, (COLUMN,)
    ),
    # where sharing a kernel would be wrong
    "sums_along_both_dims": Case(
        lambda x: ((x + 1).sum(0), (x + 1).sum(1)), ("r r c",), (COLUMN, COLUMN)
    ),
    "sum_added_across": Case(lambda x: x + x.sum(-1), ("c c",), (ROW, POINTWISE)),
    "softmax_plus_its_transpose": Case(
        lambda x: (lambda y: y + y.t())(x.softmax(-1)), ("c c",), (ROW, POINTWISE)
    ),
    "sums_of_x_and_its_copied_transpose": Case(
        lambda x: ((x + 1).sum(-1), (x + 1).t().contiguous().sum(-1)), ("c c",), (ROW, COLUMN)
    ),
}


@cache
def planned(name: str) -> tuple[Graph, FusionPlan]:
    case = CASES[name]
    used = {n: h for n, h in HINTS.items() if any(n in s for s in " ".join(case.shapes).split())}
    graph, _ = run_passes(trace(case.function, *case.shapes, **used).graph, Options())
    return graph, plan(graph)


@cache
def lowered(name: str) -> tuple[Lowered, ...]:
    graph, fusion = planned(name)
    stored = {node for group in fusion.groups for node in group.stores}
    found = (lower(group, stored, graph.hints) for group in fusion.groups)
    return tuple(replace(low, kernel=with_offsets(low.kernel, low.offsets)) for low in found)


def arguments(name: str, env: Env, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    graph, _ = planned(name)
    return [
        torch.randn([s.eval(env) for s in node.shape], generator=generator).to(dtype)
        for node in graph.inputs
    ]


def eager(name: str, args: Sequence[Tensor]) -> list[Tensor]:
    result = CASES[name].function(*args)
    return [result] if isinstance(result, Tensor) else list(result)


@pytest.mark.parametrize("name", CASES)
def test_kernels_of_a_plan(name: str):
    _, fusion = planned(name)
    assert len(fusion.steps) == len(fusion.groups), "something was left to torch"
    assert tuple(group.schedule for group in fusion.groups) == CASES[name].schedules
    assert all(refusal.reason for refusal in fusion.refusals)


@pytest.mark.parametrize("name", CASES)
def test_each_element_is_swept_once(name: str):
    """A kernel whose axes span more than its domain would reduce the same row again and again."""
    largest = max(n.numel.eval(HINTS) for n in planned(name)[0].nodes)
    for low in lowered(name):
        assert (low.kernel.num_rows * low.kernel.num_cols).eval(HINTS) <= largest


@pytest.mark.parametrize("name", CASES)
def test_meaning_of_a_plan(name: str):
    graph, fusion = planned(name)
    for env in ENVS:
        args = arguments(name, env, torch.float64)
        found = run_plan(graph, fusion, args, env)
        for ours, theirs in zip(found, eager(name, args), strict=True):
            torch.testing.assert_close(ours, theirs, **EXACT, equal_nan=True)


def interpreted(
    kernel: LoopKernel, tensors: Sequence[Tensor], env: Env, *, with_variants: bool = False
) -> None:
    emitted: Emitted | KernelForm = emit(kernel)
    if with_variants:
        fitting = (
            v
            for v in emitted.variants
            if v.size.eval(env) <= v.most and not v.size.eval(env) % v.multiple
        )
        emitted = next(fitting, emitted)
    sizes = {f"s{i}": size.eval(env) for i, size in enumerate(emitted.scalars)}
    storages = [
        t.as_strided((t.untyped_storage().nbytes() // t.element_size(),), (1,)) for t in tensors
    ]
    interpret(emitted.source, storages, sizes | {"splits": 3})


def compare(name: str, env: Env, execute: Execute) -> None:
    graph, fusion = planned(name)
    args = arguments(name, env)
    found = run_plan(graph, fusion, args, env, execute, exact=False)
    for ours, theirs in zip(found, eager(name, args), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=2e-5, equal_nan=True)


@pytest.mark.parametrize("name", CASES)
def test_triton(name: str):
    for env in ENVS[:2]:
        compare(name, env, interpreted)
    if any(emit(low.kernel).variants for low in lowered(name)):
        for env in (ENVS[2], {"b": 2, "r": 3, "c": 40}):  # 40 is a multiple of eight
            compare(name, env, partial(interpreted, with_variants=True))


@pytest.fixture(scope="module")
def native(
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[LoopKernel, tuple[Emitted, NativeFunction]]:
    """The C++ functions of all cases, from one run of the compiler."""
    kernels = [low.kernel for name in CASES for low in lowered(name)]
    emitted = [cpp.emit(kernel) for kernel in kernels]
    cache = NativeKernels(DiskCache(tmp_path_factory.mktemp("cache")))
    functions = cache.build([e.source for e in emitted])
    return {k: (e, functions[e.source]) for k, e in zip(kernels, emitted, strict=True)}


@pytest.mark.parametrize("name", CASES)
def test_cpp(name: str, native: Built):
    def execute(kernel: LoopKernel, tensors: Sequence[Tensor], env: Env) -> None:
        emitted, function = native[kernel]
        launch(function, emitted, tensors, env)

    nothing = [{"b": 0, "r": 2, "c": 3}] if CASES[name].empty else []
    for env in [*ENVS, *nothing]:
        compare(name, env, execute)
