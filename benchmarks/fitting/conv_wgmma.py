"""3x3 convolutions by WGMMA, in PTX, whose sum a cluster of programs may share.

One H100, fp16, channels-last: see ``strop/kernels/gemm/wgmma_gemm.py``. 128 pixels x 160
channels, in up to eight parts, leave few of 132 processors without work at all sizes of SD1.5's
UNet. The peer is cuDNN. Errors are against fp32.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import astuple
from typing import Any

import torch
from torch import Tensor

from benchmarks.fitting import contest, conv_shapes
from benchmarks.fitting.conv_narrow import SETS, arguments, library_call, window_of
from strop.bench.select import HELD_OUT, picture
from strop.ir.source import KernelSource
from strop.kernels.gemm.implicit import ConvShape
from strop.kernels.gemm.rows import GemmForm, dense, form, is_able
from strop.kernels.gemm.tile import PLAIN, GemmTile
from strop.kernels.gemm.wgmma_gemm import wgmma_gemm
from strop.kernels.kernel import Late
from strop.kernels.ptx import DEPTH, LINE, ROWS
from strop.kernels.tuned import h100

SECONDS = 150
AT_ONCE = {**h100.CLUSTERS, 5: 24}  # of five: a guess
# Batch, height = width, channels in and out where every second pixel is left out.
STRIDED = (
    (2, 64, 320, 320),
    (2, 32, 640, 640),
    (2, 16, 1280, 1280),
    (8, 64, 320, 320),
    (8, 32, 640, 640),
    (2, 128, 320, 320),
    (2, 64, 640, 640),
    (2, 96, 320, 320),
    (3, 48, 640, 640),
    (4, 16, 1280, 1280),
)
MORE = 28  # pictures of 768x768, and others between
WORST = 1.35  # tiles of which a guess says that they take so much longer are left out
OTHERS = tuple(
    GemmTile(*each)
    for each in (
        (2, 160, 5),
        (2, 80, 7),
        (2, 80, 7, 8),
        (2, 256, 4),
        (1, 160, 7, 2),
        (2, 216, 4, 5),
        *((2, 128, 6, split) for split in (1, 3)),
        (2, 192, 5),
        (2, 192, 5, 2),
        (2, 256, 4, 2),
        *((4, 80, 5, split) for split in (1, 2)),
        *((2, *each, 1, True, True) for each in ((160, 4), (128, 5), (192, 3))),
    )
)
TILES = tuple(dict.fromkeys((*h100.CONV_TILES, *h100.STRIDED_TILES, *OTHERS)))


def clocks(each: GemmForm, of: ConvShape) -> float:
    """A guess: a step takes as long as its products, or as what they read and write of shared
    memory at 128 bytes a clock."""
    product, tile = each.product, each.product.tile
    rounds = -(-each.num_tiles // AT_ONCE[tile.split])
    reads = LINE // DEPTH * tile.groups * (ROWS + tile.cols) * 2 * DEPTH
    step = max(2 * tile.groups * tile.cols, (reads + product.stage) / 128)
    steps = -(-(of.size**2) * -(-of.ins // LINE) // tile.split)
    around = 5000 + (rounds - 1) * 3000 if tile.keeps_on else rounds * 5000
    return around + rounds * steps * step


def forms(
    of: ConvShape, end: str = PLAIN, tiles: Iterable[GemmTile] = TILES, worst: float = WORST
) -> list[GemmForm]:
    """Those that are worth a try."""
    tried = (form(tile, of, end, sms=h100.DEVICE.sms) for tile in tiles)
    found = {each: clocks(each, of) for each in tried if is_able(each.product, of)}
    least = min(found.values())
    return [each for each, guess in found.items() if guess <= worst * least]


def scalars_of(each: GemmForm, ins: int, *, late: bool) -> list[int]:
    """What a launch passes; ``late`` where a kernel that may still run writes the weights."""
    return [int(late) if isinstance(s, Late) else s for s in each.scalars(ins)]


def bound(
    each: GemmForm,
    of: ConvShape,
    sets: list[tuple[Tensor, ...]],
    library: Any,
    stream: int,
    *,
    late: bool = False,
    dtype: torch.dtype = torch.float16,
) -> Callable[[], None]:
    product, scalars = each.product, scalars_of(each, of.ins, late=late)
    columns = of.outs * of.windows * (2 if product.gated else 1)
    sides = (of.height * of.stride, of.width * of.stride)
    sizes = [(of.batch, *sides, of.ins), (columns, of.size**2 * of.ins)]
    views = [(size, torch.empty(size, device="meta").stride()) for size in sizes]
    views[0] = (*views[0], (*each.box, LINE))
    if each.results:
        views.append((of.result, dense(of.result), each.results))
    source = wgmma_gemm(product, dtype)
    # a convolution adds nothing
    pointers = ([*(t.data_ptr() for t in tensors), 0][:4] for tensors in sets)
    return contest.launched_in_turn(library, source, pointers, scalars, stream, views)


def sources(shape: tuple[int, ...]) -> Iterator[KernelSource]:
    of = picture(shape)
    yield from (wgmma_gemm(each.product, torch.float16) for each in forms(of))


def measure(shape: tuple[int, ...], library: Any) -> dict[str, Any]:
    of, stream = picture(shape), torch.cuda.Stream()
    with torch.cuda.stream(stream), torch.no_grad():
        sets = arguments(shape)
        x, w, out = sets[0]
        truth = torch.nn.functional.conv2d(x.float(), w.float(), padding=1, stride=of.stride)
        calls: dict[str, Callable[[], None]] = {"cudnn": library_call(sets, window_of(shape))}
        for each in forms(of):
            name = str(astuple(each.product.tile))
            calls[name] = bound(each, of, sets, library, stream.cuda_stream)
        return contest.judged(calls, SETS, out, truth, stream)


def shapes_of(args: argparse.Namespace) -> list[tuple[int, ...]]:
    if args.strided:
        return [(*each, 3, 2) for each in STRIDED]
    if args.held_out:
        return sorted(HELD_OUT["conv_wgmma"])
    every = [shape for shape in conv_shapes.shapes() if shape[2] >= 256]
    first = [shape for shape in conv_shapes.shapes()[:40] if shape in every]
    more = [s for s in every if s not in first and (s[1] % 12 == 0 or s in every[-40:])]
    shapes = [*first, *more[:MORE]]
    return [shape for shape in shapes if args.side in (None, shape[1])]


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--side", type=int, help="pictures of this height and width only")
    parser.add_argument("--held-out", action="store_true", help="sizes that no rule was fitted to")
    parser.add_argument("--strided", action="store_true", help="every second pixel is left out")


def run(args: argparse.Namespace) -> None:
    torch.backends.cudnn.allow_tf32 = False
    shapes = shapes_of(args)
    wanted = itertools.chain.from_iterable(map(sources, shapes))
    contest.hold("conv_wgmma", args, wanted, shapes, measure)
