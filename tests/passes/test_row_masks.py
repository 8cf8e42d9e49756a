"""A mask that is the same for all queries stays a row on a CPU, and gives what it gave."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import strop
from strop.ir.dims import const
from strop.options import Options
from strop.passes.row_masks import row_masks
from tests.frontend.tracing import Function, trace

Q = "b 2 s 8"


def places(x: Tensor) -> Tensor:
    return torch.arange(x.shape[2])


def padding(x: Tensor) -> Tensor:
    """(B, 1, 1, S), of values."""
    return (x[:, 0, :, 0] > -0.5)[:, None, None, :]


def with_all_queries(x: Tensor) -> Tensor:
    return (places(x) >= 0)[None, None, :, None] & padding(x)


MASKS = {
    "marks": (with_all_queries, True),
    "numbers": (
        lambda x: torch.where(with_all_queries(x), 0.0, -float("inf")),
        True,
    ),
    "numbers that hide little": (lambda x: torch.where(with_all_queries(x), 0.0, -2.0), True),
    "the other order": (lambda x: padding(x) & (places(x) >= 0)[None, None, :, None], True),
    "all queries but the first": (
        lambda x: (places(x) >= 1)[None, None, :, None] & padding(x),
        False,
    ),
    "a condition that never holds": (
        lambda x: (places(x) < 0)[None, None, :, None] | padding(x),
        False,
    ),
    "causal, too": (
        lambda x: (places(x)[None] <= places(x)[:, None])[None, None] & padding(x),
        False,
    ),
}


@pytest.mark.parametrize("name", MASKS)
def test_rows_are_found(name):
    mask, is_row = MASKS[name]

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, mask(q))

    graph = row_masks(trace(attend, Q, Q, Q, b=2, s=5).graph, Options())
    (attention,) = (node for node in graph.nodes if node.op == "attention")
    seen = attention.inputs[3]
    assert (seen.op == "expand") == is_row
    if is_row:
        assert seen.inputs[0].shape[-2] == const(1)
        assert "ge" not in {node.op for node in graph.nodes}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", MASKS)
def test_results_are_those_of_eager(name, dtype, tmp_path):
    mask, _ = MASKS[name]

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, mask(q).to(_kind(q, mask)))

    own = Function(attend).eval()
    strop.optimize(own, options=Options(cache_dir=str(tmp_path), strict=True))
    for batch, length, shown in ((2, 5, 0.0), (3, 70, 0.0), (1, 33, 9.0)):
        q, k, v = (torch.randn(batch, 2, length, 8).to(dtype) for _ in range(3))
        q[:, 0, 0, 0] = 1  # a key that all see
        q[:, 0, :, 0] += shown  # or all keys
        with torch.no_grad():
            found, wanted = own(q, k, v), attend(q, k, v)
        tolerance = 1e-5 if dtype is torch.float32 else 2e-2
        torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)


def _kind(q: Tensor, mask: object) -> torch.dtype:
    found = mask(q)  # type: ignore[operator]
    return torch.bool if found.dtype is torch.bool else q.dtype
