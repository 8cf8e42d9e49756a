"""Attention that reads by TMA, at short heads, beside cuDNN's and flash attention.

One H100, fp16: attention of SD1.5 at 512x512 and 1024x1024 (heads of 40, 80 and 160), to itself and
to 77 words, and of SDXL (64). ``strop.kernels.attention.tma`` says how ours works. Errors are
against fp64, of 256 queries of one head.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Iterator
from dataclasses import astuple
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.fitting import contest
from benchmarks.fitting.conv_narrow import SETS
from strop.ir.source import KernelSource
from strop.kernels.attention.tma import TmaTile, tma_attention

SECONDS = 120
# batch, heads, queries, keys, size of a head
SHAPES = (
    (2, 8, 4096, 4096, 40),
    (2, 8, 16384, 16384, 40),
    (2, 8, 4096, 77, 40),
    (2, 8, 1024, 1024, 80),
    (2, 8, 1024, 77, 80),
    (2, 8, 4096, 4096, 80),
    (2, 10, 4096, 4096, 64),
    (2, 20, 1024, 1024, 64),
    (2, 8, 256, 256, 160),
    (2, 8, 64, 64, 160),
    (2, 8, 256, 77, 160),
    (2, 8, 64, 77, 160),
    (2, 8, 16384, 77, 40),
    (2, 20, 1024, 77, 64),
    (8, 8, 4096, 4096, 40),
)
# queries, keys, stages, warps, parts of a head, blocks a step, queries with each step
LONG = {
    40: (
        (128, 64, 3, 8, 1),
        (128, 64, 4, 8, 1),
        (128, 64, 3, 8, 1, 2),
        (128, 64, 3, 8, 2),
        (128, 64, 3, 4, 1),
        (128, 64, 3, 4, 2),
        (128, 128, 3, 8, 1),
        (64, 128, 3, 4, 1),
        (64, 128, 2, 4, 2),
        (64, 64, 3, 4, 1),
        (64, 64, 3, 4, 2),
        (256, 64, 3, 16, 1),
    ),
    64: (
        (128, 64, 3, 8),
        (128, 64, 4, 8),
        (128, 64, 3, 8, 1, 2),
        (128, 64, 3, 4),
        (128, 128, 3, 8),
        (64, 128, 3, 4),
        (64, 128, 2, 4),
        (64, 64, 3, 4),
        (64, 64, 2, 4),
        (256, 64, 3, 16),
    ),
    80: (
        (128, 64, 3, 8, 2),
        (128, 64, 4, 8, 2),
        (128, 64, 3, 4, 2),
        (128, 128, 3, 8, 2),
        (64, 128, 3, 4, 2),
        (64, 64, 3, 4, 2),
        (64, 64, 4, 4, 2),
        (64, 64, 3, 4, 1),
        (128, 64, 3, 8, 1),
        (128, 32, 4, 4, 2),
        (64, 32, 4, 4, 2),
        (256, 64, 3, 16, 2),
    ),
    160: (
        (64, 64, 3, 4, 2),
        (64, 64, 2, 4, 2),
        (64, 64, 2, 4, 2, 0),
        (64, 32, 3, 4, 2),
        (64, 32, 4, 4, 2),
        (64, 32, 4, 4, 2, 0),
        (64, 32, 4, 4, 1),
        (64, 128, 2, 4, 2),
        (64, 64, 3, 4, 2, 0, True),
        (64, 128, 2, 4, 2, 0, True),
        (128, 64, 2, 8, 2),
    ),
}
SHORT = {
    40: (
        (64, 32, 4, 4, 1, 0),
        (64, 32, 4, 4, 2, 0),
        (64, 16, 6, 4, 1, 0),
        (64, 16, 6, 4, 2, 0),
        (64, 128, 2, 4, 1, 0),
        (64, 64, 3, 4, 1, 0),
        (128, 32, 4, 8, 1, 0),
        (128, 32, 4, 4, 1, 0),
        (64, 128, 2, 4, 2, 0, True),
        (64, 128, 2, 4, 1, 0, True),
        (64, 32, 4, 4, 2, 0, True),
        (64, 64, 3, 4, 1, 0, True),
        (128, 128, 2, 8, 1, 0, True),
        (64, 64, 2, 4, 1),
    ),
    64: (
        (64, 32, 4, 4, 1, 0),
        (64, 16, 6, 4, 1, 0),
        (64, 128, 2, 4, 1, 0),
        (64, 64, 3, 4, 1, 0),
        (128, 32, 4, 8, 1, 0),
        (128, 32, 4, 4, 1, 0),
        (64, 128, 2, 4, 1, 0, True),
        (64, 64, 3, 4, 1, 0, True),
        (64, 32, 4, 4, 1, 0, True),
        (64, 64, 2, 4, 1),
    ),
    80: (
        (64, 32, 4, 4, 2, 0),
        (64, 32, 4, 4, 1, 0),
        (64, 16, 6, 4, 2, 0),
        (64, 64, 2, 4, 2, 0),
        (64, 128, 2, 4, 2, 0),
        (64, 128, 2, 4, 2, 0, True),
        (64, 64, 3, 4, 2, 0, True),
        (64, 32, 4, 4, 2, 0, True),
        (64, 32, 4, 4, 1, 0, True),
        (64, 64, 2, 4, 2),
    ),
    160: (
        (64, 32, 4, 4, 2, 0),
        (64, 32, 4, 4, 1, 0),
        (64, 64, 2, 4, 2, 0),
        (64, 128, 2, 4, 2, 0),
        (64, 128, 2, 4, 2, 0, True),
        (64, 64, 2, 4, 2, 0, True),
        (64, 64, 3, 4, 2, 0, True),
        (64, 64, 2, 4, 1, 0, True),
        (64, 32, 4, 4, 2, 0, True),
        (64, 64, 2, 4, 2),
    ),
}
SHORTEST = 128  # keys up to which tiles are those for few


def tiles(shape: tuple[int, ...]) -> Iterator[TmaTile]:
    *_, queries, keys, head = shape
    for each in (SHORT if keys <= SHORTEST else LONG)[head]:
        if each[0] <= queries:
            yield TmaTile(*each)


Candidate = tuple[str, KernelSource, tuple[int, ...]]  # and further scalars
Candidates = Callable[[tuple[int, ...]], Iterator[Candidate]]


def candidates(shape: tuple[int, ...]) -> Iterator[Candidate]:
    for tile in tiles(shape):
        source = tma_attention(shape[-1], shape[-1] ** -0.5, tile, torch.float16)
        yield str(astuple(tile)), source, ()


def arguments(shape: tuple[int, ...]) -> list[tuple[Tensor, ...]]:
    """Sets of q, k, v, slices of one product as in the UNet, and the result: (B, H, S, d)."""
    batch, heads, queries, keys, head = shape
    found = []
    for seed in range(SETS):
        torch.manual_seed(seed)
        half: dict[str, Any] = {"device": "cuda", "dtype": torch.float16}
        q, out = torch.randn(2, batch, queries, heads, head, **half)
        k, v = torch.randn(batch, keys, 2, heads, head, **half).unbind(2)
        if keys == queries:
            merged = torch.stack((q, k, v), 2)
            q, k, v = merged.unbind(2)
        found.append(tuple(t.transpose(1, 2) for t in (q, k, v, out)))
    return found


def bound(
    source: KernelSource,
    sets: list[tuple[Tensor, ...]],
    library: Any,
    stream: int,
    more: tuple[int, ...] = (),
) -> Callable[[], None]:
    q, k, *_ = sets[0]
    sizes = [q.shape[2], k.shape[2], q.shape[1], q.shape[0] * q.shape[1], *more]
    launches = []
    for tensors in sets:
        laid = tensors * (len(source.params) // len(tensors))
        launches.append(
            library.bind(
                source,
                [t.data_ptr() for t in laid],
                sizes,
                stream,
                views=[(t.shape, t.stride()) for t in laid],
            )
        )
    turns = itertools.cycle(launches)
    return lambda: next(turns)()


def error(out: Tensor, q: Tensor, k: Tensor, v: Tensor) -> float:
    q, k, v = (t[-1, -1].double() for t in (q, k, v))
    truth = torch.softmax(q[:256] @ k.T / q.shape[1] ** 0.5, -1) @ v
    return contest.error(out[-1, -1, :256], truth)


def measure(
    shape: tuple[int, ...],
    library: Any,
    *,
    candidates: Callable[[tuple[int, ...]], Iterator[Candidate]],
) -> dict[str, Any]:
    stream, errors = torch.cuda.Stream(), {}
    with torch.cuda.stream(stream), torch.no_grad():
        sets = arguments(shape)
        numbers, calls = itertools.cycle(sets), dict[str, Callable[[], object]]()

        def of_torch(backend: SDPBackend) -> Tensor:
            with sdpa_kernel(backend):
                return torch.nn.functional.scaled_dot_product_attention(*next(numbers)[:3])

        for name, backend in (
            ("cudnn", SDPBackend.CUDNN_ATTENTION),
            ("flash", SDPBackend.FLASH_ATTENTION),
        ):
            errors[name] = error(of_torch(backend), *sets[0][:3])
            for _ in range(SETS - 1):
                of_torch(backend)
            calls[name] = lambda backend=backend: of_torch(backend)
        for name, source, more in candidates(shape):
            calls[name] = bound(source, sets, library, stream.cuda_stream, more)
            sets[0][3].fill_(float("nan"))
            for _ in range(SETS):
                calls[name]()
            torch.cuda.synchronize()
            errors[name] = error(sets[0][3], *sets[0][:3])
        return {**contest.us_in_turns(calls, stream), "errors": errors}


def run(args: argparse.Namespace) -> None:
    sources = [source for shape in SHAPES for _, source, _ in candidates(shape)]
    contest.hold("attn_tma", args, sources, SHAPES, partial(measure, candidates=candidates))
