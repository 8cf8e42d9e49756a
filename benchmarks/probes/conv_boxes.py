"""Is a 3x3 convolution of ours that reads boxes of pixels by TMA faster than cuDNN's?

python benchmarks/probes/conv_boxes.py --out FOLDER [--seconds 150]

One H100, fp16, channels-last, stride 1: the convolutions of SD1.5's UNet at 512x512, batch 2, and
of its VAE's decoder. An implicit GEMM without addresses: for each place of the window the tensor
memory accelerator brings the box of pixels moved by that place, zeros where it leaves the picture,
laid out as the tensor cores read it. Weights are the first operand and pixels the second, which is
what lets Triton use the box where it lies (the other way round it goes through registers). Small
pictures cut the depth between programs; fp32 parts are added by a kernel of their own, which is
timed with it. Errors are against fp64.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, dataclass
from typing import Any

import contest
import torch
import triton
import triton.language as tl
from conv_narrow import SETS, arguments, library_call, window_of
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

# pictures, height and width, channels in and out, window, stride
SHAPES = tuple((*shape, 3, 1) for shape in (
    (2, 64, 320, 320), (2, 8, 1280, 1280), (2, 16, 1280, 1280), (2, 32, 640, 640),
    (2, 64, 640, 320), (2, 64, 960, 320), (2, 32, 1920, 640), (2, 16, 2560, 1280),
    (2, 8, 2560, 1280), (2, 32, 960, 640), (2, 64, 640, 640), (2, 32, 1280, 1280),
    (1, 64, 512, 512), (1, 128, 512, 512), (1, 256, 256, 256), (1, 512, 128, 128),
))  # fmt: skip


@dataclass(frozen=True)
class Tile:
    """``cols`` output channels of ``pixels``, and of ``extra`` lines below them: a product's sizes
    are powers of two, but tiles of 64 x 320 are 130 in two pictures of 64x64 and 320 channels, for
    132 processors. The depth is cut into ``split`` parts."""

    cols: int
    pixels: int
    stages: int
    warps: int
    split: int = 1
    depth: int = 64
    extra: int = 0


PLAIN = tuple(Tile(*each) for each in (
    (128, 128, 4, 8), (128, 128, 4, 4), (64, 256, 4, 4), (64, 256, 4, 8), (64, 128, 6, 4),
    (128, 256, 4, 8), (128, 64, 5, 4), (256, 128, 4, 8), (64, 64, 6, 4), (64, 128, 4, 4),
    (64, 256, 4, 4, 1, 64, 1), (64, 256, 4, 8, 1, 64, 1),
))  # fmt: skip
CUT = tuple(Tile(*each) for each in (
    (128, 128, 4, 8, 3), (64, 128, 6, 4, 3), (128, 64, 5, 4, 3), (128, 128, 4, 4, 3),
    (64, 128, 6, 4, 9), (128, 128, 5, 8, 9), (128, 64, 6, 4, 9), (64, 64, 6, 4, 9),
    (128, 128, 5, 8, 12), (256, 128, 4, 8, 9), (256, 64, 4, 8, 3),
))  # fmt: skip
SMALL = 32  # pixels of a side up to which the depth is cut, too


@triton.jit(do_not_specialize=["tiles_y", "tiles_x", "tiles_n"])
def conv_boxes(x, w, out, x_extra, out_extra, tiles_y, tiles_x, tiles_n, CI: tl.constexpr,
               CO: tl.constexpr, COUNT: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
               COLS: tl.constexpr, DEPTH: tl.constexpr, SPLIT: tl.constexpr,
               STAGES: tl.constexpr, EXTRA: tl.constexpr):  # fmt: skip
    pixels: tl.constexpr = COUNT * HEIGHT * WIDTH
    chunks: tl.constexpr = CI // DEPTH
    steps: tl.constexpr = 9 * chunks // SPLIT
    col = tl.program_id(0) % (CO // COLS) * COLS
    box = tl.program_id(0) // (CO // COLS)
    x0 = box % tiles_x * WIDTH
    y0 = box // tiles_x % tiles_y * (HEIGHT + EXTRA)
    n0 = box // (tiles_x * tiles_y) * COUNT
    first = tl.program_id(1) * steps
    acc = tl.zeros([COLS, pixels], tl.float32)
    below = tl.zeros([COLS, WIDTH], tl.float32)
    for at in tl.range(0, steps, num_stages=STAGES):
        step = first + at
        place = step // chunks
        c = step % chunks * DEPTH
        y, xx = y0 + place // 3 - 1, x0 + place % 3 - 1
        a = w.load([col, step * DEPTH])
        acc = tl.dot(a, x.load([n0, y, xx, c]).reshape([pixels, DEPTH]).T, acc)
        if EXTRA:
            b = x_extra.load([n0, y + HEIGHT, xx, c]).reshape([WIDTH, DEPTH])
            below = tl.dot(a, b.T, below)
    result = acc.to(out.dtype).T.reshape([COUNT, HEIGHT, WIDTH, COLS])
    out.store([n0 + tl.program_id(1) * tiles_n * COUNT, y0, x0, col], result)
    if EXTRA:
        rest = below.to(out.dtype).T.reshape([1, 1, WIDTH, COLS])
        out_extra.store([n0, y0 + HEIGHT, x0, col], rest)


@triton.jit
def add_parts(parts, out, numel, SPLIT: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for part in tl.static_range(SPLIT):
        total += tl.load(parts + part * numel + at, mask=at < numel)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=at < numel)


def tiles(shape: tuple[int, ...]) -> Iterator[Tile]:
    count, side, ins, outs, _, _ = shape
    for tile in PLAIN + CUT * (side <= SMALL):
        fits = outs % tile.cols == 0 and 9 * ins // tile.depth % tile.split == 0
        fits = fits and (not tile.extra or (side >= 64 and outs == 320))
        programs = count * side**2 * outs * tile.split / (tile.cols * tile.pixels)
        if fits and tile.pixels <= count * side**2 and 32 <= programs <= 6000:
            yield tile


def box_of(tile: Tile, count: int, side: int) -> tuple[int, int, int]:
    """Pictures, lines and columns of a tile."""
    width = min(side, tile.pixels, 64)
    height = min(side, tile.pixels // width)
    return max(1, tile.pixels // (width * height)), height, width


def call_of(tile: Tile, x: Tensor, w: Tensor, out: Tensor) -> Callable[[], None]:
    """The convolution of channels-last tensors (N, C, H, W)."""
    x, w, out = (t.permute(0, 2, 3, 1) for t in (x, w, out))
    count, side, _, ins = x.shape
    outs, box = w.shape[0], box_of(tile, count, side)
    parts = out
    if tile.split > 1:
        shape = (tile.split * count, side, side, outs)
        parts = torch.empty(shape, device=x.device, dtype=torch.float32)
    place = TensorDescriptor.from_tensor(parts, [*box, tile.cols])
    pixels = TensorDescriptor.from_tensor(x, [*box, tile.depth])
    weights = TensorDescriptor.from_tensor(w.reshape(outs, -1), [tile.cols, tile.depth])
    line = [1, tile.extra or 1, box[2]]
    more = (TensorDescriptor.from_tensor(x, [*line, tile.depth]),
            TensorDescriptor.from_tensor(parts, [*line, tile.cols]))  # fmt: skip
    steps = (box[0], box[1] + tile.extra, box[2])
    boxes = [-(-size // part) for size, part in zip((count, side, side), steps, strict=True)]
    grid = (boxes[0] * boxes[1] * boxes[2] * (outs // tile.cols), tile.split)

    def call() -> None:
        conv_boxes[grid](pixels, weights, place, *more, boxes[1], boxes[2], boxes[0], ins, outs,
                         *box, tile.cols, tile.depth, tile.split, tile.stages, tile.extra,
                         num_warps=tile.warps)  # fmt: skip
        if tile.split > 1:
            add_parts[(triton.cdiv(out.numel(), 1024),)](parts, out, out.numel(), tile.split, 1024)

    return call


def run(shape: tuple[int, ...], tile: Tile) -> None:
    call_of(tile, *arguments(shape)[0])()


def measure(shape: tuple[int, ...], good: Sequence[Tile]) -> dict[str, Any]:
    stream, window = torch.cuda.Stream(), window_of(shape)
    with torch.cuda.stream(stream), torch.no_grad():
        sets = arguments(shape)
        x, w, out = sets[0]
        truth = torch.nn.functional.conv2d(x.double(), w.double(), padding=window.padding)
        calls: dict[str, Callable[[], None]] = {"cudnn": library_call(sets, window)}
        for tile in good:
            turns = itertools.cycle([call_of(tile, *tensors) for tensors in sets])
            calls[str(astuple(tile))] = lambda turns=turns: next(turns)()
        return contest.judged(calls, SETS, out, truth, stream)


def main() -> None:
    args = contest.arguments_of(__doc__, seconds=150).parse_args()
    contest.hold_jit("conv_boxes", args, SHAPES, tiles, run, measure)


if __name__ == "__main__":
    main()
