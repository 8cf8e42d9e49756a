"""Which kernel of ours does an attention, by sizes alone; or none, where the library is faster."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from strop.ir.dims import Expr
from strop.ir.functions import HALVES
from strop.ir.source import KernelSource
from strop.kernels.attention.cross import MASKED, KeysTile, cross_attention
from strop.kernels.attention.tma import Tile, tma_attention
from strop.kernels.attention.wgmma import wgmma_attention
from strop.kernels.attention.wgmma_tiles import WgmmaTile

AnyTile = Tile | WgmmaTile | KeysTile

# Measured on an H100 in fp16 (benchmarks/fit_kernels.py attn_tma and attn_wgmma).
FITTED = (  # batch, heads, queries, keys, size of a head of the measurements that set these numbers
    (2, 8, 1024, 77, 80),
    (2, 8, 4096, 77, 40),
    (2, 8, 256, 256, 160),
    (2, 20, 1024, 1024, 64),
    (2, 10, 4096, 4096, 64),
    (2, 8, 4096, 4096, 40),
    (2, 8, 16384, 16384, 40),
    (2, 8, 2304, 2304, 40),
    (2, 8, 1024, 1024, 40),
    (2, 8, 4096, 4096, 80),
    (8, 8, 1024, 1024, 80),
    (2, 8, 256, 77, 80),
    (2, 10, 4096, 77, 64),
    (1, 8, 4096, 4096, 40),
    (8, 8, 4096, 4096, 40),
    (2, 8, 9216, 9216, 40),
    (2, 8, 1024, 1024, 80),
    (2, 8, 2304, 2304, 80),
    (1, 10, 4096, 4096, 64),
    (4, 10, 4096, 4096, 64),
    (2, 10, 2304, 2304, 64),
    (2, 20, 576, 576, 64),
    (2, 10, 6144, 6144, 64),
    (1, 20, 1024, 1024, 64),
    (2, 20, 2304, 2304, 64),
    (2, 10, 9216, 9216, 64),
    (4, 20, 1024, 1024, 64),
    (8, 20, 1024, 1024, 64),
    (2, 8, 1024, 77, 40),
    (2, 20, 1024, 77, 64),
    (2, 8, 4096, 77, 80),
    (2, 8, 256, 77, 160),
)
FEW_KEYS = 128  # which are a few blocks
OF_LIBRARY = WgmmaTile(2, 128, 1)  # as times of cuDNN's say: 128 queries a program, not shared out
UNBOUNDED = 1 << 62


@dataclass(frozen=True, slots=True)
class Rule:
    """A tile, where there are no more scores, of all heads together, and so many keys."""

    tile: AnyTile
    most_scores: int = UNBOUNDED
    most_keys: int = UNBOUNDED
    least_keys: int = 1

    def holds(self, scores: int, keys: int) -> bool:
        return scores <= self.most_scores and self.least_keys <= keys <= self.most_keys


@dataclass(frozen=True, slots=True)
class Rounds:
    """A tile, or the library (None), of which a processor has one program at a time. Microseconds
    to begin a round of programs, and of a step over some keys."""

    tile: WgmmaTile | None
    start: float
    step: float

    def us(self, batch_times_heads: int, queries: int, keys: int) -> float:
        tile = self.tile or OF_LIBRARY
        shares = tile.shares(batch_times_heads, queries, keys)
        return shares.rounds * self.start + shares.load * -(-keys // tile.keys) * self.step


_BOX = Tile(64, 64, 3, 4, blocks=0, with_queries=True)
WORDS = 80  # keys of a single step
LEAST_WORDS = WORDS - MASKED + 1  # and of a tile that takes no fewer
FEW: Mapping[int, tuple[Rule, ...]] = {  # by the size of a head; the first that holds
    40: (
        Rule(WgmmaTile(2, WORDS, 1, 2), 2 << 20, WORDS),
        Rule(KeysTile(2, WORDS, 2), UNBOUNDED, WORDS, LEAST_WORDS),
        Rule(Tile(128, 32, 4, 4, parts=1, blocks=0), 24 << 20),
    ),
    64: (
        Rule(WgmmaTile(1, WORDS, 1, 5), UNBOUNDED, WORDS),
        Rule(Tile(64, 32, 4, 4, blocks=0), 4 << 20),
    ),
    80: (
        Rule(WgmmaTile(1, WORDS, 1, 2), 2 << 20, WORDS),
        Rule(KeysTile(2, WORDS, 2), UNBOUNDED, WORDS, LEAST_WORDS),
        Rule(_BOX, 4 << 20),
    ),
    160: (Rule(WgmmaTile(1, WORDS, 1, 2), UNBOUNDED, WORDS), Rule(_BOX, 1 << 20)),
}
MANY: Mapping[int, tuple[Rule, ...]] = {
    64: (Rule(Tile(64, 64, 3, 4), 12 << 20),),
    160: (Rule(_BOX, 8 << 20),),
}
IN_ROUNDS: Mapping[int, tuple[Rounds, ...]] = {  # of many keys, where no rule holds
    40: (
        Rounds(WgmmaTile(4, 80, 4), 5.7, 0.95),
        Rounds(WgmmaTile(3, 80, 3), 4.4, 0.79),
        Rounds(WgmmaTile(2, 64, 4, 2), 4.8, 0.57),
    ),
    80: (
        Rounds(WgmmaTile(2, 128, 3), 6.3, 1.08),
        Rounds(WgmmaTile(2, 64, 3), 5.3, 0.65),
        Rounds(WgmmaTile(3, 64, 3, early=True), 6.0, 0.80),
    ),
    64: (
        Rounds(WgmmaTile(4, 64, 4, early=True), 4.1, 0.875),
        Rounds(WgmmaTile(3, 80, 3, early=True), 4.5, 0.83),
        Rounds(None, 2.3, 1.15),
    ),
}
LEAST_QUERIES = {40: 256, 64: 576, 80: 128, 160: 64}  # fewer have not been measured


@lru_cache(maxsize=4096)
def tile_of(head: int, batch_times_heads: int, queries: int, keys: int) -> AnyTile | None:
    """The fastest tile, or None where the library is faster."""
    if queries < LEAST_QUERIES.get(head, UNBOUNDED):
        return None
    scores = batch_times_heads * queries * keys
    for rule in (MANY if keys > FEW_KEYS else FEW).get(head, ()):
        if rule.holds(scores, keys):
            return rule.tile
    if keys > FEW_KEYS and head in IN_ROUNDS:
        return min(IN_ROUNDS[head], key=lambda way: way.us(batch_times_heads, queries, keys)).tile
    return None


def tiles_of(head: int) -> tuple[AnyTile, ...]:
    """All that run at some sizes, each once."""
    rules: tuple[Rule | Rounds, ...] = (
        *FEW.get(head, ()),
        *MANY.get(head, ()),
        *IN_ROUNDS.get(head, ()),
    )
    return tuple(dict.fromkeys(rule.tile for rule in rules if rule.tile is not None))


@lru_cache(maxsize=256)  # a model asks for the same at each of its calls
def source_of(head: int, scale: float, tile: AnyTile, dtype: torch.dtype) -> KernelSource:
    if isinstance(tile, WgmmaTile):
        return wgmma_attention(head, scale, tile, dtype)
    if isinstance(tile, KeysTile):
        return cross_attention(head, scale, tile, dtype)
    return tma_attention(head, scale, tile, dtype)


def scalars_of(tile: AnyTile, batch: int, heads: int, queries: int, keys: int) -> tuple[int, ...]:
    """What a launch passes."""
    sizes = queries, keys, heads, batch * heads
    if isinstance(tile, KeysTile):
        return *sizes, *tile.shares(batch * heads, queries)
    if isinstance(tile, WgmmaTile) and tile.is_shared:
        return *sizes, *tile.shares(batch * heads, queries, keys).scalars
    return sizes


def sources_at(
    attrs: Mapping[str, Any], shapes: Sequence[Sequence[int]], dtype: torch.dtype
) -> list[KernelSource]:
    """What is launched for operands of these sizes; nothing where the library does it."""
    batch, heads, queries, head = shapes[0]
    tile = tile_of(head, batch * heads, queries, shapes[1][2])
    return [source_of(head, scale_of(attrs, head), tile, dtype)] if tile else []


def sources_anywhere(attrs: Mapping[str, Any], head: int, dtype: torch.dtype) -> list[KernelSource]:
    """At any sizes."""
    scale = scale_of(attrs, head)
    return [source_of(head, scale, tile, dtype) for tile in tiles_of(head)]


def scale_of(attrs: Mapping[str, Any], head: int) -> float:
    scale: float | None = attrs["scale"]
    return head**-0.5 if scale is None else scale


def is_boxed(
    attrs: Mapping[str, Any], shapes: Sequence[Sequence[Expr]], dtype: torch.dtype
) -> bool:
    """Whether the kernel can take these operands of an attention, (B, H, S, D) each."""
    widths = {shape[-1] for shape in shapes}
    return (
        len(shapes) == 3  # no mask
        and all(len(shape) == 4 for shape in shapes)
        and not attrs["causal"]
        and (attrs["scale"] is None or attrs["scale"] > 0)
        and dtype in HALVES
        and len(widths) == 1
        and all(width.is_const and width.value in LEAST_QUERIES for width in widths)
    )
