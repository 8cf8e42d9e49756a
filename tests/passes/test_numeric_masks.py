"""On a GPU, masks of marks are numbers with aligned rows, made once for all attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from strop.debug.reference import evaluate, input_values
from strop.ir.affine import strided
from strop.ir.graph import Graph, Node
from strop.options import Options
from strop.passes import run as run_passes
from tests.frontend.tracing import trace

Mask = Callable[[Tensor, Tensor], Tensor]
MASKS: dict[str, Mask] = {
    "of each key": lambda q, k: (k[:, :, :, 0] > 0)[:, :1, None, :],
    "spread over queries": lambda q, k: (k[:, :1, :, 0] > 0)[:, :, None].expand(
        -1, -1, q.shape[2], -1
    ),
    "of each pair": lambda q, k: q[:, :, :, :1] > k[:, :, None, :, 0],
    "of two dims": lambda q, k: q[0, 0, :, :1] > k[0, 0, None, :, 0],
    "of each query": lambda q, k: (q[:, :, :, :1] > -9).expand(-1, -1, -1, k.shape[2]),
    "one mark for all": lambda q, k: q[:1, :1, :1, :1] > -9,
}


def twice(mask: Mask) -> Callable[..., Tensor]:
    def attend(q: Tensor, k: Tensor) -> Tensor:
        seen = mask(q, k)
        once = F.scaled_dot_product_attention(q, k, k, seen)
        return F.scaled_dot_product_attention(once, k, k, seen)

    return attend


def graph_of(
    function: Any, device: str = "cuda", keys: str = "t", dtype: torch.dtype = torch.float32
) -> Graph:
    graph = trace(function, "b 2 s 8", f"b 2 {keys} 8", dtype=dtype, b=2, s=5, t=7).graph
    return run_passes(graph, Options(), device)[0]


def attentions(graph: Graph) -> list[Node]:
    return [node for node in graph.nodes if node.op == "attention"]


@pytest.mark.parametrize("name", MASKS)
def test_marks_become_numbers_once(name: str) -> None:
    function = twice(MASKS[name])
    graph = graph_of(function)
    first, second = attentions(graph)
    mask = first.inputs[3]
    assert mask is second.inputs[3]
    assert mask.dtype is torch.float32
    torch.manual_seed(0)
    for length in (7, 16, 17):
        given = [torch.randn(2, 2, 5, 8), torch.randn(2, 2, length, 8)]
        sizes = {"b": 2, "s": 5, "t": length}
        inputs = input_values(graph, dict(enumerate(given)))
        (found,) = evaluate(graph.outputs, inputs, sizes, exact=False).values()
        torch.testing.assert_close(found, function(*given), equal_nan=True)
        view = strided(mask)
        assert view is not None
        assert view.strides is not None
        *rows, last = (stride.eval(sizes) for stride in view.strides)
        assert last == 1
        assert not any(stride % 16 for stride in rows)


def test_keys_that_fill_whole_rows_are_not_copied() -> None:
    graph = graph_of(twice(MASKS["of each pair"]), keys="32")
    assert not [node for node in graph.nodes if node.op == "cat"]


def test_other_masks_stay() -> None:
    """Kernels of ours read marks on a CPU and in half precision; numbers are what torch wants."""
    function = twice(MASKS["of each pair"])
    for graph in (graph_of(function, "cpu"), graph_of(function, dtype=torch.bfloat16)):
        assert attentions(graph)[0].inputs[3].dtype is torch.bool
    numbers = twice(lambda q, k: q[:, :, :, :1] - k[:, :, None, :, 0])
    assert "where" not in {node.op for node in graph_of(numbers).nodes}
