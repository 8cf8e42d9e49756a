"""3x3 convolutions of e4m3 codes by WGMMA, in PTX, with a scale for each pixel.

One Hopper GPU, channels-last, results in fp16: see ``strop/kernels/gemm/scaled_codes.py``. Batch,
height and width, and channels are those of SDXL's and SD1.5's UNets at 1024x1024. The peers
convolve the same numbers, rounded to fp16: cuDNN, and the tile for halves that is chosen. Errors
are beside fp32: of results in fp16 alone 2.5e-4.
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
from benchmarks.fitting.conv_narrow import SETS, library_call, window_of
from strop.bench.select import picture
from strop.ir.eight_bit import FORMATS
from strop.ir.source import KernelSource
from strop.kernels.gemm.implicit import ConvShape
from strop.kernels.gemm.rows import GemmForm, dense, form_of
from strop.kernels.gemm.scaled_convs import form
from strop.kernels.gemm.tile import PLAIN, GemmTile
from strop.kernels.gemm.wgmma_gemm import wgmma_gemm
from strop.kernels.tuned import h100

SECONDS = 100
# Batch, height = width, channels in and out, window, stride
SHAPES = tuple(
    (*sizes, 3, stride)
    for sizes, stride in (
        *(((2, 128, *each), 1) for each in ((320, 320), (640, 320), (960, 320), (640, 640))),
        *(((2, 64, *each), 1) for each in ((320, 640), (640, 640), (960, 640), (1280, 640))),
        *(((2, 64, *each), 1) for each in ((1920, 640), (1280, 1280))),
        *(((2, 32, *each), 1) for each in ((640, 1280), (1280, 1280), (1920, 1280), (2560, 1280))),
        *(((2, 32, *each), 1) for each in ((320, 640), (640, 640))),
        *(((2, 16, *each), 1) for each in ((1280, 1280), (2560, 1280))),
        ((2, 128, 320, 320), 2),
        ((2, 64, 640, 640), 2),
    )
)
TILES = tuple(
    GemmTile(*each)
    for each in (
        *((2, *size, 1, True) for size in ((80, 6), (128, 5), (160, 5), (192, 4))),
        *((2, *size, 1, True, True) for size in ((80, 4), (96, 4))),
        *((1, *size, 1, True) for size in ((80, 8), (160, 6))),
        *((1, *size) for size in ((80, 8), (160, 6))),
    )
)


def forms_of(of: ConvShape) -> list[GemmForm]:
    return [form(tile, of, sms=h100.DEVICE.sms) for tile in TILES if tile.cols <= of.outs]


def of_halves(of: ConvShape) -> GemmForm | None:
    """Return the tile that computes the same convolution exactly."""
    return form_of(of, PLAIN, h100.DEVICE)[0]


def sources(shape: tuple[int, ...]) -> Iterator[KernelSource]:
    of = picture(shape)
    exact = of_halves(of)
    for each in (*forms_of(of), *([exact] if exact else [])):
        yield wgmma_gemm(each.product, torch.float16)


def codes_of(x: Tensor, dims: int) -> tuple[Tensor, Tensor]:
    """Return codes and scales of the rows of a tensor's last dims."""
    codes, scales = FORMATS["fp8"].quantised(x.flatten(end_dim=-dims - 1).flatten(1))
    return codes.view(x.shape), scales


def numbers_of(x: Tensor, w: Tensor, pixels: Tensor, columns: Tensor) -> tuple[Tensor, Tensor]:
    """Return, in fp32 and as torch convolves them, what codes and scales stand for."""
    wide = x.float() * pixels.view(*x.shape[:3], 1), w.float() * columns.view(-1, 1, 1, 1)
    return wide[0].permute(0, 3, 1, 2), wide[1].permute(0, 3, 1, 2)


def arguments(of: ConvShape) -> list[tuple[tuple[Tensor, ...], tuple[Tensor, ...]]]:
    """Return, for each turn, codes with their scales, and the same numbers in fp16; both write one
    result."""
    found = []
    for seed in range(SETS):
        torch.manual_seed(seed)
        new: dict[str, Any] = {"device": "cuda"}
        x = torch.randn(of.batch, of.height * of.stride, of.width * of.stride, of.ins, **new)
        w = torch.randn(of.outs, of.size, of.size, of.ins, **new) / (of.ins * of.size**2) ** 0.5
        (x, pixels), (w, columns) = codes_of(x, 1), codes_of(w, 3)
        out = torch.empty(of.batch, of.height, of.width, of.outs, dtype=torch.float16, **new)
        halves = [each.half() for each in numbers_of(x, w, pixels, columns)]
        found.append(((x, w, out, pixels, columns), (*halves, out.permute(0, 3, 1, 2))))
    return found


def bound(
    each: GemmForm, of: ConvShape, sets: list[tuple[Tensor, ...]], library: Any, stream: int
) -> Callable[[], None]:
    x, w, *_ = sets[0]
    views: list[Any] = [
        (x.shape, x.stride(), (*each.box, each.product.line)),
        ((of.outs, w[0].numel()), (w[0].numel(), 1)),
        (of.result, dense(of.result), each.results),
    ]
    scalars = conv_wgmma.scalars_of(each, of.ins, late=False)
    source = wgmma_gemm(each.product, torch.float16)
    pointers = ([*(t.data_ptr() for t in tensors), 0] for tensors in sets)
    return contest.launched_in_turn(library, source, pointers, scalars, stream, views)


def measure(shape: tuple[int, ...], library: Any) -> dict[str, Any]:
    of, stream = picture(shape), torch.cuda.Stream()
    with torch.cuda.stream(stream), torch.no_grad():
        sets = arguments(of)
        codes, halves = [one for one, _ in sets], [one for _, one in sets]
        x, w, out, pixels, columns = codes[0]
        numbers = numbers_of(x, w, pixels, columns)
        truth = torch.nn.functional.conv2d(*numbers, padding=1, stride=of.stride)
        calls = {"cudnn": library_call(halves, window_of(shape))}
        if exact := of_halves(of):
            calls["halves"] = conv_wgmma.bound(exact, of, halves, library, stream.cuda_stream)
        for each in forms_of(of):
            name = str(astuple(each.product.tile))
            calls[name] = bound(each, of, codes, library, stream.cuda_stream)
        return contest.judged(calls, SETS, out, truth.permute(0, 2, 3, 1), stream)


def run(args: argparse.Namespace) -> None:
    torch.backends.cudnn.allow_tf32 = False
    wanted = itertools.chain.from_iterable(map(sources, SHAPES))
    contest.hold("code_conv", args, wanted, SHAPES, measure)
