"""Convolutions on a CPU by a kernel of ours, against fp64 and eager."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import strop
from strop.ir.device import CPU
from strop.kernels import library
from strop.kernels.conv import conv_cpu
from strop.kernels.gemm import linear_cpu
from strop.kernels.kernel import NUM_FETCHED, Launch, Problem, Stride
from strop.options import Options
from strop.runtime.build.cache import DiskCache
from strop.runtime.build.native import BoundNativeKernel, NativeKernels
from strop.runtime.build.processors import processor
from strop.runtime.run.launched_calls import has_pixels
from strop.testing import assert_as_accurate_as_eager
from tests.kernels.cpu_programs import run_while_weights_change

HAS_AVX = torch.backends.cpu.get_cpu_capability().startswith("AVX")
needs_avx = pytest.mark.skipif(not HAS_AVX, reason="has vectors of AVX")
MEASURED = replace(CPU, isa=linear_cpu.WITH_BF16)
TYPES = [torch.float32, torch.bfloat16]
LAST = torch.channels_last
# picture, channels out, window, and stride, padding, dilation: parts of channels and what is left
# of them, all heights and widths of tiles, few columns, windows that are larger than the picture
CASES: list[Any] = [
    ((2, 64, 5, 7), 64, (3, 3), 1, 1, 1),
    ((1, 34, 6, 5), 70, (3, 3), 2, 1, 1),
    ((3, 4, 4, 4), 17, (3, 3), 1, 1, 1),
    ((2, 32, 5, 6), 4, (3, 3), 1, 1, 1),
    ((1, 64, 3, 3), 3, (3, 3), (1, 2), 1, 2),
    ((2, 8, 9, 9), 3, (2, 5), (2, 1), (1, 2), 1),
    ((1, 20, 8, 7), 33, (1, 1), 1, 0, 1),
    ((1, 6, 2, 1), 5, (5, 5), 1, 2, 1),
    ((1, 2, 12, 70), 130, (3, 3), 1, (2, 1), (2, 1)),
    ((1, 272, 1, 9), 48, (1, 3), 1, (0, 1), 1),
    ((2, 4, 20, 21), 20, (8, 8), 3, 4, 1),
]


def convolved(
    kernels: NativeKernels, x: Tensor, weight: Tensor, bias: Tensor | None, attrs: dict[str, Any]
) -> Tensor:
    given = [x, weight] if bias is None else [x, weight, bias]
    shapes = tuple(tuple(t.shape) for t in given)
    problem = Problem("conv2d", tuple(sorted(attrs.items())), shapes, x.dtype)
    assert conv_cpu.supports(problem.call, MEASURED) == ""
    launches = conv_cpu.launch(problem, MEASURED)
    assert launches is not None
    (part,) = launches.parts
    assert isinstance(part, Launch)
    batch, outs, rows, columns = launches.result
    room = torch.full((batch, rows, columns, outs + 2), 7.0, dtype=x.dtype)
    out = room[..., :-2].permute(0, 3, 1, 2)
    assert has_pixels(x.shape, x.stride())
    assert has_pixels(out.shape, out.stride())
    tensors = [x, weight, out, *given[2:]]
    scalars = [
        tensors[each.operand].stride(each.dim) if isinstance(each, Stride) else each
        for each in part.scalars
    ]
    kernels.build([part.source])[part.source].bind([t.data_ptr() for t in tensors], scalars)()
    assert bool((room[..., -2:] == 7).all())
    return out


def pair(value: Any) -> tuple[int, int]:
    return value if isinstance(value, tuple) else (value, value)


@pytest.fixture(scope="module", params=["", "cpu-v3"])
def target(request: Any) -> str:
    """This processor, and one with AVX2 alone."""
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def kernels(target: str, tmp_path_factory: pytest.TempPathFactory) -> NativeKernels:
    return NativeKernels(DiskCache(tmp_path_factory.mktemp("kernels")), target=target)


def operands(case: Any, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, dict[str, Any]]:
    """Return a picture whose pixels lie apart, between numbers that nothing may read."""
    (batch, ins, height, width), outs, window, stride, padding, dilation = case
    torch.manual_seed(outs)
    room = torch.full((batch, height, width, ins + 4), torch.nan)
    room[..., 2:-2] = torch.randn(batch, height, width, ins)
    x = room.to(dtype)[..., 2:-2].permute(0, 3, 1, 2)
    weight = (torch.randn(outs, ins, *window) / ins**0.5).to(dtype)
    attrs = {"stride": pair(stride), "padding": pair(padding), "dilation": pair(dilation)}
    return x, weight, torch.randn(outs).to(dtype), {**attrs, "groups": 1}


@needs_avx
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_against_fp64(kernels: NativeKernels, target: str, case: Any, dtype: torch.dtype) -> None:
    if not linear_cpu.can_multiply(dtype, processor(target).isa):
        pytest.skip("pairs of bf16 are for processors that multiply them")
    x, weight, bias, attrs = operands(case, dtype)
    gaps = torch.zeros(*weight.shape[:3], weight.shape[3] + 1, dtype=dtype)[..., :-1]
    for w in (weight, weight.contiguous(memory_format=LAST), gaps.copy_(weight)):
        for b in (bias, None):
            exact = F.conv2d(x.double(), w.double(), None if b is None else b.double(), **attrs)
            eager = F.conv2d(x, w, b, **attrs)
            assert_as_accurate_as_eager(convolved(kernels, x, w, b, attrs), eager, exact)


@needs_avx
def test_pictures_and_threads_do_not_count(kernels: NativeKernels) -> None:
    x, weight = torch.randn(5, 20, 13, 11).contiguous(memory_format=LAST), torch.randn(70, 20, 3, 3)
    attrs = {"stride": (1, 1), "padding": (1, 1), "dilation": (1, 1), "groups": 1}
    full = torch.get_num_threads()
    try:
        found = []
        for threads in (1, 3):
            torch.set_num_threads(threads)
            found.append(convolved(kernels, x, weight, None, attrs).clone())
    finally:
        torch.set_num_threads(full)
    assert torch.equal(*found)
    assert torch.equal(found[0][1:3], convolved(kernels, x[1:3], weight, None, attrs))


@needs_avx
@pytest.mark.parametrize("outs", [3, 20])
def test_what_is_not_finite_stays_where_it_is(kernels: NativeKernels, outs: int) -> None:
    """It does not leave its windows, and padding is no product with it."""
    x = torch.ones(1, 32, 6, 6).contiguous(memory_format=LAST)
    weight = torch.ones(outs, 32, 3, 3)
    x[0, 3, 0, 0], weight[0, 5, 2, 2] = torch.nan, torch.inf
    attrs = {"stride": (1, 1), "padding": (1, 1), "dilation": (1, 1), "groups": 1}
    found = convolved(kernels, x, weight, None, attrs)
    eager = F.conv2d(x.double(), weight.double(), **attrs).float()
    torch.testing.assert_close(found, eager, rtol=1e-6, atol=0, equal_nan=True)


class Convolutions(nn.Module):
    """Makes pictures of other sizes of pictures, of which one is contiguous."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.down = nn.Conv2d(4, 32, 3, padding=1), nn.Conv2d(32, 48, 3, 2, 1)
        self.last = nn.Conv2d(48, 4, 3, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.last(self.down(self.first(x).sin()).cos())
        return found


@pytest.mark.skipif(not processor().has_bf16, reason="was measured with BF16 alone")
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_in_a_program(dtype: torch.dtype, tmp_path: Any) -> None:
    """All sizes share a graph, calls are bound as kernels are, and weights are never stale."""
    torch.manual_seed(0)
    inputs = (torch.randn(2, 4, side, 6).to(dtype) for side in (8, 5, 12, 8))
    module, bound = run_while_weights_change(Convolutions, dtype, inputs, tmp_path)
    assert {choice.kernel for choice in bound.plan.choices.values()} == {conv_cpu.NAME}
    assert bound.straight(list) is not None  # nothing but kernels
    assert strop.explain(module).num_graphs == 1


@pytest.mark.skipif(not processor().has_bf16, reason="was measured with BF16 alone")
def test_the_next_weight_is_fetched(tmp_path: Any) -> None:
    """Each kernel is told of the first part of the next one's weight, if that lies so."""
    module = Convolutions().eval()
    module.last.weight.data = module.last.weight.data.contiguous(memory_format=LAST)
    strop.optimize(module, options=Options(cache_dir=str(tmp_path), strict=True))
    with torch.no_grad():
        module(torch.randn(2, 4, 8, 6))
    dispatcher: Any = module.forward
    linked = dispatcher.shapes.entries[0].bounds[0]._linked
    count = len(conv_cpu.source(torch.float32).scalars)
    bound = [step for step in linked.steps if isinstance(step, BoundNativeKernel)]
    told = [[*step.scalars][-NUM_FETCHED:] for step in bound if len(step.scalars) == count]
    down = module.down.weight
    assert told == [[down.data_ptr(), 4 * 32 * 9, 4 * 16 * 9, 48], [0] * 4, [0] * 4]


def problem(dtype: torch.dtype, weight: Any = (64, 64, 3, 3), **other: Any) -> Problem:
    places = {"stride": (1, 1), "padding": (1, 1), "dilation": (1, 1), "groups": 1, **other}
    return Problem("conv2d", tuple(sorted(places.items())), ((2, weight[1], 16, 24), weight), dtype)


def test_choices() -> None:
    for dtype in TYPES:
        asked = problem(dtype)
        assert library.select(asked.call, asked, MEASURED, ()).kernel == conv_cpu.NAME
        other = replace(MEASURED, isa="neon")  # was not measured
        assert library.select(asked.call, asked, other, ()).kernel == "torch"
    small = {dtype: problem(dtype, (64, 16, 3, 3)) for dtype in TYPES}
    for isa in ("avx2", "avx512"):  # which lack the instructions for bf16
        device = replace(MEASURED, isa=isa)
        names = {dtype: library.select(p.call, p, device, ()).kernel for dtype, p in small.items()}
        assert names == {torch.float32: conv_cpu.NAME, torch.bfloat16: "torch"}
    none = problem(torch.float32, (8, 64, 30, 3))
    assert conv_cpu.cost_us(none, MEASURED) == conv_cpu.NEVER
    assert conv_cpu.launch(none, MEASURED) is None


def test_reasons() -> None:
    for asked, why in (
        (problem(torch.float32), ""),
        (problem(torch.float16), "fp32 and bf16"),
        (problem(torch.float32, groups=2), "one group"),
        (problem(torch.float32, (8, 64, 9, 9)), "64 pixels"),
        (problem(torch.bfloat16, (8, 63, 3, 3)), "even"),
        (replace(problem(torch.float32), shapes=((1, 3, 9), (4, 3, 3))), "(O, C, h, w)"),
    ):
        found = conv_cpu.supports(asked.call, MEASURED)
        assert why in found
        assert bool(why) == bool(found)
    assert "AVX2" in conv_cpu.supports(problem(torch.float32).call, CPU)


def test_pixels() -> None:
    base = torch.empty(2, 6, 4, 5).contiguous(memory_format=LAST)
    dense = (base, base[:, 1:4], base[:1], base[:, :, :, :1][:1, :, :1], base[:, :1])
    assert all(has_pixels(x.shape, x.stride()) for x in dense)
    others = (torch.empty(2, 6, 4, 5), base[:, ::2], base[..., 1:], base[:, :, ::2])
    assert not any(has_pixels(x.shape, x.stride()) for x in others)
