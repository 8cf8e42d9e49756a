"""Products in PTX: what the assembler makes of them, and their results by the machine for PTX,
which runs warps in any order and lets loads come late."""

from __future__ import annotations

import math
import subprocess
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from strop.ir.contractions import GELU, GELU_TANH, SILU, Gate
from strop.ir.source import KernelSource
from strop.kernels.gemm.tile import (
    ACTIVATED,
    CODE_CONV,
    CODES,
    GATED,
    GATED_CODES,
    GEGLU,
    MOST_SHARED,
    NARROW,
    NORMED,
    PLAIN,
    SUM,
    GemmTile,
    Product,
)
from strop.kernels.gemm.trimmed import able_to_store
from strop.kernels.gemm.wgmma_gemm import wgmma_gemm
from strop.kernels.ptx import HALF, KINDS, LINE
from strop.kernels.tuned import tuned
from strop.runtime.run.library_calls import upsampled
from tests.codegen.test_triton_compile import TOOLS
from tests.gpus import H100
from tests.kernels.ptx_machine import launch
from tests.kernels.test_ptx_kernels import survivors

F16, BF16 = torch.float16, torch.bfloat16
BOUND = {F16: 2.5e-4, BF16: 2e-3}  # of rounding a result: 1 / sqrt(3) of half an ulp, in the mean
TWICE = math.sqrt(5 / 3)  # what is rounded before it is added, of two thirds of all variance


@dataclass(frozen=True)
class Case:
    tile: GemmTile
    sizes: tuple[int, int, int, int, int]  # pictures, lines, columns, channels in and out
    box: tuple[int, int, int]
    size: int = 3
    end: str = PLAIN
    dtype: torch.dtype = F16
    stride: int = 1
    rank: int = 0  # of a second pair of operands
    activation: str = GELU
    gates_first: bool = False
    has_biases: bool = True
    any_width: bool = False


CASES = (
    Case(GemmTile(2, 160, 5), (1, 1, 300, 200, 328), (1, 1, 128), 1),
    Case(GemmTile(1, 80, 3), (1, 1, 100, 128, 88), (1, 1, 64), 1),
    Case(GemmTile(1, 80, 3, 1, True), (1, 1, 200, 320, 160), (1, 1, 64), 1),
    Case(GemmTile(1, 80, 3, 1, True), (1, 1, 200, 128, 160), (1, 1, 64), 1, end=GATED),
    Case(GemmTile(1, 160, 3, 1, True), (1, 1, 200, 128, 320), (1, 1, 64), 1, end=GATED),
    Case(GemmTile(1, 64, 3, 1, True), (1, 3, 140, 64, 128), (1, 1, 64)),
    Case(GemmTile(1, 80, 3), (1, 7, 9, 128, 88), (1, 8, 8)),
    Case(GemmTile(2, 80, 4), (3, 7, 8, 64, 88), (2, 8, 8)),
    Case(GemmTile(1, 80, 3, 2), (2, 8, 8, 128, 88), (1, 8, 8)),
    Case(GemmTile(1, 80, 3, 4), (1, 9, 8, 128, 88), (1, 8, 8)),
    Case(GemmTile(1, 160, 3, 3), (1, 9, 8, 128, 88), (1, 8, 8)),
    Case(GemmTile(1, 80, 3, 2), (1, 1, 100, 328, 88), (1, 1, 64), 1, dtype=BF16),
    Case(GemmTile(1, 80, 3), (1, 15, 20, 128, 88), (1, 8, 8), stride=2),
    Case(GemmTile(2, 80, 3, 2), (3, 14, 9, 64, 88), (2, 8, 8), stride=2),
    Case(GemmTile(1, 80, 3, 1, True), (1, 3, 140, 64, 160), (1, 1, 64), stride=2),
    Case(GemmTile(2, 80, 4), (2, 7, 20, 64, 88), (1, 6, 20)),  # fewer pixels than rows
    Case(GemmTile(1, 80, 3, 2), (3, 5, 7, 128, 88), (1, 5, 7)),
    Case(GemmTile(2, 80, 3, 3), (3, 5, 7, 64, 88), (3, 5, 7)),
    Case(GemmTile(1, 80, 3, 1, True), (2, 9, 11, 64, 160), (1, 5, 11)),
    Case(GemmTile(2, 80, 4), (2, 20, 20, 64, 88), (2, 3, 10), stride=2),
    Case(GemmTile(2, 80, 3, 1, True, True), (1, 1, 300, 320, 160), (1, 1, 128), 1),
    Case(GemmTile(2, 80, 2, 1, True, True), (1, 1, 200, 128, 160), (1, 1, 128), 1, end=GATED),
    Case(GemmTile(2, 64, 4, 1, True, True), (2, 9, 20, 64, 160), (1, 6, 20)),
    Case(GemmTile(2, 96, 3, 1, True, True), (1, 1, 100, 128, 96), (1, 1, 128), 1),  # a single tile
    Case(GemmTile(1, 80, 3), (1, 7, 9, 128, 88), (1, 8, 8), 2),  # four windows
    Case(GemmTile(2, 80, 3, 1, True), (3, 5, 7, 64, 160), (3, 5, 7), 2),
    Case(GemmTile(2, 64, 4, 1, True, True), (2, 9, 20, 64, 64), (1, 6, 20), 2, dtype=BF16),
    Case(GemmTile(2, 80, 3, 1, True), (1, 1, 300, 200, 160), (1, 1, 128), 1, SUM),
    Case(GemmTile(1, 160, 3), (1, 1, 100, 128, 320), (1, 1, 64), 1, SUM),
    Case(GemmTile(1, 80, 3), (1, 1, 5, 128, 80), (1, 1, 64), 1, SUM, BF16),
    Case(GemmTile(2, 80, 3, 1, True, True), (1, 1, 300, 320, 160), (1, 1, 128), 1, SUM),
    Case(GemmTile(1, 64, 3), (1, 7, 9, 128, 128), (1, 8, 8), 3, SUM),
    Case(GemmTile(1, 80, 3, 2), (1, 1, 100, 328, 160), (1, 1, 64), 1, SUM),
    Case(GemmTile(2, 80, 3, 4), (1, 1, 130, 320, 80), (1, 1, 128), 1, SUM, BF16),
    Case(GemmTile(2, 80, 3, 2), (1, 1, 300, 320, 48), (1, 1, 128), 1),  # fewer than the tile has
    Case(GemmTile(2, 80, 3, 1, True, True), (1, 1, 300, 320, 16), (1, 1, 128), 1),
    Case(GemmTile(1, 32, 8), (1, 1, 300, 600, 32), (1, 1, 64), 1),
    Case(GemmTile(1, 32, 8, 2), (1, 1, 100, 328, 96), (1, 1, 64), 1, dtype=BF16),
    Case(GemmTile(1, 32, 8, 3), (1, 1, 100, 640, 32), (1, 1, 64), 1),
    Case(GemmTile(2, 32, 8, 6), (1, 1, 130, 832, 24), (1, 1, 128), 1),
    Case(GemmTile(2, 32, 8, 1, True), (1, 1, 400, 128, 32), (1, 1, 128), 1),
    Case(GemmTile(1, 64, 8, 3), (1, 1, 100, 200, 48), (1, 1, 64), 1),
    Case(GemmTile(2, 64, 8, 6), (1, 1, 100, 640, 64), (1, 1, 128), 1),
    Case(GemmTile(1, 96, 8), (1, 1, 100, 128, 96), (1, 1, 64), 1),
    Case(GemmTile(1, 96, 8, 3), (1, 1, 70, 200, 96), (1, 1, 64), 1),
    Case(GemmTile(2, 160, 5), (1, 1, 300, 200, 328), (1, 1, 128), 1, rank=16),
    Case(GemmTile(1, 80, 3), (1, 1, 100, 128, 88), (1, 1, 64), 1, rank=128),
    Case(GemmTile(1, 80, 3), (1, 1, 100, 64, 80), (1, 1, 64), 1, SUM, BF16, rank=200),
    Case(GemmTile(1, 160, 3, 1, True), (1, 1, 200, 128, 320), (1, 1, 64), 1, GATED, rank=64),
    Case(GemmTile(2, 80, 3, 1, True, True), (1, 1, 300, 320, 160), (1, 1, 128), 1, SUM, rank=32),
    Case(GemmTile(2, 80, 2, 1, True, True), (1, 1, 200, 72, 160), (1, 1, 128), 1, rank=72),
    Case(GemmTile(1, 80, 3, 2), (1, 1, 100, 328, 88), (1, 1, 64), 1, dtype=BF16, rank=16),
    Case(GemmTile(2, 80, 3, 4), (1, 1, 130, 128, 80), (1, 1, 128), 1, SUM, rank=256),
    Case(GemmTile(2, 80, 3, 1, True), (1, 1, 300, 128, 160), (1, 1, 128), 1, GATED, rank=96),
    Case(GemmTile(1, 80, 3, 3), (1, 1, 100, 128, 88), (1, 1, 64), 1, rank=32),
    *(
        Case(GemmTile(2, cols, 2, 1, True, True), sizes, (1, 1, 128), 1, end, dtype, 1, 0, *how)
        for end, cols, sizes in (
            (GATED, 160, (1, 1, 200, 128, 320)),
            (ACTIVATED, 96, (1, 1, 200, 128, 192)),
        )
        for dtype, *how in (
            (F16, GELU_TANH, False),
            (BF16, SILU, False),
            (F16, SILU, end == GATED),
            (BF16, GELU_TANH, end == GATED),
            (F16, GELU, end == GATED),
        )
    ),
    Case(GemmTile(1, 80, 3), (1, 1, 100, 128, 80), (1, 1, 64), 1, ACTIVATED, activation=SILU),
    Case(GemmTile(2, 80, 2, 1, True, True), (1, 1, 300, 128, 200), (1, 1, 128), 1, ACTIVATED,
         activation=GELU_TANH),  # columns that two tiles have
    Case(GemmTile(2, 80, 3, 1, True), (1, 1, 300, 128, 160), (1, 1, 128), 1, ACTIVATED, rank=96),
    Case(GemmTile(1, 160, 3, 1, True), (1, 1, 200, 128, 320), (1, 1, 64), 1, GATED, rank=64,
         activation=SILU, gates_first=True),
    Case(GemmTile(1, 160, 3, 1, True), (1, 1, 200, 128, 320), (1, 1, 64), 1, GATED,
         activation=SILU, gates_first=True, has_biases=False),
    Case(GemmTile(2, 80, 2, 1, True, True), (1, 1, 200, 128, 160), (1, 1, 128), 1, GATED,
         has_biases=False),
    *(
        Case(GemmTile(*tile), (1, 1, rows, 128, outs), (1, 1, 64 * tile[0]), 1, any_width=True)
        for tile, rows, outs in (
            ((2, 160, 5), 300, 331),
            ((1, 96, 3), 61, 96),
            ((2, 64, 3, 1, True), 300, 129),
            ((2, 128, 3, 1, True, True), 300, 261),
            ((2, 96, 3, 1, True, True), 200, 97),
        )
    ),
)  # fmt: skip


def operands(case: Case) -> tuple[Tensor, Tensor, Tensor]:
    batch, height, width, ins, outs = case.sizes
    torch.manual_seed(ins + outs)
    depth, windows = case.size**2 * ins, 4 if case.size == 2 else 1
    x = torch.randn(batch, height, width, ins).to(case.dtype)
    w = (torch.randn(windows * outs, depth) * depth**-0.5).to(case.dtype)
    return x, w, torch.randn(outs).to(case.dtype)


def truth(case: Case, x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
    size, ins = case.size, case.sizes[3]
    window = w.double().view(-1, size, size, ins).permute(0, 3, 1, 2)
    pixels = x.double().permute(0, 3, 1, 2)
    if size == 2:
        return upsampled(pixels, window).permute(0, 2, 3, 1).contiguous()
    out = torch.nn.functional.conv2d(pixels, window, padding=size // 2, stride=case.stride)
    out = out.permute(0, 2, 3, 1)
    if case.end == SUM:
        return out + bias.double()
    activation = REFERENCES[case.activation]
    if case.end == GATED:
        first, second = (out + bias.double()).chunk(2, -1)
        return activation(first) * second if case.gates_first else first * activation(second)
    return activation(out + bias.double()) if case.end == ACTIVATED else out


REFERENCES: dict[str, Callable[[Tensor], Tensor]] = {
    GELU: F.gelu,
    GELU_TANH: partial(F.gelu, approximate="tanh"),
    SILU: F.silu,
}


def prepared(case: Case) -> tuple[KernelSource, Callable[[KernelSource, int], None]]:
    """The kernel, and what runs it or another and asserts that results are right."""
    product = Product(
        case.tile,
        case.size,
        case.end,
        case.stride,
        bool(case.rank),
        Gate(case.activation, case.gates_first),
        case.has_biases,
        any_width=case.any_width,
    )
    x, w, bias = operands(case)
    further = replace(case, sizes=(*case.sizes[:3], case.rank, case.sizes[4]))
    pair = operands(further)[:2] if case.rank else ()
    whole = replace(case, sizes=(*case.sizes[:3], case.sizes[3] + case.rank, case.sizes[4]))
    both = (torch.cat(parts, -1) for parts in zip((x, w), pair, strict=True)) if pair else (x, w)
    wanted = truth(whole, *both, bias if case.has_biases else torch.zeros_like(bias))
    windows = 4 if product.has_four_windows else 1
    sides = x.shape[1:3] if windows > 1 else wanted.shape[1:3]
    down, *along = (-(-n // step) for n, step in zip((len(x), *sides), case.box, strict=True))
    across = -(-wanted.shape[-1] // product.width)
    total = across * down * math.prod(along) * windows
    at_work = min(total, 2) if case.tile.keeps_on else total
    scalars = [across, along[1], along[0], down, case.sizes[3], at_work]
    of_box = (
        [*case.box, *(-(-(1 << 16) // n) for n in case.box[1:])]
        if product.has_box
        else [min(along[1], 2)]
    )
    views = [(x.shape, x.stride(), (*case.box, LINE)), (w.shape, w.stride())]
    further_boxes = ((*case.box, HALF),), ()
    views += [(t.shape, t.stride(), *own) for t, own in zip(pair, further_boxes, strict=False)]
    if windows > 1:
        count, height, width = case.box
        places = wanted.view(len(x), sides[0], 2, sides[1], -1)
        views.append((places.shape, places.stride(), (count, height, 1, width, product.unit)))
    elif product.leaves_by_boxes:
        views.append((wanted.shape, wanted.stride(), (*case.box, product.unit)))

    def call(source: KernelSource, seed: int) -> None:
        """Weights come late where the seed is odd. The last columns may be written twice."""
        before = torch.randn(wanted.shape).to(case.dtype)
        out = before.clone() if case.end == SUM else torch.full_like(before, math.nan)
        launch(
            source,
            [x, w, *pair, out, bias],
            [*scalars, seed % 2, *of_box],
            seed=seed,
            views=views,
            allow_rewrites=True,
        )
        total = wanted + before.double() if case.end == SUM else wanted
        bound = BOUND[case.dtype] * (TWICE if case.end == SUM else 1)
        assert float((out.double() - total).norm() / total.norm()) < bound

    return wgmma_gemm(product, case.dtype), call


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_results(case: Case, seed: int) -> None:
    """Boxes leave the picture, columns the result; parts are uneven; programs keep on."""
    source, call = prepared(case)
    call(source, seed)


@pytest.mark.parametrize(
    "case",
    [
        Case(GemmTile(2, 80, 2, 2), (2, 8, 8, 192, 88), (2, 8, 8)),
        Case(GemmTile(2, 80, 2, 1, True), (1, 1, 300, 320, 160), (1, 1, 128), 1),
        Case(GemmTile(2, 80, 2), (2, 8, 8, 192, 88), (2, 8, 8)),
        Case(GemmTile(2, 80, 2, 1, True, True), (1, 1, 400, 320, 160), (1, 1, 128), 1),
        Case(GemmTile(2, 80, 2, 1, True), (1, 1, 300, 320, 160), (1, 1, 128), 1, SUM),
        Case(GemmTile(2, 80, 2, 1, True), (1, 1, 300, 256, 160), (1, 1, 128), 1, rank=96),
        Case(GemmTile(2, 64, 2, 1, True), (1, 1, 300, 256, 131), (1, 1, 128), 1, any_width=True),
    ],
    ids=str,
)
def test_all_that_orders_it_is_needed(case: Case) -> None:
    found = survivors(*prepared(case))
    assert not [what for what in found if "setmaxnreg" not in what]  # which the assembler judges


# Window, end and stride of each kind of GEMM for which there is a table.
TABLES = {
    "conv": (3, PLAIN, 1),
    "strided": (3, PLAIN, 2),
    "upsampled": (2, PLAIN, 1),
    PLAIN: (1, PLAIN, 1),
    NARROW: (1, PLAIN, 1),
    GATED: (1, GATED, 1),
    SUM: (1, SUM, 1),
    ACTIVATED: (1, ACTIVATED, 1),
}
ELSEWHERE = (CODES, GATED_CODES, CODE_CONV, NORMED)  # see test_scaled_codes, test_column_norm
GATES = {ACTIVATED: Gate(GELU_TANH)}
APART = ((2, 160, 4, 1, True, True), (2, 128, 5, 1, True, True), (2, 192, 3, 1, True, True))
TRIED = {  # tiles that were measured, and are in no table
    "conv": (
        (2, 160, 5),
        (2, 80, 7),
        (2, 80, 7, 8),
        (2, 256, 4),
        (1, 160, 7, 2),
        (2, 216, 4, 5),
        (2, 128, 6),
        (2, 128, 6, 3),
        (2, 192, 5),
        (2, 192, 5, 2),
        (2, 256, 4, 2),
        (4, 80, 5),
        (4, 80, 5, 2),
        *APART,
    ),
    PLAIN: (
        *((2, 80, 7, split) for split in (1, 2, 4)),
        *((1, 80, 8, split) for split in (2, 4)),
        (2, 128, 6),
        (2, 160, 5),
        (2, 256, 4),
        (3, 160, 3, 1, True),
        *APART,
    ),
    GATED: (
        (2, 160, 5),
        (2, 256, 4),
        (2, 128, 6, 1, True),
        (2, 64, 7, 1, True),
        (2, 80, 7, 1, True),
        *APART[:2],
        (2, 192, 4, 1, True, True),
    ),
    SUM: (
        (2, 80, 7, 8),
        (1, 80, 8, 8),
        *((1, 160, 7, split) for split in (2, 4)),
        (2, 256, 3, 1, True),
        (2, 80, 6, 1, True),
        *APART[:2],
    ),
}
ALL = [
    Product(tile, *TABLES[kind], gate=GATES.get(kind, GEGLU))
    for kind, tiles in tuned(H100).gemm.tiles.items()
    if kind not in ELSEWHERE
    for tile in dict.fromkeys((*tiles, *(GemmTile(*each) for each in TRIED.get(kind, ()))))
]
ALL = [*dict.fromkeys(ALL)]  # those of few columns are in the table of others, too


def test_every_table_is_there() -> None:
    assert tuned(H100).gemm.tiles.keys() == {*TABLES, *ELSEWHERE}
    assert len(ALL) == len(set(ALL)) > 90


PAIRS = [
    Product(tile, 1, end, paired=True)
    for end in (PLAIN, GATED, SUM)
    for tile in tuned(H100).gemm.tiles[end]
]


OF_ANY_WIDTH = [
    Product(tile, 1, any_width=True) for tile in able_to_store(tuned(H100).gemm.tiles[PLAIN])
]


def test_products_of_any_width_assemble(tmp_path: Path) -> None:
    assert OF_ANY_WIDTH
    assert_assembled(OF_ANY_WIDTH, F16, tmp_path)


def test_pairs_assemble(tmp_path: Path) -> None:
    assert_assembled(PAIRS, F16, tmp_path)


@pytest.mark.parametrize("dtype", KINDS, ids=str)
def test_all_tiles_assemble(dtype: torch.dtype, tmp_path: Path) -> None:
    assert_assembled(ALL, dtype, tmp_path)


def assert_assembled(products: Iterable[Product], dtype: torch.dtype, tmp_path: Path) -> None:
    """Without a spill, within a program's memory, and with products that do not wait for each
    other, of which ptxas would tell."""
    ptxas = [TOOLS / "ptxas", "-v", "--gpu-name=sm_90a", "-o", "/dev/null"]
    for product in products:
        text = tmp_path / "kernel.ptx"
        text.write_text(wgmma_gemm(product, dtype).text)
        done = subprocess.run([*ptxas, text], capture_output=True, text=True, check=False)
        assert done.returncode == 0, (product, done.stderr)
        assert "serialized" not in done.stderr, product
        assert "0 bytes spill stores" in done.stderr, product
        assert product.shared <= MOST_SHARED
