"""Which kernels are compiled to be launched before the one before them has ended."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from strop.backend import compile_graph
from strop.codegen.assemble import Signature
from strop.ir.source import KernelSource
from strop.options import Options
from tests.frontend.tracing import trace
from tests.gpus import H100


def norms(x: Tensor) -> tuple[Tensor, Tensor]:
    """A stitched GroupNorm, a row kernel and a pointwise one."""
    x = torch.nn.functional.silu(torch.nn.functional.group_norm(x, 4))
    return x, torch.softmax(x.flatten(1), 1)


class Builder:
    """Note which kernels are begun."""

    device = H100

    def __init__(self) -> None:
        self.begun: list[KernelSource] = []

    def begin(self, sources: Sequence[KernelSource]) -> None:
        self.begun.extend(sources)


@pytest.mark.parametrize("wanted", [True, False])
def test_the_option_decides_for_all_kernels_also_those_begun_before(wanted: bool) -> None:
    traced = trace(norms, "b 32 h w", b=2, h=8, w=8)
    builder = Builder()
    signature = Signature(traced.returned, traced.captured.guards)
    options = Options(early_launch=wanted)
    program = compile_graph(traced.graph, signature, "cuda", options, builder).program
    assert builder.begun
    assert set(builder.begun) <= set(program.sources)
    assert {dict(s.constants)["EARLY"] for s in program.sources} == {int(wanted)}


def test_each_kernel_is_begun_once() -> None:
    """Layers that are alike share a kernel, which is printed once and begun once."""

    def layers(x: Tensor, weight: Tensor) -> Tensor:
        for _ in range(3):
            x = torch.nn.functional.layer_norm(x, (32,)) @ weight
        return x

    traced = trace(layers, "b 32", "32 32", b=8)
    builder = Builder()
    signature = Signature(traced.returned, traced.captured.guards)
    program = compile_graph(traced.graph, signature, "cuda", Options(), builder).program
    assert len(program.kernel_steps) > len(builder.begun) > 0
    assert len(builder.begun) == len(set(builder.begun))
