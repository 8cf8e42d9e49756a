"""Tensors of more than 2^31 elements: C++ kernels count in 64 bits, Triton's are not asked to."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from strop.api import optimize_module
from strop.backend import compile_graph
from strop.codegen.assemble import Signature
from strop.frontend.capture import TensorSpec
from strop.options import Options
from strop.runtime.executor import needs_wide_indices
from tests.frontend.tracing import Function, trace, trace_specs


@pytest.mark.parametrize(("device", "rows", "wide"), [
    ("cuda", 2**21 - 1, False), ("cuda", 2**21, True), ("cpu", 2**21, False),
])  # fmt: skip
def test_triton_kernels_stop_below_32_bits(device: str, rows: int, wide: bool) -> None:
    traced = trace(lambda x: torch.nn.functional.silu(x), "b 1024", b=2)
    signature = Signature(traced.returned, traced.captured.guards)
    program = compile_graph(traced.graph, signature, device, Options()).program
    assert needs_wide_indices(program, {"b": rows}) == wide


@pytest.mark.parametrize(("columns", "wide"), [(2**31 - 1, False), (2**31, True)])
def test_places_have_32_bits(columns: int, wide: bool) -> None:
    specs = [TensorSpec(("h", "8"), torch.float32, torch.device("cpu")),
             TensorSpec(("b",), torch.int64, torch.device("cpu"))]  # fmt: skip
    module = Function(lambda x, i: x[i])
    traced = trace_specs(module, module, specs, {"h": 3, "b": 2})
    signature = Signature(traced.returned, traced.captured.guards)
    program = compile_graph(traced.graph, signature, "cpu", Options()).program
    assert needs_wide_indices(program, {"h": columns, "b": 2}) == wide


def test_cpp_counts_in_64_bits() -> None:
    traced = trace(lambda x: x[:, 1:].flip(1).sum(1) + x[:, :-1].amax(1), "b 4*h", b=2, h=3)
    signature = Signature(traced.returned, traced.captured.guards)
    for source in compile_graph(traced.graph, signature, "cpu", Options()).program.sources:
        assert "int64_t" in source.text
        assert " int " not in source.text
        assert "int32" not in source.text


def test_places_times_strides_have_64_bits(tmp_path: Path) -> None:
    """Memory that nobody touches costs nothing."""
    table = torch.zeros(2**22, 768, dtype=torch.uint8)
    table[-1] = torch.arange(768) % 100
    module = Function(lambda x, i: x[i] * 2).eval()
    optimize_module(module, Options(cache_dir=str(tmp_path), strict=True))
    index = torch.tensor([-1, 0, 2**22 - 1])
    assert torch.equal(module(table, index), table[index] * 2)
