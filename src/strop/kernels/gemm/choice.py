"""Which tile of ``wgmma_gemm`` does a convolution or a linear, by sizes alone; or none, where a
library is faster."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from strop.ir.dims import Expr
from strop.ir.graph import Node
from strop.ir.source import KernelSource
from strop.kernels.gemm.implicit import Box, Picture, box_of, boxes_along, windows_of
from strop.kernels.gemm.implicit import picture_of as convolution_of
from strop.kernels.gemm.tile import GATED, PLAIN, SUM, Product, Tile
from strop.kernels.gemm.wgmma_gemm import wgmma_gemm
from strop.kernels.ptx import KINDS, LINE

OPS: Mapping[str, str] = {
    "conv2d": PLAIN,
    "upsampled_conv2d": PLAIN,
    "linear": PLAIN,
    "geglu": GATED,
    "linear_add": SUM,
}
OPERANDS: Mapping[str, int] = {PLAIN: 2, GATED: 3, SUM: 4}  # SUM: what is added, biases
CONVOLUTIONS = ("conv2d", "upsampled_conv2d")
LINEARS = tuple(op for op in OPS if op not in CONVOLUTIONS)

# Of the columns and the depth of linears, as in Stable Diffusion's UNets. The kernel wants 8; what
# it takes at other sizes, of BERT or of ResNet's 1x1 convolutions, has not been measured.
MULTIPLE = 320
STRIDES, LEAST_MEASURED = (1, 2), 320  # of convolutions: and channels either way
SMS = 132
MOST_TOGETHER = 64  # tiles of a linear's rows
LEAST_ROWS = 128  # of a linear: fewer wait for their weights alone
# Small pictures with fewer channels either way, as at the end of ResNet, have not been measured.
LEAST_PIXELS, LEAST_CHANNELS = 2048, 640


@dataclass(frozen=True, slots=True)
class Form:
    """A product, its box: pictures, lines and columns of pixels; and how many of these lie side by
    side: of pictures, down, right."""

    product: Product
    box: Box
    boxes: Box
    across: int  # tiles of columns

    @property
    def windows(self) -> int:
        return windows_of(self.product.size)

    @property
    def num_tiles(self) -> int:
        return math.prod(self.boxes) * self.across * self.windows

    @property
    def num_programs(self) -> int:
        tile = self.product.tile
        return min(self.num_tiles, SMS) if tile.keeps_on else self.num_tiles * tile.split

    @property
    def results(self) -> tuple[int, ...]:
        """The box in which results leave, columns last; none where programs share a sum. Of four
        windows, every second line."""
        if self.product.has_parts:
            return ()
        count, height, width = self.box
        lines = (height, 1) if self.windows > 1 else (height,)
        return (count, *lines, width, self.product.unit)

    def scalars(self, ins: int, *, late: bool) -> tuple[int, ...]:
        """``late``: kernels that may still run write the weights."""
        count, down, right = self.boxes
        at_work = self.num_programs // self.product.tile.split
        all_have = self.across, right, down, count, ins, at_work, int(late)
        if not self.product.has_box:
            return *all_have, self.together
        _, height, width = self.box
        return *all_have, *self.box, -(-(1 << 16) // height), -(-(1 << 16) // width)

    @property
    def together(self) -> int:
        """Tiles of rows that are gone through together, in shares that are alike: what programs
        read at a time, of which large weights are more than a cache keeps, is little."""
        count = math.prod(self.boxes)
        return -(-count // -(-count // MOST_TOGETHER))


def form(tile: Tile, of: Picture, end: str = PLAIN) -> Form:
    """``of.outs``: columns of the result."""
    product = Product(tile, of.size, end, of.stride)
    box = box_of(product.rows, of) if product.has_box else (1, 1, product.rows)
    return Form(product, box, boxes_along(box, of), -(-of.outs // product.width))


@dataclass(frozen=True, slots=True)
class Cost:
    """Microseconds of a tile: to begin and end, of every further round of programs but its steps,
    and of a step of 64 channels."""

    begin: float
    again: float
    step: float


# Fitted to what they take on an H100 in fp16 (benchmarks/fit_kernels.py conv_wgmma, linear_wgmma).
CONV_TILES: Mapping[Tile, Cost] = {
    Tile(2, 80, 6, keeps_on=True): Cost(0.0, 2.3, 0.293),
    Tile(2, 128, 5, keeps_on=True): Cost(0.0, 2.8, 0.368),
    Tile(2, 128, 6, split=2): Cost(3.0, 6.4, 0.446),
    Tile(2, 160, 5, keeps_on=True): Cost(2.6, 5.2, 0.42),
    Tile(2, 160, 5, split=2): Cost(5.6, 7.6, 0.475),
    Tile(2, 160, 5, split=3): Cost(5.5, 7.9, 0.429),
    Tile(2, 160, 5, split=4): Cost(0.7, 8.4, 0.496),
    Tile(2, 160, 5, split=6): Cost(7.4, 8.2, 0.425),
    Tile(2, 160, 5, split=8): Cost(3.2, 3.8, 0.68),
    Tile(2, 184, 4, split=4): Cost(5.4, 9.3, 0.518),
    Tile(2, 256, 3, keeps_on=True): Cost(2.4, 3.7, 0.703),
    Tile(3, 128, 5): Cost(2.4, 6.0, 0.539),
    Tile(3, 128, 5, split=2): Cost(3.1, 8.3, 0.574),
    Tile(3, 160, 3, keeps_on=True): Cost(2.4, 3.1, 0.678),
    Tile(3, 160, 4): Cost(3.4, 17.1, 0.607),
    Tile(3, 160, 4, split=2): Cost(5.2, 8.6, 0.682),
}
STRIDED_TILES: Mapping[Tile, Cost] = {
    Tile(1, 80, 8): Cost(0.9, 7.7, 0.191),
    Tile(1, 160, 7): Cost(2.6, 5.5, 0.29),
    Tile(2, 80, 6, keeps_on=True): Cost(0.3, 18.9, 0.304),
    Tile(2, 128, 5, keeps_on=True): Cost(0.2, 7.5, 0.399),
    Tile(2, 160, 5, keeps_on=True): Cost(3.4, 3.0, 0.436),
    Tile(2, 160, 5, split=6): Cost(6.6, 8.7, 0.466),
    Tile(2, 160, 5, split=8): Cost(3.4, 7.4, 0.642),
    Tile(2, 184, 4, split=4): Cost(5.7, 8.6, 0.529),
}
# Of four windows (benchmarks/fit_kernels.py conv_upsampled).
UPSAMPLED_TILES: Mapping[Tile, Cost] = {
    Tile(2, 80, 6, keeps_on=True): Cost(0.0, 2.3, 0.293),
    Tile(2, 128, 5, keeps_on=True): Cost(1.5, 1.2, 0.39),
    Tile(2, 160, 5, keeps_on=True): Cost(1.8, 1.3, 0.478),
    Tile(2, 160, 4, keeps_on=True, apart=True): Cost(1.2, 1.2, 0.475),
    Tile(2, 256, 3, keeps_on=True): Cost(2.4, 1.5, 0.8),
    Tile(3, 128, 4, keeps_on=True): Cost(1.5, 1.9, 0.56),
    Tile(3, 160, 3, keeps_on=True): Cost(2.4, 3.1, 0.678),
}
LINEAR_TILES: Mapping[Tile, Cost] = {
    Tile(2, 160, 5, keeps_on=True): Cost(3.2, 1.0, 0.443),
    Tile(2, 80, 6, keeps_on=True): Cost(3.0, 7.6, 0.189),
    Tile(1, 160, 7): Cost(2.3, 9.8, 0.284),
    Tile(1, 80, 8): Cost(0.7, 9.0, 0.238),
    Tile(2, 128, 5, keeps_on=True): Cost(2.9, 1.1, 0.37),
    Tile(2, 256, 3, keeps_on=True): Cost(4.6, 1.6, 0.719),
    Tile(2, 192, 4, keeps_on=True): Cost(3.3, 1.4, 0.556),
    Tile(3, 160, 4): Cost(4.5, 4.4, 0.656),
}
SUM_TILES: Mapping[Tile, Cost] = {  # of LINEAR_TILES, and those that small ones want
    Tile(2, 160, 5, keeps_on=True): Cost(5.0, 2.0, 0.44),
    Tile(1, 160, 7): Cost(2.7, 9.8, 0.284),
    Tile(2, 80, 7): Cost(2.8, 7.6, 0.272),
    Tile(1, 80, 8): Cost(1.9, 9.0, 0.226),
    Tile(2, 128, 5, keeps_on=True): Cost(4.2, 1.4, 0.30),
    Tile(3, 160, 4): Cost(6.5, 4.4, 0.634),
    Tile(2, 160, 5, split=3): Cost(5.5, 7.9, 0.429),
    Tile(2, 80, 7, split=2): Cost(4.9, 6.0, 0.39),
    Tile(2, 80, 7, split=4): Cost(3.5, 6.0, 0.41),
    Tile(1, 80, 8, split=2): Cost(3.0, 2.8, 0.253),
    Tile(1, 80, 8, split=4): Cost(2.6, 2.8, 0.374),
}
GATED_TILES: Mapping[Tile, Cost] = {
    Tile(2, 256, 4, keeps_on=True): Cost(2.8, 2.2, 0.761),
    Tile(2, 160, 4, keeps_on=True, apart=True): Cost(3.0, 0.4, 0.537),
    Tile(2, 128, 5, keeps_on=True, apart=True): Cost(0.3, 0.9, 0.437),
}
# Clusters that run at a time, by their programs, one a processor: what the driver says of an H100.
CLUSTERS: Mapping[int, int] = {1: SMS, 2: 66, 3: 39, 4: 30, 6: 17, 8: 15}
# cuDNN: so many operations a microsecond, or as long as it reads the weights, and a beginning. It
# is the faster where it is at its best, which most sizes do not see.
CONV_OPS_A_US, CONV_BYTES_A_US, CONV_BEGIN_US = 637e6, 4.3e6, 23.0
WEIGHT_BYTES_A_US, WEIGHT_BEGIN_US = 2.6e6, 3.0  # that no cache holds: each pass reads them again
# cuBLAS: operations and bytes of results a microsecond; a beginning; and what a launch costs that
# cannot come early. Of the kernel with gates behind it, likewise.
LINEAR_OPS_A_US, LINEAR_BYTES_A_US, LINEAR_BEGIN_US, GAP_US = 856e6, 3.1e6, 2.8, 1.5
BEHIND_BYTES_A_US, BEHIND_BEGIN_US = 3.2e6, 1.5
ADDING_US = 4.0  # a launch of torch's behind it


def tiles_of(of: Picture, end: str) -> Mapping[Tile, Cost]:
    """Those that are there for it."""
    if of.size == 1:
        return {PLAIN: LINEAR_TILES, GATED: GATED_TILES, SUM: SUM_TILES}[end]
    if of.windows > 1:
        return UPSAMPLED_TILES
    return CONV_TILES if of.stride == 1 else STRIDED_TILES


def us_of(found: Form, of: Picture) -> float:
    """About how long it takes, on a GPU that does nothing else."""
    product, tile = found.product, found.product.tile
    weights = 2 * of.size**2 * of.ins * found.across * tile.cols * of.windows
    cost = tiles_of(of, product.end)[tile]
    rounds = -(-found.num_tiles // CLUSTERS[tile.split])
    steps = -(-_steps(of) // tile.split)
    us = cost.begin + (rounds - 1) * cost.again + rounds * steps * cost.step
    return max(us, weights / WEIGHT_BYTES_A_US + WEIGHT_BEGIN_US)


def _steps(of: Picture) -> int:
    return of.size**2 * -(-of.ins // LINE)


def has_steps(tile: Tile, of: Picture) -> bool:
    """Whether every part of a sum has some."""
    return (tile.split - 1) * -(-_steps(of) // tile.split) < _steps(of)


def is_able(product: Product, of: Picture) -> bool:
    """Whether it can do this: its parts have steps, its gates lie behind the values, and no column
    is added twice."""
    is_whole = of.outs % product.width == 0
    return has_steps(product.tile, of) and (is_whole or product.end == PLAIN)


@lru_cache(maxsize=4096)
def form_of(of: Picture, end: str = PLAIN) -> Form | None:
    """How to compute it, or None where a library, or another kernel, is faster."""
    found = {each: us_of(each, of) for each in _forms(of, end)}
    best = min(found, key=lambda each: found[each], default=None)
    return best if best and found[best] <= others_us(of, end) else None


def _forms(of: Picture, end: str) -> Iterator[Form]:
    if of.width < _least_rows(end) if of.size == 1 else _is_small(of):
        return
    for tile in tiles_of(of, end):
        found = form(tile, of, end)
        if is_able(found.product, of):
            yield found


def _least_rows(end: str) -> int:
    """Of a linear. Beside a sum no library is faster with few, as it would be another launch."""
    return 1 if end == SUM else LEAST_ROWS


def _is_small(of: Picture) -> bool:
    is_small = max(of.ins, of.outs) < LEAST_CHANNELS and of.pixels < LEAST_PIXELS
    return is_small and of.windows == 1


def others_us(of: Picture, end: str) -> float:
    """What it takes otherwise, about."""
    if of.windows > 1:
        return math.inf  # a library computes all four everywhere, and another kernel places them
    if of.size > 1:
        weights = of.size**2 * of.ins * of.outs
        ops = 2 * of.pixels * weights
        return CONV_BEGIN_US + max(ops / CONV_OPS_A_US, 2 * weights / CONV_BYTES_A_US)
    columns = 2 * of.outs if end == GATED else of.outs
    ops, numel = 2 * of.width * of.ins * columns, of.width * columns
    us = LINEAR_BEGIN_US + GAP_US + ops / LINEAR_OPS_A_US + 2 * numel / LINEAR_BYTES_A_US
    if end == GATED:
        us += BEHIND_BEGIN_US + 3 * numel / BEHIND_BYTES_A_US
    elif end == SUM:
        least = LINEAR_BEGIN_US + GAP_US + 2 * of.ins * columns / WEIGHT_BYTES_A_US
        us = max(us, least) + ADDING_US + 6 * numel / BEHIND_BYTES_A_US
    return us


def fits(node: Node) -> bool:
    """Whether there are tiles for this convolution or linear."""
    weight = node.inputs[1].shape if node.op in OPS else ()
    known = node.dtype in KINDS and all(size.is_const for size in weight)
    if node.op not in OPS or len(node.inputs) != OPERANDS[OPS[node.op]] or not known:
        return False
    outs, ins = weight[0].value, weight[1].value
    if node.op == "upsampled_conv2d":
        return True  # as ``passes.upsampled_conv`` makes them
    if node.op == "conv2d":
        is_like = min(ins, outs) >= LEAST_MEASURED and ins % LINE == outs % LINE == 0
        return is_like and _is_window(node)
    halves = 2 if OPS[node.op] == GATED else 1
    return ins % MULTIPLE == 0 and outs % (halves * MULTIPLE) == 0


def _is_window(node: Node) -> bool:
    """Of 3x3 pixels, with zeros around that keep height and width, but for the stride."""
    attrs, window = node.attrs, [size.value for size in node.inputs[1].shape[2:]]
    goes_on = tuple(attrs["stride"]) in [(stride, stride) for stride in STRIDES]
    is_plain = attrs["groups"] == 1 and tuple(attrs["dilation"]) == (1, 1)
    return window == [3, 3] and tuple(attrs["padding"]) == (1, 1) and goes_on and is_plain


def picture_of(op: str, attrs: Mapping[str, Any], shapes: Sequence[Sequence[int]]) -> Picture:
    """From the sizes of the operands: (B, CI, H, W) and (CO, CI, size, size), or (..., K) and
    (N, K), whose rows are one line of pixels."""
    if op in CONVOLUTIONS:
        return convolution_of(shapes[0], shapes[1], attrs.get("stride", (1,))[0])
    *rows, depth = shapes[0]
    return line_of(math.prod(rows), shapes[1][0], depth, OPS[op])


def line_of(rows: int, columns: int, depth: int, end: str) -> Picture:
    """A linear of so many columns, those of gates among them."""
    return Picture(1, depth, columns // 2 if end == GATED else columns, 1, 1, rows)


def sources_at(
    op: str, attrs: Mapping[str, Any], shapes: Sequence[Sequence[int]], dtype: torch.dtype
) -> list[KernelSource]:
    """What is launched for operands of these sizes, as far as it is ours."""
    found = form_of(picture_of(op, attrs, shapes), OPS[op])
    return [wgmma_gemm(found.product, dtype)] if found else []


def sources_anywhere(
    op: str, attrs: Mapping[str, Any], shapes: Sequence[Sequence[Expr]], dtype: torch.dtype
) -> list[KernelSource]:
    """What may be launched with such weights at any sizes."""
    end, weight = OPS[op], [size.value for size in shapes[1]]
    of = picture_of(op, attrs, [(1, weight[1], 1, 1)[: len(weight)], weight])
    found = dict[KernelSource, None]()
    for tile in tiles_of(of, end):
        product = Product(tile, of.size, end, of.stride)
        if is_able(product, of):
            found[wgmma_gemm(product, dtype)] = None
    return list(found)
