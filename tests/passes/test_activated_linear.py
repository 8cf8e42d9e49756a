"""A linear and the GELU behind it, which a library's GEMM computes at its end."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import strop
from strop.debug.reference import evaluate, input_values
from strop.ir.graph import Graph, Node
from strop.kernels.kernel import Call
from strop.kernels.library import select
from strop.options import Options
from strop.passes import run as run_passes
from strop.testing import assert_as_accurate_as_eager
from tests.frontend.tracing import trace
from tests.gpus import H100

HALVES = [torch.float16, torch.bfloat16]


class FeedForward(nn.Module):
    """As in blocks of Flux, SD3, Wan, Qwen-Image and PixArt."""

    approximate = "tanh"

    def __init__(self, *, depth: int = 64, width: int = 96, bias: bool = True) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(depth, width, bias=bias), nn.Linear(width, depth)

    def forward(self, x: Tensor) -> Any:
        return self.down(F.gelu(self.up(x), approximate=self.approximate))


class Exact(FeedForward):
    approximate = "none"


class ReadTwice(FeedForward):
    def forward(self, x: Tensor) -> Any:
        hidden = self.up(x)
        return F.gelu(hidden, approximate="tanh") + hidden


class Result(FeedForward):
    def forward(self, x: Tensor) -> Any:
        hidden = self.up(x)
        return F.gelu(hidden, approximate="tanh"), hidden


def traced(
    module: nn.Module,
    rows: int = 128,
    dtype: torch.dtype = torch.float16,
    device: str = "cuda",
    options: Options | None = None,
) -> Graph:
    given = trace(module.to(dtype), "b s 64", dtype=dtype, b=2, s=rows // 2).graph
    return run_passes(given, options or Options(), device)[0]


def found_in(graph: Graph) -> list[Node]:
    return [node for node in graph.nodes if node.op == "linear_gelu"]


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_gelu_is_computed_where_the_product_ends(dtype: torch.dtype) -> None:
    module = FeedForward()
    graph = traced(module, dtype=dtype)
    (found,) = found_in(graph)
    assert not [node for node in graph.nodes if node.op == "gelu_tanh"]
    assert len(found.inputs) == 3  # biases are added before
    call = Call.of(found)
    assert select(call, call.at({"b": 2, "s": 64}), H100).kernel == "cublas_gelu"
    x = torch.randn(2, 64, 64).to(dtype)
    numbers = [n.attrs["index"] for n in graph.inputs if not n.attrs["state"]]
    given = dict(enumerate(module.parameters())) | {numbers[0]: x}
    env = {"b": 2, "s": 64}
    (value,) = evaluate(graph.outputs, input_values(graph, given), env, exact=False).values()
    torch.testing.assert_close(value, module(x), rtol=0.02, atol=0.01)


@pytest.mark.parametrize(
    ("module", "given"),
    [
        (Exact(), {}),
        (FeedForward(bias=False), {}),
        (FeedForward(width=100), {}),
        (ReadTwice(), {}),
        (Result(), {}),
        (FeedForward(), {"rows": 64}),
        (FeedForward(), {"dtype": torch.float32}),
        (FeedForward(), {"device": "cpu"}),
        (FeedForward(), {"options": Options().in_training}),
    ],
    ids=[
        *("exact", "no biases", "odd width", "read twice", "a result", "few rows", "fp32"),
        *("cpu", "training"),
    ],
)
def test_where_a_kernel_of_its_own_stays(module: nn.Module, given: dict[str, Any]) -> None:
    graph = traced(module, **given)
    assert not found_in(graph)
    assert any(node.op in ("gelu", "gelu_tanh") for node in graph.nodes)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_values_on_a_gpu(dtype: torch.dtype, tmp_path: Path) -> None:
    eager = FeedForward(depth=1152, width=4608).to("cuda", dtype).eval().requires_grad_(False)
    exact = copy.deepcopy(eager).double()
    options = strop.Options(cache_dir=str(tmp_path))
    fast = strop.optimize(copy.deepcopy(eager), options=options)
    for tokens in (300, 77, 300):  # the last one replays a graph
        x = torch.randn(2, tokens, 1152, device="cuda", dtype=dtype)
        assert_as_accurate_as_eager(fast(x), eager(x), exact(x.double()))
    summary = strop.explain(fast).summary()
    assert summary["calls"]["linear_gelu"] == 1
    assert summary["num_kernels"] == 0
