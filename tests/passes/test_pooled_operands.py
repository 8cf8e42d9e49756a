"""What only a pool reads is computed in the pool's kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from strop.backend import compile_graph
from strop.codegen.assemble import Signature
from strop.options import Options
from tests.frontend.tracing import trace

Pool = Callable[[Tensor], Tensor]


def num_kernels(rest: Callable[[Tensor], Any], *disabled: str) -> int:
    """Of what follows a convolution and a batch norm, on a GPU. What such kernels compute is in
    ``test_reference_cases``."""

    def stem(x: Tensor, kernel: Tensor, w: Tensor) -> Any:
        return rest(F.batch_norm(F.conv2d(x, kernel), w, w.abs(), w, w))

    traced = trace(stem, "b 8 h w", "16 8 3 3", "16", b=2, h=40, w=48)
    signature = Signature(traced.returned, traced.captured.guards)
    options = Options(disable=disabled)
    return len(compile_graph(traced.graph, signature, "cuda", options).program.kernel_steps)


POOLS: dict[str, Pool] = {
    "3x3, as in ResNet": lambda x: F.max_pool2d(F.relu(x), 3, 2, 1),
    "ceil": lambda x: F.max_pool2d(F.relu(x), 3, 2, ceil_mode=True),
    "mean": lambda x: F.avg_pool2d(F.gelu(x), 3, 2, 1),
}


@pytest.mark.parametrize("name", POOLS)
def test_one_kernel(name: str) -> None:
    apart = num_kernels(POOLS[name], "pooled_operands")
    assert num_kernels(POOLS[name]) == apart - 1


OTHERS: dict[str, Callable[[Tensor], Any]] = {
    "one kernel without it": lambda x: F.max_pool2d(F.silu(x), 2),
    "each element is looked up nine times": lambda x: F.max_pool2d(F.relu(x), 3, 1, 1),
    "enlarged": lambda x: F.interpolate(F.relu(x), scale_factor=2.0),
    "returned too": lambda x: (y := F.relu(x), F.max_pool2d(y, 3, 2, 1)),
    "read by another": lambda x: F.max_pool2d(y := F.relu(x), 3, 2, 1).sum() + y,
    "of two tensors": lambda x: F.max_pool2d(F.relu(x + x.flip(2)), 3, 2, 1),
    "scaled by rows": lambda x: F.max_pool2d(x * torch.arange(x.shape[2])[:, None], 3, 2, 1),
}


@pytest.mark.parametrize("name", OTHERS)
def test_not_where_it_costs_more(name: str) -> None:
    assert num_kernels(OTHERS[name]) == num_kernels(OTHERS[name], "pooled_operands")
