"""Products of e4m3 codes in PTX, by the machine for PTX."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.fitting import code_conv as sweep_of_convolutions
from benchmarks.fitting import codes_gated, codes_wgmma
from strop.ir.contractions import GELU_TANH, SILU, Gate
from strop.ir.source import KernelSource
from strop.kernels.gemm import scaled_convs, scaled_rows
from strop.kernels.gemm.tile import CODE_CONV, CODES, GATED, GATED_CODES, GemmTile, Product
from strop.kernels.gemm.times import Cost
from strop.kernels.gemm.wgmma_gemm import wgmma_gemm
from strop.kernels.kernel import NEVER, RESULT, Late, Launch, Problem
from strop.kernels.libraries import conv_us
from strop.kernels.library import select
from strop.kernels.tuned import tuned
from strop.passes.gated_codes import LEAST_COLUMNS
from strop.runtime.build.loader import kernel_loader
from strop.runtime.run.library_calls import ACTIVATIONS
from tests.gpus import H100
from tests.kernels.ptx_machine import launch
from tests.kernels.test_ptx_kernels import survivors
from tests.kernels.test_wgmma_gemm import BF16, BOUND, F16, assert_assembled

APART = GemmTile(2, 80, 3, 1, keeps_on=True, apart=True)
Run = Callable[[KernelSource, int], None]


@dataclass(frozen=True)
class Case:
    tile: GemmTile
    rows: int
    depth: int
    columns: int
    dtype: torch.dtype = F16
    has_biases: bool = True
    gate: Gate | None = None  # of values and gates, which are halves of ``columns``


CASES = (
    Case(APART, 300, 320, 160),
    Case(APART, 300, 1040, 160, BF16, has_biases=False),  # more steps than stages, the last short
    Case(APART, 100, 128, 80),  # a single tile
    Case(GemmTile(2, 128, 4, 1, True, True), 200, 272, 200, BF16),  # columns that two tiles have
    Case(GemmTile(2, 80, 3, 1, True), 300, 208, 160),
    Case(GemmTile(1, 160, 4), 100, 640, 320, BF16),
    Case(GemmTile(2, 160, 5), 300, 144, 328, has_biases=False),
    Case(APART, 300, 320, 160, gate=Gate()),
    Case(APART, 200, 1040, 240, BF16, has_biases=False, gate=Gate(SILU, is_first=True)),
    Case(GemmTile(2, 128, 4, 1, True, True), 200, 272, 144, BF16, gate=Gate(GELU_TANH)),
    Case(GemmTile(2, 160, 4, 1, True), 300, 208, 320, gate=Gate(is_first=True)),
    Case(GemmTile(2, 192, 4, 1, True), 130, 144, 400, gate=Gate(SILU)),  # columns of two tiles
    Case(GemmTile(1, 80, 8), 100, 640, 160, BF16, gate=Gate()),
    Case(GemmTile(1, 160, 4, 1, True), 200, 128, 320, has_biases=False, gate=Gate(GELU_TANH)),
)


def _product(case: Case) -> Product:
    if case.gate is None:
        return Product(case.tile, 1, has_biases=case.has_biases, codes=True)
    return Product(case.tile, 1, GATED, gate=case.gate, has_biases=case.has_biases, codes=True)


def _gated(columns: Tensor, gate: Gate) -> Tensor:
    value, gates = columns.chunk(2, 1)[:: -1 if gate.is_first else 1]
    return value * ACTIVATIONS[gate.activation](gates)


def prepared(case: Case) -> tuple[KernelSource, Run]:
    """The kernel, and what runs it or another and asserts that results are right."""
    product = _product(case)
    torch.manual_seed(case.rows + case.depth)
    x, w = (
        (8 * torch.randn(n, case.depth)).to(torch.float8_e4m3fn) for n in (case.rows, case.columns)
    )
    by_row, by_column = torch.rand(case.rows) + 0.5, (torch.rand(case.columns) + 0.5) / case.depth
    bias = torch.randn(case.columns).to(case.dtype)
    wanted = (x.double() @ w.double().t()) * by_row.double()[:, None] * by_column.double()
    wanted += bias.double() if case.has_biases else 0.0
    wanted = _gated(wanted, case.gate) if case.gate else wanted
    outs = wanted.shape[1]
    right, across = -(-case.rows // product.rows), -(-outs // product.width)
    total = across * right
    at_work = min(total, 2) if case.tile.keeps_on else total
    box = (1, 1, product.rows)
    result = (1, 1, case.rows, outs)
    views = [
        (x[None, None].shape, x[None, None].stride(), (*box, product.line)),
        (w.shape, w.stride()),
        (result, torch.empty(result).stride(), (*box, product.unit)),
    ]
    counts = [across, right, 1, 1, case.depth, at_work]
    read = x, w, by_row, by_column, bias
    return wgmma_gemm(product, case.dtype), judged(read, wanted, counts, [min(right, 2)], views)


def judged(
    read: tuple[Tensor, ...],
    wanted: Tensor,
    counts: list[int],
    further: list[int],
    views: list[Any],
) -> Run:
    """Return what launches a kernel on codes of values and of a weight, their scales and biases,
    and asserts that results are right. Between ``counts`` and ``further`` scalars stands whether
    weights come late: where the seed is odd."""
    x, w, of_rows, of_columns, bias = read

    def call(source: KernelSource, seed: int) -> None:
        out = torch.full(wanted.shape, torch.nan, dtype=bias.dtype)
        codes = (each.view(torch.uint8) for each in (x, w))
        launch(
            source,
            [*codes, out, of_rows, of_columns, bias],
            [*counts, seed % 2, *further],
            seed=seed,
            views=views,
            allow_rewrites=True,
        )
        error = float((out.double() - wanted).norm() / wanted.norm())
        assert error < BOUND[bias.dtype]

    return call


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_results(case: Case, seed: int) -> None:
    source, call = prepared(case)
    call(source, seed)


@dataclass(frozen=True)
class ConvCase:
    """Sizes are those of the input, and the channels of the result."""

    tile: GemmTile
    sizes: tuple[int, int, int, int, int]
    box: tuple[int, int, int]
    stride: int = 1
    dtype: torch.dtype = F16
    has_biases: bool = True


CONVS = (
    ConvCase(GemmTile(1, 80, 3), (1, 7, 9, 128, 88), (1, 8, 8)),
    ConvCase(GemmTile(2, 80, 4), (3, 7, 8, 64, 88), (2, 8, 8), dtype=BF16),  # half a line
    ConvCase(GemmTile(1, 80, 3), (1, 15, 20, 192, 88), (1, 8, 8), stride=2, has_biases=False),
    ConvCase(GemmTile(2, 80, 4), (2, 7, 20, 64, 88), (1, 6, 20)),  # fewer pixels than rows
    ConvCase(GemmTile(2, 80, 3, 1, True), (2, 9, 11, 320, 160), (1, 5, 11)),
    ConvCase(GemmTile(1, 80, 3), (1, 4, 5, 784, 80), (1, 4, 5)),  # two sums of a place
    ConvCase(GemmTile(2, 64, 4, 1, True, True), (2, 9, 20, 192, 160), (1, 6, 20), dtype=BF16),
    ConvCase(GemmTile(2, 80, 3, 1, True, True), (2, 20, 20, 64, 160), (2, 3, 10), stride=2),
)


def convolution(case: ConvCase) -> tuple[KernelSource, Run]:
    """The kernel, and what runs it or another and asserts that results are right. Scales of pixels
    differ by powers of ten."""
    product = Product(case.tile, 3, stride=case.stride, has_biases=case.has_biases, codes=True)
    batch, height, width, ins, outs = case.sizes
    torch.manual_seed(ins + outs)
    x = (8 * torch.randn(batch, height, width, ins)).to(torch.float8_e4m3fn)
    w = (8 * torch.randn(outs, 3, 3, ins)).to(torch.float8_e4m3fn)
    by_pixel = torch.exp(2 * torch.randn(batch, height, width))
    by_column = (torch.rand(outs) + 0.5) / ins
    bias = torch.randn(outs).to(case.dtype)
    pixels = (x.double() * by_pixel[..., None]).permute(0, 3, 1, 2)
    window = w.double().permute(0, 3, 1, 2)
    wanted = torch.conv2d(pixels, window, stride=case.stride, padding=1).permute(0, 2, 3, 1)
    wanted = wanted * by_column.double() + (bias.double() if case.has_biases else 0.0)
    down, *along = (-(-n // step) for n, step in zip(wanted.shape[:3], case.box, strict=True))
    across = -(-outs // product.width)
    total = across * down * math.prod(along)
    at_work = min(total, 2) if case.tile.keeps_on else total
    of_box = [*case.box, *(-(-(1 << 16) // n) for n in case.box[1:])]
    views = [
        (x.shape, x.stride(), (*case.box, product.line)),
        ((outs, 9 * ins), (9 * ins, 1)),
        (wanted.shape, torch.empty(wanted.shape).stride(), (*case.box, product.unit)),
    ]
    counts = [across, along[1], along[0], down, ins, at_work]
    read = x, w, by_pixel, by_column, bias
    return wgmma_gemm(product, case.dtype), judged(read, wanted, counts, of_box, views)


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("case", CONVS, ids=str)
def test_pixels_of_a_window_have_scales_of_their_own(case: ConvCase, seed: int) -> None:
    source, call = convolution(case)
    call(source, seed)


@pytest.mark.parametrize(
    "case",
    [
        ConvCase(GemmTile(2, 80, 3, 1, True), (2, 9, 11, 320, 160), (1, 5, 11)),
        Case(APART, 300, 640, 160),
    ],
    ids=str,
)
def test_all_that_orders_it_is_needed(case: Case | ConvCase) -> None:
    found = survivors(*(convolution(case) if isinstance(case, ConvCase) else prepared(case)))
    assert not [what for what in found if "setmaxnreg" not in what]  # which the assembler judges


def test_tiles_to_be_measured_assemble(tmp_path: Path) -> None:
    assert_assembled([Product(tile, 1, codes=True) for tile in codes_wgmma.TILES], F16, tmp_path)
    gates = itertools.cycle((Gate(), Gate(SILU, is_first=True), Gate(GELU_TANH)))
    gated = [Product(tile, 1, GATED, gate=next(gates), codes=True) for tile in codes_gated.TILES]
    assert_assembled(gated, F16, tmp_path)
    of_pixels = [
        Product(tile, 3, stride=stride, has_biases=False, codes=True)
        for tile in sweep_of_convolutions.TILES
        for stride in (1, 2)
    ]
    assert_assembled(of_pixels, F16, tmp_path)


def product(
    rows: int,
    columns: int,
    depth: int,
    *,
    by_row: bool = True,
    dtype: torch.dtype = F16,
    gate: Gate | None = None,
) -> Problem:
    scales = (rows if by_row else 1, 1), (1, columns)
    shapes = ((rows, depth), (columns, depth), *scales, (columns,))
    attrs = {"is_fast": False, **(gate.attrs if gate else {})}
    op = "scaled_geglu" if gate else "scaled_product"
    return Problem(op, tuple(sorted(attrs.items())), shapes, dtype)


REFUSED = {
    "wants depths of 16s": product(300, 160, 328),
    "and widths of 8s": product(300, 164, 320),
    "scales each row and each column": product(300, 160, 320, by_row=False),
    "computes fp16 and bf16": product(300, 160, 320, dtype=torch.float32),
    "no tile that was measured": product(300, 72, 320),
    "not 320 -> 328": product(300, 328, 320, gate=Gate()),
}


@pytest.mark.parametrize("said", REFUSED)
def test_what_it_does_not_compute(said: str) -> None:
    assert said in scaled_rows.supports(REFUSED[said].call, H100)


def test_where_there_is_no_tile_the_library_multiplies() -> None:
    problem = product(2048, 72, 1280)
    assert scaled_rows.cost_us(problem, H100) == NEVER
    assert scaled_rows.launch(problem, H100) is None
    assert select(problem.call, problem, H100).kernel == "scaled_mm"


# The faster of the two by codes_wgmma, where it is by more than 10 %.
@pytest.mark.parametrize("shape", [(2048, 1280, 5120), (154, 1280, 2048), (32768, 320, 320)])
def test_where_a_tile_is_faster_it_multiplies(shape: tuple[int, int, int]) -> None:
    problem = product(*shape)
    assert select(problem.call, problem, H100).kernel == "wgmma_codes"


@pytest.mark.parametrize("shape", [(2048, 10240, 1280), (8192, 5120, 640), (512, 10240, 1280)])
def test_gates_are_at_the_end_of_a_product(shape: tuple[int, int, int]) -> None:
    """Their tile has values and gates of half as many columns of the result."""
    rows, columns, depth = shape
    how = Gate(SILU, is_first=True)
    problem = product(*shape, gate=how)
    choice = select(problem.call, problem, H100)
    assert choice.kernel == "wgmma_codes"
    assert [name for name, _ in choice.beaten] == ["scaled_mm_and_torch"]
    assert choice.launches is not None
    (part,) = choice.launches.parts
    assert isinstance(part, Launch)
    found, _ = scaled_rows.fastest(problem, H100)
    assert found is not None
    tile = found.product.tile
    assert part.source == wgmma_gemm(Product(tile, 1, GATED, gate=how, codes=True), F16)
    assert part.source in list(scaled_rows.forms(problem.call, H100))
    across, right = -(-columns // tile.cols), -(-rows // (64 * tile.groups))
    assert part.scalars[:5] == (across, right, 1, 1, depth)
    assert part.operands[2].view is not None
    assert part.operands[2].view.box == (1, 1, 64 * tile.groups, found.product.unit)


def test_each_tile_for_gates_is_in_the_sweep_and_the_pass_knows_the_smallest() -> None:
    known = tuned(H100).gemm.tiles[GATED_CODES]
    assert known.keys() <= {*codes_gated.TILES}
    assert min(tile.cols for tile in known) == LEAST_COLUMNS


def test_the_fastest_tile_is_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    small, large = APART, replace(APART, cols=112)
    costs = {small: Cost(1.0, 0.5, 0.2), large: Cost(1.0, 0.5, 0.25)}
    known = tuned(H100)
    table = replace(known, gemm=replace(known.gemm, tiles={**known.gemm.tiles, CODES: costs}))
    monkeypatch.setattr(scaled_rows, "tuned", lambda device: table)
    scaled_rows.fastest.cache_clear()
    problem = product(300, 160, 320)
    assert scaled_rows.supports(problem.call, H100) == ""
    (part,) = scaled_rows.launch(problem, H100).parts  # type: ignore[union-attr]
    assert isinstance(part, Launch)
    assert part.source in list(scaled_rows.forms(problem.call, H100))
    assert [operand.number for operand in part.operands] == [0, 1, RESULT, 2, 3, 4]
    assert part.scalars == (2, 3, 1, 1, 320, 6, Late.WEIGHTS, 3)
    wide = scaled_rows.launch(product(4608, 12288, 3072), H100)
    assert wide is not None
    assert wide.sources == (wgmma_gemm(Product(large, 1, codes=True), F16),)
    scaled_rows.fastest.cache_clear()


def code_conv(ins: int, outs: int, side: int = 64, stride: int = 1, window: int = 3) -> Problem:
    around = {"stride": (stride,) * 2, "padding": (1, 1), "dilation": (1, 1), "groups": 1}
    shapes = (2, ins, side, side), (outs, ins, window, window), (2, 1, side, side), (outs,)
    return Problem("scaled_conv2d", tuple(sorted(around.items())), shapes, F16)


def test_tiles_that_were_measured_take_the_convolutions_of_unets() -> None:
    for ins, outs, stride in ((320, 320, 1), (960, 640, 1), (2560, 1280, 1), (640, 640, 2)):
        problem = code_conv(ins, outs, stride=stride)
        assert scaled_convs.supports(problem.call, H100) == ""
        found, us = scaled_convs.fastest(problem, H100)
        assert found is not None
        assert us < conv_us(replace(problem, op="conv2d", shapes=problem.shapes[:2]), H100)


def test_the_fastest_tile_of_a_convolution_is_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    small, large = GemmTile(2, 80, 6, 1, True), GemmTile(2, 160, 5, 1, True)
    costs = {small: Cost(1.0, 0.5, 0.2), large: Cost(1.0, 0.5, 0.35)}
    known = tuned(H100)
    table = replace(known, gemm=replace(known.gemm, tiles={**known.gemm.tiles, CODE_CONV: costs}))
    monkeypatch.setattr(scaled_rows, "tuned", lambda device: table)
    scaled_convs.fastest.cache_clear()
    problem = code_conv(320, 640, stride=2)
    assert scaled_convs.supports(problem.call, H100) == ""
    (part,) = scaled_convs.launch(problem, H100).parts  # type: ignore[union-attr]
    assert isinstance(part, Launch)
    assert part.source in list(scaled_convs.forms(problem.call, H100))
    assert [operand.number for operand in part.operands] == [0, 1, RESULT, 2, 3, 3]
    assert part.scalars[:4] == (8, 1, 8, 2)  # tiles of columns, boxes right, down and of pictures
    assert "3x3 windows" in scaled_convs.supports(code_conv(320, 320, window=5).call, H100)
    assert "from 320 channels" in scaled_convs.supports(code_conv(128, 320).call, H100)
    scaled_convs.fastest.cache_clear()


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="multiplies by WGMMA",
)
@pytest.mark.parametrize("shape", [(2, 32, 320, 640, 3, 1), (3, 24, 384, 320, 3, 2)], ids=str)
def test_convolutions_on_a_gpu(shape: tuple[int, ...]) -> None:
    library = kernel_loader("cuda", 0, "", 0)
    library.build(list(dict.fromkeys(sweep_of_convolutions.sources(shape))))
    errors = sweep_of_convolutions.measure(shape, library)["errors"]
    assert len(errors) >= len(sweep_of_convolutions.TILES) + 1
    assert max(errors.values()) < 3 * BOUND[F16], errors  # the peers' numbers are rounded to fp16


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="multiplies by WGMMA",
)
@pytest.mark.parametrize("shape", [(300, 336, 208), (2048, 1280, 5120)], ids=str)
def test_on_a_gpu(shape: tuple[int, ...]) -> None:
    library = kernel_loader("cuda", 0, "", 0)
    library.build(list(dict.fromkeys(codes_wgmma.sources(shape))))
    errors = codes_wgmma.measure(shape, library)["errors"]
    assert len(errors) == len(codes_wgmma.TILES) + 1
    assert max(errors.values()) < 2 * BOUND[F16], errors  # sums of Hopper are short


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="multiplies by WGMMA",
)
@pytest.mark.parametrize("shape", [(300, 416, 208), (2048, 10240, 1280)], ids=str)
def test_gates_on_a_gpu(shape: tuple[int, ...]) -> None:
    library = kernel_loader("cuda", 0, "", 0)
    library.build(list(dict.fromkeys(codes_gated.sources(shape))))
    errors = codes_gated.measure(shape, library)["errors"]
    assert len(errors) == len(codes_gated.TILES) + 2
    assert max(errors.values()) < 3 * BOUND[F16], errors  # the pairs' are rounded twice
