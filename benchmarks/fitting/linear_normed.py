"""Linears that normalise their columns, in one product, beside cuBLAS and torch.

One Hopper GPU, fp16: x (M, K) w (N, K)^T, a batch norm by known statistics, maybe a sum, and ReLU,
of ResNet-50's 1x1 convolutions at batches 1, 8 and 32: see ``strop/kernels/gemm/column_norm.py``.
"cublas" is the product with torch's norm behind it; ``product_us`` is what cuBLAS alone takes, to
which a kernel behind it adds 1.5 to 6 us. Chains of launches that may begin early. Errors are
beside fp64: of results in fp16 alone 2.5e-4.
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
from strop.ir.contractions import NORMED, RELU, ColumnNorm
from strop.ir.normed_linear import normed_linear
from strop.ir.source import KernelSource
from strop.kernels.gemm import rows as products
from strop.kernels.gemm.rows import GemmForm, form
from strop.kernels.gemm.wgmma_gemm import wgmma_gemm
from strop.kernels.kernel import Problem
from strop.kernels.tuned import h100
from strop.runtime.run.launched_calls import CallSite, Launched
from strop.runtime.run.library_calls import CUDA_PLANNED_OUT

SECONDS = 180
HOW: dict[str, Any] = {"activation": RELU, "eps": 1e-5}
Shape = tuple[Any, ...]  # M, N, K, whether a value is added
# Pixels of a picture, columns, depth, whether a value is added.
LAYERS = (
    *((3136, 64, 64, False), (3136, 256, 64, True), (3136, 64, 256, False)),
    *((3136, 128, 256, False), (784, 512, 128, True), (784, 128, 512, False)),
    *((784, 256, 512, False), (196, 1024, 256, True), (196, 256, 1024, False)),
    *((196, 512, 1024, False), (49, 2048, 512, True), (49, 512, 2048, False)),
)
SHAPES = tuple((batch * rows, *rest) for batch in (1, 8, 32) for rows, *rest in LAYERS)
MORE = ((2, 128, 6, 2), (2, 64, 7, 2), (1, 96, 8), (1, 128, 8), (2, 256, 3, 1, True))


def problem_of(shape: Shape) -> Problem:
    rows, columns, depth, adds = shape
    added = ((rows, columns),) if adds else ()
    shapes = ((rows, depth), (columns, depth), *added, *((columns,),) * 4)
    return Problem(NORMED[adds], tuple(sorted(HOW.items())), shapes, torch.float16)


def forms_of(shape: Shape) -> list[GemmForm]:
    problem = problem_of(shape)
    of, end = products.picture_of(problem), products.OPS[problem.op]
    tiles = dict.fromkeys((*h100.NORMED_TILES, *(products.GemmTile(*each) for each in MORE)))
    tried = [form(tile, of, end, sms=h100.DEVICE.sms) for tile in tiles]
    return [each for each in tried if products.is_able(each.product, of)]


def sources(shape: Shape) -> Iterator[KernelSource]:
    problem = problem_of(shape)
    for each in forms_of(shape):
        yield wgmma_gemm(products.ended_as(each.product, problem), problem.dtype)


def arguments(shape: Shape) -> list[tuple[list[Tensor], Tensor]]:
    """Operands and result of each set."""
    new: dict[str, Any] = {"device": "cuda", "dtype": torch.float16}
    found = []
    for seed in range(SETS):
        torch.manual_seed(seed)
        inputs = [torch.randn(sizes, **new) for sizes in problem_of(shape).shapes]
        inputs[1] *= shape[2] ** -0.5
        inputs[-3].uniform_(0.5, 1.5)  # variances
        found.append((inputs, torch.empty(shape[0], shape[1], **new)))
    return found


def measure(shape: Shape, library: Any) -> dict[str, Any]:
    stream, problem = torch.cuda.Stream(), problem_of(shape)
    with torch.cuda.stream(stream), torch.no_grad():
        sets = arguments(shape)
        site = CallSite(library, stream.cuda_stream, is_early=True, is_steady=True)
        inputs, out = sets[0]
        truth = normed_linear([t.double() for t in inputs], ColumnNorm.of(problem.op, HOW))
        calls: dict[str, Callable[[], None]] = {
            "cublas": in_turn(CUDA_PLANNED_OUT[problem.op](HOW), sets)
        }
        for each in forms_of(shape):
            launches = products.launches_by(each, problem)
            run = Launched(launches, site, None).writing(refuse)
            calls[str(astuple(each.product.tile))] = in_turn(run, sets)
        found = contest.judged(calls, SETS, out, truth, stream)
        product = in_turn(lambda x, out: torch.mm(x[0], x[1].t(), out=out), sets)
        alone = contest.us_in_turns({"product": product}, stream)
    return {**found, "product_us": alone["us"]["product"]}


def in_turn(
    run: Callable[[list[Tensor], Tensor], object], sets: list[tuple[list[Tensor], Tensor]]
) -> Callable[[], None]:
    turns = itertools.cycle(sets)

    def call() -> None:
        run(*next(turns))

    return call


def refuse(inputs: Any, out: Tensor) -> None:
    raise AssertionError("operands lie as the kernel wants them")


def run(args: argparse.Namespace) -> None:
    wanted = itertools.chain.from_iterable(map(sources, SHAPES))
    contest.hold("linear_normed", args, wanted, SHAPES, measure)
