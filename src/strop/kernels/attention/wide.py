"""Compute attention with heads wider than any library's fast kernel: two products and rows between
them.

The VAE of Stable Diffusion has one head of 512. cuDNN and flash end at 256; what torch runs instead
took 348 us at 64 x 64 latents on an H100, a tenth of what its tensor cores can do. The scores are
fp32 and exist for a few queries at a time. Weights are rounded to half precision before the second
product, as every fused kernel does, and divided by the sum of the rounded ones after it. All of it
lies in the program's working memory, 392 MiB at 128 x 128 latents: a decoder has more than that for
its largest pictures, which are not there yet.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from strop.ir.device import Device
from strop.ir.source import KernelSource
from strop.kernels.attention.exp_rows import MULTIPLE, exp_rows
from strop.kernels.attention.rows import SEQUENCE_FIRST, is_plain, scale_of
from strop.kernels.kernel import (
    FASTEST,
    NEVER,
    RESULT,
    Call,
    Kernel,
    Launch,
    Launches,
    Lies,
    Operand,
    PartScratch,
    Problem,
    Torch,
    scratch,
)

WIDEST_OF_LIBRARIES = 256
SCORES_BYTES = 256 << 20  # of the fp32 scores that exist at once
QUERIES_MULTIPLE = 128  # a tile of the library's products
SCORES, WEIGHTS, SUMS, VALUES = map(scratch, range(4))


def supports(call: Call, device: Device) -> str:
    if not device.arch:
        return "runs on GPUs"
    reason = is_plain(call)
    if reason:
        return reason
    heads = [shape[-1].value for shape in call.shapes]
    if any(head % 8 for head in heads) or heads[0] <= WIDEST_OF_LIBRARIES:
        return f"is for heads above {WIDEST_OF_LIBRARIES} that are multiples of 8"
    return ""


def cost_us(problem: Problem, device: Device) -> float:
    """Operands that are broadcast, or empty, are left to the library."""
    q, k, v = problem.shapes
    is_whole = q[:2] == k[:2] and k[:3] == v[:3] and math.prod(q) * math.prod(k) > 0
    return FASTEST if is_whole else NEVER


@dataclass(frozen=True, slots=True)
class _Piece:
    """Hold some queries of some heads: operands (H, S, D) are these parts of (B, H, S, D)."""

    heads: tuple[tuple[int, ...], ...]
    queries: tuple[int, int]

    def operand(self, number: int) -> Operand:
        return Operand(number, Lies.ANYHOW, piece=self.heads)

    def some(self, number: int) -> Operand:
        """Take the queries of the first input, or of the result."""
        return Operand(number, Lies.ANYHOW, piece=(*self.heads, (1, *self.queries)))


def launch(problem: Problem, device: Device) -> Launches:
    (batch, heads, queries, width), (keys, values) = problem.shapes[0], problem.shapes[2][2:]
    source = exp_rows(problem.dtype, scale_of(problem.attr("scale"), width), keys)
    # heads of one picture, or pictures of one head: what a batched product can take as it lies
    together = heads if heads > 1 else batch
    most = chunk_of(queries, together * keys)
    parts = tuple(
        part
        for piece in _pieces(batch, heads, queries, most)
        for part in _parts(piece, source, together, keys, values)
    )
    shape = (together, most, keys)
    memory = (
        PartScratch(shape, torch.float32),
        PartScratch(shape, problem.dtype),
        PartScratch((together, most, 1), torch.float32),
        PartScratch((together, most, values), torch.float32),
    )
    return Launches(parts, memory, (batch, heads, queries, values), SEQUENCE_FIRST)


def _pieces(batch: int, heads: int, queries: int, most: int) -> Iterator[_Piece]:
    which = [((0, n),) for n in range(batch)] if heads > 1 else [((1, 0),)]
    for picked in which:
        for begin in range(0, queries, most):
            yield _Piece(picked, (begin, min(most, queries - begin)))


def _parts(
    piece: _Piece, source: KernelSource, together: int, keys: int, values: int
) -> tuple[Launch | Torch, ...]:
    length = piece.queries[1]
    scores, weights, sums, sums_of_values = (
        Operand(number, shape=(together, length, columns))
        for number, columns in ((SCORES, keys), (WEIGHTS, keys), (SUMS, 1), (VALUES, values))
    )
    return (
        Torch("scores", (piece.some(0), piece.operand(1), scores)),
        Launch(source, (scores, weights, sums), (keys, together * length)),
        Torch("weighted", (weights, piece.operand(2), sums_of_values)),
        Torch("divided", (sums_of_values, sums, piece.some(RESULT))),
    )


def forms(call: Call, device: Device) -> Iterable[KernelSource]:
    scale = scale_of(call.attr("scale"), call.shapes[0][-1].value)
    return [exp_rows(call.dtype, scale, length) for length in (MULTIPLE, 1)]


def chunk_of(queries: int, scores_a_query: int) -> int:
    """Return how many queries to take at a time."""
    most = SCORES_BYTES // (4 * scores_a_query) // QUERIES_MULTIPLE * QUERIES_MULTIPLE
    return min(max(most, QUERIES_MULTIPLE), queries)


ROW = Kernel("wide_attention", ("attention",), supports, cost_us, launch, forms)
