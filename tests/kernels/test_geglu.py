"""A linear and its gate: the pass, both kernels in the interpreter and the compiler, the whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import strop
from strop.ir.device import Device
from strop.kernels.gemm.geglu import HALVES, TILE, Tile, geglu, tile_of, tma_geglu
from strop.options import Options
from strop.runtime.run import gated_linear
from strop.runtime.run.gated_linear import GatedLinear
from strop.runtime.run.library_calls import CUDA_PLANNED_OUT
from strop.testing import assert_as_accurate_as_eager
from tests.codegen.test_triton_compile import compiled, resources
from tests.gpus import A100, H100
from tests.kernels.interpreted import Interpreted

pytest.importorskip("triton")

LIBRARY = CUDA_PLANNED_OUT["geglu"]({})
SMALL = Tile(32, 32, 2, 4)


def operands(
    rows: int, depth: int, width: int, *, has_bias: bool = True, dtype: torch.dtype = torch.float16
) -> list[Tensor]:
    torch.manual_seed(0)
    x, weight = torch.randn(rows, depth), torch.randn(2 * width, depth) * depth**-0.5
    found = [x, weight, torch.randn(2 * width)]
    return [t.to(dtype) for t in found[: 2 + has_bias]]


def run(
    inputs: Sequence[Tensor], device: Device, monkeypatch: pytest.MonkeyPatch
) -> tuple[Tensor, list[str]]:
    kernels = Interpreted(device)
    x, weight = inputs[:2]
    out = torch.full((len(x), len(weight) // 2), float("nan"), dtype=x.dtype)
    matmul: Callable[..., Tensor] = torch.mm

    def mm(*args: Any) -> Tensor:
        return kernels.known(matmul(*args))

    for tensor in (*inputs, out):
        kernels.known(tensor)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "mm", mm)
        patch.setattr(gated_linear, "tile_of", lambda rows, depth, width: SMALL)
        call = GatedLinear(LIBRARY, kernels, 0, is_early=False)  # type: ignore[arg-type]
        call(inputs, out)
    return out, kernels.ran


def truth_of(inputs: Sequence[Tensor]) -> Tensor:
    value, gate = F.linear(*(t.double() for t in inputs)).chunk(2, -1)
    return value * F.gelu(gate)


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize(("device", "name"), [(H100, "tma_geglu"), (A100, "geglu")])
@pytest.mark.parametrize("rows", [64, 45])  # the last tile leaves the tensor
def test_as_accurate_as_torch(
    rows: int, device: Device, name: str, has_bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = operands(rows, 128, 64, has_bias=has_bias)
    found, ran = run(inputs, device, monkeypatch)
    eager = torch.empty_like(found)
    LIBRARY(inputs, eager)
    assert_as_accurate_as_eager(found, eager, truth_of(inputs))
    assert ran == [name]


@pytest.mark.parametrize("device", [H100, A100])
def test_extremes(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight, bias = operands(32, 64, 32)
    bias[:8] = torch.tensor([1e4, -1e4, 6e4, -6e4, 0, torch.inf, -torch.inf, torch.nan])
    bias[32:40] = torch.tensor([torch.inf, -torch.inf, torch.nan, 6e4, -6e4, 1, 1, 1])
    found, _ = run([x, weight, bias], device, monkeypatch)
    truth = truth_of([x, weight, bias]).half()
    assert torch.equal(found.isnan(), truth.isnan())
    assert torch.equal(found.isinf(), truth.isinf())


def test_torch_does_what_lies_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight, bias = operands(64, 128, 64)
    wide = torch.stack((x, x), 1)[:, 0]
    found, ran = run([wide, weight, bias], 90, monkeypatch)
    assert not ran
    assert_as_accurate_as_eager(found, found, truth_of([x, weight, bias]))


def test_where_one_kernel_is_faster() -> None:
    assert tile_of(8192, 640, 2560) == tile_of(2048, 1280, 5120) == TILE
    assert tile_of(32768, 320, 1280) == TILE
    assert tile_of(8192, 320, 1280) is None  # the product stays in the cache
    assert tile_of(2048, 640, 2560) is tile_of(512, 1280, 5120) is None
    assert tile_of(32768, 320, 1280 + 64) is None


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("has_bias", [True, False])
def test_compiles(has_bias: bool, dtype: torch.dtype, tmp_path: Path) -> None:
    boxed = compiled(tma_geglu(TILE, dtype, has_bias=has_bias), 90)
    assert boxed.shared <= 227 * 1024
    assert boxed.early
    assert resources(boxed, tmp_path)[1] == 0  # nothing spilled
    assert resources(compiled(geglu(1280, dtype, has_bias=has_bias), 80), tmp_path)[1] == 0


class FeedForward(nn.Module):
    def __init__(self, depth: int = 320, width: int = 1280) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(depth, 2 * width), nn.Linear(width, depth)

    def forward(self, x: Tensor) -> Tensor:
        value, gate = self.first(x).chunk(2, dim=-1)
        return self.last(value * F.gelu(gate))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_on_a_gpu(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    module = FeedForward().cuda().to(dtype).eval().requires_grad_(False)
    exact = FeedForward().cuda().double()
    exact.load_state_dict(module.state_dict())
    inputs = [
        torch.randn(b, rows, 320, device="cuda", dtype=dtype)
        for b, rows in ((4, 4096), (1, 100), (5, 4095), (3, 7))
    ]
    with torch.no_grad():
        wanted = [(module(x), exact(x.double())) for x in inputs]
        for options in (Options(strict=True, tma_geglu=True), Options(strict=True)):
            strop.optimize(module, options=options)
            for x, (eager, truth) in zip(inputs, wanted, strict=True):
                for _ in range(3):  # step by step, captured, replayed
                    assert_as_accurate_as_eager(module(x), eager, truth)
            strop.restore(module)
