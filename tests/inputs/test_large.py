"""Tensors of 2^31 elements and more: C++ kernels count in 64 bits, Triton's have a variant."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import strop
from strop.api import optimize_module
from strop.backend import compile_graph, dynamo_backend
from strop.codegen.assemble import Signature
from strop.codegen.triton import emit
from strop.codegen.triton_interpreter import interpret
from strop.ir.device import GpuTarget
from strop.ir.loops import Schedule
from strop.ir.serialize import from_json, to_json
from strop.ir.tensor_spec import TensorSpec
from strop.options import Options
from strop.runtime.build.cubin import compile_cubin, request_of
from strop.runtime.build.driver import BoundLaunch, CudaFunction
from strop.runtime.run.limits import looks_too_far, needs_wide_indices
from tests.codegen.kernels import SAMPLES
from tests.e2e import tiny
from tests.frontend.tracing import Function, trace, trace_specs

F16 = torch.float16


@pytest.mark.parametrize(
    ("scalars", "numels", "wide"),
    [
        ([1024], [2**31 - 1], False),
        ([1024], [10, 2**31], True),
        ([2**28 - 1], [10], False),
        ([2**28], [10], True),  # the text may multiply it by 8
        ([], [], False),
    ],
)
def test_when_32_bits_do_not_do(scalars: list[int], numels: list[int], wide: bool) -> None:
    assert needs_wide_indices(scalars, numels) == wide


@pytest.mark.parametrize("name", SAMPLES)
def test_the_wide_variant_computes_the_same(name: str) -> None:
    """In the interpreter, and no program id of 32 bits is left; then through the real compiler."""
    sample = SAMPLES[name](F16)
    emitted = emit(sample.kernel)
    wide = emitted.source.widened()
    assert wide.text.count("tl.program_id(0).to(tl.int64)") == wide.text.count("program_id") == 1
    env = sample.envs[1]
    sizes = {f"s{i}": size.eval(env) for i, size in enumerate(emitted.scalars)} | {"splits": 3}
    results = []
    for source in (emitted.source, wide):
        tensors = sample.tensors(env)
        interpret(source, tensors, sizes)
        results.append(tensors)
    for narrow, other in zip(*results, strict=True):
        assert torch.equal(narrow.nan_to_num(), other.nan_to_num())
    compile_cubin(wide, 90)
    integers = [
        t for t in request_of(wide, GpuTarget(90))["signature"].values() if t in ("i32", "i64")
    ]
    split = sample.kernel.schedule is Schedule.COLUMN
    assert integers == ["i64"] * (len(emitted.scalars) + split)


def test_a_launch_of_the_wide_variant_passes_64_bits() -> None:
    function = CudaFunction.__new__(CudaFunction)
    function._handle, function.cubin = (
        None,
        compile_cubin(emit(SAMPLES["silu_flat"](F16).kernel).source, 90),
    )
    launch = BoundLaunch(function, [0, 0], [2**40], [1], 0, wide=True)
    assert launch._values[2].value == 2**40
    with pytest.raises(strop.errors.CodegenError, match="does not fit in 32 bits"):
        BoundLaunch(function, [0, 0], [2**40], [1], 0)


def test_a_stored_program_keeps_the_width() -> None:
    traced = trace(torch.nn.functional.silu, "b 1024", b=2)
    signature = Signature(traced.returned, traced.captured.guards)
    program = compile_graph(traced.graph, signature, "cuda", Options()).program
    for source in from_json(to_json(program)).sources:
        assert not source.wide
        assert source.widened().wide


@pytest.mark.parametrize(("columns", "wide"), [(2**31 - 1, False), (2**31, True)])
def test_places_have_32_bits(columns: int, wide: bool) -> None:
    specs = [
        TensorSpec(("h", "8"), torch.float32, torch.device("cpu")),
        TensorSpec(("b",), torch.int64, torch.device("cpu")),
    ]
    module = Function(lambda x, i: x[i])
    traced = trace_specs(module, module, specs, {"h": 3, "b": 2})
    signature = Signature(traced.returned, traced.captured.guards)
    program = compile_graph(traced.graph, signature, "cpu", Options()).program
    assert looks_too_far(program, {"h": columns, "b": 2}) == wide


def test_cpp_counts_in_64_bits() -> None:
    traced = trace(lambda x: x[:, 1:].flip(1).sum(1) + x[:, :-1].amax(1), "b 4*h", b=2, h=3)
    signature = Signature(traced.returned, traced.captured.guards)
    for source in compile_graph(traced.graph, signature, "cpu", Options()).program.sources:
        assert "int64_t" in source.text
        assert " int " not in source.text.replace(" int nan_", "")  # a flag, no place
        assert "int32" not in source.text


def test_places_times_strides_have_64_bits(tmp_path: Path) -> None:
    """Memory that nobody touches costs nothing."""
    table = torch.zeros(2**22, 768, dtype=torch.uint8)
    table[-1] = torch.arange(768) % 100
    module = Function(lambda x, i: x[i] * 2).eval()
    optimize_module(module, Options(cache_dir=str(tmp_path), strict=True))
    index = torch.tensor([-1, 0, 2**22 - 1])
    assert torch.equal(module(table, index), table[index] * 2)


class Large(nn.Module):
    """Pointwise, rows and columns, of a tensor whose last elements only 64 bits reach."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = torch.nn.functional.silu(x)
        return y, x.float().sum(1), x.amax(0)


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_properties(0).total_memory < 60 << 30,
    reason="needs an NVIDIA GPU with 60 GB",
)
@pytest.mark.parametrize("way", ["optimize", "torch.compile"])
def test_more_than_2_to_the_31_elements(way: str) -> None:
    torch._dynamo.reset()
    rows, columns = 2**21 + 5, 1024  # 4.3 GB
    plain = Large().eval()
    options = tiny.options(strict=True)
    if way == "optimize":
        fast = strop.optimize(copy.deepcopy(plain), options=options)
    else:
        fast = torch.compile(
            plain, backend=dynamo_backend, options={"strict": True, "cache_dir": tiny.cache_dir()}
        )
    with torch.no_grad():
        for count in (7, rows, 9):  # the same graph before and after
            x = torch.randn(count, columns, device="cuda", dtype=F16)
            x[-1, -1] = 100.0
            for _ in range(2 if count == rows else 3):
                y, sums, largest = fast(x)
            assert largest[-1] == 100
            torch.testing.assert_close(sums, x.sum(1, dtype=torch.float32), rtol=1e-3, atol=0.05)
            for part in (slice(0, 5), slice(count // 2, count // 2 + 4), slice(count - 3, count)):
                wanted = torch.nn.functional.silu(x[part])
                torch.testing.assert_close(y[part], wanted, rtol=2e-3, atol=2e-3)
            torch.testing.assert_close(largest, x.amax(0))
            del y, sums, largest, x
