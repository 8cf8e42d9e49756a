"""Convolutions of upsampled pictures, from the smaller ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import strop
from strop import passes
from strop.backend import compile_graph
from strop.codegen.assemble import Signature
from strop.ir.graph import Graph
from strop.ir.program import CallStep
from strop.kernels.gemm.rows import form_of, picture_of
from strop.kernels.gemm.tile import PLAIN
from strop.kernels.kernel import NEVER
from strop.kernels.library import select
from strop.options import Options
from strop.passes import run as run_passes
from strop.runtime.run import library_calls as calls
from strop.runtime.run.choices import call_of
from strop.runtime.run.library_calls import fold_taps, upsampled
from strop.testing import assert_as_accurate_as_eager
from tests.frontend.tracing import trace
from tests.gpus import H100
from tests.kernels.launching import problem
from tests.passes.ours import assert_needs_kernels_of_ours

HALF, WIDTH = torch.float16, 256


class Upsample(nn.Module):
    """As between two blocks of a UNet."""

    def __init__(
        self, outs: int = WIDTH, mode: str = "nearest", factor: float = 2.0, **how: Any
    ) -> None:
        super().__init__()
        self.conv = nn.Conv2d(WIDTH, outs, **({"kernel_size": 3, "padding": 1} | how))
        self.mode, self.factor = mode, factor

    def larger(self, x: Tensor) -> Tensor:
        return F.interpolate(F.silu(x), scale_factor=self.factor, mode=self.mode)

    def forward(self, x: Tensor) -> Any:
        return F.silu(self.conv(self.larger(x)))


class ReadTwice(Upsample):
    def forward(self, x: Tensor) -> Any:
        larger = self.larger(x)
        return F.silu(self.conv(larger)) + larger


class OneSide(Upsample):
    def larger(self, x: Tensor) -> Tensor:
        return F.interpolate(F.silu(x), scale_factor=(2.0, 1.0), mode="nearest")


def traced(
    module: nn.Module, device: str = "cuda", dtype: torch.dtype = HALF, **options: Any
) -> Graph:
    graph = trace(module.to(dtype), f"b {WIDTH} h w", dtype=dtype, b=2, h=4, w=6).graph
    return run_passes(graph, Options(**options), device)[0]


def found_in(graph: Graph) -> list[Any]:
    return [node for node in graph.nodes if node.op == "upsampled_conv2d"]


def test_the_larger_picture_is_never_made() -> None:
    graph = traced(Upsample(outs=320))
    (found,) = found_in(graph)
    x, taps = found.inputs
    assert [str(size) for size in x.shape] == ["b", "256", "h", "w"]
    assert [size.value for size in taps.shape] == [1280, 256, 2, 2]
    assert not [n for n in graph.nodes if n.op in ("expand", "take") and n.shape == found.shape]


@pytest.mark.parametrize(
    "module",
    [
        ReadTwice(),
        OneSide(),
        Upsample(factor=3.0),
        Upsample(mode="bilinear"),
        Upsample(outs=128),
        Upsample(outs=264),
        Upsample(stride=2),
        Upsample(groups=2),
        Upsample(padding=0),
        Upsample(dilation=2, padding=2),
        Upsample(kernel_size=5, padding=2),
    ],
    ids=[
        "read twice",
        "one side",
        "thrice",
        "bilinear",
        "narrow",
        "odd",
        "stride",
        "groups",
        "padding",
        "dilation",
        "window",
    ],
)
def test_other_convolutions_stay(module: nn.Module) -> None:
    assert not found_in(traced(module))


def test_where_kernels_of_ours_can_do_it() -> None:
    assert_needs_kernels_of_ours(
        "upsampled_conv", lambda *device, **how: found_in(traced(Upsample(), *device, **how))
    )
    graph = trace(Upsample().to(HALF), f"b {WIDTH} h w", dtype=HALF, b=2, h=4, w=6).graph
    assert not found_in(run_passes(graph, Options().in_training, "cuda")[0])


@pytest.mark.parametrize("sizes", [(1, 256, 1, 1), (2, 1280, 8, 8), (8, 512, 35, 41)], ids=str)
def test_a_kernel_does_it_at_all_sizes(sizes: tuple[int, ...]) -> None:
    taps = (4 * 320, sizes[1], 2, 2)
    asked = problem("upsampled_conv2d", sizes, taps)
    choice = select(asked.call, asked, H100)
    assert (choice.kernel, choice.beaten) == ("wgmma_gemm", (("cudnn", NEVER),))
    form, us = form_of(picture_of(asked), PLAIN, H100)
    assert form is not None
    assert us == choice.cost_us
    assert not form.product.has_parts
    assert form.num_tiles % 4 == 0


def test_its_steps() -> None:
    captured = trace(Upsample().to(HALF), f"b {WIDTH} h w", dtype=HALF, b=2, h=4, w=6)
    signature = Signature(captured.returned, ())
    program = compile_graph(captured.graph, signature, "cuda", Options()).program
    taps, conv = (step for step in program.steps if isinstance(step, CallStep))
    chosen = []
    for step in (taps, conv):
        call = call_of(program, step)
        chosen.append(select(call, call.at({"b": 2, "h": 32, "w": 32}), H100).kernel)
    assert chosen == ["folded_taps", "wgmma_gemm"]
    assert conv.inputs[1].buffer == taps.outputs[0]


def test_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU, by torch; a later weight is seen by the next call."""
    ran = list[str]()
    by_torch = {
        "folded_taps": lambda w: fold_taps(w.float()).to(w.dtype),
        "upsampled_conv2d": upsampled,
    }
    for name, function in by_torch.items():

        def heard(inputs: Any, name: str = name, function: Any = function) -> Tensor:
            ran.append(name)
            result: Tensor = function(*inputs)
            return result

        monkeypatch.setitem(calls.ALLOCATING, name, lambda attrs, heard=heard: heard)
    planned = passes.ONLY_ON | {"upsampled_conv": "cpu"}
    monkeypatch.setattr(passes, "ONLY_ON", planned)
    monkeypatch.setattr(Options, "on", lambda self, *, has_wgmma: self)
    torch.manual_seed(0)
    module = Upsample(outs=320).to(HALF).eval()
    eager, exact = Upsample(outs=320).to(HALF), Upsample(outs=320).double()
    optimized = strop.optimize(module, options=Options(strict=True))
    with torch.no_grad():
        for shape in ((2, WIDTH, 4, 6), (1, WIDTH, 3, 5), (1, WIDTH, 3, 5)):
            x = torch.randn(shape).to(HALF)
            eager.load_state_dict(module.state_dict())
            exact.load_state_dict(module.state_dict())
            assert_as_accurate_as_eager(optimized(x), eager(x), exact(x.double()))
            module.conv.weight.mul_(-1.5)
    assert ran == ["folded_taps", "upsampled_conv2d"] * 3


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("dtype", [HALF, torch.bfloat16], ids=str)
@pytest.mark.parametrize("outs", [WIDTH, 640])
def test_on_a_gpu(dtype: torch.dtype, outs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """By our kernels alone, at sizes whose boxes fit and do not; a later weight is seen."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs sm_90")
    for name in ("folded_taps", "upsampled_conv2d"):
        monkeypatch.setitem(calls.CUDA_PLANNED_OUT, name, lambda attrs: None)  # cannot be called
    torch.manual_seed(0)
    module = Upsample(outs=outs).cuda().to(dtype).eval().requires_grad_(False)
    eager, exact = Upsample(outs=outs).cuda().to(dtype), Upsample(outs=outs).cuda().double()
    optimized = strop.optimize(module, options=Options(strict=True))
    shapes = ((2, WIDTH, 32, 32), (1, WIDTH, 1, 1), (3, WIDTH, 9, 7), (1, WIDTH, 41, 130))
    with torch.no_grad():
        for shape in (*shapes, *shapes, *shapes[:2]):  # the second run of a shape is captured
            x = torch.randn(shape, device="cuda").to(dtype)
            eager.load_state_dict(module.state_dict())
            exact.load_state_dict(module.state_dict())
            assert_as_accurate_as_eager(optimized(x), eager(x), exact(x.double()))
            module.conv.weight.mul_(-1.01)
