"""Linears of few rows: by the interpreter, what the compiler makes of them, and on a GPU."""

from __future__ import annotations

import math
import re
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from strop.ir.device import CPU, Device
from strop.ir.source import KernelSource
from strop.kernels import library
from strop.kernels.gemm import skinny as skinny_gemm
from strop.kernels.gemm.skinny import (
    MOST_HALVES,
    MOST_REGISTERS,
    PLAIN,
    ROWS,
    UNIT,
    SkinnyEnd,
    SkinnyTile,
    chunk_of,
)
from strop.kernels.kernel import NEVER, RESULT, Call, Late, Launch, Stride
from strop.options import Options
from strop.runtime.build.cubin import compile_cubin
from strop.runtime.build.loader import kernel_loader
from strop.runtime.run.choices import call_of
from strop.runtime.run.launched_calls import Launched
from strop.testing import assert_as_accurate_as_eager
from tests.codegen.test_triton_compile import TOOLS
from tests.gpus import A100, H100, RTX_5090
from tests.kernels.interpreted import Interpreted
from tests.kernels.launching import call, launched, problem, refuse
from tests.passes.planning import planned_by

pytest.importorskip("triton")
F16, BF16 = torch.float16, torch.bfloat16
SHAPES = (
    *((2, 320, 1280), (2, 1280, 1280), (2, 1280, 20160), (4, 768, 1000), (1, 2560, 8)),
    *((1, 3072, 768), (4, 4096, 1024)),
)


def operands(
    rows: int, depth: int, columns: int, dtype: torch.dtype, gap: int = 0, device: str = "cpu"
) -> tuple[Tensor, Tensor]:
    torch.manual_seed(rows + depth)
    x = torch.randn(rows, depth + gap, device=device).to(dtype)[:, :depth]
    return x, (torch.randn(columns, depth, device=device) * depth**-0.5).to(dtype)


def bound(
    x: Tensor,
    *weights: Tensor,
    kernels: Any,
    stream: int = 0,
    op: str = "linear",
    by_columns: bool = False,
    **site: bool,
) -> Launched:
    asked = problem(op, x.shape, *(w.shape for w in weights), dtype=x.dtype)
    asked = replace(asked, by_columns=by_columns)
    return launched(skinny_gemm.ROW.launch(asked, H100), kernels, stream, **site)


@pytest.mark.parametrize("dtype", [F16, BF16])
@pytest.mark.parametrize(
    ("rows", "depth", "columns", "gap"),
    [
        (1, 64, 128, 0),
        (2, 320, 24, 0),
        (3, 192, 50, 8),
        (4, 768, 33, 0),
        (2, 2560, 77, 64),
        (1, 3072, 20, 0),
        (3, 4096, 9, 8),
    ],
)
def test_results(rows: int, depth: int, columns: int, gap: int, dtype: torch.dtype) -> None:
    x, w = operands(rows, depth, columns, dtype, gap)
    kernels: Any = Interpreted()
    out = torch.full((rows, columns), math.nan, dtype=dtype)
    for tensor in (x, w, out):
        kernels.known(tensor)
    bound(x, w, kernels=kernels, is_early=True).writing(refuse)((x, w), out)
    assert kernels.ran == ["skinny_gemm"]
    assert kernels.early == [True]
    assert_as_accurate_as_eager(out, F.linear(x, w), F.linear(x.double(), w.double()))


@pytest.mark.parametrize("dtype", [F16, BF16])
@pytest.mark.parametrize("op", ["linear", "linear_gelu"])
@pytest.mark.parametrize(
    ("rows", "depth", "columns"), [(1, 64, 16), (2, 320, 24), (3, 768, 40), (4, 3072, 8)]
)
def test_weights_by_columns(
    rows: int, depth: int, columns: int, op: str, dtype: torch.dtype
) -> None:
    """As GPT-2's lie, with and without a bias."""
    x, w = operands(rows, depth, columns, dtype, 8)
    w = w.t().contiguous().t()
    bias = torch.linspace(-2, 2, columns).to(dtype)
    for given in ([x, w, bias], [x, w])[: 1 if op == "linear_gelu" else 2]:
        kernels, out = Interpreted(), torch.full((rows, columns), math.nan, dtype=dtype)
        for tensor in (*given, out):
            kernels.known(tensor)
        found = bound(*given, kernels=kernels, op=op, is_early=True, by_columns=True)
        found.writing(refuse)(given, out)
        assert kernels.ran == ["skinny_gemm"]
        assert_as_accurate_as_eager(out, ended(op, *given), ended(op, *wide(*given)))


def test_rows_are_no_columns() -> None:
    """What lies as rows is left to the library where the program has said columns."""
    x, w = operands(2, 64, 16, F16)
    out, left = torch.zeros(2, 16, dtype=F16), list[Sequence[Tensor]]()
    kernels: Any = Interpreted()
    found = bound(x, w, kernels=kernels, by_columns=True)
    found.writing(lambda inputs, out: left.append(inputs))((x, w), out)
    assert len(left) == 1
    assert not kernels.ran


def test_a_program_says_how_weights_lie() -> None:
    """Only the skinny GEMM reads columns; more rows are a library's."""
    asked = replace(call("linear", ("b", 768), (2304, 768), (2304,)), by_columns=True)
    assert skinny_gemm.ROW.supports(asked, H100) == ""
    odd = replace(call("linear", ("b", 768), (2300, 768)), by_columns=True)
    assert "pieces of 8" in skinny_gemm.ROW.supports(odd, H100)
    anywhere = list(skinny_gemm.ROW.forms(asked, H100))
    assert len(anywhere) == len(ROWS)
    assert not {*anywhere} & {*skinny_gemm.ROW.forms(replace(asked, by_columns=False), H100)}
    for rows in (1, 4, 5, 512):
        choice = library.select(asked, asked.at({"b": rows}), H100)
        assert choice.kernel == ("skinny_gemm" if rows <= max(ROWS) else "cublas")
        assert {*choice.sources} <= {*anywhere}


def test_gpt2_is_known_to_have_columns() -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stored = nn.Parameter(torch.randn(128, 384))
            self.linear = nn.Linear(384, 64)

        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = self.linear(x @ self.stored)
            return found

    made, _ = planned_by(Layer(), {"x": ("b", "128")}, Options(), F16, {"b": 1})
    calls = [call_of(made.program, step) for step in made.program.call_steps]
    assert [(c.op, c.by_columns) for c in calls] == [("linear", True), ("linear", False)]


@pytest.mark.parametrize("why", ["columns", "odd rows", "odd place", "weights", "result"])
def test_what_lies_otherwise_is_left_to_the_library(why: str) -> None:
    x, w = operands(2, 64, 16, F16)
    out = torch.zeros(2, 16, dtype=F16)
    x = {
        "columns": torch.zeros(64, 2, dtype=F16).t(),
        "odd rows": torch.zeros(2, 68, dtype=F16)[:, :64],
        "odd place": torch.zeros(2, 80, dtype=F16)[:, 4:68],
    }.get(why, x)
    w = torch.zeros(64, 16, dtype=F16).t() if why == "weights" else w
    out = torch.zeros(16, 2, dtype=F16).t() if why == "result" else out
    kernels: Any = Interpreted()
    left = list[Sequence[Tensor]]()
    bound(x, w, kernels=kernels).writing(lambda inputs, out: left.append(inputs))((x, w), out)
    assert len(left) == 1
    assert not kernels.ran


def test_a_single_row_may_have_any_stride() -> None:
    x, w = operands(1, 64, 16, F16)
    odd = x.as_strided(x.shape, (3, 1))
    kernels: Any = Interpreted()
    out = torch.full((1, 16), math.nan, dtype=F16)
    for tensor in (odd, w, out):
        kernels.known(tensor)
    bound(odd, w, kernels=kernels).writing(refuse)((odd, w), out)
    torch.testing.assert_close(out, F.linear(x, w))


def test_no_row_is_no_work_of_its() -> None:
    asked = problem("linear", (0, 64), (16, 64))
    assert skinny_gemm.ROW.cost_us(asked, H100) == NEVER
    assert skinny_gemm.ROW.launch(asked, H100) is None


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (call("linear", ("b", 320), (1280, 320)), ""),
        (call("linear", ("b", 320), (1280, 320), dtype=BF16), ""),
        (call("linear", ("b", 320), (1280, 320), dtype=torch.float32), "fp16 or bf16"),
        (call("linear", ("b", 320), (1280, 320), (1280,)), ""),
        (call("linear_gelu", ("b", 320), (1280, 320), (1280,)), ""),
        (call("linear_gelu", ("b", 320), (1280, 320), (1280,), among_columns=2), "a dense linear"),
        (call("linear", ("b", 8, 320), (1280, 320)), "up to 4 rows"),  # eight at least
        (call("linear", ("b", 96), (1280, 96)), "a multiple of 64"),
        (call("linear", ("b", 768), (1280, 768)), ""),
        (call("linear", ("b", 2560), (1280, 2560)), ""),
        (call("linear", ("b", 4096), (1280, 4096)), ""),
        (call("linear", ("b", 5120), (1280, 5120)), "up to 4096"),
        (call("linear", ("b", 0), (1280, 0)), "a multiple of 64"),
        (call("linear", ("b", 320), (0, 320)), "weights of a known size"),
        (call("linear", ("b", 320), ("n", 320)), "weights of a known size"),
    ],
)
def test_what_fits(given: Call, reason: str) -> None:
    for device in (A100, H100, RTX_5090):
        found = skinny_gemm.ROW.supports(given, device)
        assert reason in found
        assert bool(reason) == bool(found)
    assert skinny_gemm.ROW.supports(given, CPU) == "runs on GPUs"


def test_a_sum_is_no_operator_of_its() -> None:
    assert skinny_gemm.ROW.ops == ("linear", "linear_gelu")


@pytest.mark.parametrize("dtype", [F16, BF16])
@pytest.mark.parametrize("op", ["linear", "linear_gelu"])
@pytest.mark.parametrize(("rows", "columns"), [(1, 40), (3, 33), (4, 8)])
def test_biases_and_gelu(op: str, rows: int, columns: int, dtype: torch.dtype) -> None:
    """Of the sum in fp32: eager rounds it first."""
    x, w = operands(rows, 320, columns, dtype)
    bias = torch.linspace(-2, 2, columns).to(dtype)
    kernels, out = Interpreted(), torch.full((rows, columns), math.nan, dtype=dtype)
    for tensor in (x, w, bias, out):
        kernels.known(tensor)
    found = bound(x, w, bias, kernels=kernels, op=op, is_early=True)
    found.writing(refuse)((x, w, bias), out)
    assert kernels.ran == ["skinny_gemm"]
    assert_as_accurate_as_eager(out, ended(op, x, w, bias), ended(op, *wide(x, w, bias)))


def ended(op: str, *given: Tensor) -> Tensor:
    found = F.linear(*given)
    return F.gelu(found, approximate="tanh") if op == "linear_gelu" else found


def wide(*given: Tensor) -> list[Tensor]:
    return [tensor.double() for tensor in given]


def test_tiles_hold_what_registers_do() -> None:
    for depth in range(UNIT, 32 * MOST_HALVES + 1, UNIT):
        chunk = chunk_of(depth)
        assert depth % chunk == 0
        assert chunk & (chunk - 1) == 0
        for columns in (8, 1280, 20160):
            for sms in (H100.sms, A100.sms):
                tile = skinny_gemm.tile_of(columns, depth, sms)
                assert tile.cols * depth <= tile.num_warps * 32 * MOST_HALVES
                assert tile.num_warps == 2 or columns >= 2 * sms * tile.cols


@pytest.mark.parametrize("device", [A100, H100, RTX_5090], ids=lambda device: device.name)
def test_rows_choose_and_all_is_known_before(device: Device) -> None:
    asked = call("linear", ("b", 320), (1280, 320))
    anywhere = list(skinny_gemm.ROW.forms(asked, device))
    assert len(anywhere) == len(ROWS)
    for rows in range(1, 6):
        choice = library.select(asked, asked.at({"b": rows}), device)
        assert (choice.kernel == "skinny_gemm") == (rows <= max(ROWS))
        assert len(choice.sources) == (rows <= max(ROWS))
        assert set(choice.sources) <= set(anywhere)


def test_it_takes_as_long_as_its_weights() -> None:
    """Which a library waits for, too, and then for the launch before."""
    asked = problem("linear", (2, 1280), (20160, 1280))
    choice = library.select(asked.call, asked, H100)
    assert choice.cost_us < dict(choice.beaten)["cublas"]
    half = problem("linear", (2, 1280), (10080, 1280))
    assert 1.5 < choice.cost_us / skinny_gemm.ROW.cost_us(half, H100) < 2


def test_what_is_launched() -> None:
    launches = skinny_gemm.ROW.launch(problem("linear", (3, 320), (1280, 320)), H100)
    assert launches is not None
    (part,) = launches.parts
    assert isinstance(part, Launch)
    assert [operand.number for operand in part.operands] == [0, 1, RESULT]
    assert part.scalars == (3, 1280, Stride(0, 0, 8), Late.WEIGHTS)


def test_late_weights_are_waited_for() -> None:
    x, w = operands(2, 64, 16, F16)
    out = torch.zeros(2, 16, dtype=F16)
    kernels: Any = Interpreted()
    for tensor in (x, w, out):
        kernels.known(tensor)
    for is_steady in (True, False):
        bound(x, w, kernels=kernels, is_early=True, is_steady=is_steady).writing(refuse)(
            (x, w), out
        )
    assert [each.scalars for each in kernels.bound] == [(2, 16, 8, 0), (2, 16, 8, 1)]


@pytest.mark.parametrize("arch", [80, 86, 89, 120])
def test_it_compiles_for_gpus_without_early_launches(arch: int) -> None:
    tile = skinny_gemm.tile_of(1280, 1280, A100.sms)
    assert compile_cubin(skinny_gemm.skinny_gemm(2, 1280, tile, F16), arch).code


def around_the_wait(source: KernelSource, file: Path) -> tuple[list[str], list[str]]:
    """Return the loads, and stores of what registers do not hold, before the last wait and behind
    it. Nothing may be spilled."""
    file.write_bytes(compile_cubin(source, 90).code)
    done = subprocess.run(
        [TOOLS / "cuobjdump", "-sass", "-res-usage", file],
        capture_output=True,
        text=True,
        check=True,
    )
    registers = re.search(r"REG:(\d+) STACK:(\d+)", done.stdout + done.stderr)
    assert registers
    assert int(registers[1]) <= MOST_REGISTERS
    assert registers[2] == "0"
    found = re.findall(r"ACQBULK|LDG\S*|STL\S*", done.stdout)
    assert not any(name.startswith("STL") for name in found)
    *_, last = (n for n, name in enumerate(found) if name == "ACQBULK")
    return found[:last], found[last:]


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("depth", [320, 1280, 2560, 3072, 4096])
@pytest.mark.parametrize("end", [PLAIN, SkinnyEnd(bias=True, gelu=True)])
def test_weights_are_asked_for_before_the_wait(
    rows: int, depth: int, end: SkinnyEnd, tmp_path: Path
) -> None:
    """In pieces of 16 bytes, and nothing is spilled."""
    tile = skinny_gemm.tile_of(1280, depth, H100.sms)
    source = skinny_gemm.skinny_gemm(rows, depth, tile, F16, end)
    before, behind = around_the_wait(source, tmp_path / "k.cubin")
    assert before.count("LDG.E.EF.128") == tile.cols * depth // (tile.num_warps * 32 * 8)
    assert not any("EF" in name for name in behind)
    found = [name for name in (*before, *behind) if name.startswith("LDG")]
    biases = found.count("LDG.E.U16") if end.bias else 0
    assert biases <= tile.cols
    assert sum("128" not in name for name in found) == biases


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("depth", [320, 768, 1280, 3072, 4096])
@pytest.mark.parametrize("end", [PLAIN, SkinnyEnd(bias=True, gelu=True)])
def test_columns_are_asked_for_before_the_wait(
    rows: int, depth: int, end: SkinnyEnd, tmp_path: Path
) -> None:
    tile = skinny_gemm.tile_by_columns(depth)
    source = skinny_gemm.skinny_gemm(rows, depth, tile, F16, end, by_columns=True)
    before, behind = around_the_wait(source, tmp_path / "k.cubin")
    assert before.count("LDG.E.EF.128") == -(-depth * tile.cols // (tile.num_warps * 32 * 8))
    assert not any("EF" in name for name in behind)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("dtype", [F16, BF16])
@pytest.mark.parametrize("op", ["linear", "linear_gelu"])
@pytest.mark.parametrize(
    ("rows", "depth", "columns"), [(1, 768, 2304), (2, 320, 24), (4, 3072, 768), (3, 4096, 40)]
)
def test_columns_on_a_gpu(rows: int, depth: int, columns: int, op: str, dtype: torch.dtype) -> None:
    x, w = operands(rows, depth, columns, dtype, 8, "cuda")
    w = w.t().contiguous().t()
    given = (x, w, torch.linspace(-2, 2, columns, device="cuda").to(dtype))
    kernels = kernel_loader("cuda", torch.cuda.current_device(), "", 0)
    stream = torch.cuda.current_stream().cuda_stream
    for is_steady in (True, False):
        out = torch.full((rows, columns), math.nan, dtype=dtype, device="cuda")
        site = {"is_early": True, "is_steady": is_steady, "by_columns": True}
        found = bound(*given, kernels=kernels, stream=stream, op=op, **site)
        found.writing(refuse)(given, out)
        assert_as_accurate_as_eager(out, ended(op, *given), ended(op, *wide(*given)))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("dtype", [F16, BF16])
@pytest.mark.parametrize(("rows", "depth", "columns"), SHAPES)
def test_on_a_gpu(rows: int, depth: int, columns: int, dtype: torch.dtype) -> None:
    x, w = operands(rows, depth, columns, dtype, 8, "cuda")
    kernels = kernel_loader("cuda", torch.cuda.current_device(), "", 0)
    stream = torch.cuda.current_stream().cuda_stream
    exact = F.linear(x.double(), w.double())
    for is_steady in (True, False):
        out = torch.full((rows, columns), math.nan, dtype=dtype, device="cuda")
        found = bound(x, w, kernels=kernels, stream=stream, is_early=True, is_steady=is_steady)
        found.writing(refuse)((x, w), out)
        assert_as_accurate_as_eager(out, F.linear(x, w), exact)
    assert SkinnyTile(16, 8) == skinny_gemm.tile_of(20160, 1280, H100.sms)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("dtype", [F16, BF16])
@pytest.mark.parametrize("op", ["linear", "linear_gelu"])
def test_biases_and_gelu_on_a_gpu(op: str, dtype: torch.dtype) -> None:
    x, w = operands(1, 768, 3072, dtype, 0, "cuda")
    bias = torch.linspace(-2, 2, 3072, device="cuda").to(dtype)
    kernels = kernel_loader("cuda", torch.cuda.current_device(), "", 0)
    stream = torch.cuda.current_stream().cuda_stream
    out = torch.full((1, 3072), math.nan, dtype=dtype, device="cuda")
    found = bound(x, w, bias, kernels=kernels, stream=stream, op=op, is_early=True)
    found.writing(refuse)((x, w, bias), out)
    assert_as_accurate_as_eager(out, ended(op, x, w, bias), ended(op, *wide(x, w, bias)))
