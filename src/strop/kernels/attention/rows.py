"""Choose the tile that computes attention with short heads, by sizes alone.

What was measured on a card (``kernels.tuned``) says which tile, of all kinds, is the fastest at
some sizes. Three rows share that answer: each runs where the tile is one of its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

import torch

from strop.ir.device import Device
from strop.ir.functions import HALVES
from strop.ir.source import KernelSource
from strop.kernels.attention.cases import measured_us, nearest, speaks_of
from strop.kernels.attention.cross import CrossTile, cross_attention
from strop.kernels.attention.times import AnyTile
from strop.kernels.attention.tma import TmaTile, tma_attention
from strop.kernels.attention.wgmma import wgmma_attention
from strop.kernels.attention.wgmma_tiles import WgmmaTile
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
    Problem,
    View,
)
from strop.kernels.tuned import tuned

MOST_PROGRAMS = 65535  # along the second dim of a grid, which counts heads
MOST_NUMBERS = 2**31
SEQUENCE_FIRST = (0, 2, 1, 3)  # the order of a result (B, H, S, D) in memory


@lru_cache(maxsize=4096)
def tile_of(
    head: int, batch_times_heads: int, queries: int, keys: int, device: Device
) -> AnyTile | None:
    """The fastest tile, or None where the library is faster or nothing was measured."""
    times = tuned(device).attention
    if queries < times.least_queries.get(head, MOST_NUMBERS):
        return None
    rule = times.rule(head, batch_times_heads * queries * keys, keys)
    if rule is not None:
        return rule.tile
    if keys <= times.few_keys or head not in times.in_rounds:
        return None
    ways = times.in_rounds[head]
    best = min(ways, key=lambda way: way.us(batch_times_heads, queries, keys, device.sms))
    return best.tile


def library_us(
    head: int, batch_times_heads: int, queries: int, keys: int, device: Device
) -> float | None:
    """Microseconds of the library's own kernel where these were measured."""
    ways = tuned(device).attention.in_rounds.get(head, ())
    found = (way.us(batch_times_heads, queries, keys, device.sms) for way in ways if not way.tile)
    return next(found, None)


@lru_cache(maxsize=256)  # a model asks for the same at each of its calls
def source_of(head: int, scale: float, tile: AnyTile, dtype: torch.dtype) -> KernelSource:
    if isinstance(tile, WgmmaTile):
        return wgmma_attention(head, scale, tile, dtype)
    if isinstance(tile, CrossTile):
        return cross_attention(head, scale, tile, dtype)
    return tma_attention(head, scale, tile, dtype)


def scalars_of(
    tile: AnyTile, batch: int, heads: int, queries: int, keys: int, sms: int
) -> tuple[int, ...]:
    """Return what a launch passes on a GPU of so many multiprocessors."""
    sizes = queries, keys, heads, batch * heads
    if isinstance(tile, CrossTile):
        return *sizes, *tile.shares(batch * heads, queries, sms)
    if isinstance(tile, WgmmaTile) and tile.is_shared:
        return *sizes, *tile.shares(batch * heads, queries, keys, sms).scalars
    return sizes


def scale_of(given: float | None, head: int) -> float:
    """The scale of scores: torch's own where none is given."""
    return head**-0.5 if given is None else given


def is_plain(call: Call) -> str:
    """Say why a call is no attention without mask of half precision and one size of heads, or
    ""."""
    if len(call.shapes) != 3 or call.attr("causal"):
        return "computes attention without a mask"
    if call.attr("scale") is not None and call.attr("scale") <= 0:
        return "wants a positive scale"
    if call.dtype not in HALVES:
        return f"computes fp16 and bf16, not {call.dtype}"
    if any(len(shape) != 4 or not shape[-1].is_const for shape in call.shapes):
        return "wants operands (B, H, S, D) whose heads have a known size"
    return ""


@dataclass(frozen=True, slots=True)
class _Kind:
    """One kind of tile, and the feature of a device that its kernel runs by."""

    name: str
    tile: type[AnyTile]
    feature: str

    def supports(self, call: Call, device: Device) -> str:
        if not getattr(device, self.feature):
            return f"runs by {self.feature.removeprefix('has_').upper()}, which {device.name} lacks"
        reason = is_plain(call)
        if reason:
            return reason
        heads = {shape[-1].value for shape in call.shapes}
        if len(heads) > 1 or not heads <= tuned(device).attention.least_queries.keys():
            sizes = ", ".join(map(str, sorted(heads)))
            return f"was not measured for heads of {sizes} on {device.name}"
        return ""

    def chosen(self, problem: Problem, device: Device) -> AnyTile | None:
        """The fastest tile, of this very case or by the rules, where it is one of this kind."""
        q, k, v = problem.shapes
        if not match(q, k, v):
            return None
        case = nearest(problem, tuned(device).cases)
        found = None if case is None else case.tiles.get(self.name)
        if isinstance(found, self.tile) and takes(found, k[2]):
            return found
        tile = tile_of(q[3], q[0] * q[1], q[2], k[2], device)
        return tile if isinstance(tile, self.tile) else None

    def cost_us(self, problem: Problem, device: Device) -> float:
        """Return the time of the very case, where it was measured, else that of the rules."""
        tile = self.chosen(problem, device)
        if tile is None:
            return NEVER
        us = measured_us(problem, self.name, tuned(device).cases)
        return _us(problem, tile, device) if us is None else us

    def launch(self, problem: Problem, device: Device) -> Launches | None:
        tile = self.chosen(problem, device)
        return None if tile is None else launches(problem, tile, device)

    def forms(self, call: Call, device: Device) -> Iterable[KernelSource]:
        head = call.shapes[0][-1].value
        scale = scale_of(call.attr("scale"), head)
        cases = speaks_of(call, tuned(device).cases)
        measured = (case.tiles[self.name] for case in cases if self.name in case.tiles)
        for tile in dict.fromkeys((*tuned(device).attention.tiles(head), *measured)):
            if isinstance(tile, self.tile):
                yield source_of(head, scale, tile, call.dtype)

    def row(self) -> Kernel:
        return Kernel(
            self.name, ("attention",), self.supports, self.cost_us, self.launch, self.forms
        )


def takes(tile: AnyTile, keys: int) -> bool:
    """Tell whether a tile is right for so many keys: some have all of them in a single step."""
    if isinstance(tile, CrossTile):
        return tile.takes(keys)
    return isinstance(tile, TmaTile) or tile.stages > 1 or keys <= tile.keys


def match(q: tuple[int, ...], k: tuple[int, ...], v: tuple[int, ...]) -> bool:
    """Tell whether (B, H, S, D) have equal B, H and D, are not empty, and fit 32 bits."""
    return (
        k == v
        and (*k[:2], k[3]) == (*q[:2], q[3])
        and all(0 < math.prod(shape) < MOST_NUMBERS for shape in (q, k))
        and q[0] * q[1] <= MOST_PROGRAMS
    )


def _us(problem: Problem, tile: AnyTile, device: Device) -> float:
    """Return the time by the model of rounds where the library has one too; else the tile is the
    fastest that was measured."""
    (batch, heads, queries, head), keys = problem.shapes[0], problem.shapes[1][2]
    times, of_all = tuned(device).attention, batch * heads
    if times.rule(head, of_all * queries * keys, keys) is not None:
        return FASTEST
    if library_us(head, of_all, queries, keys, device) is None:
        return FASTEST
    way = next(way for way in times.in_rounds[head] if way.tile == tile)
    return way.us(of_all, queries, keys, device.sms)


def launches(problem: Problem, tile: AnyTile, device: Device) -> Launches:
    """Return what a tile of any kind launches."""
    (batch, heads, queries, head), keys = problem.shapes[0], problem.shapes[1][2]
    source = source_of(head, scale_of(problem.attr("scale"), head), tile, problem.dtype)
    operands = tuple(Operand(n, Lies.ROWS, view=View()) for n in (0, 1, 2, RESULT))
    scalars = scalars_of(tile, batch, heads, queries, keys, device.sms)
    parts = len(source.params) // len(operands)  # a head may be two pieces, each with its boxes
    launch = Launch(source, operands * parts, scalars)
    return Launches((launch,), result=(batch, heads, queries, head), order=SEQUENCE_FIRST)


WGMMA = _Kind("wgmma_attention", WgmmaTile, "has_wgmma").row()
CROSS = _Kind("cross_attention", CrossTile, "has_wgmma").row()
TMA = _Kind("tma_attention", TmaTile, "has_tma").row()
