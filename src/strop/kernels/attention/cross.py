"""Compute attention to few keys in PTX, as to the words of a prompt: programs keep keys and values.

All keys are one step, so weights need no rescaling. A program fetches keys and values of one head
once, then goes through a share of its queries, tile by tile; each of its groups of four warps has
64 queries of a tile. What it takes is then the queries' way in and the results' way out.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from strop.ir.dims import symbol
from strop.ir.source import KernelSource
from strop.kernels.attention import moves
from strop.kernels.attention import wgmma as rows
from strop.kernels.ptx import (
    HIGH,
    KINDS,
    LINE,
    LINE_BYTES,
    ROWS,
    UNIT,
    advance,
    barriers,
    entry,
    f32,
    release,
    wait,
)

NAME = "cross_attention"
MASKED = 16  # keys at the end of the step that may be behind the last one


@dataclass(frozen=True, slots=True)
class CrossTile:
    """Describe a tile of ``groups`` of 64 queries each; ``keys``: a multiple of 16, of which the
    last 16 may be none; ``stages`` of queries on the way; ``programs`` on a processor, which bounds
    the registers."""

    groups: int
    keys: int
    stages: int
    programs: int = 1

    def takes(self, keys: int) -> bool:
        return self.keys - MASKED < keys <= self.keys

    def shares(self, batch_times_heads: int, queries: int, sms: int) -> tuple[int, int]:
        """Return the programs of a head, and the tiles of queries of a program: as many as run at a
        time."""
        tiles = -(-queries // (ROWS * self.groups))
        wanted = max(sms * self.programs // batch_times_heads, 1)
        each = -(-tiles // min(wanted, tiles))
        return -(-tiles // each), each


@dataclass(frozen=True, slots=True)
class CrossLayout(moves.Laid):
    """Lay out stages of queries, keys, values, results, barriers."""

    tile: CrossTile

    @property
    def stage(self) -> int:
        return self.parts * self.queries * LINE_BYTES

    @property
    def keys_at(self) -> int:
        return self.tile.stages * self.stage

    @property
    def values_at(self) -> int:
        return self.keys_at + self.block

    @property
    def results_at(self) -> int:
        return self.values_at + self.block

    @property
    def keys_full(self) -> int:
        return self.results_at + self.stage

    @property
    def values_full(self) -> int:
        return self.keys_full + 8

    @property
    def queries_full(self) -> int:
        """The first stage's; behind it the one that tells that the stage is free again; then those
        of the others."""
        return self.values_full + 8

    @property
    def shared(self) -> int:
        return self.queries_full + 16 * self.tile.stages


def cross_attention(head: int, scale: float, tile: CrossTile, dtype: torch.dtype) -> KernelSource:
    """out[b, h, i] = sum_j softmax_j(scale * q[b, h, i] . k[b, h, j]) v[b, h, j], scale > 0.

    Params: q, k and v, (B, H, S, D) each, whose last dim is dense and whose addresses and other
    strides are multiples of 16 bytes; and the result, dense as (B, S, H, D). D: a multiple of 8.
    Scalars: queries, keys, H, B * H, programs of a head, tiles of queries of a program. Sums are
    fp32; weights are rounded to ``dtype``. NaN or +inf in a row of scores gives NaN.
    """
    layout, kind = CrossLayout(head, tile), KINDS[dtype]
    factor = f32(scale * math.log2(math.e))
    parts = (_begin(layout), _fetch(layout), _weigh(layout, factor, kind), _stored(layout, kind))
    text = "".join(piece for part in parts for piece in part)
    boxes = tuple((1, 1, count, LINE) for count in (layout.queries, tile.keys, tile.keys))
    return KernelSource(
        NAME,
        "ptx",
        text,
        (dtype,) * 4,
        (1,) * 6,
        (symbol("s4"), symbol("s3")),
        constants=(("SHARED", layout.shared), ("EARLY", 1)),
        num_warps=4 * tile.groups + 1,
        boxes=(*boxes, moves.RESULT),
    )


_BEGIN = """\
    .reg .pred %p, %is_first, %yes, %no;
    .reg .b32 %queries, %keys, %heads, %thread, %warp, %lane, %group, %start, %batch, %h, %tiles;
    .reg .b32 %base, %bar, %to, %column, %row, %at, %stage, %phase, %tile, %low, %low_a, %low_b;
    .reg .b32 %low_q, %low_k, %low_v, %high, %last, %x<8>, %w<{weights}>;
    .reg .b64 %map<4>, %a, %b, %wide;
    .reg .f32 %s<{scores}>, %o<{results}>, %m<2>, %l<2>, %c<2>, %n<2>, %t<4>, %f<2>;

    griddepcontrol.wait;
    griddepcontrol.launch_dependents;
    ld.param.u32 %queries, [s0];
    ld.param.u32 %keys, [s1];
    ld.param.u32 %heads, [s2];
    ld.param.u32 %tiles, [s5];
    mov.u32 %thread, %tid.x;
    and.b32 %lane, %thread, 31;
    shr.u32 %warp, %thread, 5;
    shfl.sync.idx.b32 %warp, %warp, 0, 31, -1;
    mov.u32 %base, memory;
    mov.u32 %x0, %ctaid.x;
    mul.lo.u32 %start, %x0, %tiles;
    mul.lo.u32 %start, %start, {rows};
    mov.u32 %x0, %ctaid.y;
    div.u32 %batch, %x0, %heads;
    rem.u32 %h, %x0, %heads;
    sub.u32 %x0, %queries, %start;
    add.u32 %x0, %x0, {rows} - 1;
    div.u32 %x0, %x0, {rows};
    min.u32 %tiles, %tiles, %x0;
    mov.u32 %tile, 0;
    mov.u32 %stage, 0;
{barriers}"""


def _begin(layout: CrossLayout) -> Iterator[str]:
    tile = layout.tile
    counts = {layout.keys_full: 1, layout.values_full: 1}
    for n in range(tile.stages):
        at = layout.queries_full + 16 * n
        counts |= {at: 1, at + 8: 4 * tile.groups}
    threads = 128 * tile.groups + 32
    params = dict.fromkeys(("q", "k", "v", "result"), 4)
    yield entry(NAME, params, (), 6, threads, programs=tile.programs)
    yield _BEGIN.format(
        rows=layout.queries,
        scores=tile.keys // 2,
        results=layout.columns // 2,
        weights=tile.keys // 4,
        barriers=barriers(counts),
    )


def _at_stage(layout: CrossLayout) -> str:
    return f"""\
    mad.lo.u32 %at, %stage, {layout.stage}, %base;
    mad.lo.u32 %bar, %stage, 16, %base;
    add.u32 %bar, %bar, {layout.queries_full};
"""


def _fetch(layout: CrossLayout) -> Iterator[str]:
    """Fetch by one thread: the first queries, keys and values, then more queries as stages are
    free."""
    tile = layout.tile
    yield f"""\
    setp.lt.u32 %p, %thread, {128 * tile.groups};
    @%p bra weigh;
    setp.ne.u32 %p, %thread, {128 * tile.groups};
    @%p bra done;
"""
    for n, name in enumerate(("q", "k", "v")):
        yield f"    mov.b64 %wide, {name};\n    cvta.param.u64 %map{n}, %wide;\n"
    yield "    mov.u32 %row, 0;\n"
    for n, (at, full) in enumerate(
        ((layout.keys_at, layout.keys_full), (layout.values_at, layout.values_full)), start=1
    ):
        yield f"    add.u32 %bar, %base, {full};\n    add.u32 %at, %base, {at};\n"
        yield moves.boxed(layout, n, "%at", tile.keys, "%row", "%bar")
    yield "    mov.u32 %phase, 1;\nfetch:\n" + _at_stage(layout)
    yield wait("free", "%bar+8", "%phase")
    yield moves.boxed(layout, 0, "%at", layout.queries, "%start", "%bar")
    yield f"    add.u32 %start, %start, {layout.queries};\n    add.u32 %tile, %tile, 1;\n"
    yield advance(tile.stages, "%stage", "%phase")
    yield "    setp.lt.u32 %p, %tile, %tiles;\n    @%p bra fetch;\n    bra done;\n"


def _masked(layout: CrossLayout) -> Iterator[str]:
    """Minus infinity for what is behind the last key."""
    yield """\
    and.b32 %x2, %lane, 3;
    shl.b32 %x2, %x2, 1;
    sub.s32 %x1, %keys, %x2;
"""
    count = layout.tile.keys // 2
    for n in range(count - MASKED // 2, count):
        yield f"    setp.gt.s32 %p, %x1, {n // 4 * 8 + n % 2};\n"
        yield f"    selp.f32 %s{n}, %s{n}, {f32(-math.inf)}, %p;\n"


def _weigh(layout: CrossLayout, factor: str, kind: str) -> Iterator[str]:
    apart = layout.tile.keys * LINE_BYTES // UNIT  # columns of values, where there are more
    yield f"""\
weigh:
    setp.eq.u32 %yes, 0, 0;
    setp.ne.u32 %no, 0, 0;
    setp.eq.u32 %is_first, %lane, 0;
    shr.u32 %group, %warp, 2;
    add.u32 %x0, %base, {layout.keys_at};
    shr.u32 %low_k, %x0, 4;
    or.b32 %low_k, %low_k, {1 << 16};
    add.u32 %x0, %base, {layout.values_at};
    shr.u32 %low_v, %x0, 4;
    or.b32 %low_v, %low_v, {apart << 16};
    mov.u32 %high, {HIGH};
    mov.u32 %phase, 0;
    add.u32 %bar, %base, {layout.keys_full};
"""
    yield wait("keys_are_there", "%bar", "0")
    yield "next:\n" + _at_stage(layout)
    yield wait("queries_are_there", "%bar", "%phase")
    yield f"""\
    mad.lo.u32 %x0, %group, {ROWS * LINE_BYTES}, %at;
    shr.u32 %low_q, %x0, 4;
    or.b32 %low_q, %low_q, {1 << 16};
    wgmma.fence.sync.aligned;
"""
    yield from rows.scores(layout, kind, "%low_k")
    yield "    wgmma.commit_group.sync.aligned;\n    wgmma.wait_group.sync.aligned 0;\n"
    yield release(layout.queries_full, "%stage", "%x0")
    yield from _masked(layout)
    yield from rows.maxima(layout.tile.keys, factor)
    yield "    mov.f32 %m0, %c0;\n    mov.f32 %m1, %c1;\n"
    yield from rows.powers(layout.tile.keys, factor)
    yield "    mov.f32 %l0, %c0;\n    mov.f32 %l1, %c1;\n"
    yield from rows.rounded(layout.tile.keys, kind)
    yield f"    add.u32 %bar, %base, {layout.values_full};\n"
    yield wait("values_are_there", "%bar", "0")
    yield "    wgmma.fence.sync.aligned;\n"
    yield from rows.weighed(layout, kind, "%low_v", is_added=False)
    yield "    wgmma.commit_group.sync.aligned;\n    wgmma.wait_group.sync.aligned 0;\n"


def _stored(layout: CrossLayout, kind: str) -> Iterator[str]:
    """Store results when those of the tile before have left."""
    yield moves.READ
    yield from rows.divided(layout, kind)
    yield advance(layout.tile.stages, "%stage", "%phase")
    yield f"""\
    add.u32 %start, %start, {layout.queries};
    add.u32 %tile, %tile, 1;
    setp.lt.u32 %p, %tile, %tiles;
    @%p bra next;
{moves.TAKEN}done:
    ret;
}}
"""
