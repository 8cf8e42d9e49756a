"""Pieces of a cat have loops of their own: what is cut, what is left of each part, and its
results."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from strop.backend import compile_graph
from strop.codegen import pieces
from strop.codegen.assemble import Signature
from strop.codegen.cpp import emit
from strop.ir.loops import Apply, Load, LoopKernel, Position
from strop.ir.tensor_spec import TensorSpec
from strop.lowering.lower import lower
from strop.options import Options
from strop.runtime.build.cubin import compile_cubin
from tests.codegen.kernels import Sample, numels_of
from tests.codegen.test_model_kernels import check
from tests.frontend.tracing import Function, Traced, trace, trace_specs
from tests.views.cases import Case, make
from tests.views.running import assert_equal, optimized

ENVS = ({"b": 2, "h": 4, "w": 6}, {"b": 3, "h": 5, "w": 3}, {"b": 1, "h": 17, "w": 1})


def _kernels(function: Callable[..., Any], *shapes: str) -> list[LoopKernel]:
    return _kernels_of(trace(function, *shapes, b=2, h=4, w=6))


def _kernels_of(traced: Traced) -> list[LoopKernel]:
    signature = Signature(traced.returned, traced.captured.guards)
    compiled = compile_graph(traced.graph, signature, "cpu", Options())
    groups = compiled.plan.groups
    stored = {node for group in groups for node in group.stores}
    return [lower(group, stored, compiled.graph.hints).kernel for group in groups]


def _bags(kernel: LoopKernel) -> int:
    return sum(isinstance(stmt, Load) and stmt.bag is not None for stmt in kernel.body)


def _exps(kernel: LoopKernel) -> int:
    return sum(isinstance(stmt, Apply) and stmt.op == "exp" for stmt in kernel.body)


def test_each_part_computes_its_own_piece() -> None:
    (kernel,) = _kernels(
        lambda x, y, z: torch.cat([x.exp(), y.exp(), z.exp()], 1), "b h 8", "b w 8", "b 3 8"
    )
    assert _exps(kernel) == 3
    parts = pieces.cut(kernel)
    assert [_exps(part) for part in parts] == [1, 1, 1]
    for part in parts:
        assert not any(isinstance(stmt, Position) for stmt in part.body)
        assert all(stmt.guard is None for stmt in part.body if isinstance(stmt, Load))
    sizes = {str(axis.size) for part in parts for axis in part.rows + part.cols}
    assert {"h", "w", "3"} <= sizes


def test_few_pieces_that_alternate_stay_one_loop() -> None:
    (kernel,) = _kernels(lambda x, y: torch.stack([x * 2, y * 3], -1), "b h", "b h")
    assert pieces.cut(kernel) == (kernel,)
    assert pieces.cut_loops(kernel) == (kernel,)


def test_two_pieces_of_much_work_that_alternate_are_cut_on_a_cpu() -> None:
    (kernel,) = _kernels(lambda x, y: torch.stack([x.exp(), y.exp()], -1), "b h", "b h")
    assert pieces.cut_programs(kernel) == (kernel,)
    assert [_exps(part) for part in pieces.cut_loops(kernel)] == [1, 1]


def test_few_bags_beside_a_narrow_piece_are_cut_on_a_cpu() -> None:
    """A bag adds up rows, which costs more than steps between short pieces."""
    specs = [
        TensorSpec(tuple(shape.split()), dtype, torch.device("cpu"))
        for shape, dtype in (
            ("b 13", torch.float32),
            *[("50 16", torch.float32), ("h", torch.int64), ("b", torch.int64)] * 2,
        )
    ]

    def looked_up(dense: torch.Tensor, *given: torch.Tensor) -> torch.Tensor:
        bags = (
            F.embedding_bag(ids, table, begins, mode="sum")
            for table, ids, begins in (given[:3], given[3:])
        )
        return torch.cat([dense, *bags], 1)

    function = Function(looked_up)
    (kernel,) = _kernels_of(trace_specs(function, function, specs, {"b": 2, "h": 4}))
    assert _bags(kernel) == 2
    assert pieces.cut(kernel) == (kernel,)
    assert sorted(map(_bags, pieces.cut_loops(kernel))) == [0, 1, 1]


def test_many_pieces_that_alternate_are_cut() -> None:
    def stacked(x: torch.Tensor) -> torch.Tensor:
        return torch.stack([(x * n).exp() for n in range(9)], -1)

    (kernel,) = _kernels(stacked, "b h")
    assert [_exps(part) for part in pieces.cut(kernel)] == [1] * 9


def _num_functions(function: Callable[..., Any], *shapes: str) -> int:
    (kernel,) = _kernels(function, *shapes)
    text: str = emit(kernel).source.text
    assert len(re.findall(r"^  part\d+\(", text, re.MULTILINE)) == len(pieces.cut_loops(kernel))
    return text.count("__attribute__((noinline))")


def test_parts_that_are_alike_are_one_function() -> None:
    """They read other arguments, and write to another place."""

    def stacked(*pieces: torch.Tensor) -> torch.Tensor:
        return torch.stack([piece.exp() * 2 + 1 for piece in pieces], 1)

    assert _num_functions(stacked, *["b h"] * 7) == 1
    assert _num_functions(lambda x, y: torch.cat([x, y, x], 1), "b h 8", "b w 8") == 1


def test_parts_that_differ_are_functions_of_their_own() -> None:
    def joined(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.cat([x * 2, y * 2, x * 3, y.exp(), y, x[:, ::2]], 1)

    assert _num_functions(joined, "b h 8", "b h 8") == 5


def test_a_cat_of_two_dims_is_cut_along_both() -> None:
    def joined(x: torch.Tensor) -> torch.Tensor:
        rows = torch.cat([x.exp(), x.sin()], 2), torch.cat([x.cos(), x * 2], 2)
        return torch.cat(rows, 1)

    (kernel,) = _kernels(joined, "b h 32")
    assert len(pieces.cut(kernel)) == 4


CASES: dict[str, Case] = {
    "three lengths": Case(
        lambda x, y, z: torch.cat([x.exp(), y * 2, z], 1), ("b h 8", "b w 8", "b 3 8")
    ),
    "first dim": Case(lambda x, y: torch.cat([x.exp(), y.sin()]) + 1, ("b 4 h", "w 4 h")),
    "last dim": Case(lambda x, y: torch.cat([x.exp(), y.sin()], -1), ("b h", "b w")),
    "short runs": Case(
        lambda x, y, z: torch.cat([x.exp(), y.exp(), z.sin(), z], -1), ("b h w", "b h 2", "b h 9")
    ),
    "offsets": Case(lambda x: torch.cat([x[:, 1:] + x[:, :-1], x[:, :2].exp()], 1), ("b 7 h",)),
    "two dims": Case(
        lambda x, y: torch.cat([torch.cat([x, y], 1).exp(), torch.cat([y, x], 1)], 2),
        ("b h 20", "b w 20"),
    ),
    "lookups": Case(
        lambda w, i, j: torch.stack([w[i], w[j] * 2, w[i + 1 - 1]]), ("9 6", "i9: b h", "i9: b h")
    ),
    "many": Case(lambda x: torch.stack([x * n for n in range(16)], -1), ("b h",)),
    "a slice of a cat": Case(lambda x, y: torch.cat([x.exp(), y], 1)[:, 1:-1] * 2, ("b h", "b w")),
    "where": Case(lambda x: torch.where(torch.arange(x.shape[1]) < 3, x.exp(), x.sin()), ("b 40",)),
    "flipped": Case(lambda x, y: torch.cat([x.exp(), y.flip(1)], 1).flip(1), ("b h 8", "b w 8")),
}


@pytest.mark.parametrize("name", CASES)
def test_equals_torch(name: str, tmp_path: Any) -> None:
    case = CASES[name]
    module, dispatcher = optimized(case, ENVS[0], str(tmp_path))
    for env in ENVS:
        generator = torch.Generator().manual_seed(len(name))
        arguments = [make(text, env, generator) for text in case.arguments]
        assert_equal(module(*arguments), case.function(*arguments))
    assert not dispatcher.counters.fallbacks
    assert dispatcher.variants.num_captures == 1


MANY: dict[str, tuple[Callable[..., Any], tuple[str, ...]]] = {
    "rows": (
        lambda x, y, z: torch.cat([x.exp(), y * 2, z.sin(), x + 1, y.abs(), z], 1),
        ("b h 8", "b w 8", "b 3 8"),
    ),
    "alternating": (lambda x: torch.stack([x * n for n in range(9)], -1), ("b h",)),
    "whole": (lambda x, y: torch.cat([x, y.exp(), x + 1, y, x.sin(), y * 2]), ("b", "h")),
}


@pytest.mark.parametrize("name", MANY)
def test_in_triton(name: str) -> None:
    """The kernel that calls a function for each part, in Triton's interpreter, against loop IR."""
    function, shapes = MANY[name]
    traced = trace(function, *shapes, **ENVS[0])
    signature = Signature(traced.returned, traced.captured.guards)
    compiled = compile_graph(traced.graph, signature, "cuda", Options())
    (group,) = compiled.plan.groups
    low = lower(group, set(group.stores), compiled.graph.hints)
    num_parts = len(pieces.cut(low.kernel))
    assert num_parts >= 6
    for source in compiled.program.sources:
        assert source.text.count("@triton.jit") == num_parts + 1
    for env in ENVS:
        numels = numels_of(low)
        check(Sample(low.kernel, numels, (env,)), compiled.graph.hints, 1)


def test_compiles_for_an_h100() -> None:
    pytest.importorskip("triton")
    function, shapes = MANY["rows"]
    traced = trace(function, *shapes, **ENVS[0])
    signature = Signature(traced.returned, traced.captured.guards)
    program = compile_graph(traced.graph, signature, "cuda", Options()).program
    assert all(compile_cubin(source, 90).code for source in program.sources)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("name", MANY)
def test_on_a_gpu(name: str, tmp_path: Any) -> None:
    function, texts = MANY[name]
    module, dispatcher = optimized(Case(function, texts), ENVS[0], str(tmp_path))
    for env in ENVS:
        generator = torch.Generator().manual_seed(1)
        given = [make(text, env, generator).cuda() for text in texts]
        assert_equal(module(*given), function(*given))
    assert not dispatcher.counters.fallbacks
