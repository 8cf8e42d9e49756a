"""Generated Triton text through the real compiler, without a GPU: registers, spills, accesses."""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from functools import cache
from pathlib import Path

import pytest
import torch

from strop.codegen.triton import emit
from strop.ir.source import KernelSource
from strop.runtime.build.cubin import Cubin, compile_cubin
from tests.codegen import kernels
from tests.codegen.kernels import SAMPLES
from tests.codegen.triton_samples import CONTIGUOUS

triton = pytest.importorskip("triton")

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
SHARED_LIMIT = 99 * 1024  # of one block on sm_86 and sm_89
F16 = torch.float16


@cache
def compiled(source: KernelSource, arch: int) -> Cubin:
    return compile_cubin(source, arch)


def disassemble(cubin: Cubin, folder: Path) -> list[str]:
    """The machine instructions, in order."""
    path = folder / "kernel.cubin"
    path.write_bytes(cubin.code)
    text = _output("nvdisasm", "-c", str(path))
    return re.findall(r"^\s+(?:/\*\w+\*/)?\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9.]+)", text, re.M)


def resources(cubin: Cubin, folder: Path) -> tuple[int, int]:
    """(registers of a thread, bytes of its stack)"""
    path = folder / "kernel.cubin"
    path.write_bytes(cubin.code)
    text = _output("cuobjdump", "--dump-resource-usage", str(path))
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    assert found, text
    return int(found[1]), int(found[2])


def _output(tool: str, *args: str) -> str:
    command = [str(TOOLS / tool), *args]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("arch", [80, 86, 89, 90, 100, 120])
def test_samples_compile(arch: int, tmp_path: Path):
    # Two dtypes on one architecture, one on the others: the text is the same.
    for name, sample in SAMPLES.items():
        for dtype in (F16, torch.float32) if arch == 90 else (F16,):
            cubin = compiled(emit(sample(dtype).kernel).source, arch)
            assert cubin.shared <= SHARED_LIMIT, name
            if arch in (80, 90):
                _, stack = resources(cubin, tmp_path)
                # The slow path of sin and cos keeps its table of digits on the stack.
                assert stack == 0 or name == "timestep_embedding", name


@pytest.mark.parametrize("channels", [320, 1280])
@pytest.mark.parametrize("name", CONTIGUOUS)
def test_accesses_are_16_bytes_wide(name: str, channels: int, tmp_path: Path):
    cubin = compiled(emit(CONTIGUOUS[name](F16, channels).kernel).source, 90)
    registers, stack = resources(cubin, tmp_path)
    assert stack == 0
    found = Counter(disassemble(cubin, tmp_path))
    if name == "group_norm_stats":  # loads through shared memory, stores only a few statistics
        assert registers <= 128
        assert any(op.startswith("LDGSTS.E") and "128" in op for op in found)
    elif name == "layer_norm":  # threads have less of a row, see test_ptx.py
        assert registers <= 64
    else:
        assert registers <= 64
        assert found["LDG.E.128"] > 0
        assert found["STG.E.128"] > 0
        assert not any(op.startswith("STG") and op != "STG.E.128" for op in found)
    if name in ("geglu", "silu_flat", "nchw_to_nhwc"):
        assert not any(op.startswith("LDG") and op != "LDG.E.128" for op in found)


@pytest.mark.parametrize("name", ["geglu", "layer_norm", "silu_flat"])
def test_no_divisions_where_an_index_has_one_stride(name: str):
    """Integer division by a number that is not constant starts with a reciprocal."""
    text = emit(CONTIGUOUS[name](F16, 320).kernel).source.text
    for line in text.splitlines():
        on_vectors = re.search(r"(//|%) [(\w]*[a-z]", line) and "tile" not in line
        assert not on_vectors, line


@pytest.mark.parametrize("arch", [80, 90])
def test_every_operator_compiles(arch: int):
    """All rows in one kernel, in every type that they take: starting the compiler costs most."""
    others = (torch.float64, torch.int64, torch.uint8) if arch == 90 else ()
    for dtype in (torch.float32, *others):
        compiled(emit(kernels.every_row(dtype)).source, arch)


@pytest.mark.parametrize("name", SAMPLES)
def test_nothing_is_read_or_written_before_the_wait(name: str, tmp_path: Path):
    """A kernel that is launched early sees the memory of the one before only after its wait."""
    source = emit(SAMPLES[name](F16).kernel).source
    early, in_turn = compiled(source, 90), compiled(source.with_constants(EARLY=0), 90)
    assert (early.early, in_turn.early) == (True, False)
    order = disassemble(early, tmp_path)
    wait = order.index("ACQBULK")
    accesses = [n for n, op in enumerate(order) if re.match(r"(LD|ST|ATOM|RED)G?S?T?S?\b", op)]
    assert accesses
    assert min(accesses) > wait
    assert "ACQBULK" not in disassemble(in_turn, tmp_path)
    older = compiled(source, 80)
    assert not older.early
