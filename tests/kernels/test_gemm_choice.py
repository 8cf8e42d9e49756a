"""Which tile does a convolution or a linear, by sizes alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from strop.ir.dims import const, symbol
from strop.ir.graph import Node
from strop.kernels.gemm import choice as products
from strop.kernels.gemm.choice import SMS, form, form_of, has_steps
from strop.kernels.gemm.implicit import Box, Picture, box_of
from strop.kernels.gemm.tile import ENDS, GATED, MOST_SHARED, PLAIN, SUM, Tile

HALF = torch.float16
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
    Picture(3, ins, outs, batch, side * 64 // step, side * 64 // step)
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


def node(op: str, *shapes: Sequence[Any], dtype: torch.dtype = HALF, **attrs: Any) -> Node:
    operands = [
        Node("input", (), {}, tuple(const(n) if isinstance(n, int) else n for n in shape), dtype)
        for shape in shapes
    ]
    return Node(op, tuple(operands), attrs, operands[0].shape, dtype)


ROWS = symbol("r")
SAME: dict[str, Any] = {"stride": (1, 1), "padding": (1, 1), "dilation": (1, 1), "groups": 1}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (node("linear", (ROWS, 320), (640, 320)), True),
        (node("linear", (ROWS, 320), (640, 320), (640,)), False),  # a bias is the next kernel's
        (node("linear", (ROWS, 768), (768, 768)), False),
        (node("linear", (ROWS, 320), (648, 320)), False),
        (node("linear", (ROWS, 320), (symbol("n"), 320)), False),
        (node("linear", (ROWS, 320), (640, 320), dtype=torch.float32), False),
        (node("linear_add", (ROWS, 320), (640, 320), (ROWS, 640), dtype=torch.bfloat16), False),
        (node("linear_add", (ROWS, 320), (640, 320), (ROWS, 640), (640,)), True),
        (node("geglu", (ROWS, 320), (640, 320), (640,)), True),
        (node("geglu", (ROWS, 320), (960, 320), (960,)), False),
        (node("geglu", (ROWS, 320), (640, 320)), False),
        (node("conv2d", (2, 320, ROWS, 8), (320, 320, 3, 3), **SAME), True),
        (node("conv2d", (2, 320, ROWS, 8), (320, 320, 3, 3), **SAME | {"stride": (2, 2)}), True),
        (node("conv2d", (2, 320, ROWS, 8), (320, 320, 3, 3), **SAME | {"stride": (2, 1)}), False),
        (node("conv2d", (2, 320, ROWS, 8), (320, 320, 3, 3), **SAME | {"stride": (3, 3)}), False),
        (
            node(
                "conv2d",
                (2, 320, ROWS, 8),
                (320, 320, 3, 3),
                **SAME | {"stride": (2, 2), "padding": (0, 0)},
            ),
            False,
        ),
        (node("conv2d", (2, 64, ROWS, 8), (320, 64, 3, 3), **SAME), False),
        (node("upsampled_conv2d", (2, 256, ROWS, 8), (1024, 256, 2, 2)), True),
        (node("matmul", (ROWS, 64), (64, 80)), False),
    ],
)
def test_what_fits(given: Node, expected: bool) -> None:
    assert products.fits(given) == expected


@pytest.mark.parametrize("of", PICTURES, ids=str)
def test_boxes_cover_a_picture(of: Picture) -> None:
    for tile in products.CONV_TILES:
        found = form(tile, of)
        sizes = zip(found.boxes, found.box, (of.batch, of.height, of.width), strict=True)
        assert all(0 <= count * step - size < step for count, step, size in sizes)
        assert math.prod(found.box) <= found.product.rows
        assert found.across * found.product.width >= of.outs
        *counts, ins, at_work, late = found.scalars(of.ins, late=True)[:7]
        assert (ins, late) == (of.ins, 1)
        assert found.scalars(of.ins, late=True)[7:10] == found.box
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
    of = Picture(3, 64, 64, *sizes, stride)
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
    op = {PLAIN: "linear", GATED: "geglu", SUM: "linear_add"}[end]
    columns = 8 * columns if end == GATED else columns
    anywhere = products.sources_anywhere(op, {}, [(), [const(columns), const(depth)]], HALF)
    at = products.sources_at(op, {}, [(rows, depth), (columns, depth)], HALF)
    assert set(at) <= set(anywhere)
    assert len(anywhere) == len(set(anywhere)) > 2 * (end != GATED)
    found = form_of(products.picture_of(op, {}, [(rows, depth), (columns, depth)]), end)
    assert bool(found) == bool(at)
    if found:
        assert has_steps(found.product.tile, Picture(1, depth, columns, 1, 1, rows))


@pytest.mark.parametrize("of", PICTURES, ids=str)
def test_a_convolution_is_known_before(of: Picture) -> None:
    shapes = [(of.batch, of.ins, of.height, of.width), (of.outs, of.ins, 3, 3)]
    weight = [const(n) for n in shapes[1]]
    for stride in products.STRIDES:
        attrs = SAME | {"stride": (stride, stride)}
        at = products.sources_at("conv2d", attrs, shapes, HALF)
        assert set(at) <= set(products.sources_anywhere("conv2d", attrs, [(), weight], HALF))


@pytest.mark.parametrize("of", PICTURES, ids=str)
def test_four_windows_are_known_before(of: Picture) -> None:
    """No tile of theirs shares a sum; results lie on every second line and column."""
    shapes = [(of.batch, of.ins, of.height, of.width), (4 * of.outs, of.ins, 2, 2)]
    at = products.sources_at("upsampled_conv2d", {}, shapes, HALF)
    weight = [const(n) for n in shapes[1]]
    assert len(at) == 1
    assert at[0] in products.sources_anywhere("upsampled_conv2d", {}, [(), weight], HALF)
    found = form_of(products.picture_of("upsampled_conv2d", {}, shapes))
    assert found is not None
    assert not found.product.has_parts
    assert found.num_tiles == 4 * math.prod(found.boxes) * found.across
    count, height, width = found.box
    assert found.results == (count, height, 1, width, found.product.unit)


@pytest.mark.parametrize(("rows", "together"), [(100, 1), (2048, 16), (8192, 64), (12800, 50)])
def test_rows_that_are_gone_through_together(rows: int, together: int) -> None:
    """All, up to a number; then in shares that are alike."""
    found = form(Tile(2, 160, 5, keeps_on=True), products.line_of(rows, 3840, 1280, PLAIN))
    assert found.together == together
    assert found.scalars(1280, late=False)[7] == together


def test_tiles_fit_a_processor() -> None:
    for size, end in ((3, PLAIN), (2, PLAIN), *((1, end) for end in ENDS)):
        of = Picture(size, 64, 320, 1, 1, 1)
        for tile in products.tiles_of(of, end):
            assert form(tile, of, end).product.shared <= MOST_SHARED


def test_skinny_gemm_and_slower_tiles_are_the_librarys() -> None:
    """The text's 77 words, the time of a step, and columns that leave most processors idle."""
    assert form_of(Picture(1, 320, 1280, 1, 1, 2)) is None
    assert form_of(Picture(1, 768, 640, 1, 1, 77)) is None
    assert form_of(Picture(1, 5120, 80, 1, 1, 128)) is None
    assert form_of(Picture(1, 1280, 1280, 1, 1, 2048)) is not None


@pytest.mark.parametrize("stride", products.STRIDES)
def test_small_pictures_of_few_channels_are_the_librarys(stride: int) -> None:
    """ResNet-50 has some in its last stage; no batch of those that are measured is ours."""
    for batch in range(1, 34):
        assert form_of(Picture(3, 512, 512, batch, 7, 7, stride)) is None
    assert form_of(Picture(3, 640, 640, 2, 16, 16, stride)) is not None


def test_an_estimate_grows_with_the_work() -> None:
    for tile in products.LINEAR_TILES:
        us = [
            products.us_of(form(tile, of), of)
            for of in (
                Picture(1, depth, 640, 1, 1, rows)
                for depth, rows in ((640, 2048), (1280, 2048), (1280, 8192))
            )
        ]
        assert us == sorted(us)
        assert us[0] < us[2]
