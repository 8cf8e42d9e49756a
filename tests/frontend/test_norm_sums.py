"""What is added to the result of a batch norm meets it rounded, as in eager."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import strop
from strop.bench import accuracy
from strop.options import Options
from tests.frontend.tracing import trace

NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


class Residual(nn.Module):
    """Norms as they are made, of statistics 0 and 1, in blocks with a way around each."""

    def __init__(self, is_in_place: bool, depth: int = 12, width: int = 32) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(width, width, 1, bias=False) for _ in range(depth))
        self.norms = nn.ModuleList(nn.BatchNorm2d(width) for _ in range(depth))
        self.is_in_place = is_in_place

    def forward(self, x: Tensor) -> Tensor:
        for conv, norm in zip(self.convs, self.norms, strict=True):
            y = norm(conv(x))
            if self.is_in_place:
                y += x
            x = F.relu(y if self.is_in_place else y + x)
        return x.mean((2, 3))


@pytest.mark.parametrize(
    "device", ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, NEEDS_GPU])]
)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("is_in_place", [False, True])
def test_new_norms_leave_no_bias(
    is_in_place: bool, dtype: torch.dtype, device: str, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    module = Residual(is_in_place).to(device, dtype).eval().requires_grad_(False)
    x = torch.rand(4, 32, 24, 24).to(device, dtype)
    exact = Residual(is_in_place).to(device).double().eval().requires_grad_(False)
    exact.load_state_dict(module.state_dict())
    eager, truth = module(x), exact(x.double())
    options = Options(cache_dir=str(tmp_path), strict=True)
    strop.optimize(module, options=options)
    with torch.no_grad():
        judged = accuracy.judge(module(x), eager, truth)
    assert judged["rms"] <= 1.1 * judged["rms_eager"], judged  # 3.1 and 3.7 times without
    assert judged["is_good"], judged


SUMS: dict[str, tuple[int, Callable[[Tensor, Tensor], Any]]] = {
    "nothing added": (0, lambda y, x: F.silu(y)),
    "a sum": (1, lambda y, x: y + x),
    "a sum behind an activation": (0, lambda y, x: F.silu(y) + x),
    "a difference": (1, lambda y, x: x - y),
    "behind a view": (1, lambda y, x: y.flatten(2) + x.flatten(2)),
}


@pytest.mark.parametrize("name", SUMS)
def test_only_what_is_added_is_rounded(name: str) -> None:
    expected, rest = SUMS[name]

    def network(x: Tensor, w: Tensor) -> Any:
        return rest(F.batch_norm(x, w, w.abs(), w, w), x)

    for dtype, number in ((torch.float16, expected), (torch.float32, 0)):
        graph = trace(network, "b 8 h w", "8", b=2, h=5, w=6, dtype=dtype).graph
        same = [n for n in graph.nodes if n.op == "cast" and n.dtype == n.inputs[0].dtype]
        assert len(same) == number
