"""Convolutions with few channels on one side, beside cuDNN's.

One H100, fp16, channels-last: the first convolution of ResNet-50, first and last of SD1.5's
UNet and VAE decoder. Errors are against fp64.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from benchmarks.fitting import contest
from strop.ir.source import KernelSource
from strop.kernels.conv.narrow import NarrowTile, Window, narrow_conv

SECONDS = 90
# pictures, height and width, channels in and out, window, stride
SHAPES = (
    (1, 224, 3, 64, 7, 2),
    (2, 224, 3, 64, 7, 2),
    (33, 224, 3, 64, 7, 2),
    (2, 64, 4, 320, 3, 1),
    (2, 128, 4, 320, 3, 1),
    (1, 64, 4, 512, 3, 1),
    (2, 64, 320, 4, 3, 1),
    (2, 128, 320, 4, 3, 1),
    (1, 512, 128, 3, 3, 1),
    (1, 1024, 128, 3, 3, 1),
    (1, 512, 3, 128, 3, 1),
)
FEW_IN = tuple(
    NarrowTile(*each)
    for each in (
        (64, 64, 32, 4),
        (64, 64, 64, 4),
        (128, 64, 32, 4),
        (128, 64, 32, 8),
        (32, 64, 32, 4),
        (64, 32, 32, 4),
        (128, 64, 64, 8),
        (64, 64, 16, 4),
        (128, 128, 32, 8),
        (64, 128, 32, 4),
    )
)
FEW_OUT = tuple(
    NarrowTile(*each)
    for each in (
        (64, 16, 64, 4, 3),
        (64, 16, 64, 4, 5),
        (64, 16, 64, 4, 7),
        (128, 16, 64, 4, 3),
        (128, 16, 64, 4, 4),
        (128, 16, 64, 8, 4),
        (32, 16, 64, 2, 5),
        (32, 16, 64, 4, 5),
        (16, 16, 64, 1, 5),
        (64, 16, 32, 4, 5),
        (128, 16, 32, 4, 5),
        (256, 16, 32, 8, 4),
    )
)
SETS = 4


def window_of(shape: tuple[int, ...]) -> Window:
    _, _, ins, outs, size, stride = shape
    return Window(ins, outs, (size, size), (stride, stride), (size // 2, size // 2))


def candidates(shape: tuple[int, ...]) -> Iterator[tuple[str, KernelSource]]:
    window = window_of(shape)
    is_few_in = window.ins < FEW_OUT[0].cols
    for tile in FEW_IN if is_few_in else FEW_OUT:
        multiple = 1 if is_few_in else 16
        yield str(tile)[4:], narrow_conv(window, tile, torch.float16, multiple)


def arguments(shape: tuple[int, ...]) -> list[tuple[Tensor, ...]]:
    count, side, ins, outs, size, stride = shape
    found, after = [], (side + 2 * (size // 2) - size) // stride + 1
    for seed in range(SETS):
        torch.manual_seed(seed)
        x = torch.randn(count, ins, side, side, device="cuda", dtype=torch.float16)
        w = torch.randn(outs, ins, size, size, device="cuda", dtype=torch.float16)
        w *= (size * size * ins) ** -0.5
        out = torch.empty(count, outs, after, after, device="cuda", dtype=torch.float16)
        found.append(tuple(t.to(memory_format=torch.channels_last) for t in (x, w, out)))
    return found


def library_call(sets: list[tuple[Tensor, ...]], window: Window) -> Callable[[], None]:
    numbers, conv = itertools.cycle(sets), torch.ops.aten.cudnn_convolution.out

    def call() -> None:
        x, w, out = next(numbers)
        conv(
            x, w, list(window.padding), list(window.stride), [1, 1], 1, False, False, True, out=out
        )

    return call


def bound(
    source: KernelSource, sets: list[tuple[Tensor, ...]], library: Any, stream: int
) -> Callable[[], None]:
    x, _, out = sets[0]
    count, _, height, width = out.shape
    sizes = [count * height * width, height * width, width, *x.shape[2:], *x.stride()]
    launches = itertools.cycle(
        [library.bind(source, [t.data_ptr() for t in tensors], sizes, stream) for tensors in sets]
    )
    return lambda: next(launches)()


def measure(shape: tuple[int, ...], library: Any) -> dict[str, Any]:
    stream, window = torch.cuda.Stream(), window_of(shape)
    with torch.cuda.stream(stream), torch.no_grad():
        sets = arguments(shape)
        x, w, out = sets[0]
        truth = torch.nn.functional.conv2d(
            x.double(), w.double(), stride=window.stride, padding=window.padding
        )
        calls = {"cudnn": library_call(sets, window)}
        for name, source in candidates(shape):
            calls[name] = bound(source, sets, library, stream.cuda_stream)
        return contest.judged(calls, SETS, out, truth, stream)


def run(args: argparse.Namespace) -> None:
    sources = [source for shape in SHAPES for _, source in candidates(shape)]
    contest.hold("conv_narrow", args, sources, SHAPES, measure)
