"""What a watcher sees of a compilation, and what the log says of sizes that a graph fixes."""

from __future__ import annotations

import inspect
import logging
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor, nn

import strop
from strop.options import Options
from strop.runtime.build import native

_SEEN: SimpleQueue[str] = SimpleQueue()  # a list would be put back as it was before the trace
WATCHED: list[Any] = []


class Spy(nn.Module):
    """Looks at the progress of its own compilation."""

    def forward(self, x: Tensor) -> Tensor:
        _SEEN.put(str(WATCHED[0].variants.progress))
        return torch.nn.functional.silu(x)


def test_stages_and_counts(tmp_path: Path, monkeypatch: Any) -> None:
    module = nn.Sequential(nn.Linear(8, 8), Spy(), nn.Softmax(-1), nn.Linear(8, 8), Spy()).eval()
    own = Options(cache_dir=str(tmp_path), strict=True, kernels_off=("cpu_linear",))
    strop.optimize(module, options=own)
    WATCHED[:] = [module.forward]
    usual = native.NativeKernels._compile_unit

    def compile_unit(self: Any, group: Any) -> str:
        _SEEN.put(str(WATCHED[0].variants.progress))
        return usual(self, group)

    monkeypatch.setattr(native.NativeKernels, "_compile_unit", compile_unit)
    with torch.no_grad():
        module(torch.randn(3, 8))
    kernels = len(module.forward.variants.all[0].program.sources)
    seen = [_SEEN.get(timeout=0) for _ in range(_SEEN.qsize())]
    assert seen[:2] == ["tracing modules, 3 of 6", "tracing modules, 6 of 6"]
    assert seen[2].startswith("building kernels, ")
    assert seen[2].endswith(f" of {kernels}")
    assert str(module.forward.variants.progress) == f"building kernels, {kernels} of {kernels}"


class Fixes(nn.Module):
    """Its parameter has the length of the argument."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(7, 4))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


def test_a_fixed_size_is_told_with_what_asked_for_it(tmp_path: Path, caplog: Any) -> None:
    module = strop.optimize(Fixes().eval(), options=Options(cache_dir=str(tmp_path), strict=True))
    with torch.no_grad(), caplog.at_level(logging.INFO, "strop"):
        module(torch.randn(2, 7, 4))
        module(torch.randn(3, 7, 4))
    lines = [r.getMessage() for r in caplog.records if "fixes" in r.getMessage()]
    (line,) = [text for text in lines if "the size d0_1" in text]
    assert line.startswith("Fixes: its graph fixes the size d0_1 at 7: Eq(")
    multiplies = inspect.getsourcelines(Fixes.forward)[1] + 1
    assert line.endswith(f" at test_progress.py:{multiplies}")


def test_a_size_that_a_module_of_torch_fixes_is_told_with_its_line(tmp_path: Path) -> None:
    module = nn.Sequential(nn.LayerNorm(4), nn.Conv1d(7, 7, 1)).eval()
    strop.optimize(module, options=Options(cache_dir=str(tmp_path), strict=True))
    with torch.no_grad():
        module(torch.randn(2, 7, 4))
    fixed = module.forward.variants.all[0].fixed
    sizes = [text.partition(":")[0] for text in fixed]
    assert sizes == ["the size d0_1 at 7", "the size d0_2 at 4"]
    for text, file in zip(fixed, ("conv.py", "functional.py"), strict=True):
        assert f" at {file}:" in text
