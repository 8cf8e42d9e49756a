"""Cats whose pieces are stored where they have them: each has all of its pieces.

Memory that nobody has written is not a number, so that a piece that is left out shows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import strop
from strop.codegen.mutation import joins_of
from strop.fusion.planner import plan
from strop.ir.graph import Graph
from strop.options import Options
from strop.passes import run as run_passes
from strop.testing import assert_as_accurate_as_eager
from tests.frontend.tracing import Function, trace
from tests.lowering.run_plan import run_plan

WIDTH = 16
SIZES = {"b": 2, "s": 6}


def normed(x: Tensor) -> Tensor:
    return F.layer_norm(x, (WIDTH,))


def shared_input(x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
    """A layer's history stands beside what each layer has made, as in BEVFormer's encoder."""
    for _ in range(3):
        y = normed(y + F.linear(torch.cat([x, y], -1), weight))
    return y


def shared_norm(x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
    """What a kernel computes goes to the same place of two cats."""
    one, other, third = normed(x), normed(y), normed(x - y)
    cats = torch.cat([one, other], -1), torch.cat([one, third], -1)
    return F.linear(cats[0], weight) - F.linear(cats[1].sin(), weight) + F.linear(cats[1], weight)


def shared_end(x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
    one, other, third = normed(x), normed(y), normed(x - y)
    cats = torch.cat([other, one], -1), torch.cat([third, one], -1)
    return F.linear(cats[0], weight) - F.linear(cats[1], weight)


def other_place(x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
    one, other = normed(x), normed(y)
    cats = torch.cat([one, other], -1), torch.cat([other, one], -1)
    return F.linear(cats[0], weight) - F.linear(cats[1], weight)


def twice_in_one(x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
    one = normed(x)
    return F.linear(torch.cat([one, one], -1), weight) + y


CASES = (shared_input, shared_norm, shared_end, other_place, twice_in_one)


def planned(function: Callable[..., Tensor]) -> tuple[nn.Module, Graph]:
    module = Function(function).eval()
    traced = trace(module, "b s 16", "b s 16", "16 32", **SIZES)
    graph, _ = run_passes(traced.graph, Options(), "cuda")
    return module, graph


@pytest.mark.parametrize("function", CASES, ids=lambda f: f.__name__)
def test_each_cat_has_all_of_its_pieces(function: Callable[..., Tensor]) -> None:
    module, graph = planned(function)
    joins = [node for node in graph.nodes if node.op == "join"]
    assert joins
    assert len(joins_of(graph)) == sum(len(node.inputs) for node in joins)
    given = inputs()
    (found,) = run_plan(graph, plan(graph, device="cuda"), given, SIZES)
    torch.testing.assert_close(found, module(*given), rtol=1e-9, atol=1e-9)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("function", CASES, ids=lambda f: f.__name__)
def test_on_a_gpu(function: Callable[..., Tensor], tmp_path: Path) -> None:
    module = Function(function).eval()
    given = [x.cuda().half() for x in inputs()]
    with torch.no_grad():
        wanted, eager = module(*(x.double() for x in given)), module(*given)
        found = strop.optimize(module, options=strop.Options(cache_dir=str(tmp_path)))(*given)
    assert_as_accurate_as_eager(found, eager, wanted)


def inputs() -> Sequence[Tensor]:
    torch.manual_seed(0)
    x, y = torch.randn(2, SIZES["b"], SIZES["s"], WIDTH, dtype=torch.float64)
    return x, y, torch.randn(WIDTH, 2 * WIDTH, dtype=torch.float64) / 4
