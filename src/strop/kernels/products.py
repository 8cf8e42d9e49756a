"""Which tile of ``group_product`` does a convolution or a linear, by sizes alone; or none, where a
library is faster."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch

from strop.ir.dims import Expr
from strop.ir.graph import Node
from strop.ir.source import KernelSource
from strop.kernels import box_conv
from strop.kernels.box_conv import LEAST_CHANNELS, SMS, Picture
from strop.kernels.group_product import group_product
from strop.kernels.product_layout import Product, Tile
from strop.kernels.ptx import DEPTH, KINDS, LINE, ROWS

PLAIN, ADDS, GATED = ENDS = ("", "adds", "gated")  # what becomes of the sums
OPS: Mapping[str, str] = {"conv2d": PLAIN, "linear": PLAIN, "linear_add": ADDS, "geglu": GATED}
LINEARS = (*OPS,)[1:]

# Pictures, lines and columns of a box of 64 pixels a group.
BOXES: Mapping[int, tuple[tuple[int, int, int], ...]] = {
    1: ((1, 1, 64), (1, 2, 32), (1, 4, 16), (1, 8, 8)),
    2: ((1, 1, 128), (1, 2, 64), (1, 4, 32), (1, 8, 16), (2, 8, 8)),
    3: ((1, 3, 64), (1, 6, 32), (1, 12, 16), (3, 8, 8)),
    4: ((1, 2, 128), (1, 4, 64), (1, 8, 32), (1, 16, 16), (4, 8, 8)),
}
MULTIPLE = 8  # of columns and channels: 16 bytes, which are moved at once
LEAST_ROWS = 128  # of a linear: fewer wait for their weights alone


@dataclass(frozen=True, slots=True)
class Form:
    """A product, and how many of its boxes lie side by side: of pictures, down, right."""

    product: Product
    boxes: tuple[int, int, int]
    across: int  # tiles of columns

    @property
    def num_tiles(self) -> int:
        return math.prod(self.boxes) * self.across

    @property
    def num_programs(self) -> int:
        tile = self.product.tile
        return min(self.num_tiles, SMS) if tile.keeps_on else self.num_tiles * tile.split

    def scalars(self, ins: int, *, late: bool) -> tuple[int, ...]:
        """``late``: kernels that may still run write the weights."""
        count, down, right = self.boxes
        at_work = self.num_programs // self.product.tile.split
        return self.across, right, down, count, ins, at_work, int(late)


def form(tile: Tile, of: Picture, end: str = PLAIN) -> Form:
    """With the box that wastes the fewest pixels. ``of.outs``: columns of the result."""
    line = (1, 1, ROWS * tile.groups)
    boxes = (line,) if of.size == 1 else BOXES[tile.groups]
    box = min(boxes, key=lambda box: math.prod(_along(box, of)))
    product = Product(tile, of.size, box, end == GATED, end == ADDS)
    return Form(product, _along(box, of), -(-of.outs // product.width))


def _along(box: tuple[int, int, int], of: Picture) -> tuple[int, int, int]:
    count, down, right = (-(-size // step) for size, step in
                          zip((of.batch, of.height, of.width), box, strict=True))  # fmt: skip
    return count, down, right


# Not measured yet (benchmarks/probes/conv_groups.py, linear_groups.py): tiles that the estimate
# below finds to be the fastest at sizes of SD1.5 and SDXL, or nearly so.
TILES = tuple(Tile(*each) for each in (
    (2, 160, 5), (2, 160, 5, 2), (2, 160, 5, 4), (2, 160, 5, 8), (2, 192, 5, 2), (2, 256, 4),
    (2, 256, 4, 2), (2, 256, 4, 4), (3, 160, 4, 2), (3, 160, 4, 4), (1, 160, 7), (1, 160, 7, 4),
    (1, 160, 7, 8), (1, 80, 8), (2, 80, 7), (2, 160, 5, 1, True), (3, 160, 3, 1, True),
    (2, 128, 5, 1, True), (2, 192, 4, 1, True), (2, 256, 3, 1, True),
))  # fmt: skip
GATED_TILES = tuple(Tile(*each, 1, True) for each in ((2, 256, 4), (2, 160, 5), (3, 160, 4)))
# An estimate: a step of 64 channels takes as long as its products, or as what these and the
# accelerator read and write of shared memory, 128 bytes a clock. Clocks around the steps of a
# program: by itself, of a part of a sum, of one that keeps on, between its tiles.
CLOCKS_A_US, ALONE, SHARING, KEEPING = 1700, 5000, 7000, 3000
GATE_CLOCKS = 12  # of 64 results with their gates, by four warps
WEIGHT_BYTES_A_US, WEIGHT_BEGIN_US = 2.6e6, 3.0  # that no cache holds: each pass reads them again
# cuBLAS: operations and bytes of results a microsecond; a beginning; and what a launch costs that
# cannot come early. Of the kernel with gates behind it, likewise.
LINEAR_OPS_A_US, LINEAR_BYTES_A_US, LINEAR_BEGIN_US, GAP_US = 750e6, 2.8e6, 2.5, 1.0
BEHIND_BYTES_A_US, BEHIND_BEGIN_US = 3.2e6, 1.5


def us_of(found: Form, of: Picture) -> float:
    """About how long it takes, on a GPU that does nothing else."""
    weights = 2 * of.size**2 * of.ins * found.across * found.product.tile.cols
    return max(_clocks(found, of) / CLOCKS_A_US, weights / WEIGHT_BYTES_A_US + WEIGHT_BEGIN_US)


def _clocks(found: Form, of: Picture) -> float:
    product = found.product
    tile = product.tile
    programs = found.num_tiles * tile.split
    reads = LINE // DEPTH * tile.groups * (ROWS + tile.cols) * 2 * DEPTH
    step = max(2 * tile.groups * tile.cols, (reads + product.stage) / 128)
    steps = -(-_steps(of) // tile.split)
    rounds = -(-programs // SMS)
    around = rounds * (ALONE if tile.split == 1 else SHARING)
    if tile.keeps_on:
        around = ALONE + (rounds - 1) * KEEPING
    gates = GATE_CLOCKS * tile.groups * product.width if product.gated else 0
    return around + rounds * (steps * step + gates)


def _steps(of: Picture) -> int:
    return of.size**2 * -(-of.ins // LINE)


def has_steps(tile: Tile, of: Picture) -> bool:
    """Whether every part of a sum has some."""
    return (tile.split - 1) * -(-_steps(of) // tile.split) < _steps(of)


@lru_cache(maxsize=4096)
def form_of(of: Picture, end: str = PLAIN) -> Form | None:
    """How to compute it, or None where a library, or another kernel, is faster."""
    found = {each: us_of(each, of) for each in _forms(of, end)}
    best = min(found, key=lambda each: found[each], default=None)
    return best if best and found[best] <= others_us(of, end) else None


def _forms(of: Picture, end: str) -> Iterator[Form]:
    if of.size == 1 and of.width < LEAST_ROWS:
        return
    for tile in GATED_TILES if end == GATED else TILES:
        found = form(tile, of, end)
        if has_steps(tile, of) and not (end == GATED and of.outs % found.product.width):
            yield found


def others_us(of: Picture, end: str) -> float:
    """What it takes otherwise, about."""
    if of.size > 1:
        box = box_conv.form_of(of)
        return box_conv.us_of(box, of) if box else box_conv.library_us(of)
    columns = 2 * of.outs if end == GATED else of.outs
    ops, numel = 2 * of.width * of.ins * columns, of.width * columns
    us = LINEAR_BEGIN_US + GAP_US + ops / LINEAR_OPS_A_US + 2 * numel / LINEAR_BYTES_A_US
    return us + (BEHIND_BEGIN_US + 3 * numel / BEHIND_BYTES_A_US if end == GATED else 0.0)


def fits(node: Node) -> bool:
    """Whether there are tiles for this convolution or linear."""
    weight = node.inputs[1].shape if node.op in OPS else ()
    num_operands = {"linear_add": 3, "geglu": 3}.get(node.op, 2)
    known = node.dtype in KINDS and all(size.is_const for size in weight)
    if node.op not in OPS or len(node.inputs) != num_operands or not known:
        return False
    outs, ins = weight[0].value, weight[1].value
    if node.op == "conv2d":
        return box_conv.is_boxed(node) and min(ins, outs) >= LEAST_CHANNELS
    return ins % MULTIPLE == 0 and outs % (2 * MULTIPLE) == 0


def picture_of(op: str, shapes: Sequence[Sequence[int]]) -> Picture:
    """From the sizes of the operands: (B, CI, H, W) and (CO, CI, size, size), or (..., K) and
    (N, K), whose rows are one line of pixels."""
    if op == "conv2d":
        return box_conv.picture_of(shapes[0], shapes[1])
    (*rows, depth), (columns, _) = shapes[0], shapes[1]
    outs = columns // 2 if OPS[op] == GATED else columns
    return Picture(1, depth, outs, 1, 1, math.prod(rows))


def sources_at(op: str, shapes: Sequence[Sequence[int]], dtype: torch.dtype) -> list[KernelSource]:
    """What is launched for operands of these sizes, as far as it is ours."""
    found = form_of(picture_of(op, shapes), OPS[op])
    return [group_product(found.product, dtype)] if found else []


def sources_anywhere(op: str, shapes: Sequence[Sequence[Expr]], dtype: torch.dtype
                     ) -> list[KernelSource]:  # fmt: skip
    """What may be launched with such weights at any sizes."""
    end, weight = OPS[op], [size.value for size in shapes[1]]
    size = weight[2] if op == "conv2d" else 1
    outs = weight[0] // 2 if end == GATED else weight[0]
    found = dict[KernelSource, None]()
    for tile in GATED_TILES if end == GATED else TILES:
        if not has_steps(tile, Picture(size, weight[1], outs, 1, 1, 1)):
            continue
        for box in BOXES[tile.groups] if size > 1 else ((1, 1, ROWS * tile.groups),):
            product = Product(tile, size, box, end == GATED, end == ADDS)
            if not (product.gated and outs % product.width):
                found[group_product(product, dtype)] = None
    return list(found)
