"""Linears that go on over the factors of adapters, in one product, beside two by cuBLAS.

One H100, fp16: x (M, K) w (N, K)^T + low (M, R) up (N, R)^T of SDXL's layers at 1024 x 1024 and
SD1.5's at 512 x 512, batch 2, with two adapters of rank 16; R is 96 for queries, keys and values in
one. "alone" is our product without the pair, which a step without adapters has. R = 0: the product
with A, whose few columns have tiles of their own. Gates and sums are as in ``linear_wgmma``.
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
from strop.ir.contractions import PAIRED
from strop.ir.source import KernelSource
from strop.kernels.gemm import geglu
from strop.kernels.gemm import rows as products
from strop.kernels.gemm.rows import GemmForm, form
from strop.kernels.gemm.tile import GATED, PLAIN, SUM
from strop.kernels.gemm.wgmma_gemm import wgmma_gemm
from strop.kernels.kernel import Launches, Problem
from strop.kernels.tuned import h100
from strop.runtime.run.launched_calls import CallSite, Launched, scratch_bytes
from strop.runtime.run.library_calls import CUDA_PLANNED_OUT

SECONDS = 150
WORST = 1.5  # tiles of which the rules expect that they take so much longer are left out
Shape = tuple[Any, ...]  # M, N, K, R, what happens at the end
# Rows of a level of the UNet and its width: SDXL's two, then SD1.5's at 512 x 512, batch 2.
LEVELS = ((2048, 1280), (8192, 640), (8192, 320), (2048, 640), (512, 1280), (128, 1280))


def products_of(rows: int, width: int) -> tuple[Shape, ...]:
    """Products of a level's transformers, with factors, and the products with A."""
    return (
        (rows, width, width, 32, PLAIN),
        (rows, 3 * width, width, 96, PLAIN),
        (rows, width, width, 32, SUM),
        (rows, width, 4 * width, 32, SUM),
        (rows, 8 * width, width, 32, GATED),
        *((rows, *narrow, 0, PLAIN) for narrow in ((32, width), (96, width), (32, 4 * width))),
    )


SHAPES = tuple(shape for level in LEVELS for shape in products_of(*level))
OPS = {PLAIN: "linear", GATED: "geglu", SUM: "linear_add"}


def arguments(shape: Shape) -> list[tuple[list[Tensor], Tensor]]:
    """Operands and result of each set; what is added lies where the result goes."""
    rows, cols, depth, rank, end = shape
    new: dict[str, Any] = {"device": "cuda", "dtype": torch.float16}
    found = []
    for seed in range(SETS):
        torch.manual_seed(seed)
        inputs = [torch.randn(rows, depth, **new), torch.randn(cols, depth, **new) * depth**-0.5]
        if rank:
            inputs += [torch.randn(rows, rank, **new), torch.randn(cols, rank, **new) * rank**-0.5]
        out = torch.zeros(rows, cols // 2 if end == GATED else cols, **new)
        inputs += [out] if end == SUM else []
        inputs += [torch.randn(cols, **new)] if end != PLAIN else []
        found.append((inputs, out))
    return found


def problem_of(shape: Shape) -> Problem:
    rows, cols, depth, rank, end = shape
    pair = ((rows, rank), (cols, rank)) if rank else ()
    more = {PLAIN: (), GATED: ((cols,),), SUM: ((rows, cols), (cols,))}[end]
    op = PAIRED[OPS[end]] if rank else OPS[end]
    return Problem(op, (), ((rows, depth), (cols, depth), *pair, *more), torch.float16)


def forms_of(shape: Shape) -> list[GemmForm]:
    """Those that are worth a try."""
    problem, times = problem_of(shape), h100.GEMM
    of, end = products.picture_of(problem), products.OPS[problem.op]
    tiles = times.tiles[products.kind_of(of, end)]
    tried = [form(tile, of, end, sms=h100.DEVICE.sms) for tile in tiles]
    us = {f: products.us_of(f, of, times) for f in tried if products.is_able(f.product, of)}
    return [each for each, guess in us.items() if guess <= WORST * min(us.values())]


def plain_form(shape: Shape) -> GemmForm | None:
    """What does it without the pair."""
    *sizes, _, end = shape
    of = products.picture_of(problem_of((*sizes, 0, end)))
    return products.form_of(of, end, h100.DEVICE)[0]


def sources(shape: Shape) -> Iterator[KernelSource]:
    found = [*forms_of(shape), plain_form(shape)]
    yield from (wgmma_gemm(each.product, torch.float16) for each in found if each)


def truth_of(inputs: list[Tensor], end: str, rank: int) -> Tensor:
    x, w, *rest = (t.double() for t in inputs)
    found = x @ w.t()
    if rank:
        low, up, *rest = rest
        found = found + low @ up.t()
    if end == PLAIN:
        return found
    if end == SUM:
        return found + rest[-1]
    value, gate = (found + rest[-1]).chunk(2, -1)
    return value * torch.nn.functional.gelu(gate)


class Contenders:
    """Calls of one shape by all who can do it, with the pair or without."""

    def __init__(self, shape: Shape, library: Any, stream: int) -> None:
        *_, self.rank, self.end = shape
        self.sets = arguments(shape)
        self.site = CallSite(library, stream, is_early=True, is_steady=True)

    def operands(self, rank: int) -> list[tuple[list[Tensor], Tensor]]:
        """Operands with the pair, or without it where ``rank`` is 0."""
        if rank == self.rank:
            return self.sets
        return [([*inputs[:2], *inputs[4:]], out) for inputs, out in self.sets]

    def problem(self, rank: int) -> Problem:
        inputs, _ = self.operands(rank)[0]
        op = PAIRED[OPS[self.end]] if rank else OPS[self.end]
        return Problem(op, (), tuple(tuple(t.shape) for t in inputs), torch.float16)

    def ours(self, found: GemmForm, rank: int) -> Callable[[], None]:
        return self._launched(products.launches_by(found, self.problem(rank)), rank)

    def cublas(self, rank: int) -> Callable[[], None]:
        """Gates are a kernel of ours behind it, sums one of torch's."""
        problem = self.problem(rank)
        if self.end == GATED:
            return self._launched(geglu.launch(problem, h100.DEVICE), rank)
        run, turns = CUDA_PLANNED_OUT[problem.op]({}), itertools.cycle(self.operands(rank))
        return lambda: run(*next(turns))

    def _launched(self, launches: Launches, rank: int) -> Callable[[], None]:
        memory = torch.empty(scratch_bytes(launches), dtype=torch.uint8, device="cuda")
        turns = itertools.cycle(
            (Launched(launches, self.site, memory), *each) for each in self.operands(rank)
        )

        def call() -> None:
            launched, inputs, out = next(turns)
            assert launched.run(inputs, out)

        return call

    def error(self, call: Callable[[], None], rank: int) -> float:
        inputs, out = self.operands(rank)[0]
        out.fill_(0.0)
        truth = truth_of(inputs, self.end, rank)
        for _ in range(SETS):
            call()
        torch.cuda.synchronize()
        return contest.error(out, truth)


def measure(shape: Shape, library: Any) -> dict[str, Any]:
    stream, rank = torch.cuda.Stream(), shape[3]
    with torch.cuda.stream(stream), torch.no_grad():
        of = Contenders(shape, library, stream.cuda_stream)
        calls = {"cublas": (of.cublas(rank), rank)}
        if rank:
            calls["cublas alone"] = of.cublas(0), 0
        plain = plain_form(shape) if rank else None
        if plain is not None:
            calls["alone"] = of.ours(plain, 0), 0
        for each in forms_of(shape):
            calls[str(astuple(each.product.tile))] = of.ours(each, rank), rank
        errors = {name: of.error(*call) for name, call in calls.items()}
        timed = contest.us_in_turns({name: call for name, (call, _) in calls.items()}, stream)
        return {**timed, "errors": errors}


def run(args: argparse.Namespace) -> None:
    wanted = itertools.chain.from_iterable(map(sources, SHAPES))
    contest.hold("linear_paired", args, wanted, SHAPES, measure)
