"""Linears of transformers by cuBLAS: several as one product or apart, and with GELU at the end.

One H100, bf16, biases everywhere. A shape is (M, widths, K): linears of one input x (M, K), whose
widths are joined in every way that keeps their order ("9216+12288" are two products). With one
width the contenders are the product alone ("linear"), with GELU's tanh form in cuBLASLt's epilogue
("cublas_gelu"), and with torch's GELU behind it ("linear_and_gelu"). Errors are of the first
product's result against fp64, and of what a contender leaves there: a linear, or GELU of it.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.fitting import contest

SECONDS = 60
SETS = 3  # of operands that calls take in turn, so that none lies in a cache
Shape = tuple[int, tuple[int, ...], int]
SHAPES: tuple[Shape, ...] = (
    (4608, (9216, 12288), 3072),  # Flux.1: query, key and value, and feed-forward; single blocks
    (4096, (3072, 3072, 3072), 3072),  # double blocks, pictures
    (512, (3072, 3072, 3072), 3072),  # and words
    (14040, (1536, 1536, 1536), 1536),  # Wan 2.1
    (8192, (1536, 1536, 1536), 1536),  # SD3
    *(
        (rows, (columns,), depth)
        for rows, columns, depth in (
            (4096, 12288, 3072),
            (512, 12288, 3072),
            (4608, 12288, 3072),
            (4224, 12288, 3072),  # Qwen-Image
            (14040, 8960, 1536),
            (8192, 6144, 1536),
            (666, 6144, 1536),
            (8192, 4608, 1152),  # PixArt
            (1024, 4096, 1024),
            (788, 4096, 1024),  # ViT-L
            (128, 4096, 1024),
        )
    ),
)


def joined(widths: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Yield the widths of products that compute such linears, neighbours in one or apart."""
    for cuts in itertools.product((False, True), repeat=len(widths) - 1):
        products = [widths[0]]
        for width, is_cut in zip(widths[1:], cuts, strict=True):
            if is_cut:
                products.append(width)
            else:
                products[-1] += width
        yield tuple(products)


def operands(shape: Shape) -> list[tuple[Tensor, Tensor, Tensor, Tensor]]:
    rows, widths, depth = shape
    new: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    found = []
    for seed in range(SETS):
        torch.manual_seed(seed)
        columns = sum(widths)
        x, w = torch.randn(rows, depth, **new), torch.randn(columns, depth, **new) * depth**-0.5
        found.append((x, w, torch.randn(columns, **new), torch.empty(rows * columns, **new)))
    return found


def products(sets: list[tuple[Tensor, ...]], widths: tuple[int, ...]) -> Callable[[], None]:
    turns, ends = itertools.cycle(sets), list(itertools.accumulate(widths))

    def call() -> None:
        x, w, bias, out = next(turns)
        for width, end in zip(widths, ends, strict=True):
            start, rows = end - width, len(x)
            result = out[rows * start : rows * end].view(rows, width)
            torch.addmm(bias[start:end], x, w[start:end].t(), out=result)

    return call


def with_gelu(sets: list[tuple[Tensor, ...]]) -> dict[str, Callable[[], None]]:
    turns, room = itertools.cycle(sets), torch.empty_like(sets[0][3])

    def epilogue() -> None:
        x, w, bias, out = next(turns)
        torch._addmm_activation(bias, x, w.t(), use_gelu=True, out=out.view(len(x), len(w)))

    def behind() -> None:
        x, w, bias, out = next(turns)
        torch.addmm(bias, x, w.t(), out=room.view(len(x), len(w)))
        torch.ops.aten.gelu.out(room, approximate="tanh", out=out)

    return {"cublas_gelu": epilogue, "linear_and_gelu": behind}


def measure(shape: Shape, library: Any) -> dict[str, Any]:
    stream, widths = torch.cuda.Stream(), shape[1]
    with torch.cuda.stream(stream), torch.no_grad():
        sets = operands(shape)
        calls = {"+".join(map(str, each)): products(sets, each) for each in joined(widths)}
        if len(widths) == 1:
            calls = {"linear": products(sets, widths), **with_gelu(sets)}
        x, w, bias, out = sets[0]
        errors = {}
        for name, call in calls.items():
            first = widths[0] if len(widths) == 1 else int(name.partition("+")[0])
            out.fill_(float("nan"))
            for _ in range(SETS):
                call()
            torch.cuda.synchronize()
            exact = F.linear(x[:64].double(), w[:first].double(), bias[:first].double())
            if "gelu" in name:
                exact = F.gelu(exact, approximate="tanh")
            result = out[: len(x) * first].view(len(x), first)[:64]
            errors[name] = contest.error(result.double(), exact)
        return {**contest.us_in_turns(calls, stream), "errors": errors}


def run(args: argparse.Namespace) -> None:
    contest.hold("linear_libraries", args, (), SHAPES, measure)
