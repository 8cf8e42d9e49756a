"""Choose ``short_attention`` where a measurement says that it is the fastest, and its tile."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace

import torch

from strop.ir.device import Device
from strop.ir.functions import HALVES
from strop.ir.source import KernelSource
from strop.kernels.attention.cases import (
    case_of,
    masking_of,
    measured_us,
    nearest,
    speaks_of,
    unmeasured,
)
from strop.kernels.attention.rows import MOST_NUMBERS, SEQUENCE_FIRST, scale_of
from strop.kernels.attention.short import (
    UNIT,
    MaskedTile,
    Masking,
    ShortAttention,
    short_attention,
)
from strop.kernels.kernel import (
    NEVER,
    RESULT,
    Call,
    Kernel,
    Launch,
    Launches,
    Lies,
    Operand,
    Problem,
    Scalar,
    Stride,
)
from strop.kernels.tuned import tuned

NAME = "short_attention"
WIDEST = 128  # of heads: a wider one leaves no registers
MASK = 3  # the number of that operand


def supports(call: Call, device: Device) -> str:
    if not device.arch:
        return "runs on GPUs"
    if call.dtype not in HALVES:
        return f"computes fp16 and bf16, not {call.dtype}"
    if any(len(shape) != 4 or not shape[-1].is_const for shape in call.shapes[:3]):
        return "wants operands (B, H, S, D) whose heads have a known size"
    head = call.shapes[0][-1].value
    if head % UNIT or head > WIDEST:
        return f"is for heads up to {WIDEST} that are multiples of {UNIT}"
    if not _tiles(call, device):
        return unmeasured(call, device)
    return ""


def cost_us(problem: Problem, device: Device) -> float:
    us = measured_us(problem, NAME, tuned(device).cases)
    return NEVER if us is None or not _fits(problem) else us


def _fits(problem: Problem) -> bool:
    """Tell whether places in all operands, and programs, are counted in 32 bits."""
    return all(math.prod(shape) < MOST_NUMBERS for shape in problem.shapes)


def launch(problem: Problem, device: Device) -> Launches | None:
    case = nearest(problem, tuned(device).cases)
    tile = None if case is None else case.tiles.get(NAME)
    return launches(problem, tile) if isinstance(tile, MaskedTile) and _fits(problem) else None


def _tiles(call: Call, device: Device) -> list[MaskedTile]:
    """Return the tiles that may run the call at some sizes."""
    cases = speaks_of(call, tuned(device).cases)
    found = dict.fromkeys(case.tiles.get(NAME) for case in cases)
    return [tile for tile in found if isinstance(tile, MaskedTile)]


def launches(problem: Problem, tile: MaskedTile) -> Launches:
    """Return what computes a call that has a case."""
    case = case_of(problem)
    assert case is not None
    masks = tuple(_as_rows(mask) for mask in problem.shapes[MASK:])
    of = ShortAttention(
        case.head,
        scale_of(problem.attr("scale"), case.head),
        case.masking,
        any(_is_wide(mask, case.masking) for mask in masks),
    )
    tile = replace(tile, batch=1) if "b" in case.spread else tile
    batches, tiles = -(-case.batch // tile.batch), -(-case.queries // tile.queries)
    scalars: list[Scalar] = [
        case.queries,
        case.keys // of.mask_unit,
        case.heads,
        case.batch,
        case.groups,
        batches * tiles * case.heads,
        *(Stride(n, dim, UNIT) for n in range(MASK) for dim in range(3)),
    ]
    operands = [Operand(n, Lies.ROWS) for n in range(MASK)]
    for mask in masks:
        rank = len(problem.shapes[MASK])
        scalars += _mask_strides(mask, rank, of)
        operands.append(Operand(MASK, Lies.ROWS if of.is_wide else Lies.ANYHOW))
    operands.append(Operand(RESULT, order=SEQUENCE_FIRST))
    part = Launch(short_attention(of, tile, problem.dtype), tuple(operands), tuple(scalars))
    result = (case.batch, case.heads, case.queries, case.head)
    return Launches((part,), result=result, order=SEQUENCE_FIRST)


def _as_rows(mask: tuple[int, ...]) -> tuple[int, ...]:
    """Return the sizes of a mask as those of scores (B, H, S, K)."""
    return (1,) * (4 - len(mask)) + mask


def _is_wide(mask: tuple[int, ...], masking: Masking) -> bool:
    """Tell whether rows are whole pieces of 16 bytes, unless all keys share a mark."""
    unit = 2 * UNIT if masking is Masking.BOOL else UNIT
    return mask[-1] > 1 and mask[-1] % unit == 0


def _mask_strides(mask: tuple[int, ...], rank: int, of: ShortAttention) -> Iterator[Scalar]:
    """Yield the strides of a mask of so many dims; dims that all share have none."""
    for dim, size in enumerate(mask[:-1] if of.is_wide else mask):
        own = dim - (4 - rank)
        yield Stride(MASK, own, of.mask_unit) if size > 1 else 0


def forms(call: Call, device: Device) -> Iterable[KernelSource]:
    masking = masking_of(call)
    assert masking is not None
    head = call.shapes[0][-1].value
    scale = scale_of(call.attr("scale"), head)
    return sources(head, scale, masking, _tiles(call, device), call.dtype)


def sources(
    head: int,
    scale: float,
    masking: Masking,
    tiles: Iterable[MaskedTile],
    dtype: torch.dtype,
) -> list[KernelSource]:
    """Return the kernels of these tiles for masks of all shapes."""
    wide = (False, True) if masking in (Masking.BIAS, Masking.BOOL) else (False,)
    every = dict.fromkeys(each for tile in tiles for each in (tile, replace(tile, batch=1)))
    return [
        short_attention(ShortAttention(head, scale, masking, is_wide), tile, dtype)
        for is_wide in wide
        for tile in every
    ]


ROW = Kernel(NAME, ("attention",), supports, cost_us, launch, forms)
