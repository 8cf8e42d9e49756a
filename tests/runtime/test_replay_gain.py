"""Where arguments and results are large, and the GPU is at work for long, no graph is captured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import strop
from strop.backend import compile_graph
from strop.codegen.assemble import Signature
from strop.options import Options
from strop.runtime.run import executor
from strop.runtime.run.replay_gain import LEAST_BYTES, reason_against
from strop.runtime.run.shape_plan import ShapePlan, plan_shape
from tests.frontend.tracing import trace
from tests.gpus import H100
from tests.runtime.test_choices import Kernels

DEPTH, LAYERS = 1024, 8
ROW_BYTES = 2 * DEPTH  # of an argument, or of a result


class Layers(nn.Module):
    def __init__(self, layers: int = LAYERS) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(DEPTH, DEPTH) for _ in range(layers)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return x


def planned(rows: int, device: str = "cuda") -> ShapePlan:
    traced = trace(Layers().half(), "n 1024", dtype=torch.float16, n=64)
    signature = Signature(traced.returned, ())
    program = compile_graph(traced.graph, signature, device, Options()).program
    kernels: Any = Kernels(H100)
    return plan_shape(program, {"n": rows}, kernels, None, None, shares=True)


def test_long_work_on_much_memory_has_none() -> None:
    rows = 1 << 18  # 0.5 GiB in and as much out, 4.4e12 operations
    reason = reason_against(planned(rows), hands_over=False)
    assert f"{2 * rows * ROW_BYTES >> 20} MiB of arguments and results" in reason
    assert reason.startswith("the GPU takes some ")


@pytest.mark.parametrize("rows", [1, 64, (LEAST_BYTES // (2 * ROW_BYTES)) - 1])
def test_what_is_short_or_copies_little_has_one(rows: int) -> None:
    assert not reason_against(planned(rows))


def test_the_host_would_be_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launches that are slow are spared, whatever is copied."""
    monkeypatch.setattr("strop.runtime.run.replay_gain.LAUNCH_US", 1e5)
    assert not reason_against(planned(1 << 18))


def test_a_cpu_has_no_graph_to_spare() -> None:
    assert not reason_against(planned(1 << 18, "cpu"))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_results_on_a_gpu_are_there_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And they are the caller's own, whatever the reason is."""
    monkeypatch.setattr(executor, "reason_against", lambda plan: "a test says so")
    eager = Layers(2).cuda().half().eval().requires_grad_(False)
    fast = Layers(2).cuda().half().eval().requires_grad_(False)
    fast.load_state_dict(eager.state_dict())
    strop.optimize(fast, options=Options(cache_dir=str(tmp_path)))
    x = torch.randn(4096, DEPTH, device="cuda").half()
    kept = [fast(x) for _ in range(3)]
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    found = fast(x)
    torch.cuda.synchronize()
    most = torch.cuda.max_memory_allocated() - before
    assert most < 1.5 * found.nbytes, "the result, and no other copy of it"
    assert "a test says so" in " ".join(fast.forward.counters.fallbacks)
    for result in (*kept, found):
        torch.testing.assert_close(result, eager(x), rtol=2e-2, atol=2e-2)
    strop.restore(fast)
