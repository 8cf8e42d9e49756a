"""Convolutions of few channels: the kernel in the interpreter and the compiler, and the whole."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import strop
from strop.ir.dims import const, symbol
from strop.ir.graph import Node
from strop.ir.source import KernelSource
from strop.kernels.conv.narrow import HALVES, of_node, reads_pieces
from strop.options import Options
from strop.runtime.run.narrow_convolution import NarrowConvolution
from strop.testing import assert_as_accurate_as_eager
from tests.codegen.test_triton_compile import compiled, resources

pytest.importorskip("triton")
from strop.codegen.triton_interpreter import interpret

# channels in and out, window, stride, padding
STEM = (3, 24, (7, 7), (2, 2), (3, 3))
FIRST = (4, 72, (3, 3), (1, 1), (1, 1))
LAST = (64, 3, (3, 3), (1, 1), (1, 1))
UNEVEN = (1, 17, (2, 5), (3, 1), (0, 2))
CASES = (STEM, FIRST, LAST, UNEVEN, (128, 4, (1, 3), (1, 2), (0, 1)))
Case = tuple[int, int, tuple[int, int], tuple[int, int], tuple[int, int]]


def node_of(case: Case, dtype: torch.dtype = torch.float16, **changes: Any) -> Node:
    ins, outs, size, stride, padding = case
    sizes = tuple(map(symbol, "bhw"))
    x = Node("input", (), {}, (sizes[0], const(ins), *sizes[1:]), dtype)
    weight = Node("input", (), {}, tuple(map(const, (outs, ins, *size))), dtype)
    attrs = {"stride": stride, "padding": padding, "dilation": (1, 1), "groups": 1} | changes
    return Node("conv2d", (x, weight), attrs, (sizes[0], const(outs), *sizes[1:]), dtype)


def source_of(case: Case, dtype: torch.dtype = torch.float16) -> KernelSource:
    source = of_node(node_of(case, dtype))
    assert source is not None
    return source


class Interpreted:
    """Stands where a GPU's kernels are built and bound."""

    def __init__(self) -> None:
        self.num_launches = 0
        self.tensors: list[Tensor] = []

    def build(self, sources: Sequence[KernelSource]) -> None:
        pass

    def bind(
        self, source: KernelSource, pointers: Sequence[int], scalars: Sequence[int], stream: int
    ) -> Interpreted:
        self.source, self.scalars = source, {f"s{i}": n for i, n in enumerate(scalars)}
        return self

    def set_pointer(self, place: int, pointer: int) -> None:
        assert self.tensors[place].data_ptr() == pointer

    def __call__(self) -> None:
        self.num_launches += 1
        interpret(self.source, self.tensors, self.scalars)


def run(case: Case, x: Tensor, weight: Tensor) -> tuple[Tensor, int]:
    """The result of the step, and how often the kernel ran."""
    *_, stride, padding = case
    kernels = Interpreted()

    def library(inputs: Sequence[Tensor], out: Tensor) -> None:
        out.copy_(F.conv2d(*inputs, stride=stride, padding=padding))

    shape = F.conv2d(x, weight, stride=stride, padding=padding).shape
    out = torch.empty(shape, dtype=x.dtype).to(memory_format=torch.channels_last)
    call = NarrowConvolution(source_of(case, x.dtype), library, kernels, 0)  # type: ignore[arg-type]
    kernels.tensors = [x, weight, out]
    call([x, weight], out)
    return out, kernels.num_launches


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
    for odd in (x.contiguous(), moved.copy_(x)):
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


@pytest.mark.parametrize(
    ("case", "changes", "is_ours"),
    [
        (STEM, {}, True),
        (LAST, {}, True),
        (STEM, {"groups": 3}, False),
        (STEM, {"dilation": (2, 2)}, False),
        ((5, 64, (3, 3), (1, 1), (1, 1)), {}, False),
        ((3, 768, (16, 16), (16, 16), (0, 0)), {}, False),  # too deep
        ((3, 4, (3, 3), (1, 1), (1, 1)), {}, False),  # few on both sides
        ((96, 3, (3, 3), (1, 1), (1, 1)), {}, False),
        ((64, 64, (3, 3), (1, 1), (1, 1)), {}, False),
    ],
    ids=str,
)
def test_which_convolutions(case: Case, changes: dict[str, Any], is_ours: bool) -> None:
    assert (of_node(node_of(case, **changes)) is not None) == is_ours
    assert of_node(node_of(case, torch.float32, **changes)) is None


def test_which_read_pieces() -> None:
    assert [reads_pieces(source_of(case)) for case in (STEM, FIRST, LAST)] == [False, False, True]


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
    takes = NarrowConvolution._bind

    def bind(self: NarrowConvolution, x: Tensor, out: Tensor) -> Any:
        seen.append(self._source.name)
        return takes(self, x, out)

    monkeypatch.setattr(NarrowConvolution, "_bind", bind)
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
        assert seen == ["narrow_conv"] * len(seen)
        assert len(seen) >= 2 * len(inputs)
        strop.restore(module)
        strop.optimize(module, options=Options(strict=True, narrow_conv=False))
        seen.clear()
        assert_as_accurate_as_eager(module(inputs[0]), *wanted[0])
        assert not seen
