"""Linears of few rows: by the interpreter, what the compiler makes of them, and on a GPU."""

from __future__ import annotations

import math
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from strop.ir.dims import const, symbol
from strop.ir.graph import Node
from strop.kernels.gemm import skinny as skinny_gemm
from strop.kernels.gemm.choice import SMS
from strop.kernels.gemm.skinny import MOST_HALVES, MOST_REGISTERS, ROWS, UNIT, Tile, chunk_of
from strop.runtime.build.cubin import compile_cubin
from strop.runtime.build.loader import kernel_loader
from strop.runtime.run.skinny_gemm import SkinnyGemm
from strop.testing import assert_as_accurate_as_eager
from tests.codegen.test_triton_compile import TOOLS
from tests.kernels.interpreted import Interpreted

pytest.importorskip("triton")
F16, BF16 = torch.float16, torch.bfloat16
SHAPES = ((2, 320, 1280), (2, 1280, 1280), (2, 1280, 20160), (4, 768, 1000), (1, 2560, 8))


def never(inputs: Sequence[Tensor], out: Tensor) -> None:
    raise AssertionError("left to the library")


def operands(
    rows: int, depth: int, columns: int, dtype: torch.dtype, gap: int = 0, device: str = "cpu"
) -> tuple[Tensor, Tensor]:
    torch.manual_seed(rows + depth)
    x = torch.randn(rows, depth + gap, device=device).to(dtype)[:, :depth]
    return x, (torch.randn(columns, depth, device=device) * depth**-0.5).to(dtype)


@pytest.mark.parametrize("dtype", [F16, BF16])
@pytest.mark.parametrize(
    ("rows", "depth", "columns", "gap"),
    [
        (1, 64, 128, 0),
        (2, 320, 24, 0),
        (3, 192, 50, 8),
        (4, 768, 33, 0),
        (2, 2560, 77, 64),
    ],
)
def test_results(rows: int, depth: int, columns: int, gap: int, dtype: torch.dtype) -> None:
    x, w = operands(rows, depth, columns, dtype, gap)
    kernels: Any = Interpreted()
    out = torch.full((rows, columns), math.nan, dtype=dtype)
    for tensor in (x, w, out):
        kernels.known(tensor)
    SkinnyGemm(never, kernels, 0, is_early=True, is_steady=True)((x, w), out)
    assert kernels.ran == ["skinny_gemm"]
    assert_as_accurate_as_eager(out, F.linear(x, w), F.linear(x.double(), w.double()))


@pytest.mark.parametrize("why", ["columns", "odd rows", "weights", "result", "empty"])
def test_what_lies_otherwise_is_left_to_the_library(why: str) -> None:
    x, w = operands(2, 64, 16, F16)
    out = torch.zeros(2, 16, dtype=F16)
    x = {
        "columns": torch.zeros(64, 2, dtype=F16).t(),
        "empty": x[:0],
        "odd rows": torch.zeros(2, 68, dtype=F16)[:, :64],
    }.get(why, x)
    w = torch.zeros(64, 16, dtype=F16).t() if why == "weights" else w
    out = {"result": torch.zeros(16, 2, dtype=F16).t(), "empty": out[:0]}.get(why, out)
    kernels: Any = Interpreted()
    left = list[Sequence[Tensor]]()
    SkinnyGemm(lambda inputs, out: left.append(inputs), kernels, 0, is_early=True, is_steady=True)(
        (x, w), out
    )
    assert len(left) == 1
    assert not kernels.ran


def node(op: str, *shapes: Sequence[Any], dtype: torch.dtype = F16) -> Node:
    operands = [
        Node("input", (), {}, tuple(const(n) if isinstance(n, int) else n for n in shape), dtype)
        for shape in shapes
    ]
    return Node(op, tuple(operands), {}, operands[0].shape, dtype)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (node("linear", (symbol("b"), 320), (1280, 320)), True),
        (node("linear", (symbol("b"), 320), (1280, 320), dtype=torch.float32), False),
        (node("linear", (symbol("b"), 320), (1280, 320), (1280,)), False),
        (node("linear", (symbol("b"), 8, 320), (1280, 320)), False),  # eight rows at least
        (node("linear", (symbol("b"), 96), (1280, 96)), False),
        (node("linear", (symbol("b"), 768), (1280, 768)), False),
        (node("linear", (symbol("b"), 5120), (1280, 5120)), False),
        (node("linear", (symbol("b"), 320), (symbol("n"), 320)), False),
        (node("linear_add", (symbol("b"), 320), (1280, 320), (symbol("b"), 1280)), False),
    ],
)
def test_what_fits(given: Node, expected: bool) -> None:
    assert skinny_gemm.fits(given) == expected


def test_tiles_hold_what_registers_do() -> None:
    for depth in range(UNIT, 32 * MOST_HALVES + 1, UNIT):
        chunk = chunk_of(depth)
        assert depth % chunk == 0
        assert chunk & (chunk - 1) == 0
        for columns in (8, 1280, 20160):
            tile = skinny_gemm.tile_of(columns, depth)
            assert tile.cols * depth <= tile.num_warps * 32 * MOST_HALVES
            assert tile.num_warps == 2 or columns >= 2 * SMS * tile.cols


def test_rows_choose_and_all_is_known_before() -> None:
    shapes = [const(1280), const(320)]
    anywhere = skinny_gemm.sources_anywhere("linear", {}, [(), shapes], F16)
    assert len(anywhere) == len(ROWS)
    for rows in range(1, 6):
        at = skinny_gemm.sources_at("linear", {}, [(rows, 320), (1280, 320)], F16)
        assert len(at) == (rows <= max(ROWS))
        assert set(at) <= set(anywhere)


def test_late_weights_are_waited_for() -> None:
    x, w = operands(2, 64, 16, F16)
    scalars = []

    class Kernels:
        def build(self, sources: Any) -> None: ...

        def bind(self, source: Any, pointers: Any, given: Any, stream: int, early: bool) -> Any:
            scalars.append(given)
            return Interpreted().bind(source, pointers, given, stream)

    kernels: Any = Kernels()
    for is_steady in (True, False):
        call = SkinnyGemm(never, kernels, 0, is_early=True, is_steady=is_steady)
        call._bind(x, w)
    assert scalars == [[2, 16, 8, 0], [2, 16, 8, 1]]


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("depth", [320, 1280, 2560])
def test_weights_are_asked_for_before_the_wait(rows: int, depth: int, tmp_path: Path) -> None:
    """In pieces of 16 bytes, and nothing is spilled."""
    tile = skinny_gemm.tile_of(1280, depth)
    code = compile_cubin(skinny_gemm.skinny_gemm(rows, depth, tile, F16), 90).code
    (tmp_path / "k.cubin").write_bytes(code)
    done = subprocess.run(
        [TOOLS / "cuobjdump", "-sass", "-res-usage", tmp_path / "k.cubin"],
        capture_output=True,
        text=True,
        check=True,
    )
    found = re.findall(r"ACQBULK|LDG\S*|STL\S*", done.stdout)
    *_, last = (n for n, name in enumerate(found) if name == "ACQBULK")
    loads = found[:last].count("LDG.E.EF.128")
    assert loads == tile.cols * depth // (tile.num_warps * 32 * 8)
    assert not any("EF" in name for name in found[last:])
    assert all("128" in name for name in found if name.startswith("LDG"))
    registers = re.search(r"REG:(\d+) STACK:(\d+)", done.stdout + done.stderr)
    assert registers
    assert int(registers[1]) <= MOST_REGISTERS
    assert registers[2] == "0"


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
        SkinnyGemm(never, kernels, stream, is_early=True, is_steady=is_steady)((x, w), out)
        assert_as_accurate_as_eager(out, F.linear(x, w), exact)
    assert Tile(16, 8) == skinny_gemm.tile_of(20160, 1280)
