"""Which tile does a convolution or a linear, by sizes alone."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from strop.kernels import library
from strop.kernels.gemm import rows as products
from strop.kernels.gemm.implicit import Box, ConvShape, box_of
from strop.kernels.gemm.rows import GemmForm, form, has_steps
from strop.kernels.gemm.tile import ENDS, GATED, MOST_SHARED, PLAIN, SUM, GemmTile
from strop.kernels.gemm.times import Cost
from strop.kernels.kernel import NEVER, RESULT, Call, Late, Launch, Lies, Problem, Torch
from strop.kernels.tuned import h100, tuned
from tests.gpus import A100, H100, RTX_5090
from tests.kernels.launching import SAME, call, problem

SMS = H100.sms
OP_OF = {PLAIN: "linear", GATED: "geglu", SUM: "linear_add"}
TIMES = tuned(H100).gemm
KEEPS = GemmTile(2, 80, 6, keeps_on=True)
LINEARS = [  # of SD1.5 and SDXL: rows, columns, depth
    (8192, 320, 320),
    (8192, 960, 320),
    (8192, 320, 1280),
    (2048, 640, 640),
    (2048, 1920, 640),
    (2048, 1280, 1280),
    (2048, 3840, 1280),
    (8192, 640, 640),
    (9216, 320, 320),
    (300, 640, 768),
]
PICTURES = [
    ConvShape(3, ins, outs, batch, side * 64 // step, side * 64 // step)
    for side, batch in ((1, 2), (1, 8), (2, 2), (1, 1))
    for step, ins, outs in (
        (1, 320, 320),
        (1, 960, 320),
        (2, 640, 640),
        (2, 1920, 640),
        (4, 1280, 1280),
        (8, 2560, 1280),
    )
]


def form_of(of: ConvShape, end: str = PLAIN) -> GemmForm | None:
    return products.form_of(of, end, H100)[0]


def chosen(asked: Problem) -> library.Choice:
    return library.select(asked.call, asked, H100)


def line_of(rows: int, columns: int, depth: int, end: str = PLAIN) -> Problem:
    """A linear, a gated one, or one that is added to, of so many columns of weights."""
    shapes = {
        PLAIN: (),
        GATED: ((columns,),),
        SUM: ((rows, columns), (columns,)),
    }[end]
    return problem(OP_OF[end], (rows, depth), (columns, depth), *shapes)


def conv_of(of: ConvShape, stride: int = 1) -> Problem:
    shapes = (of.batch, of.ins, of.height, of.width), (of.outs, of.ins, 3, 3)
    return problem("conv2d", *shapes, **{**SAME, "stride": (stride, stride)})


WINDOW = ((2, 320, "r", 8), (320, 320, 3, 3))
STRIDED: dict[str, Any] = {**SAME, "stride": (2, 2)}


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (call("linear", ("r", 320), (640, 320)), ""),
        # a bias is the next kernel's
        (call("linear", ("r", 320), (640, 320), (640,)), "takes 2 operands for linear, not 3"),
        (call("linear", ("r", 768), (768, 768)), ""),
        (call("linear", ("r", 320), (648, 320)), ""),
        (call("linear", ("r", 324), (640, 324)), "multiples of 8, not 324 -> 640"),
        (call("linear", ("r", 320), (644, 320)), "multiples of 8, not 320 -> 644"),
        (call("linear", ("r", 320), ("n", 320)), "weights of a known size"),
        (call("linear", ("r", 320), (640, 320), dtype=torch.float32), "not torch.float32"),
        (
            call("linear_add", ("r", 320), (640, 320), ("r", 640), dtype=torch.bfloat16),
            "takes 4 operands for linear_add, not 3",
        ),
        (call("linear_add", ("r", 320), (640, 320), ("r", 640), (640,)), ""),
        # each of whose columns is added once
        (call("linear_add", ("r", 320), (648, 320), ("r", 648), (648,)), "no tile for 320 -> 648"),
        (call("geglu", ("r", 320), (640, 320), (640,)), ""),
        (call("geglu", ("r", 320), (960, 320), (960,)), ""),
        (call("geglu", ("r", 320), (968, 320), (968,)), "multiples of 8, not 320 -> 968"),
        (call("geglu", ("r", 320), (176, 320), (176,)), "has no tile for 320 -> 176"),
        (call("geglu", ("r", 320), (640, 320)), ""),
        (call("geglu", ("r", 8), (16, 8), (16,), (16,)), "takes 3 operands for geglu, not 4"),
        (call("conv2d", *WINDOW, **SAME), ""),
        (call("conv2d", *WINDOW, **STRIDED), ""),
        (call("conv2d", *WINDOW, (320,), **SAME), "takes 2 operands for conv2d, not 3"),
        (call("conv2d", *WINDOW, **SAME | {"stride": (2, 1)}), "padding 1 and stride 1 or 2"),
        (call("conv2d", *WINDOW, **SAME | {"stride": (3, 3)}), "padding 1 and stride 1 or 2"),
        (call("conv2d", *WINDOW, **STRIDED | {"padding": (0, 0)}), "padding 1"),
        (call("conv2d", *WINDOW, **SAME | {"groups": 2}), "dense 3x3 windows"),
        (call("conv2d", *WINDOW, **SAME | {"dilation": (2, 2)}), "dense 3x3 windows"),
        (call("conv2d", WINDOW[0], (320, 320, 1, 1), **SAME), "dense 3x3 windows"),
        (call("conv2d", (2, 64, "r", 8), (320, 64, 3, 3), **SAME), "from 320 channels on"),
        (call("conv2d", (2, 360, "r", 8), (320, 360, 3, 3), **SAME), "multiples of 64"),
        (call("upsampled_conv2d", (2, 256, "r", 8), (1024, 256, 2, 2)), ""),
    ],
)
def test_what_fits(given: Call, reason: str) -> None:
    found = products.ROW.supports(given, H100)
    assert reason in found
    assert bool(reason) == bool(found)


@pytest.mark.parametrize("device", [A100, RTX_5090], ids=lambda device: device.name)
def test_other_architectures_multiply_otherwise(device) -> None:
    for given in (call("linear", ("r", 320), (640, 320)), call("conv2d", *WINDOW, **SAME)):
        assert (
            products.ROW.supports(given, device)
            == f"multiplies by WGMMA, which {device.name} lacks"
        )


def test_a_product_of_two_activations_is_no_operator_of_its() -> None:
    assert "matmul" not in products.ROW.ops


@pytest.mark.parametrize("of", PICTURES, ids=str)
def test_boxes_cover_a_picture(of: ConvShape) -> None:
    for tile in h100.CONV_TILES:
        found = form(tile, of, sms=SMS)
        sizes = zip(found.boxes, found.box, (of.batch, of.height, of.width), strict=True)
        assert all(0 <= count * step - size < step for count, step, size in sizes)
        assert math.prod(found.box) <= found.product.rows
        assert found.across * found.product.width >= of.outs
        *counts, ins, at_work, late = found.scalars(of.ins)[:7]
        assert (ins, late) == (of.ins, Late.WEIGHTS)
        assert found.scalars(of.ins)[7:10] == found.box
        assert counts == [found.across, found.boxes[2], found.boxes[1], found.boxes[0]]
        assert found.num_programs == at_work * tile.split
        assert at_work <= SMS or not tile.keeps_on


@pytest.mark.parametrize(
    ("rows", "sizes", "stride", "box"),
    [
        (128, (2, 64, 64), 1, (1, 2, 64)),
        (128, (2, 16, 16), 1, (1, 8, 16)),
        (128, (2, 8, 8), 1, (2, 8, 8)),
        (128, (2, 20, 20), 1, (2, 20, 3)),
        (128, (2, 72, 72), 1, (1, 7, 18)),
        (192, (2, 48, 48), 1, (1, 4, 48)),
        (192, (1, 1, 500), 1, (1, 1, 167)),
        (192, (1, 1, 500), 2, (1, 1, 125)),  # 256 of the input at most
        (64, (9, 3, 5), 1, (4, 3, 5)),
    ],
)
def test_boxes(rows: int, sizes: tuple[int, int, int], stride: int, box: Box) -> None:
    """As few as possible, of few pictures, and wide."""
    of = ConvShape(3, 64, 64, *sizes, stride)
    assert box_of(rows, of) == box


def test_a_row_of_a_box_is_found_without_a_division() -> None:
    """As the kernel does it, by 2^16."""
    for size in range(1, 257):
        by = -(-(1 << 16) // size)
        assert all(row * by >> 16 == row // size for row in range(256))


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize(("rows", "columns", "depth"), LINEARS)
def test_what_runs_is_known_before(rows: int, columns: int, depth: int, end: str) -> None:
    """The background builds whatever may be chosen, and every part of a sum has steps."""
    asked = line_of(rows, 8 * columns if end == GATED else columns, depth, end)
    known = [*products.ROW.forms(asked.call, H100)]
    is_able = not products.ROW.supports(asked.call, H100)
    assert not is_able or len(known) == len(set(known)) > 2 * (end != GATED)
    choice = chosen(asked)
    assert set(choice.sources) <= set(library.forms(asked.call, H100))
    if choice.kernel == "wgmma_gemm":
        found = form_of(products.picture_of(asked), end)
        assert found is not None
        assert set(choice.sources) <= set(known)
        assert has_steps(found.product.tile, ConvShape(1, depth, columns, 1, 1, rows))


def test_most_of_these_are_ours() -> None:
    """Else the test above says little."""
    ours = [
        chosen(line_of(rows, columns, depth)).kernel == "wgmma_gemm"
        for rows, columns, depth in LINEARS
    ]
    assert sum(ours) >= 5


@pytest.mark.parametrize("of", PICTURES, ids=str)
def test_a_convolution_is_known_before(of: ConvShape) -> None:
    for stride in products.STRIDES:
        asked = conv_of(of, stride)
        assert set(chosen(asked).sources) <= set(products.ROW.forms(asked.call, H100))


@pytest.mark.parametrize("of", PICTURES, ids=str)
def test_four_windows_are_known_before(of: ConvShape) -> None:
    """No tile of theirs shares a sum; results lie on every second line and column."""
    shapes = (of.batch, of.ins, of.height, of.width), (4 * of.outs, of.ins, 2, 2)
    asked = problem("upsampled_conv2d", *shapes)
    choice = chosen(asked)
    assert choice.kernel == "wgmma_gemm"
    assert dict(choice.beaten) == {"cudnn": NEVER}
    assert len(choice.sources) == 1
    assert choice.sources[0] in set(products.ROW.forms(asked.call, H100))
    found = form_of(products.picture_of(asked))
    assert found is not None
    assert not found.product.has_parts
    assert found.num_tiles == 4 * math.prod(found.boxes) * found.across
    count, height, width = found.box
    assert found.results == (count, height, 1, width, found.product.unit)


@pytest.mark.parametrize(("rows", "together"), [(100, 1), (2048, 16), (8192, 64), (12800, 50)])
def test_rows_that_are_gone_through_together(rows: int, together: int) -> None:
    """All, up to a number; then in shares that are alike."""
    found = form(
        GemmTile(2, 160, 5, keeps_on=True), products.line_of(rows, 3840, 1280, PLAIN), sms=SMS
    )
    assert found.together == together
    assert found.scalars(1280)[7] == together


def test_tiles_fit_a_processor() -> None:
    for size, end in ((3, PLAIN), (2, PLAIN), *((1, end) for end in ENDS)):
        of = ConvShape(size, 64, 320, 1, 1, 1)
        for tile in TIMES.tiles[products.kind_of(of, end)]:
            assert form(tile, of, end, sms=SMS).product.shared <= MOST_SHARED


def test_skinny_gemm_and_slower_tiles_are_the_librarys() -> None:
    """The text's 77 words, the time of a step, and columns that leave most processors idle."""
    assert form_of(ConvShape(1, 320, 1280, 1, 1, 2)) is None
    assert form_of(ConvShape(1, 768, 640, 1, 1, 77)) is None
    assert chosen(line_of(77, 640, 320)).kernel == "cublas"
    assert chosen(line_of(128, 320, 5120)).kernel == "cublas"
    choice = chosen(line_of(2048, 1280, 1280))
    assert choice.kernel == "wgmma_gemm"
    assert choice.cost_us <= dict(choice.beaten)["cublas"]


def test_few_rows_of_a_sum_are_ours() -> None:
    """Beside it no library is faster, as it would be one launch more."""
    for rows in (1, 2, 77, 127):
        assert chosen(line_of(rows, 320, 320, SUM)).kernel == "wgmma_gemm"
        assert form_of(ConvShape(1, 320, 320, 1, 1, rows)) is None


@pytest.mark.parametrize("stride", products.STRIDES)
def test_small_pictures_of_few_channels_are_the_librarys(stride: int) -> None:
    """ResNet-50 has some in its last stage; no batch of those that are measured is ours."""
    for batch in range(1, 34):
        assert form_of(ConvShape(3, 512, 512, batch, 7, 7, stride)) is None
        assert chosen(conv_of(ConvShape(3, 512, 512, batch, 7, 7), stride)).kernel == "cudnn"
    assert form_of(ConvShape(3, 640, 640, 2, 16, 16, stride)) is not None


def test_an_estimate_grows_with_the_work() -> None:
    for tile in h100.LINEAR_TILES:
        us = [
            products.us_of(form(tile, of, sms=SMS), of, TIMES)
            for of in (
                ConvShape(1, depth, 640, 1, 1, rows)
                for depth, rows in ((640, 2048), (1280, 2048), (1280, 8192))
            )
        ]
        assert us == sorted(us)
        assert us[0] < us[2]


def test_a_step_takes_less_beside_idle_multiprocessors() -> None:
    cost = Cost(2.0, 5.0, 0.2, spared=0.5)
    assert cost.us(1, 10, 0.0) == pytest.approx(4.0)
    assert cost.us(1, 10, 1.0) == pytest.approx(3.0)
    assert cost.us(3, 10, 0.5) == pytest.approx(2.0 + 2 * 5.0 + 3 * 10 * 0.15)
    assert replace(cost, spared=0.0).us(1, 10, 1.0) == pytest.approx(4.0)


def test_tiles_that_wait_for_weights_are_as_wide_as_needed() -> None:
    """Then all take as long; the one with the least to do has the most programs, which ask for
    more weights at a time."""
    of = products.line_of(128, 3840, 1280, PLAIN, 96)
    small, large = (form(tile, of, sms=SMS) for tile in (GemmTile(1, 80, 8), KEEPS))
    assert products.us_of(small, of, TIMES) == products.us_of(large, of, TIMES)
    assert small.num_programs > large.num_programs
    assert form_of(of) == small


def test_few_columns_read_their_rows_once_for_each_tile() -> None:
    """With few rows the smallest tile begins first, with many the one that reads them once is the
    fastest, and one between them where that takes as long as the product."""
    widths = {}
    for rows in (512, 2048, 8192):
        found = form_of(products.line_of(rows, 96, 1280, PLAIN))
        assert found is not None
        widths[rows] = found.product.tile.cols
    assert widths == {512: 32, 2048: 64, 8192: 96}


@pytest.mark.parametrize("end", ENDS)
def test_what_a_linear_launches(end: str) -> None:
    """Rows may have gaps, and those of plain results; biases come last, where there are none the
    weights; a sum is copied to where the result lies first."""
    columns = 2560 if end == GATED else 1280
    launches = products.ROW.launch(line_of(2048, columns, 640, end), H100)
    assert launches is not None
    *before, part = launches.parts
    assert isinstance(part, Launch)
    assert [operand.number for operand in part.operands] == [
        0,
        1,
        RESULT,
        {PLAIN: 1, GATED: 2, SUM: 3}[end],
    ]
    result = Lies.ROWS if end == PLAIN else Lies.DENSE
    assert [operand.lies for operand in part.operands] == [
        Lies.ROWS,
        Lies.DENSE,
        result,
        Lies.DENSE,
    ]
    assert part.scalars[6] is Late.WEIGHTS
    assert [type(each) for each in before] == [Torch] * (end == SUM)
    for each in before:
        assert [operand.number for operand in each.operands] == [2, RESULT]
    assert not launches.scratch


def test_how_many_multiprocessors_there_are_counts() -> None:
    """Of tiles that keep on, there are no more programs; and clusters are as many times fewer."""
    half = replace(H100, name="a piece of an H100", sms=66)
    asked, keeps = line_of(8192, 1280, 1280), 0
    of = products.picture_of(asked)
    for tile in h100.LINEAR_TILES:
        whole, piece = (form(tile, of, sms=device.sms) for device in (H100, half))
        keeps += tile.keeps_on
        assert (whole.num_programs > piece.num_programs) == tile.keeps_on
    assert keeps > 2
    assert products.ROW.cost_us(asked, half) > 1.5 * products.ROW.cost_us(asked, H100)
