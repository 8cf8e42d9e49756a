"""Products of e4m3 codes by WGMMA, in PTX, beside torch's ``_scaled_mm``.

One Hopper GPU: codes (M, K) and (N, K) with scales by row and by column and biases, results in
fp16: see ``strop/kernels/gemm/scaled_codes.py``. M, N and K are of linears of SDXL, SD1.5 and
Flux.1. Chains of launches that may begin early. Errors are beside fp64: of results in fp16 alone
2.5e-4.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Iterator
from dataclasses import astuple
from typing import Any

import torch
from torch import Tensor

from benchmarks.fitting import contest
from benchmarks.fitting.conv_narrow import SETS
from strop.ir.eight_bit import FORMATS
from strop.ir.source import KernelSource
from strop.kernels.gemm.rows import GemmForm
from strop.kernels.gemm.scaled_rows import form
from strop.kernels.gemm.tile import GemmTile
from strop.kernels.gemm.wgmma_gemm import wgmma_gemm
from strop.kernels.kernel import Late
from strop.kernels.tuned import h100

SECONDS = 150
# M, N, K
SHAPES = (
    *((2048, n, k) for n, k in ((1280, 1280), (3840, 1280), (10240, 1280), (1280, 5120))),
    *((8192, n, k) for n, k in ((640, 640), (1920, 640), (5120, 640), (640, 2560))),
    *((154, n, k) for n, k in ((2560, 2048), (1280, 2048))),
    *((4608, n, k) for n, k in ((9216, 3072), (12288, 3072), (3072, 15360), (3072, 3072))),
    *((4096, n, k) for n, k in ((9216, 3072), (12288, 3072), (3072, 12288))),
    *((512, n, k) for n, k in ((9216, 3072), (12288, 3072), (3072, 12288))),
    *((32768, n, k) for n, k in ((320, 320), (960, 320), (2560, 320), (320, 1280))),
    (4096, 1536, 1536),
    (300, 336, 208),
)
TILES = tuple(
    GemmTile(*each)
    for each in (
        *((2, *size, 1, True, True) for size in ((80, 4), (96, 4), (112, 4))),
        *((2, *size, 1, True) for size in ((80, 6), (128, 5), (160, 5), (176, 4), (192, 4))),
        *((1, *size, 1, True) for size in ((80, 8), (128, 6), (160, 6))),
        *((1, *size) for size in ((80, 8), (160, 6))),
    )
)


def forms_of(shape: tuple[int, ...]) -> list[GemmForm]:
    rows, columns, _ = shape
    fit = (tile for tile in TILES if tile.cols <= columns)
    return [form(tile, rows, columns, has_biases=True, sms=h100.DEVICE.sms) for tile in fit]


def sources(shape: tuple[int, ...]) -> Iterator[KernelSource]:
    yield from (wgmma_gemm(each.product, torch.float16) for each in forms_of(shape))


def arguments(shape: tuple[int, ...]) -> list[tuple[Tensor, ...]]:
    rows, columns, depth = shape
    found = []
    for seed in range(SETS):
        torch.manual_seed(seed)
        parts = [torch.randn(count, depth, device="cuda") for count in (rows, columns)]
        (x, of_rows), (w, of_columns) = (FORMATS["fp8"].quantised(part) for part in parts)
        new: dict[str, Any] = {"device": "cuda", "dtype": torch.float16}
        out, bias = torch.empty(rows, columns, **new), torch.randn(columns, **new)
        found.append((x, w, out, of_rows, of_columns / depth**0.5, bias))
    return found


def bound(
    each: GemmForm, shape: tuple[int, ...], sets: list[Any], library: Any, stream: int
) -> Callable[[], None]:
    rows, columns, depth = shape
    sizes = [(1, 1, rows, depth), (columns, depth), (1, 1, *sets[0][2].shape)]
    views: list[Any] = [(size, torch.empty(size, device="meta").stride()) for size in sizes]
    views[0] = (*views[0], (*each.box, each.product.line))
    views[2] = (*views[2], each.results)
    scalars = [0 if isinstance(one, Late) else one for one in each.scalars(depth)]
    source = wgmma_gemm(each.product, torch.float16)
    pointers = ([tensor.data_ptr() for tensor in tensors] for tensors in sets)
    return contest.launched_in_turn(library, source, pointers, scalars, stream, views)


def library_call(sets: list[tuple[Tensor, ...]]) -> Callable[[], object]:
    turns = itertools.cycle(sets)

    def call() -> Tensor:
        x, w, out, of_rows, of_columns, bias = next(turns)
        scales = of_rows[:, None], of_columns[None]
        return torch._scaled_mm(x, w.t(), *scales, bias, out_dtype=out.dtype, out=out)

    return call


def measure(shape: tuple[int, ...], library: Any) -> dict[str, Any]:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream), torch.no_grad():
        sets = arguments(shape)
        x, w, out, of_rows, of_columns, bias = sets[0]
        truth = (x.double() @ w.double().t()) * (of_rows.double()[:, None] * of_columns) + bias
        calls = {"_scaled_mm": library_call(sets)}
        for each in forms_of(shape):
            name = str(astuple(each.product.tile))
            calls[name] = bound(each, shape, sets, library, stream.cuda_stream)
        return contest.judged(calls, SETS, out, truth, stream)


def run(args: argparse.Namespace) -> None:
    wanted = itertools.chain.from_iterable(map(sources, SHAPES))
    contest.hold("codes_wgmma", args, wanted, SHAPES, measure)
