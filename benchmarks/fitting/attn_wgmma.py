"""Attention by WGMMA, in PTX, beside cuDNN's, and beside that by TMA.

One H100, fp16: attention of SD1.5 (heads of 40, 80 and 160) and SDXL (64) at pictures of 256 to
1024, to itself and to 77 words. ``strop.kernels.attention.wgmma`` says how ours works. Errors are
against fp64, of 256 queries of one head.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import astuple
from functools import partial

import torch

from benchmarks.fitting import attn_tma, contest
from strop.kernels.attention import rows as attention
from strop.kernels.attention.cross import CrossLayout, CrossTile, cross_attention
from strop.kernels.attention.tma import TmaTile
from strop.kernels.attention.wgmma_tiles import WgmmaTile
from strop.kernels.gemm.tile import MOST_SHARED
from strop.kernels.tuned import h100

SECONDS = 120
# batch, heads, queries, keys, size of a head
SHAPES = (
    (2, 8, 4096, 4096, 40),
    (2, 8, 1024, 1024, 80),
    (2, 20, 1024, 1024, 64),
    (2, 8, 4096, 77, 40),
    (2, 8, 1024, 77, 80),
    (2, 20, 1024, 77, 64),
    (2, 10, 4096, 77, 64),
    (2, 8, 256, 77, 160),
    (2, 8, 16384, 16384, 40),
    (2, 8, 4096, 4096, 80),
    (2, 10, 4096, 4096, 64),
    (2, 8, 1024, 1024, 40),
    (2, 8, 2304, 2304, 40),
    (1, 8, 4096, 4096, 40),
    (2, 8, 6144, 6144, 40),
    (2, 8, 9216, 9216, 40),
    (8, 8, 4096, 4096, 40),
    (2, 8, 256, 256, 80),
    (2, 8, 576, 576, 80),
    (1, 8, 1024, 1024, 80),
    (2, 8, 2304, 2304, 80),
    (8, 8, 1024, 1024, 80),
    (8, 20, 1024, 1024, 64),
    (2, 8, 16384, 77, 40),
    (8, 8, 4096, 77, 40),
    (2, 8, 1024, 77, 40),
    (2, 8, 4096, 77, 80),
    (8, 8, 1024, 77, 80),
    (2, 8, 256, 77, 80),
    (8, 20, 1024, 77, 64),
    (2, 8, 1024, 77, 160),
    (2, 8, 64, 77, 160),
    (8, 8, 256, 77, 160),
    (1, 3, 1000, 333, 40),
    (2, 2, 170, 129, 80),
    (1, 10, 4096, 4096, 64),
    (4, 10, 4096, 4096, 64),
    (2, 10, 2304, 2304, 64),
    (2, 20, 576, 576, 64),
    (2, 10, 6144, 6144, 64),
    (1, 20, 1024, 1024, 64),
    (2, 20, 2304, 2304, 64),
    (2, 10, 9216, 9216, 64),
    (4, 20, 1024, 1024, 64),
    (1, 8, 9216, 9216, 40),
    (2, 8, 1536, 1536, 40),
    (4, 8, 4096, 4096, 40),
    (3, 8, 1536, 1536, 80),
    (4, 8, 2304, 2304, 80),
)
# Transformers: Flux and Wan (128), SD3 (64), PixArt (72), and sizes between
OTHER_HEADS = (
    (1, 24, 4608, 4608, 128),
    (1, 24, 1536, 1536, 128),
    (2, 12, 8192, 8192, 128),
    (1, 24, 4608, 512, 128),
    (2, 24, 1024, 1024, 128),
    (2, 16, 512, 512, 128),
    (2, 24, 4429, 4429, 64),
    (2, 24, 1178, 1178, 64),
    (1, 16, 1024, 1024, 72),
    (2, 16, 4096, 4096, 72),
    (2, 16, 4096, 4096, 96),
    (2, 16, 1024, 1024, 96),
    (1, 20, 4096, 4096, 112),
    (2, 32, 2048, 2048, 64),
    (4, 12, 577, 577, 64),
    (2, 12, 197, 197, 64),
)
SMS = h100.DEVICE.sms
# groups, keys, stages, programs, early
LONG = {
    40: ((4, 80, 4), (3, 80, 3), (2, 64, 4, 2)),
    64: ((4, 64, 4, 1, True), (3, 80, 3, 1, True), (4, 64, 4), (2, 128, 2)),
    80: ((2, 128, 3), (3, 64, 3, 1, True), (2, 64, 3), (3, 64, 3)),
    160: (),
    72: ((2, 128, 3), (3, 64, 3, 1, True), (2, 64, 3)),
    96: ((2, 128, 2), (3, 64, 3, 1, True), (2, 64, 3), (3, 64, 2)),
    112: ((2, 128, 2), (3, 64, 2, 1, True), (2, 64, 3)),
    128: ((2, 128, 2), (2, 64, 3), (2, 80, 3), (2, 96, 2)),
}
# groups, keys, stages of queries, programs: keys and values are fetched once a program
KEEPING = (
    (1, 80, 2, 2),
    (1, 80, 2, 4),
    (2, 80, 2, 2),
    (2, 80, 3, 2),
    (3, 80, 2),
    (4, 80, 2),
    (2, 80, 2),
)
SHORT = ((1, 80, 1, 4), (1, 80, 1, 5), (2, 80, 1, 2), (4, 80, 1), (1, 80, 1, 2))


def tiles(shape: tuple[int, ...]) -> Iterator[TmaTile | WgmmaTile]:
    *_, keys, head = shape
    is_short = keys <= attn_tma.SHORTEST
    if head in BOXES:
        yield BOXES[head][not is_short]
    for each in SHORT if is_short else LONG[head]:
        if head < 160 or each[-1] < 5:  # more than its registers
            yield WgmmaTile(*each)


BOXES = {  # for few keys, and else
    40: (TmaTile(128, 32, 4, 4, parts=1, blocks=0), TmaTile(128, 64, 3, 8, parts=1)),
    64: (TmaTile(64, 32, 4, 4, blocks=0), TmaTile(64, 64, 3, 4)),
    80: (TmaTile(64, 64, 3, 4, blocks=0, with_queries=True), TmaTile(64, 64, 3, 4)),
    160: (TmaTile(64, 64, 3, 4, blocks=0, with_queries=True),) * 2,
}


def candidates(shape: tuple[int, ...]) -> Iterator[attn_tma.Candidate]:
    batch, heads, queries, keys, head = shape
    for tile in tiles(shape):
        source = attention.source_of(head, head**-0.5, tile, torch.float16)
        yield (
            str(astuple(tile)),
            source,
            attention.scalars_of(tile, batch, heads, queries, keys, SMS)[4:],
        )
    for each in KEEPING if keys <= attn_tma.SHORTEST else ():
        kept = CrossTile(*each)
        if kept.takes(keys) and _is_there(head, kept):
            source = cross_attention(head, head**-0.5, kept, torch.float16)
            yield f"keeps {astuple(kept)}", source, kept.shares(batch * heads, queries, SMS)


def _is_there(head: int, tile: CrossTile) -> bool:
    """Within the memory and the registers of a processor."""
    is_held = tile.programs * (CrossLayout(head, tile).shared + 1024) <= MOST_SHARED
    return is_held and (head < 160 or tile.groups * tile.programs < 4)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--other-heads", action="store_true", help="heads of transformers")


def run(args: argparse.Namespace) -> None:
    shapes = OTHER_HEADS if args.other_heads else SHAPES
    sources = [source for shape in shapes for _, source, _ in candidates(shape)]
    measure = partial(attn_tma.measure, candidates=candidates)
    contest.hold("attn_wgmma", args, sources, shapes, measure)
