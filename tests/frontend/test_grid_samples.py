"""Grid samples have eager's pixels, in every mode, padding and layout.

Most cases evaluate the imported graph with torch's operators, node by node: that is quick, and a
place that is off by one shows. A few go through the kernels of both code generators.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

import strop
from strop.debug.reference import evaluate
from strop.frontend import grid_samples
from strop.ir.tensor_spec import TensorSpec
from strop.testing import assert_as_accurate_as_eager
from tests.frontend.tracing import Function, trace_specs
from tests.fuzz.interpreted import interpreted

MODES = ("bilinear", "nearest", "bicubic")
PADDINGS = ("zeros", "border", "reflection")
CASES = list(itertools.product(MODES, PADDINGS, (False, True)))
FEW = [("bilinear", "zeros", False), ("nearest", "reflection", False), ("bicubic", "border", True)]
SIZES = ((5, 7), (2, 9), (1, 4))


@pytest.fixture(autouse=True)
def everywhere(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have kernels of ours for samples that a CPU leaves to ATen, too."""
    if "chosen" not in request.node.name:
        monkeypatch.setattr(grid_samples, "suits_cpu", lambda channels, *, is_last: True)


def sampler(mode: str, padding: str, align: bool) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda x, grid: F.grid_sample(x, grid, mode, padding, align)


def drawn(shape: tuple[int, ...], grid: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
    """Images, and places of which a third lie outside."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    places = 1.5 * torch.randn((*grid, len(grid) - 1), generator=generator, dtype=torch.float64)
    return [x.to(dtype), places.to(dtype)]


def evaluated(
    function: Callable[..., Tensor], calls: Sequence[Sequence[Tensor]]
) -> Iterator[Tensor]:
    """What a graph with symbolic sides, without a call into torch, comes to for each call."""
    x, grid = calls[0]
    names = ("d", "h", "w")[5 - x.dim() :]
    rest = tuple(f"g{number}" for number in range(grid.dim() - 2))
    specs = [
        TensorSpec((*map(str, x.shape[:2]), *names), x.dtype, x.device),
        TensorSpec((str(len(grid)), *rest, str(grid.shape[-1])), grid.dtype, grid.device),
    ]
    module = Function(function).eval()
    traced = trace_specs(module, module, specs, dict.fromkeys((*names, *rest), 6))
    assert "aten" not in traced.ops()
    assert "take" in traced.ops()
    (output,) = traced.outputs
    for x, grid in calls:
        env = dict(zip((*names, *rest), (*x.shape[2:], *grid.shape[1:-1]), strict=True))
        given = dict(zip(traced.graph.inputs, (x, grid), strict=True))
        yield evaluate(traced.outputs, given, env, exact=False)[output].to(x.dtype)


def check(function: Callable[..., Tensor], calls: Sequence[Sequence[Tensor]]) -> None:
    for (x, grid), found in zip(calls, evaluated(function, calls), strict=True):
        torch.testing.assert_close(found, function(x, grid), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("mode", "padding", "align"), CASES)
def test_every_mode(mode: str, padding: str, align: bool) -> None:
    calls = [drawn((2, 3, *size), (2, 4, 6), torch.float64) for size in SIZES]
    check(sampler(mode, padding, align), calls)


@pytest.mark.parametrize(
    ("mode", "padding", "align"), [case for case in CASES if case[0] != "bicubic"]
)
def test_volumes(mode: str, padding: str, align: bool) -> None:
    check(sampler(mode, padding, align), [drawn((2, 3, 4, 5, 3), (2, 2, 3, 4), torch.float64)])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("padding", PADDINGS)
def test_places_that_are_no_numbers(mode: str, padding: str) -> None:
    """Nothing outside of the image is read, wherever the grid looks. Linear and cubic samples are
    no numbers then unless the place was moved to the border."""
    x, grid = drawn((1, 2, 4, 5), (1, 2, 3), torch.float64)
    grid[0, 0, :, 0] = torch.tensor([math.nan, math.inf, -math.inf])
    grid[0, 1, :2, 1] = torch.tensor([1e30, -1e30])
    (found,) = evaluated(sampler(mode, padding, False), [(x, grid)])
    assert found[0, :, 1, 2].isfinite().all()
    if mode == "nearest":
        assert found.isfinite().all()
    if padding == "zeros" and mode != "bicubic":
        assert not found[0, :, 1, :2].any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_other_types(dtype: torch.dtype) -> None:
    """Halves are computed in fp32, by weights that have not been rounded."""
    function = sampler("bilinear", "border", False)
    x, grid = drawn((2, 3, 5, 7), (2, 4, 6), dtype)
    (found,) = evaluated(function, [(x, grid)])
    wanted = function(x.double(), grid.double()).to(dtype)
    torch.testing.assert_close(
        found, wanted, rtol=1.6e-2 if dtype == torch.bfloat16 else 2e-3, atol=1e-3
    )


class Deformable(nn.Module):
    """Sums weighted samples of each head, as deformable attention does."""

    def __init__(self, height: int, width: int) -> None:
        super().__init__()
        self.height, self.width = height, width

    def forward(self, values: Tensor, grid: Tensor, weights: Tensor) -> Tensor:
        batch, _, heads, width = values.shape
        images = values.permute(0, 2, 3, 1).reshape(batch * heads, width, self.height, self.width)
        found = F.grid_sample(images, 2 * grid - 1, align_corners=False)
        summed = (found * weights.transpose(1, 2).flatten(0, 1)[:, None]).sum(-1)
        return summed.view(batch, heads * width, -1).transpose(1, 2)


def arguments() -> list[Tensor]:
    torch.manual_seed(0)
    weights = torch.rand(2, 7, 2, 3).softmax(-1)
    return [torch.randn(2, 20, 2, 8), torch.rand(4, 7, 3, 2) * 1.2 - 0.1, weights]


@pytest.mark.parametrize("way", ["c++", "triton"])
def test_deformable_attention_is_one_kernel(way: str, tmp_path: Path) -> None:
    """Places, weights and the sum share the kernel that looks up, channels innermost."""
    module, given = Deformable(4, 5).eval(), arguments()
    options = strop.Options(cache_dir=str(tmp_path), strict=True)
    with torch.no_grad():
        wanted = module(*(x.double() for x in given))
        eager = module(*given)
        with interpreted(triton=True) if way == "triton" else contextlib.nullcontext():
            optimized = strop.optimize(Deformable(4, 5).eval(), options=options)
            assert_as_accurate_as_eager(optimized(*given), eager, wanted)
    assert optimized.forward.counters.launches == 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_deformable_attention_on_a_gpu(dtype: torch.dtype, tmp_path: Path) -> None:
    given = [x.to("cuda", dtype) for x in arguments()]
    plain, fast = Deformable(4, 5).eval(), Deformable(4, 5).eval()
    strop.optimize(fast, options=strop.Options(cache_dir=str(tmp_path), strict=True))
    with torch.no_grad():
        wanted, eager = plain(*(x.double() for x in given)), plain(*given)
        for _ in range(3):
            assert_as_accurate_as_eager(fast(*given), eager, wanted)
    assert not fast.forward.counters.fallbacks


@pytest.mark.parametrize("is_last", [False, True])
@pytest.mark.parametrize("way", ["c++", "triton"])
def test_in_kernels(way: str, is_last: bool, tmp_path: Path) -> None:
    def sampled(x: Tensor, grid: Tensor) -> list[Tensor]:
        return [sampler(*case)(x, grid) for case in FEW]

    module = Function(sampled).eval()
    x, grid = drawn((2, 8, 5, 7), (2, 3, 5), torch.float32)
    x = x.contiguous(memory_format=torch.channels_last) if is_last else x
    options = strop.Options(cache_dir=str(tmp_path), strict=True)
    with torch.no_grad():
        wanted, eager = sampled(x.double(), grid.double()), sampled(x, grid)
        with interpreted(triton=True) if way == "triton" else contextlib.nullcontext():
            found = strop.optimize(module, options=options)(x, grid)
    for got, want, exact in zip(found, eager, wanted, strict=True):
        assert_as_accurate_as_eager(got, want, exact)


def test_cudnns_operator_has_the_pixels_of_aligned_corners() -> None:
    """It cannot run here; its trace can."""
    x, grid = drawn((2, 3, 5, 7), (2, 4, 6), torch.float64)
    (found,) = evaluated(torch.cudnn_grid_sampler, [(x, grid)])
    wanted = F.grid_sample(x, grid, align_corners=True)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


def test_gradients_of_cudnns_operator_have_shapes() -> None:
    with FakeTensorMode():
        x, grid = torch.empty(2, 3, 5, 7, requires_grad=True), torch.empty(2, 4, 6, 2)
        grid.requires_grad_()
        torch.cudnn_grid_sampler(x, grid).sum().backward()
        assert x.grad is not None
        assert (x.grad.shape, x.grad.stride()) == (x.shape, x.stride())
        assert grid.grad is not None
        assert (grid.grad.shape, grid.grad.stride()) == (grid.shape, grid.stride())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("align", [False, True])
def test_training_on_a_gpu(dtype: torch.dtype, align: bool, tmp_path: Path) -> None:
    function = sampler("bilinear", "zeros", align)
    given = [t.cuda() for t in drawn((2, 8, 5, 7), (2, 3, 5), dtype)]
    module = strop.optimize(
        Function(function), train=True, options=strop.Options(cache_dir=str(tmp_path), strict=True)
    )

    def gradients(call: Callable[..., Tensor], wide: bool) -> list[Tensor]:
        own = [(t.double() if wide else t).clone().requires_grad_() for t in given]
        call(*own).square().mean().backward()
        return [t.grad for t in own if t.grad is not None]

    exact = gradients(function, wide=True)
    pairs = zip(gradients(module, wide=False), gradients(function, wide=False), exact, strict=True)
    for found, eager, wanted in pairs:
        assert_as_accurate_as_eager(found, eager, wanted)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("align", [False, True])
def test_on_a_gpu(dtype: torch.dtype, align: bool, tmp_path: Path) -> None:
    """With corners aligned torch asks cuDNN, of which a trace has another operator."""
    function = sampler("bilinear", "zeros", align)
    x, grid = (t.cuda() for t in drawn((2, 8, 5, 7), (2, 3, 5), dtype))
    module = strop.optimize(
        Function(function).eval(), options=strop.Options(cache_dir=str(tmp_path), strict=True)
    )
    with torch.no_grad():
        wanted = function(x.double(), grid.double())
        assert_as_accurate_as_eager(module(x, grid), function(x, grid), wanted)


@pytest.mark.parametrize(
    ("channels", "is_last", "is_ours"), [(16, True, True), (3, True, False), (16, False, False)]
)
def test_which_samples_are_chosen_on_a_cpu(channels: int, is_last: bool, is_ours: bool) -> None:
    """ATen's call is faster where no vector of channels lies side by side."""
    x, grid = drawn((2, channels, 8, 9), (2, 4, 6), torch.float32)
    if is_last:
        x = x.contiguous(memory_format=torch.channels_last)
    module = Function(sampler("bilinear", "zeros", False)).eval()
    expected = module(x, grid)
    strop.optimize(module)
    torch.testing.assert_close(module(x, grid), expected)
    (graph,) = strop.explain(module).graphs
    assert (graph.num_compiled_nodes == graph.num_nodes) == is_ours
