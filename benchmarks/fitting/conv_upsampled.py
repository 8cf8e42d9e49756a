"""3x3 convolutions of an upsampled picture, as four windows of the smaller one.

One H100, fp16, channels-last: see ``strop/passes/upsampled_conv.py``. The peers convolve the larger
picture, which lies in memory already: cuDNN, and the tile of ours that is chosen for it ("whole").
``taps`` is what sums of taps take, once more for each call. Errors are against fp32.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Iterator
from dataclasses import astuple
from typing import Any

import torch
from torch import Tensor

from benchmarks.fitting import contest, conv_wgmma
from benchmarks.fitting.conv_narrow import SETS, arguments, library_call, window_of
from strop.ir.source import KernelSource
from strop.kernels.conv.folded_taps import folded_taps
from strop.kernels.gemm import rows as products
from strop.kernels.gemm.implicit import FOUR_WINDOWS, ConvShape
from strop.kernels.gemm.rows import GemmForm, form, is_able
from strop.kernels.gemm.tile import PLAIN, GemmTile
from strop.kernels.gemm.wgmma_gemm import wgmma_gemm
from strop.kernels.tuned import h100

SECONDS = 60
HALF = torch.float16
# Pictures, height = width, channels in and out: of SD1.5's UNet at 512 and 1024, of SDXL's, of the
# decoder at 512 and 1024.
SHAPES = (
    (2, 8, 1280, 1280),
    (2, 16, 1280, 1280),
    (2, 32, 640, 640),
    (2, 32, 1280, 1280),
    (2, 64, 640, 640),
    (8, 8, 1280, 1280),
    (8, 16, 1280, 1280),
    (8, 32, 640, 640),
    (1, 64, 512, 512),
    (1, 128, 512, 512),
    (1, 256, 256, 256),
    (1, 256, 512, 512),
    (1, 512, 256, 256),
    (2, 12, 1280, 1280),
    (2, 24, 1280, 1280),
    (2, 48, 640, 640),
)
MORE = tuple(
    GemmTile(*each)
    for each in (
        (1, 160, 7),
        (1, 80, 8),
        (2, 80, 7),
        (2, 160, 5),
        (2, 192, 4, 1, True),
        (3, 128, 5),
        (3, 160, 4),
        (2, 128, 5, 1, True, True),
    )
)
TILES = tuple(dict.fromkeys((*h100.UPSAMPLED_TILES, *MORE)))
Shape = tuple[int, ...]


def smaller(shape: Shape) -> ConvShape:
    count, side, ins, outs = shape
    return ConvShape(FOUR_WINDOWS, ins, outs, count, side, side)


def whole(shape: Shape) -> tuple[int, ...]:
    """The convolution of the larger picture, as ``conv_wgmma`` has them."""
    count, side, ins, outs = shape
    return count, 2 * side, ins, outs, 3, 1


def whole_form(shape: Shape) -> GemmForm | None:
    count, side, ins, outs, *_ = whole(shape)
    return products.form_of(ConvShape(3, ins, outs, count, side, side), PLAIN, h100.DEVICE)[0]


def forms(of: ConvShape) -> list[GemmForm]:
    tried = [form(tile, of, PLAIN, sms=h100.DEVICE.sms) for tile in TILES]
    return [each for each in tried if is_able(each.product, of)]


def sources(shape: Shape) -> Iterator[KernelSource]:
    _, _, ins, outs = shape
    yield folded_taps(outs, ins, HALF)
    found = whole_form(shape)
    for each in (*forms(smaller(shape)), *([found] if found else [])):
        yield wgmma_gemm(each.product, HALF)


def folding(sets: list[tuple[Tensor, ...]], library: Any, stream: int) -> Callable[[], None]:
    outs, ins = sets[0][0].shape[:2]
    source = folded_taps(outs, ins, HALF)
    turns = itertools.cycle(
        [
            library.bind(source, [t.data_ptr() for t in tensors], [outs * ins], stream)
            for tensors in sets
        ]
    )
    return lambda: next(turns)()


def measure(shape: Shape, library: Any) -> dict[str, Any]:
    stream, of, found = torch.cuda.Stream(), smaller(shape), whole_form(shape)
    with torch.cuda.stream(stream), torch.no_grad():
        sets = arguments(whole(shape))
        x, w, out = sets[0]
        small = [s[0][:, :, ::2, ::2].contiguous(memory_format=torch.channels_last) for s in sets]
        for (larger, *_), pixels in zip(sets, small, strict=True):
            larger.copy_(torch.nn.functional.interpolate(pixels, scale_factor=2.0))
        taps = [torch.empty(4 * of.outs, 4 * of.ins, device="cuda", dtype=HALF) for _ in sets]
        fold = folding(
            [(s[1], t) for s, t in zip(sets, taps, strict=True)], library, stream.cuda_stream
        )
        for _ in sets:
            fold()
        truth = torch.nn.functional.conv2d(x.float(), w.float(), padding=1)
        calls: dict[str, Callable[[], None]] = {
            "cudnn": library_call(sets, window_of(whole(shape)))
        }
        if found:
            larger_of = ConvShape(3, of.ins, of.outs, of.batch, 2 * of.height, 2 * of.width)
            calls["whole"] = conv_wgmma.bound(found, larger_of, sets, library, stream.cuda_stream)
        folded = [(p, t, s[2]) for p, t, s in zip(small, taps, sets, strict=True)]
        for each in forms(of):
            name = str(astuple(each.product.tile))
            calls[name] = conv_wgmma.bound(each, of, folded, library, stream.cuda_stream, late=True)
        row = contest.judged(calls, SETS, out, truth, stream)
        chosen, _ = products.form_of(of, PLAIN, h100.DEVICE)
        return {
            **row,
            "taps_us": contest.us_in_turns({"taps": fold}, stream)["us"]["taps"],
            "chosen": str(astuple(chosen.product.tile)) if chosen else "",
        }


def run(args: argparse.Namespace) -> None:
    torch.backends.cudnn.allow_tf32 = False
    wanted = itertools.chain.from_iterable(map(sources, SHAPES))
    contest.hold("conv_upsampled", args, wanted, SHAPES, measure)
