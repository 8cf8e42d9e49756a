"""Kernels with an older architecture's features, in machine code for a newer GPU."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from strop.codegen.triton import emit
from strop.ir.device import GpuTarget
from strop.runtime.build import compilers as builds
from strop.runtime.build.cubin import Cubin, compile_cubin
from tests.codegen.kernels import SAMPLES
from tests.codegen.test_model_kernels import NoCache, kernels_of
from tests.codegen.test_triton_compile import SHARED_LIMIT, _output, disassemble

pytest.importorskip("triton")

F16 = torch.float16
NAMES = ("silu_flat", "softmax", "column_sum")  # of each schedule one
PAIRS = [(80, 90), (86, 90), (89, 90), (80, 100), (86, 120)]


def target_of(cubin: Cubin, folder: Path) -> str:
    """The GPU that NVIDIA's tool finds the code to be for."""
    path = folder / "kernel.cubin"
    path.write_bytes(cubin.code)
    found = re.search(r"\.(sm_\w+)\.cubin", _output("cuobjdump", "--list-elf", str(path)))
    assert found
    return found[1]


@pytest.mark.parametrize(("arch", "runs_on"), PAIRS)
@pytest.mark.parametrize("name", NAMES)
def test_the_code_is_the_newer_ones(name: str, arch: int, runs_on: int, tmp_path: Path) -> None:
    source = emit(SAMPLES[name](F16).kernel).source
    native, ported = compile_cubin(source, arch), compile_cubin(source, arch, runs_on)
    assert target_of(native, tmp_path) == f"sm_{arch}"
    assert target_of(ported, tmp_path) == f"sm_{runs_on}"
    assert (ported.entry, ported.shared, ported.num_warps, ported.arch) == (
        native.entry,
        native.shared,
        native.num_warps,
        arch,
    )
    again = compile_cubin(source, arch), compile_cubin(source, arch, runs_on)
    assert [target_of(each, tmp_path) for each in again] == [f"sm_{arch}", f"sm_{runs_on}"], (
        "one is found in the other's place"
    )


@pytest.mark.parametrize("name", NAMES)
def test_none_waits_for_the_kernel_before_it(name: str, tmp_path: Path) -> None:
    """That instruction is sm_90's, which the kernels for sm_90 itself have."""
    source = emit(SAMPLES[name](F16).kernel).source
    ported = compile_cubin(source, 80, 90)
    assert not ported.early
    assert "ACQBULK" not in disassemble(ported, tmp_path)
    assert "ACQBULK" in disassemble(compile_cubin(source, 90), tmp_path)


def test_a_unet_compiles_by_processes(tmp_path: Path) -> None:
    arch = 86
    sources = kernels_of("unet", F16).samples
    cubins = builds.build(sources, GpuTarget(arch, 90), NoCache(), workers=2)
    assert cubins.keys() == sources.keys()
    for source, made in cubins.items():
        assert made.shared <= SHARED_LIMIT, source.name
        assert (made.arch, made.early, made.boxes) == (arch, False, ()), source.name
    assert target_of(next(iter(cubins.values())), tmp_path) == "sm_90"
