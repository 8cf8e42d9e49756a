"""Kernels for calls that a trace makes are begun there, the same that the program asks for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from strop.backend import compile_graph
from strop.codegen.assemble import Signature
from strop.ir.dims import Expr
from strop.ir.source import KernelSource
from strop.options import Options
from strop.runtime.build.early import EarlyBuild
from strop.runtime.run import own_calls
from strop.stages.targets import families
from tests.frontend.tracing import trace_specs
from tests.gpus import H100

HALF = torch.float16
SIZES = {"b": 2, "h": 64, "w": 64}
BY_HAND = {  # kernels of an option
    "wgmma_gemm": {"wgmma_gemm"},
    "tma_attention": {"tma_attention", "cross_attention", "wgmma_attention"},
}
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


def foreseen(options: Options) -> tuple[set[KernelSource], set[KernelSource]]:
    """What a trace begins, and what of that kind the program runs at the traced sizes."""
    from strop.ir.tensor_spec import TensorSpec

    begun: list[KernelSource] = []
    module, cpu = Block().half(), torch.device("cpu")
    specs = [TensorSpec(("b", "4", "h", "w"), HALF, cpu), TensorSpec(("b", "77", "64"), HALF, cpu)]

    def call(*args: Tensor) -> Any:
        with EarlyBuild(begun.extend, families("cuda", options)):
            return module(*args)

    traced = trace_specs(module, call, specs, SIZES)
    assert len(begun) == len(set(begun))
    program = compile_graph(traced.graph, Signature(traced.returned, ()), "cuda", options).program
    steps, chosen = program.at(SIZES), own_calls.chosen(program, program.at(SIZES), sizes_of, H100)
    own = {n: each for n, each in chosen.items() if getattr(steps[n], "op", "") in CALLS}
    return set(begun), {source for each in own.values() for source in each.sources}


def sizes_of(exprs: tuple[Expr, ...]) -> tuple[int, ...]:
    return tuple(expr.eval(SIZES) for expr in exprs)


def names(sources: set[KernelSource]) -> set[str]:
    return {source.name for source in sources}


def test_the_same_as_the_program_asks_for() -> None:
    """Linears are merged, or become something else: their kernels may be others, of few."""
    begun, needed = foreseen(Options())
    assert names(needed) <= set().union(*BY_HAND.values())
    assert names(needed) >= {"wgmma_gemm", "cross_attention"}
    assert begun >= needed
    assert names(begun - needed) <= {"wgmma_gemm"}


@pytest.mark.parametrize("name", BY_HAND)
def test_only_what_is_on(name: str) -> None:
    given: dict[str, Any] = {name: False}
    begun, needed = foreseen(Options(**given))
    assert begun >= needed
    assert not names(begun) & BY_HAND[name]
    if name == "wgmma_gemm":
        assert begun == needed
        assert names(needed) == {"cross_attention"}


def test_other_calls_pass() -> None:
    """Text for a padding, another rank, sizes for which the library is faster; errors are torch's
    own."""
    begun: list[KernelSource] = []
    x = torch.empty(1, 64, 8, 8, dtype=HALF, device="meta")
    weight = torch.empty(64, 64, 3, 3, dtype=HALF, device="meta")
    with EarlyBuild(begun.extend, families("cuda", Options())):
        assert F.conv2d(x, weight, padding="same").shape == x.shape
        assert F.conv2d(input=x[0], weight=weight, padding=[1, 1]).shape == x.shape[1:]
        assert F.conv2d(x, weight, None, 1, 1).shape == x.shape
        with pytest.raises(TypeError, match="conv2d"):
            F.conv2d(x, weight, speed=2)  # type: ignore[call-arg]
    assert not begun
