"""Convolutions of few channels: the kernel in the interpreter and the compiler, and the whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import strop
from strop.ir.device import CPU, Device
from strop.ir.source import KernelSource
from strop.kernels import library
from strop.kernels.conv.narrow import HALVES, ROW
from strop.kernels.kernel import FASTEST, RESULT, Call, Launch, Lies, Stride
from strop.options import Options
from strop.runtime.build.loader import CudaLoader
from strop.testing import assert_as_accurate_as_eager
from tests.codegen.test_triton_compile import compiled, resources
from tests.gpus import A100, H100, RTX_5090
from tests.kernels.interpreted import Interpreted
from tests.kernels.launching import call, launched, problem

pytest.importorskip("triton")

# channels in and out, window, stride, padding
STEM = (3, 24, (7, 7), (2, 2), (3, 3))
FIRST = (4, 72, (3, 3), (1, 1), (1, 1))
LAST = (64, 3, (3, 3), (1, 1), (1, 1))
UNEVEN = (1, 17, (2, 5), (3, 1), (0, 2))
CASES = (STEM, FIRST, LAST, UNEVEN, (128, 4, (1, 3), (1, 2), (0, 1)))
Case = tuple[int, int, tuple[int, int], tuple[int, int], tuple[int, int]]


def attrs_of(case: Case) -> Mapping[str, Any]:
    *_, stride, padding = case
    return {"stride": stride, "padding": padding, "dilation": (1, 1), "groups": 1}


def call_of(case: Case, dtype: torch.dtype = torch.float16, **changes: Any) -> Call:
    ins, outs, size, *_ = case
    shapes = ("b", ins, "h", "w"), (outs, ins, *size)
    return call("conv2d", *shapes, dtype=dtype, **{**attrs_of(case), **changes})


def source_of(case: Case, dtype: torch.dtype = torch.float16) -> KernelSource:
    (source,) = ROW.forms(call_of(case, dtype), H100)
    return source


def run(case: Case, x: Tensor, weight: Tensor) -> tuple[Tensor, int]:
    """The result of the step, and how often the kernel ran."""
    *_, stride, padding = case
    kernels = Interpreted()

    def library(inputs: Sequence[Tensor], out: Tensor) -> None:
        out.copy_(F.conv2d(*inputs, stride=stride, padding=padding))

    shape = F.conv2d(x, weight, stride=stride, padding=padding).shape
    out = torch.full(shape, float("nan"), dtype=x.dtype).to(memory_format=torch.channels_last)
    for tensor in (x, weight, out):
        kernels.known(tensor)
    asked = problem("conv2d", x.shape, weight.shape, dtype=x.dtype, **attrs_of(case))
    launched(ROW.launch(asked, H100), kernels).writing(library)([x, weight], out)
    assert set(kernels.ran) <= {"narrow_conv"}
    return out, len(kernels.ran)


def operands(case: Case, size: tuple[int, int, int], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    ins, outs, window, *_ = case
    batch, height, width = size
    x = torch.randn(batch, ins, height, width).to(dtype).to(memory_format=torch.channels_last)
    weight = torch.randn(outs, ins, *window) * (ins * window[0] * window[1]) ** -0.5
    return x, weight.to(dtype).to(memory_format=torch.channels_last)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_as_accurate_as_torch(case: Case) -> None:
    """In fp16: Triton's interpreter multiplies bf16 as if it were integers."""
    x, weight = operands(case, (2, 11, 13), torch.float16)
    *_, stride, padding = case
    found, launches = run(case, x, weight)
    truth = F.conv2d(x.double(), weight.double(), stride=stride, padding=padding)
    eager = F.conv2d(x, weight, stride=stride, padding=padding)
    assert_as_accurate_as_eager(found, eager, truth)
    assert launches == 1


def test_the_first_layer_reads_any_strides() -> None:
    x, weight = operands(FIRST, (2, 9, 7), torch.float16)
    wanted, _ = run(FIRST, x, weight)
    for other in (x.contiguous(), x.repeat(1, 2, 1, 1)[:, :4], x.mT.contiguous().mT):
        found, launches = run(FIRST, other, weight)
        assert launches == 1
        assert torch.equal(found, wanted)


def test_the_library_does_what_does_not_lie_right() -> None:
    x, weight = operands(LAST, (1, 6, 5), torch.float16)
    wanted, launches = run(LAST, x, weight)
    assert launches == 1
    moved = torch.empty(x.numel() + 1, dtype=x.dtype)[1:].as_strided(x.shape, x.stride())
    # rows of 72 channels begin at multiples of 16 bytes, but not of 16 numbers
    wider = torch.empty(1, 72, 6, 5, dtype=x.dtype).to(memory_format=torch.channels_last)[:, :64]
    for odd in (x.contiguous(), moved.copy_(x), wider.copy_(x)):
        found, launches = run(LAST, odd, weight)
        assert launches == 0
        torch.testing.assert_close(found, wanted)
    found, launches = run(LAST, x, weight.contiguous())
    assert launches == 0
    torch.testing.assert_close(found, wanted)


def test_nothing_of_a_neighbour() -> None:
    """What lies beside a row, or behind the last channel, has no share, be it NaN."""
    x, weight = operands(FIRST, (1, 5, 6), torch.float16)
    wanted, _ = run(FIRST, x, weight)
    around = torch.full((3, 8, 9, 12), float("nan"), dtype=x.dtype)
    inner = around[1:2, 2:6, 2:7, 3:9].copy_(x)
    assert torch.equal(run(FIRST, inner, weight)[0], wanted)


CHANNELS = "is for up to 4 channels in or out"


@pytest.mark.parametrize(
    ("case", "changes", "reason"),
    [
        (STEM, {}, ""),
        (LAST, {}, ""),
        (STEM, {"groups": 3}, "wants known weights, one group and no dilation"),
        (STEM, {"dilation": (2, 2)}, "wants known weights, one group and no dilation"),
        ((5, 64, (3, 3), (1, 1), (1, 1)), {}, CHANNELS),
        ((3, 768, (16, 16), (16, 16), (0, 0)), {}, CHANNELS),  # too deep
        ((3, 4, (3, 3), (1, 1), (1, 1)), {}, CHANNELS),  # few on both sides
        ((96, 3, (3, 3), (1, 1), (1, 1)), {}, CHANNELS),
        ((64, 64, (3, 3), (1, 1), (1, 1)), {}, CHANNELS),
    ],
    ids=str,
)
def test_which_convolutions(case: Case, changes: dict[str, Any], reason: str) -> None:
    for device in (A100, H100, RTX_5090):
        assert ROW.supports(call_of(case, **changes), device) == reason
        assert ROW.supports(call_of(case, torch.bfloat16, **changes), device) == reason
        single = ROW.supports(call_of(case, torch.float32, **changes), device)
        assert single == "computes a convolution without bias in fp16 or bf16"
    assert ROW.supports(call_of(case, **changes), CPU) == "runs on GPUs"


def test_a_bias_and_unknown_weights_are_the_librarys() -> None:
    given = (("b", 3, "h", "w"), (24, 3, 7, 7), (24,))
    assert "without bias" in ROW.supports(call("conv2d", *given, **attrs_of(STEM)), H100)
    given = (("b", 3, "h", "w"), ("n", 3, 7, 7))
    assert "known weights" in ROW.supports(call("conv2d", *given, **attrs_of(STEM)), H100)


@pytest.mark.parametrize("device", [A100, H100, RTX_5090], ids=lambda device: device.name)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_it_runs_anywhere_at_all_sizes(case: Case, device: Device) -> None:
    """By one kernel, which is known before."""
    for sizes in ({"b": 1, "h": 16, "w": 16}, {"b": 7, "h": 511, "w": 33}):
        asked = call_of(case)
        choice = library.select(asked, asked.at(sizes), device)
        assert (choice.kernel, choice.cost_us) == ("narrow_conv", FASTEST)
        assert choice.sources == tuple(library.forms(asked, device))
        assert dict(choice.beaten)["cudnn"] > 0


def test_which_read_pieces() -> None:
    """Channels that lie behind each other, 16 bytes at once."""
    found = []
    for case in (STEM, FIRST, LAST):
        ins, outs, size, *_ = case
        asked = problem("conv2d", (2, ins, 9, 8), (outs, ins, *size), **attrs_of(case))
        launches = ROW.launch(asked, H100)
        assert launches is not None
        (part,) = launches.parts
        assert isinstance(part, Launch)
        assert [operand.number for operand in part.operands] == [0, 1, RESULT]
        assert {operand.order for operand in part.operands} == {(0, 2, 3, 1)}
        assert [operand.lies for operand in part.operands[1:]] == [Lies.DENSE] * 2
        # batch, channel, height and width of the picture as the kernel reads it: channels last
        assert part.scalars[5:] == tuple(Stride(0, dim) for dim in (0, 3, 1, 2))
        found.append(part.operands[0].lies)
    assert found == [Lies.ANYHOW, Lies.ANYHOW, Lies.ROWS]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_sizes_of_the_result(case: Case) -> None:
    ins, outs, size, stride, padding = case
    for sides in ((11, 13), (8, 8), (17, 6)):
        asked = problem("conv2d", (2, ins, *sides), (outs, ins, *size), **attrs_of(case))
        launches = ROW.launch(asked, H100)
        assert launches is not None
        (part,) = launches.parts
        assert isinstance(part, Launch)
        x, weight = torch.empty(2, ins, *sides), torch.empty(outs, ins, *size)
        *_, height, width = F.conv2d(x, weight, stride=stride, padding=padding).shape
        assert part.scalars[:5] == (2 * height * width, height * width, width, *sides)


@pytest.mark.parametrize("arch", [80, 86, 89, 90, 100, 120])
@pytest.mark.parametrize("case", [STEM, (320, 4, *FIRST[2:])], ids=str)
def test_compiles(case: Case, arch: int, tmp_path: Path) -> None:
    cubin = compiled(source_of(case), arch)
    assert cubin.shared <= 99 * 1024
    if arch in (80, 90):
        assert resources(cubin, tmp_path)[1] == 0  # nothing spilled


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 64, 7, 2, 3)
        self.last = nn.Conv2d(64, 3, 3, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.first(x)))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_on_a_gpu(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    module = Network().cuda().to(dtype).eval().requires_grad_(False)
    exact = Network().cuda().double()
    exact.load_state_dict(module.state_dict())
    seen: list[str] = []
    plain = CudaLoader.bind

    def bind(self: CudaLoader, source: KernelSource, *args: Any, **kwargs: Any) -> Any:
        seen.append(source.name)
        return plain(self, source, *args, **kwargs)

    monkeypatch.setattr(CudaLoader, "bind", bind)
    inputs = [
        torch.randn(b, 3, side, side, device="cuda", dtype=dtype)
        for b, side in ((1, 224), (2, 77), (3, 32))
    ]
    with torch.no_grad():
        wanted = [(module(x), exact(x.double())) for x in inputs]
        strop.optimize(module, options=Options(strict=True))
        for x, (eager, truth) in zip(inputs, wanted, strict=True):
            for _ in range(3):  # step by step, captured, replayed
                assert_as_accurate_as_eager(module(x), eager, truth)
        assert seen.count("narrow_conv") >= 2 * len(inputs)
        strop.restore(module)
        strop.optimize(module, options=Options(strict=True, kernels_off=("narrow_conv",)))
        seen.clear()
        assert_as_accurate_as_eager(module(inputs[0]), *wanted[0])
        assert "narrow_conv" not in seen
