"""A 1x1 convolution is a product, but for fp32 on a GPU, where torch may convolve in TF32."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from strop.options import Options
from strop.passes import run as run_passes
from tests.frontend.tracing import trace


@pytest.mark.parametrize(
    ("device", "dtype", "op"),
    [
        ("cpu", torch.float32, "linear"),
        ("cpu", torch.bfloat16, "linear"),
        ("cuda", torch.float32, "conv2d"),
        ("cuda", torch.float64, "linear"),
        ("cuda", torch.bfloat16, "linear"),
        ("cuda", torch.float16, "linear"),
    ],
)
def test_which_library_computes_it(device: str, dtype: torch.dtype, op: str) -> None:
    net = nn.Sequential(nn.Conv2d(4, 8, 1), nn.ReLU()).to(dtype).eval()
    graph = trace(net, "b 4 h w", dtype=dtype, b=2, h=6, w=5).graph
    made = run_passes(graph, Options(), device)[0]
    anchors = [node for node in made.nodes if node.op in ("conv2d", "linear")]
    assert [node.op for node in anchors] == [op]
    assert len(anchors[0].inputs) == 2  # the bias is the next kernel's
