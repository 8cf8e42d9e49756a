"""The row of attention by e4m3 codes says which tile computes one, how long that takes, and what is
launched: a kernel that makes codes of the values, and the attention.

It supports calls whose ``MARK`` names e4m3, as ``passes.eight_bit_attention`` sets it. All exact
kernels support them too, so that the fastest of all runs.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

import torch

from strop.ir.device import Device
from strop.ir.eight_bit import FORMATS, MARK
from strop.ir.source import KernelSource
from strop.kernels.attention.cases import case_of, nearest
from strop.kernels.attention.codes import HEADS, MOST_HEAD, NAME, ONES, code_attention
from strop.kernels.attention.rows import SEQUENCE_FIRST, is_plain, match, scalars_of, scale_of
from strop.kernels.attention.times import Rounds
from strop.kernels.attention.to_codes import value_codes
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
    PartScratch,
    Problem,
    Stride,
    View,
    scratch,
)
from strop.kernels.tuned import tuned

_BYTES = 3  # of a number: it is read in two, and written in one
_UNIT = 8  # numbers in 16 bytes, of which strides are multiples


def supports(call: Call, device: Device) -> str:
    """Say why there are no tiles for this attention, or nothing."""
    if dict(call.attrs).get(MARK) != FORMATS["fp8"].name:
        return "computes by e4m3 codes, which is done where it is asked for by name"
    if not device.has_wgmma:
        return f"multiplies by WGMMA, which {device.name} lacks"
    reason = is_plain(call)
    if reason:
        return reason
    heads = {shape[-1].value for shape in call.shapes}
    head = min(heads)
    if len(heads) > 1 or head % HEADS or head > MOST_HEAD:
        sizes = ", ".join(map(str, sorted(heads)))
        return f"takes heads of one size, a multiple of {HEADS} up to {MOST_HEAD}, not {sizes}"
    is_able = bool(tuned(device).attention.codes.get(head))
    return "" if is_able else f"has no tile that was measured for heads of {head}"


def us_of(way: Rounds, problem: Problem, device: Device) -> float:
    """Return about how many microseconds it takes: to make codes of values, and its rounds."""
    (batch, heads, queries, head), keys = problem.shapes[0], problem.shapes[1][2]
    times = tuned(device).gemm.library
    made = batch * heads * keys * head * _BYTES
    begins = times.behind_begin_us + times.gap_us
    return begins + made / times.behind_bytes + way.us(batch * heads, queries, keys, device.sms)


@lru_cache(maxsize=4096)
def fastest(problem: Problem, device: Device) -> tuple[WgmmaTile | None, float]:
    """Return the fastest tile and its microseconds, or None and NEVER where there is none."""
    q, k, v = problem.shapes
    times = tuned(device).attention
    if not match(q, k, v) or k[2] < times.least_code_keys:
        return None, NEVER
    ways = times.codes.get(q[3], ())
    found = ((way.tile, us_of(way, problem, device)) for way in ways)
    return min(found, key=lambda each: each[1], default=(None, NEVER))


def exact_us(problem: Problem, device: Device) -> float:
    """Return what the fastest exact kernel takes: as it was measured of such sizes, or by the model
    of rounds; FASTEST where a rule, and no time, says that one is, and NEVER where nothing does."""
    (batch, heads, queries, head), keys = problem.shapes[0], problem.shapes[1][2]
    known, case, all_heads = tuned(device), case_of(problem), batch * heads
    if case and (found := nearest(problem, known.cases)):
        return min(found.us.values()) * case.work / found.case.work
    if known.attention.rule(head, all_heads * queries * keys, keys):
        return FASTEST
    ways = known.attention.in_rounds.get(head, ())
    return min((way.us(all_heads, queries, keys, device.sms) for way in ways), default=NEVER)


def cost_us(problem: Problem, device: Device) -> float:
    """Return FASTEST where codes are faster than all exact kernels, whose own rows may say that
    they are, which is no time to compare with; else NEVER."""
    is_faster = fastest(problem, device)[1] < exact_us(problem, device)
    return FASTEST if is_faster else NEVER


def launch(problem: Problem, device: Device) -> Launches | None:
    tile = fastest(problem, device)[0] if cost_us(problem, device) < NEVER else None
    return None if tile is None else launches_by(tile, problem, device)


def launches_by(tile: WgmmaTile, problem: Problem, device: Device) -> Launches:
    """Return what this tile launches."""
    (batch, heads, queries, head), keys = problem.shapes[0], problem.shapes[1][2]
    steps, (codes, scales) = -(-keys // tile.keys), map(scratch, range(2))
    working = (
        PartScratch((batch, heads, head + ONES, steps * tile.keys), torch.uint8),
        PartScratch((batch, heads, steps), torch.float32),
    )
    strides = (Stride(0, dim, _UNIT) for dim in range(3))
    first = Launch(
        value_codes(head, tile.keys, problem.dtype),
        (Operand(2, Lies.ROWS), Operand(codes), Operand(scales)),
        (keys, heads, *strides, steps, batch * heads),
    )
    second = Launch(
        _source(problem, tile),
        (
            *(Operand(n, Lies.ROWS, view=View()) for n in (0, 1)),
            Operand(codes, view=View()),
            Operand(RESULT, Lies.ROWS, view=View()),
            Operand(scales),
        ),
        scalars_of(tile, batch, heads, queries, keys, device.sms),
    )
    return Launches((first, second), working, (batch, heads, queries, head), SEQUENCE_FIRST)


def _source(of: Problem | Call, tile: WgmmaTile) -> KernelSource:
    last = of.shapes[0][-1]
    head = last if isinstance(last, int) else last.value
    return code_attention(head, scale_of(of.attr("scale"), head), tile, of.dtype)


def forms(call: Call, device: Device) -> Iterable[KernelSource]:
    head = call.shapes[0][-1].value
    for way in tuned(device).attention.codes.get(head, ()):
        if way.tile is not None:
            yield value_codes(head, way.tile.keys, call.dtype)
            yield _source(call, way.tile)


ROW = Kernel(NAME, ("attention",), supports, cost_us, launch, forms)
