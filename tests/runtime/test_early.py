"""Kernels for calls that a trace makes are begun there, the same that the program asks for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from strop.backend import compile_graph
from strop.codegen.assemble import Signature
from strop.ir.device import Device
from strop.ir.dims import Expr
from strop.ir.source import KernelSource
from strop.options import Options
from strop.runtime.build.early import EarlyBuild
from strop.runtime.run.choices import choices_of
from tests.frontend.tracing import trace_specs
from tests.gpus import A100, H100, RTX_5090

HALF = torch.float16
SIZES = {"b": 2, "h": 64, "w": 64}
GEMM, KEYS, NARROW = ("wgmma_gemm",), ("cross_attention",), ("narrow_conv",)
CALLS = ("conv2d", "attention")


class Block(nn.Module):
    """Convolutions with and without parts, one on a view, and both attentions of a UNet."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.same = nn.Conv2d(4, 320, 3, padding=1), nn.Conv2d(320, 320, 3, padding=1)
        self.deep = nn.Conv2d(320, 1280, 1)
        self.low = nn.Conv2d(1280, 1280, 3, padding=1)
        self.to_k = nn.Linear(64, 320)

    def forward(self, x: Tensor, words: Tensor) -> Tensor:
        x = self.same(F.silu(self.wide(x)))
        rows = x.flatten(2).transpose(1, 2).unflatten(-1, (8, 40)).transpose(1, 2)
        k = self.to_k(words).unflatten(-1, (8, 40)).transpose(1, 2)
        mixed = F.scaled_dot_product_attention(rows, k, k).transpose(1, 2).flatten(2)
        x = mixed.transpose(1, 2).unflatten(-1, (x.shape[2], x.shape[3]))
        return self.low(F.avg_pool2d(self.deep(x), 8))


def foreseen(
    options: Options, device: Device = H100
) -> tuple[set[KernelSource], set[KernelSource]]:
    """What a trace begins, and what of that kind the program runs at the traced sizes."""
    from strop.ir.tensor_spec import TensorSpec

    begun: list[KernelSource] = []
    module, cpu = Block().half(), torch.device("cpu")
    specs = [TensorSpec(("b", "4", "h", "w"), HALF, cpu), TensorSpec(("b", "77", "64"), HALF, cpu)]

    def call(*args: Tensor) -> Any:
        with EarlyBuild(begun.extend, device, options.kernels_off):
            return module(*args)

    traced = trace_specs(module, call, specs, SIZES)
    assert len(begun) == len(set(begun))
    program = compile_graph(traced.graph, Signature(traced.returned, ()), "cuda", options).program
    steps = program.at(SIZES)
    chosen = choices_of(program, steps, sizes_of, device)
    own = {n: each for n, each in chosen.items() if getattr(steps[n], "op", "") in CALLS}
    return set(begun), {source for each in own.values() for source in each.sources}


def sizes_of(exprs: tuple[Expr, ...]) -> tuple[int, ...]:
    return tuple(expr.eval(SIZES) for expr in exprs)


def names(sources: set[KernelSource]) -> set[str]:
    return {source.name for source in sources}


def test_the_same_as_the_program_asks_for() -> None:
    """Linears are merged, or become something else: their kernels may be others, of few."""
    begun, needed = foreseen(Options())
    assert names(needed) == {*GEMM, *KEYS, *NARROW}
    assert begun >= needed
    assert names(begun - needed) <= {*GEMM}


@pytest.mark.parametrize("off", [GEMM, KEYS, NARROW, (*GEMM, *KEYS)], ids=str)
def test_only_what_is_on(off: tuple[str, ...]) -> None:
    begun, needed = foreseen(Options(kernels_off=off))
    assert begun >= needed
    assert names(needed) == {*GEMM, *KEYS, *NARROW} - set(off)
    assert not names(begun) & set(off)
    if "wgmma_gemm" in off:
        assert begun == needed


@pytest.mark.parametrize("device", [A100, RTX_5090], ids=lambda device: device.name)
def test_only_what_runs_on_the_gpu(device: Device) -> None:
    begun, needed = foreseen(Options(), device)
    assert begun == needed
    assert names(begun) == {*NARROW}


def test_other_calls_pass() -> None:
    """Text for a padding, another rank, sizes for which the library is faster, keys of fewer dims;
    errors are torch's own."""
    begun: list[KernelSource] = []
    x = torch.empty(1, 64, 8, 8, dtype=HALF, device="meta")
    weight = torch.empty(64, 64, 3, 3, dtype=HALF, device="meta")
    q, k = (torch.empty(*shape, 40, dtype=HALF, device="meta") for shape in ((2, 8, 64), (77,)))
    with EarlyBuild(begun.extend, H100, ()):
        assert F.conv2d(x, weight, padding="same").shape == x.shape
        assert F.conv2d(input=x[0], weight=weight, padding=[1, 1]).shape == x.shape[1:]
        assert F.conv2d(x, weight, None, 1, 1).shape == x.shape
        assert F.linear(x[0, 0, 0], weight[:, 0, 0, 0][None, :8]).shape == (1,)
        assert F.scaled_dot_product_attention(q, k, k).shape == q.shape
        with pytest.raises(TypeError, match="conv2d"):
            F.conv2d(x, weight, speed=2)  # type: ignore[call-arg]
    assert not begun
