"""GELU's tanh form in half types: by a shorter text, and by two instructions on sm_90 and newer."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import strop
from strop.codegen.triton import emit
from strop.codegen.triton_interpreter import interpret
from strop.options import Options
from strop.runtime.build.cubin import compile_cubin
from tests.codegen import kernels
from tests.codegen.test_triton_compile import disassemble, resources
from tests.frontend.tracing import Function
from tests.fusion.full_width import planned

F16, BF16 = torch.float16, torch.bfloat16


def kernel(dtype: torch.dtype) -> kernels.LoopKernel:
    return kernels.pointwise("gelu_tanh", [dtype], dtype).kernel


def numbers(dtype: torch.dtype) -> torch.Tensor:
    """Return all finite numbers of a type."""
    every = torch.arange(65536).to(torch.int32).to(torch.int16).view(dtype)
    return every[every.isfinite()]


def check(x: torch.Tensor, found: torch.Tensor) -> None:
    """Hold results against fp64: half a unit in the last place, and a 32nd of it. Below 2^-126 of
    a number up to 14, where the exponential overflows, what is left may be 0."""
    wide = x.double()
    wanted = wide * torch.sigmoid(1.5957691216057308 * (wide + 0.044715 * wide**3))
    least = 2.0**-24 if x.dtype is F16 else 2.0**-121
    unit = (wanted.abs() * torch.finfo(x.dtype).eps).clamp_min(least)
    assert ((found.double() - wanted).abs() / unit).max() < 0.5 + 1 / 32


def test_values_in_the_interpreter() -> None:
    """In fp16: the interpreter cuts bf16 off."""
    x, emitted = numbers(F16), emit(kernel(F16))
    out = torch.empty_like(x)
    sizes = {f"s{i}": size.eval({"n": len(out)}) for i, size in enumerate(emitted.scalars)}
    interpret(emitted.source, [x, out], sizes)
    check(x, out)


@pytest.mark.parametrize("arch", [80, 90, 100])
def test_instructions(arch: int, tmp_path: Path) -> None:
    found = disassemble(compile_cubin(emit(kernel(F16)).source, arch), tmp_path)
    slow = [name for name in found if name.startswith("MUFU")]
    assert {*slow} == {"MUFU.EX2", "MUFU.RCP"}
    per_number = sum(name.startswith(("FMUL", "FADD", "FFMA", "FSETP")) for name in found)
    assert (2 * per_number / len(slow) <= 7) == (arch >= 90)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
@torch.no_grad()
def test_values_on_a_gpu(dtype: torch.dtype, tmp_path: Path) -> None:
    module = Function(lambda x: torch.nn.functional.gelu(x, approximate="tanh")).eval()
    strop.optimize(module, options=Options(cache_dir=str(tmp_path), strict=True))
    x = numbers(dtype)
    check(x, module(x.cuda()).cpu())
    ends = module(torch.tensor([torch.inf, -torch.inf, torch.nan], dtype=dtype, device="cuda"))
    assert ends[0] == torch.inf
    assert ends[1:].isnan().all()


def test_long_rows_that_are_quantised_leave_room_for_a_second_program(tmp_path: Path) -> None:
    program = planned("flux", "fp8").program
    sources = {program.sources[step.kernel] for step in program.kernel_steps}
    long = {s for s in sources if "e4m3_code(" in s.text and s.num_warps == 16}
    assert long
    for source in long:
        registers, stack = resources(compile_cubin(source, 90), tmp_path)
        assert registers * 32 * source.num_warps * 2 <= 65536, source.name
        assert stack <= 96, source.name
