"""Convolution whose pixels the tensor memory accelerator brings, from sm_90 on.

An implicit GEMM (https://arxiv.org/abs/1410.0759) without addresses: for each place of the window
the accelerator moves the box of pixels that lies there, zeros where it leaves the picture, and the
tensor cores read it where it lands. Weights are the first operand and pixels the second: the other
way round Triton 3.6 brings the box through registers.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch

from strop.ir.dims import Expr, symbol
from strop.ir.functions import EARLY, HALVES
from strop.ir.graph import Node
from strop.ir.source import KernelSource

DEPTH = 64  # input channels of a step: 128 bytes, what lies in one row of shared memory

_TEXT = """\
import triton
import triton.language as tl


@triton.jit
def box_conv(PARAMS, s0, s1, s2, s3, SIZE: tl.constexpr, CHUNKS: tl.constexpr, COUNT: tl.constexpr,
             HEIGHT: tl.constexpr, WIDTH: tl.constexpr, COLS: tl.constexpr, DEPTH: tl.constexpr,
             SPLIT: tl.constexpr, STAGES: tl.constexpr, EXTRA: tl.constexpr, EARLY: tl.constexpr):
EARLY_LINES    pixels: tl.constexpr = COUNT * HEIGHT * WIDTH
    col = tl.program_id(0) % s0 * COLS
    box = tl.program_id(0) // s0
    part = box % SPLIT
    box = box // SPLIT
    left = box % s1 * WIDTH
    top = box // s1 % s2 * (HEIGHT + EXTRA)
    picture = box // (s1 * s2) * COUNT
    steps: tl.constexpr = SIZE * SIZE * CHUNKS // SPLIT
    first = part * steps
    acc = tl.full([COLS, pixels], 0.0, tl.float32)
    if EXTRA:
        below = tl.full([COLS, WIDTH], 0.0, tl.float32)
    for at in tl.range(0, steps, num_stages=STAGES):
        step = first + at
        place = step // CHUNKS
        channel = step % CHUNKS * DEPTH
        y = top + place // SIZE - SIZE // 2
        x = left + place % SIZE - SIZE // 2
        weights = p1.load([col, step * DEPTH])
        acc = tl.dot(weights, p0.load([picture, y, x, channel]).reshape([pixels, DEPTH]).T, acc)
        if EXTRA:
            line = p3.load([picture, y + HEIGHT, x, channel]).reshape([WIDTH, DEPTH])
            below = tl.dot(weights, line.T, below)
    target = picture + part * s3 * COUNT
    p2.store([target, top, left, col], acc.to(OUT).T.reshape([COUNT, HEIGHT, WIDTH, COLS]))
    if EXTRA:
        p4.store([target, top + HEIGHT, left, col], below.to(OUT).T.reshape([1, 1, WIDTH, COLS]))
"""
_ADD = """\
import triton
import triton.language as tl


@triton.jit
def add_parts(p0, p1, s0, s1, PARTS: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr):
EARLY_LINES    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.full([BLOCK], 0.0, tl.float32)
    for part in tl.static_range(PARTS):
        total += tl.load(p0 + part * s1 + at, mask=at < s0, other=0.0)
    tl.store(p1 + at, total.to(HALF), mask=at < s0)
"""
ADD_BLOCK = 1024


@dataclass(frozen=True, slots=True)
class Tile:
    """What one program computes: ``cols`` output channels of a box of ``pixels``, and of ``extra``
    lines of pixels below it, as sizes of one product are powers of two: 64 x (256 + 64) cut two
    pictures of 64 x 64 pixels and 320 channels into 130 tiles, for 132 processors. The sum over
    places and input channels is cut into ``split`` parts, fp32, which ``add_parts`` adds."""

    cols: int
    pixels: int
    stages: int
    num_warps: int
    split: int = 1
    extra: int = 0


@dataclass(frozen=True, slots=True)
class Picture:
    """Sizes of a convolution with a square, odd window, around which there are as many zeros as
    keep height and width where it goes on by one pixel."""

    size: int  # of the window
    ins: int
    outs: int
    batch: int
    height: int  # of the result
    width: int
    stride: int = 1  # pixels from one place of the window to the next


@dataclass(frozen=True, slots=True)
class Form:
    """A tile, and the pictures, lines and columns of its box."""

    tile: Tile
    box: tuple[int, int, int]

    def boxes(self, of: Picture) -> tuple[int, int, int]:
        """How many lie side by side: of pictures, down, right."""
        count, height, width = self.box
        return boxes_along((count, height + self.tile.extra, width), of)

    def num_programs(self, of: Picture) -> int:
        return math.prod(self.boxes(of)) * (of.outs // self.tile.cols) * self.tile.split

    def scalars(self, of: Picture) -> tuple[int, ...]:
        count, down, right = self.boxes(of)
        return of.outs // self.tile.cols, right, down, count

    def views(self, of: Picture) -> Iterator[tuple[int, ...]]:
        """Sizes of the dense tensors behind the params."""
        x = (of.batch, of.height, of.width, of.ins)
        split = self.tile.split
        count = of.batch if split == 1 else split * self.boxes(of)[0] * self.box[0]
        out = (count, of.height, of.width, of.outs)
        yield from (x, (of.outs, of.size**2 * of.ins), out)
        if self.tile.extra:
            yield from (x, out)


def box_conv(form: Form, size: int, ins: int, dtype: torch.dtype) -> KernelSource:
    """out[b, y, x, o] = sum of w[o, i, j, c] * in[b, y + i - r, x + j - r, c], r = size // 2.

    Params: the input (B, H, W, CI), weights (CO, size * size * CI) and the result (B, H, W, CO),
    all dense; input and result again where there are extra lines. CI, here ``ins``, is a multiple
    of 64 (as a scalar it would cost a division a step, 3 to 13 % of the time), CO of ``tile.cols``.
    With parts the result is fp32, (parts * boxes of pictures * pictures of a box, H, W, CO). Sums
    are fp32. Scalars: ``Form.scalars``.
    """
    tile, (count, height, width) = form.tile, form.box
    out = dtype if tile.split == 1 else torch.float32
    pixels, result = (count, height, width, DEPTH), (count, height, width, tile.cols)
    boxes: tuple[tuple[int, ...], ...] = (pixels, (tile.cols, DEPTH), result)
    if tile.extra:
        boxes += ((1, 1, width, DEPTH), (1, 1, width, tile.cols))
    names = ", ".join(f"p{n}" for n in range(len(boxes)))
    text = _TEXT.replace("PARAMS", names).replace("EARLY_LINES", EARLY)
    text = text.replace("OUT", HALVES.get(out, "tl.float32"))
    constants = {"SIZE": size, "CHUNKS": ins // DEPTH, "COUNT": count, "HEIGHT": height,
                 "WIDTH": width, "COLS": tile.cols, "DEPTH": DEPTH, "SPLIT": tile.split,
                 "STAGES": tile.stages, "EXTRA": tile.extra, "EARLY": 1}  # fmt: skip
    cols, right, down, pictures = map(symbol, ("s0", "s1", "s2", "s3"))
    return KernelSource(
        "box_conv", "triton", text, (dtype, dtype, out, dtype, out)[: len(boxes)], (1,) * 4,
        (cols * right * down * pictures * tile.split,), constants=tuple(constants.items()),
        num_warps=tile.num_warps, boxes=boxes,
    )  # fmt: skip


def add_parts(parts: int, dtype: torch.dtype) -> KernelSource:
    """out[i] = sum over p of in[p * s1 + i], i < s0, in the order of p, in fp32."""
    text = _ADD.replace("HALF", HALVES[dtype]).replace("EARLY_LINES", EARLY)
    return KernelSource(
        "add_parts", "triton", text, (torch.float32, dtype), (16, 16),
        ((symbol("s0") + (ADD_BLOCK - 1)) // ADD_BLOCK,),
        constants=(("PARTS", parts), ("BLOCK", ADD_BLOCK), ("EARLY", 1)),
    )  # fmt: skip


Boxes = tuple[tuple[int, int, int], ...]

# Pictures, lines and columns by the number of pixels. Few, so that the kernels for all sizes can be
# built before anybody asks for them; a library has pictures that none of them covers well.
BOXES: Mapping[int, Boxes] = {
    128: ((1, 2, 64), (1, 4, 32), (1, 8, 16), (1, 16, 8), (2, 8, 8)),
    256: ((1, 4, 64), (1, 8, 32), (1, 16, 16)),
}


def boxes_along(box: tuple[int, int, int], of: Picture) -> tuple[int, int, int]:
    """How many lie side by side: of pictures, down, right."""
    count, height, width = box
    return -(-of.batch // count), -(-of.height // height), -(-of.width // width)


def box_of(pixels: int, of: Picture, extra: int = 0, boxes: Mapping[int, Boxes] = BOXES
           ) -> tuple[int, int, int]:  # fmt: skip
    """Pictures, lines and columns of a box of so many pixels that waste the fewest."""

    def wasted(box: tuple[int, int, int]) -> tuple[int, int, int]:
        count, height, width = box
        steps = (count, height + extra, width)
        return math.prod((*steps, *boxes_along(steps, of))), count, -width

    return min((box for box in boxes[pixels] if box[0] == 1 or not extra), key=wasted)


# Measured on an H100 in fp16 (benchmarks/probes/conv_boxes.py): microseconds that a program takes
# by tile, at its beginning and end and for each step of 64 input channels; of the sum of parts.
TILES = {
    Tile(64, 256, 4, 4, extra=1): (4.0, 0.463),
    Tile(128, 128, 4, 4): (1.0, 0.328),
    Tile(128, 128, 4, 4, split=3): (3.0, 0.383),
    Tile(128, 128, 5, 8, split=9): (3.7, 0.564),
}
FITTED = (  # batch, height = width, channels in and out of these measurements
    (2, 64, 320, 320), (2, 64, 640, 320), (2, 64, 960, 320), (2, 32, 640, 640), (2, 32, 960, 640),
    (2, 32, 1920, 640), (2, 16, 1280, 1280), (2, 16, 2560, 1280), (2, 8, 1280, 1280),
    (2, 8, 2560, 1280), (1, 64, 512, 512),
)  # fmt: skip
LEAST_CHANNELS = 320  # in and out; with fewer, small pictures have not been measured
SMS, ADD_US = 132, 4.5
# Programs come in rounds of one a processor. cuDNN's overlap the end of one tile with the next.
LEAST_USE = (0.59, 0.9)  # share of one round's processors, of two rounds'
# What cuDNN takes: so many operations a microsecond, or as long as it reads the weights, and 7 us.
LIBRARY_OPS_A_US, LIBRARY_BYTES_A_US, LIBRARY_BEGIN_US = 560e6, 2.0e6, 7.0


@lru_cache(maxsize=4096)
def form_of(of: Picture) -> Form | None:
    """How to compute it, or None where the library is faster, or this kernel has no way to."""
    found = {form: us_of(form, of) for form in _forms(of) if of.stride == 1}
    best = min(found, key=lambda form: found[form], default=None)
    return best if best and found[best] <= library_us(of) else None


def _forms(of: Picture) -> Iterator[Form]:
    for tile in TILES:
        if _divides(tile, of.size, of.ins, of.outs):
            form = Form(tile, box_of(tile.pixels, of, tile.extra))
            if _is_used(form, of):
                yield form


def _divides(tile: Tile, size: int, ins: int, outs: int) -> bool:
    return outs % tile.cols == 0 and size**2 * ins // DEPTH % tile.split == 0


def _is_used(form: Form, of: Picture) -> bool:
    """Whether most processors have a program in each round."""
    programs = form.num_programs(of)
    rounds = -(-programs // SMS)
    within = 0 < rounds <= len(LEAST_USE)
    return within and programs >= LEAST_USE[rounds - 1] * rounds * SMS


def us_of(form: Form, of: Picture) -> float:
    """About how long its kernels take, on a GPU that does nothing else."""
    begin_us, step_us = TILES[form.tile]
    steps = of.size**2 * of.ins // DEPTH // form.tile.split
    rounds = -(-form.num_programs(of) // SMS)
    return rounds * (begin_us + steps * step_us) + (ADD_US if form.tile.split > 1 else 0.0)


def library_us(of: Picture) -> float:
    weights = of.size**2 * of.ins * of.outs
    ops = 2 * of.batch * of.height * of.width * weights
    return LIBRARY_BEGIN_US + max(ops / LIBRARY_OPS_A_US, 2 * weights / LIBRARY_BYTES_A_US)


def is_boxed(node: Node, strides: Collection[int] = (1,)) -> bool:
    """Whether sizes may come at which ``form_of`` knows a form for this convolution, or something
    that goes on by one of these strides."""
    if node.op != "conv2d" or node.dtype not in HALVES or len(node.inputs) != 2:
        return False
    if not all(size.is_const for size in node.inputs[1].shape):
        return False
    outs, ins, down, right = (size.value for size in node.inputs[1].shape)
    attrs, around = node.attrs, (down // 2, right // 2)
    is_plain = attrs["groups"] == 1 and tuple(attrs["dilation"]) == (1, 1)
    goes_on = tuple(attrs["stride"]) in [(stride, stride) for stride in strides]
    is_same = down == right == 3 and tuple(attrs["padding"]) == around
    fits = ins % DEPTH == 0 and outs % DEPTH == 0 and min(ins, outs) >= LEAST_CHANNELS
    return bool(is_plain and goes_on and is_same and fits)


def picture_of(x: Sequence[int], weight: Sequence[int], stride: int = 1) -> Picture:
    """From the sizes (B, CI, H, W) and (CO, CI, size, size)."""
    batch, ins, *sides = x
    height, width = (-(-side // stride) for side in sides)
    return Picture(weight[2], ins, weight[0], batch, height, width, stride)


def sources_of(form: Form, of: Picture, dtype: torch.dtype) -> list[KernelSource]:
    """The kernels that it takes, in the order of their launches."""
    sources = [box_conv(form, of.size, of.ins, dtype)]
    return sources if form.tile.split == 1 else [*sources, add_parts(form.tile.split, dtype)]


def sources_at(shapes: Sequence[Sequence[int]], dtype: torch.dtype) -> list[KernelSource]:
    """What is launched for operands of these sizes; nothing where the library does it."""
    of = picture_of(shapes[0], shapes[1])
    form = form_of(of)
    return sources_of(form, of, dtype) if form else []


def sources_anywhere(weight: Sequence[Expr], dtype: torch.dtype) -> list[KernelSource]:
    """What is launched for pictures of any sizes, with weights of sizes (CO, CI, size, size)."""
    outs, ins, size, _ = (s.value for s in weight)
    found = dict[KernelSource, None]()
    for form in _forms_anywhere(size, ins, outs):
        found |= dict.fromkeys(sources_of(form, Picture(size, ins, outs, 1, 1, 1), dtype))
    return list(found)


@lru_cache(maxsize=256)
def _forms_anywhere(size: int, ins: int, outs: int) -> tuple[Form, ...]:
    """Those that beat the library where their boxes cover a picture, in full rounds."""
    return tuple(Form(tile, box) for tile in TILES if _divides(tile, size, ins, outs)
                 for box in BOXES[tile.pixels]
                 if _is_ever_faster(Form(tile, box), size, ins, outs))  # fmt: skip


def _is_ever_faster(form: Form, size: int, ins: int, outs: int) -> bool:
    count, height, width = form.box
    one = Picture(size, ins, outs, count, height + form.tile.extra, width)
    for rounds in range(1, len(LEAST_USE) + 1):
        boxes = rounds * SMS // form.num_programs(one)
        of = replace(one, height=boxes * one.height)
        if _is_used(form, of) and us_of(form, of) <= library_us(of):
            return True
    return False
