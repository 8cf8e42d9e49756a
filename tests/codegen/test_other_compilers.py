"""C++ kernels as other compilers read them: clang++, for x86-64 and AArch64, and mingw."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from strop.codegen.cpp import emit
from strop.ir.source import KernelSource
from strop.kernels.attention import cpu
from strop.kernels.gemm import code_sums, small_cpu
from strop.kernels.packed import fingerprint
from strop.runtime.build.cache import DiskCache
from strop.runtime.build.native import _FLAGS, _HEADER, NativeKernels
from strop.runtime.build.processors import TARGETS
from tests.codegen import kernels, test_cpp_ops

FLAGS = [f for f in _FLAGS if f not in ("-shared", "-fPIC", "-fno-thread-jumps")]  # g++'s alone
ARM = "aarch64-v8.6"
COMPILERS = {
    "clang++": ("clang++", *TARGETS["cpu-v4"].flags),
    "clang++ for AVX2": ("clang++", *TARGETS["cpu-v3"].flags),
    "clang++ for AArch64": ("clang++", "--target=aarch64-linux-gnu", *TARGETS[ARM].flags),
    "mingw": ("x86_64-w64-mingw32-g++", *TARGETS["cpu-v3"].flags),
}


def by_hand(isa: str) -> list[KernelSource]:
    """Kernels written by hand, those with pairs of bf16 where the processor multiplies them."""
    widened = [cpu.source(dtype, is_paired=False) for dtype in cpu.TYPES]
    paired = [cpu.source(torch.bfloat16, is_paired=True)] if isa != "avx2" else []
    return [*widened, *paired, small_cpu.source(), code_sums.source(), fingerprint.source()]


def generated() -> Iterator[KernelSource]:
    for make in kernels.SAMPLES.values():
        for dtype in (torch.float32, torch.bfloat16, torch.float64):
            yield emit(make(dtype).kernel).source
    for name, dtype in test_cpp_ops.CASES:
        yield emit(test_cpp_ops.sample_of(test_cpp_ops.ROWS[name], dtype).kernel).source


def check(folder: Path, name: str, sources: list[KernelSource]) -> None:
    """Compile each, all in one unit, to text that nobody assembles."""
    compiler, *flags = COMPILERS[name]
    if shutil.which(compiler) is None:
        pytest.skip(f"{compiler} was not found")
    (folder / "vmath.h").write_text(_HEADER.read_text())
    path = folder / "kernels.cpp"
    path.write_text(NativeKernels(DiskCache(folder))._unit_text(list(dict.fromkeys(sources))))
    command = [compiler, "-O1", *FLAGS, *flags, "-S", "-o", str(folder / "kernels.s"), str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.nightly
@pytest.mark.parametrize("name", COMPILERS)
def test_kernels_written_by_hand(name: str, tmp_path: Path) -> None:
    isa = TARGETS[ARM].isa if "AArch64" in name else "avx512"
    check(tmp_path, name, by_hand("avx2" if "-v3" in COMPILERS[name][1] else isa))


@pytest.mark.nightly
@pytest.mark.parametrize("name", COMPILERS)
def test_generated_kernels(name: str, tmp_path: Path) -> None:
    check(tmp_path, name, list(generated()))
