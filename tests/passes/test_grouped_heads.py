"""Heads of keys that serve several heads of queries reach attention without copies."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from strop.debug.reference import evaluate, input_values
from strop.ir.graph import Graph
from strop.options import Options
from strop.passes import run as run_passes
from strop.runtime.run.library_calls import ALLOCATING
from strop.testing import assert_as_accurate_as_eager
from tests.frontend.tracing import trace

Q, K = "b n 6 16", "b n 2 16"
SIZES = {"b": 2, "n": 7}


def by_option(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def repeated(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """As transformers do."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    batch, heads, length, width = k.shape
    k, v = (
        x[:, :, None].expand(batch, heads, 3, length, width).reshape(batch, -1, length, width)
        for x in (k, v)
    )
    return F.scaled_dot_product_attention(q, k, v)


def values_apart(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Keys are repeated; values are a new tensor."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(3, 1) for x in (k, v))
    return F.scaled_dot_product_attention(q, k, v.exp())


def graph_of(
    function: Any, device: str = "cuda", dtype: torch.dtype = torch.bfloat16, **options: Any
) -> Graph:
    graph = trace(function, Q, K, K, dtype=dtype, **SIZES).graph
    return run_passes(graph, Options(**options), device)[0]


def result(graph: Graph, given: list[Tensor]) -> Tensor:
    inputs = input_values(graph, dict(enumerate(given)))
    (value,) = evaluate(graph.outputs, inputs, SIZES, exact=False).values()
    return value


@pytest.mark.parametrize("function", [by_option, repeated], ids=lambda f: f.__name__)
def test_heads_are_read_where_they_lie(function: Any) -> None:
    graph = graph_of(function)
    (node,) = (node for node in graph.nodes if node.op == "attention")
    assert [x.shape[1].value for x in node.inputs] == [6, 2, 2]
    assert [n.inputs[0].op for n in graph.nodes if n.op == "copy"] == ["attention"]  # the result
    torch.manual_seed(0)
    given = [torch.randn(2, 7, heads, 16).bfloat16() for heads in (6, 2, 2)]
    exact = function(*(x.double() for x in given))
    assert_as_accurate_as_eager(result(graph, given), function(*given), exact)


def test_what_is_not_repeated_alike_stays() -> None:
    graph = graph_of(values_apart)
    (node,) = (node for node in graph.nodes if node.op == "attention")
    assert {x.shape[1].value for x in node.inputs} == {6}
    given = [torch.randn(2, 7, heads, 16).bfloat16() for heads in (6, 2, 2)]
    torch.testing.assert_close(result(graph, given), values_apart(*given))


@pytest.mark.parametrize("function", [by_option, repeated], ids=lambda f: f.__name__)
def test_in_fp32_they_are_repeated(function: Any) -> None:
    """Torch has no fused kernel for fewer heads of fp32."""
    graph = graph_of(function, dtype=torch.float32)
    (node,) = (node for node in graph.nodes if node.op == "attention")
    assert {x.shape[1].value for x in node.inputs} == {6}
    given = [torch.randn(2, 7, heads, 16) for heads in (6, 2, 2)]
    torch.testing.assert_close(result(graph, given), function(*given))


@pytest.mark.parametrize(
    ("device", "options"), [("cpu", {}), ("cuda", {"disable": ("grouped_heads",)})]
)
def test_elsewhere_they_are_repeated(device: str, options: Any) -> None:
    (node,) = (n for n in graph_of(by_option, device, **options).nodes if n.op == "attention")
    assert {x.shape[1].value for x in node.inputs} == {6}


def test_torchs_own_choice_takes_fewer_heads() -> None:
    q, k, v = (torch.randn(2, heads, 7, 16) for heads in (6, 2, 2))
    found = ALLOCATING["attention"]({"causal": False, "scale": 0.25})([q, k, v])
    wanted = F.scaled_dot_product_attention(q, k, v, scale=0.25, enable_gqa=True)
    torch.testing.assert_close(found, wanted)
