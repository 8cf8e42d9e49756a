"""Products of e4m3 codes that end in gates, in PTX, beside the pair that does the same.

One Hopper GPU: codes (M, K) and (2 N, K) with scales by row and by column and biases, gates (M, N)
in fp16: see ``strop/kernels/gemm/scaled_codes.py``. M, 2 N and K are of feed-forward layers of
SDXL and SD1.5, and of others between them. The pairs are our product and ``_scaled_mm``, each with
the kernel ``geglu`` behind it; ``product_us`` is what ours alone takes for all columns. The kernel
that quantises the gates is in none of them: without gates at a product's end it reads twice as much
and computes them. Chains of launches that may begin early. Errors are beside fp64: of results in
fp16 alone 2.5e-4; those of pairs are rounded twice.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Iterator
from dataclasses import astuple
from typing import Any

import torch

from benchmarks.fitting import codes_wgmma, contest
from benchmarks.fitting.conv_narrow import SETS
from strop.ir.source import KernelSource
from strop.kernels.gemm.geglu import geglu
from strop.kernels.gemm.rows import GemmForm
from strop.kernels.gemm.scaled_rows import fastest, form
from strop.kernels.gemm.tile import GATED, GemmTile
from strop.kernels.gemm.wgmma_gemm import wgmma_gemm
from strop.kernels.kernel import Problem
from strop.kernels.tuned import h100

SECONDS = 150
# M, 2 N, K
SHAPES = (
    *((2048, 10240, 1280), (8192, 5120, 640), (32768, 2560, 320), (512, 10240, 1280)),
    *((1024, 10240, 1280), (4096, 5120, 640), (8192, 10240, 1280), (128, 10240, 1280)),
    *((4096, 16384, 3072), (300, 416, 208)),
)
TILES = tuple(
    dict.fromkeys(
        (
            *h100.GATED_CODES_TILES,
            *(
                GemmTile(*each)
                for each in (
                    *((2, *size, 1, True) for size in ((80, 6), (176, 4), (192, 4), (192, 5))),
                    *((2, *size, 1, True, True) for size in ((80, 4), (112, 4))),
                    *((1, *size, 1, True) for size in ((80, 8), (128, 6), (192, 5))),
                    (1, 160, 6),
                )
            ),
        )
    )
)


def forms_of(shape: tuple[int, ...]) -> list[GemmForm]:
    rows, columns, _ = shape
    fit = (tile for tile in TILES if tile.cols <= columns)
    sms = h100.DEVICE.sms
    return [form(tile, rows, columns, GATED, has_biases=True, sms=sms) for tile in fit]


def plain_form(shape: tuple[int, ...]) -> GemmForm:
    """Return the form in which a product of ours has all columns, that of the fastest tile."""
    rows, columns, depth = shape
    shapes = ((rows, depth), (columns, depth), (rows, 1), (1, columns), (columns,))
    problem = Problem("scaled_product", (("is_fast", False),), shapes, torch.float16)
    found, _ = fastest(problem, h100.DEVICE)
    assert found is not None
    return found


def gates_of(shape: tuple[int, ...]) -> KernelSource:
    return geglu(shape[1] // 2, torch.float16, has_bias=False)


def sources(shape: tuple[int, ...]) -> Iterator[KernelSource]:
    for each in (*forms_of(shape), plain_form(shape)):
        yield wgmma_gemm(each.product, torch.float16)
    yield gates_of(shape)


def measure(shape: tuple[int, ...], library: Any) -> dict[str, Any]:
    (rows, columns, _), stream = shape, torch.cuda.Stream()
    with torch.cuda.stream(stream), torch.no_grad():
        sets = codes_wgmma.arguments(shape)  # whose results are columns of values and gates
        outs = [torch.empty(rows, columns // 2, device="cuda", dtype=torch.float16) for _ in sets]
        gated = [(x, w, out, *more) for (x, w, _, *more), out in zip(sets, outs, strict=True)]
        x, w, _, of_rows, of_columns, bias = sets[0]
        both = (x.double() @ w.double().t()) * (of_rows.double()[:, None] * of_columns) + bias
        value, gate = both.chunk(2, 1)
        truth = value * torch.nn.functional.gelu(gate)
        product = codes_wgmma.bound(plain_form(shape), shape, sets, library, stream.cuda_stream)
        pointers = [
            [one[2].data_ptr(), one[5].data_ptr(), out.data_ptr()]
            for one, out in zip(sets, outs, strict=True)
        ]
        theirs, ours = (
            contest.launched_in_turn(
                library, gates_of(shape), pointers, [outs[0].numel()], stream.cuda_stream, ()
            )
            for _ in range(2)
        )
        calls: dict[str, Callable[[], object]] = {
            "_scaled_mm and geglu": behind(codes_wgmma.library_call(sets), theirs),
            "product and geglu": behind(product, ours),
        }
        for each in forms_of(shape):
            name = str(astuple(each.product.tile))
            calls[name] = codes_wgmma.bound(each, shape, gated, library, stream.cuda_stream)
        found = contest.judged(calls, SETS, outs[0], truth, stream)
        alone = contest.us_in_turns({"product": product}, stream)
    return {**found, "product_us": alone["us"]["product"]}


def behind(first: Callable[[], object], then: Callable[[], object]) -> Callable[[], None]:
    """Return what makes two calls, of which the second reads what the first has written."""

    def call() -> None:
        first()
        then()

    return call


def run(args: argparse.Namespace) -> None:
    wanted = itertools.chain.from_iterable(map(sources, SHAPES))
    contest.hold("codes_gated", args, wanted, SHAPES, measure)
