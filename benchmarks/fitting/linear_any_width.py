"""Products that store dense rows of an odd width by WGMMA, in PTX, beside cuBLAS and a copy.

One Hopper GPU, fp16: M rows, N columns, a multiple of no 8, and a depth of K, as of the words that
language models choose from. The peer multiplies by a weight with rows of zeros behind its own, and
copies N columns; ``cublas`` is its product alone. Errors are beside fp32: of rounding alone 2.5e-4.
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
from strop.ir.source import KernelSource
from strop.kernels.gemm.rows import GemmForm, line_of
from strop.kernels.gemm.tile import PLAIN, GemmTile
from strop.kernels.gemm.trimmed import able_to_store, form_of_any_width
from strop.kernels.gemm.wgmma_gemm import wgmma_gemm
from strop.kernels.kernel import Late
from strop.kernels.ptx import LINE
from strop.kernels.tuned import h100

SECONDS = 60
# M, N, K
SHAPES = (
    *((rows, 50257, 768) for rows in (512, 4096, 16384)),
    (4096, 50257, 1280),
    (2048, 30523, 1024),
    (8192, 1003, 512),
    *((rows, 30522, 768) for rows in (128, 1024)),
    (1024, 32001, 2048),
)
MULTIPLE = 8  # columns of what cuBLAS writes
TILES = (
    *able_to_store(h100.LINEAR_TILES),
    *(GemmTile(*each, 1, True) for each in ((2, 96, 5), (1, 160, 6), (1, 128, 6))),
)


def form_by(tile: GemmTile, shape: tuple[int, ...]) -> GemmForm:
    rows, columns, depth = shape
    of = line_of(rows, columns, depth, PLAIN)
    return form_of_any_width(tile, of, sms=h100.DEVICE.sms)


def sources(shape: tuple[int, ...]) -> Iterator[KernelSource]:
    yield from (wgmma_gemm(form_by(tile, shape).product, torch.float16) for tile in TILES)


def arguments(shape: tuple[int, ...]) -> list[tuple[Tensor, ...]]:
    """Return, for each turn, rows, a weight with zeros behind it, and a result."""
    rows, columns, depth = shape
    found = []
    for seed in range(SETS):
        torch.manual_seed(seed)
        new: dict[str, Any] = {"device": "cuda", "dtype": torch.float16}
        weight = torch.zeros(-(-columns // MULTIPLE) * MULTIPLE, depth, **new)
        weight[:columns] = torch.randn(columns, depth, **new) / depth**0.5
        found.append((torch.randn(rows, depth, **new), weight, torch.empty(rows, columns, **new)))
    return found


def bound(
    each: GemmForm, shape: tuple[int, ...], sets: list[Any], library: Any, stream: int
) -> Callable[[], None]:
    rows, columns, depth = shape
    views: list[Any] = [
        ((1, 1, rows, depth), (rows * depth, rows * depth, depth, 1), (*each.box, LINE)),
        ((columns, depth), (depth, 1)),
    ]
    scalars = [0 if isinstance(one, Late) else one for one in each.scalars(depth)]
    source = wgmma_gemm(each.product, torch.float16)
    # no biases are read, and so the last pointer is any
    pointers = ([*(tensor.data_ptr() for tensor in (x, w, out, w))] for x, w, out in sets)
    return contest.launched_in_turn(library, source, pointers, scalars, stream, views)


def library_calls(sets: list[tuple[Tensor, ...]]) -> dict[str, Callable[[], object]]:
    turns, wide = itertools.cycle(sets), sets[0][0].new_empty(len(sets[0][0]), len(sets[0][1]))

    def product() -> Tensor:
        x, weight, _ = next(turns)
        return torch.mm(x, weight.t(), out=wide)

    def call() -> Tensor:
        x, weight, out = next(turns)
        return out.copy_(torch.mm(x, weight.t(), out=wide)[:, : out.shape[1]])

    return {"cublas_and_copy": call, "cublas": product}


def measure(shape: tuple[int, ...], library: Any) -> dict[str, Any]:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream), torch.no_grad():
        sets = arguments(shape)
        x, weight, out = sets[0]
        truth = x.float() @ weight[: shape[1]].float().t()
        calls = library_calls(sets)
        for tile in TILES:
            made = bound(form_by(tile, shape), shape, sets, library, stream.cuda_stream)
            calls[str(astuple(tile))] = made
        return contest.judged(calls, SETS, out, truth, stream)


def run(args: argparse.Namespace) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    wanted = itertools.chain.from_iterable(map(sources, SHAPES))
    contest.hold("linear_any_width", args, wanted, SHAPES, measure)
