"""Compute attention in PTX: groups of four warps have queries of their own and share keys and
values.

As FlashAttention-3 (https://arxiv.org/abs/2407.08608): one thread fetches blocks of keys and values
by the tensor memory accelerator, each group waits for a block and goes on by itself, so that one
group's exponentials run beside another's products, and a group's next scores are computed while it
weighs the values of this block. Weights are relative to the greatest score that was known when a
row was rescaled last, and it is rescaled only where the sum of weights tells that they have become
large (FlashAttention-4 asks the maxima for it, which costs a tenth of the time): what it is divided
by at the end has grown as well.

PTX (``ptx.py``), as Triton has no group of warps that runs by itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from strop.ir.dims import Expr, symbol
from strop.ir.source import KernelSource
from strop.kernels.attention import moves
from strop.kernels.attention.wgmma_tiles import WgmmaTile
from strop.kernels.ptx import (
    DEPTH,
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
    listed,
    product,
    release,
    wait,
)

# Of the sum of a thread's weights in a block: below, they are let be (far below fp16's 65504);
# above, they are not scaled, as they may be infinite.
MOST, TOO_MANY = 2.0**8, 2.0**120

# Registers of a thread that weighs and of one that fetches, of the 96 that 640 threads begin with.
MANY_GROUPS, WEIGHING, FETCHING = 4, 112, 24


@dataclass(frozen=True, slots=True)
class WgmmaLayout(moves.Laid):
    """Lay out queries, keys, values, barriers."""

    tile: WgmmaTile

    @property
    def keys_at(self) -> int:
        return self.parts * self.queries * LINE_BYTES

    @property
    def values_at(self) -> int:
        return self.keys_at + self.tile.stages * self.block

    @property
    def queries_full(self) -> int:
        return self.values_at + self.tile.stages * self.block

    @property
    def keys_full(self) -> int:
        """The first stage's barrier; those of the others follow, each behind the one that tells
        that the stage is free again."""
        return self.queries_full + 8

    @property
    def values_full(self) -> int:
        return self.keys_full + 16 * self.tile.stages

    @property
    def shared(self) -> int:
        return self.values_full + 16 * self.tile.stages

    @property
    def results_at(self) -> int:
        """Return where a warp's queries were, whose products it has waited for."""
        return 0

    @property
    def is_single(self) -> bool:
        return self.tile.stages == 1

    @property
    def hands_over(self) -> bool:
        """Tell whether warps that fetch leave registers to those that weigh."""
        return self.tile.groups == MANY_GROUPS and not self.is_single

    @property
    def num_warps(self) -> int:
        """Return the number of warps. In a single step, a thread of the last group fetches.
        Registers change hands by four warps."""
        fetching = 0 if self.is_single else 4 if self.hands_over else 1
        return 4 * self.tile.groups + fetching


def wgmma_attention(head: int, scale: float, tile: WgmmaTile, dtype: torch.dtype) -> KernelSource:
    """out[b, h, i] = sum_j softmax_j(scale * q[b, h, i] . k[b, h, j]) v[b, h, j], scale > 0.

    Params: q, k and v, (B, H, S, D) each, whose last dim is dense and whose addresses and other
    strides are multiples of 16 bytes; and the result, dense as (B, S, H, D). D: a multiple of 8.
    Scalars: queries, keys, H, B * H, and those of the shares, if there are. Sums are fp32; weights
    are rounded to ``dtype``. NaN or +inf in a row of scores gives NaN.
    """
    layout, kind = WgmmaLayout(head, tile), KINDS[dtype]
    factor = f32(scale * math.log2(math.e))
    parts = (
        begin(layout, NAME, _REGISTERS),
        fetch(layout, moves.boxed(layout, 2, "%x1", tile.keys, "%row", "%bar_v")),
        _weigh(layout, factor, kind),
        _store(layout, kind),
    )
    text = "".join(piece for part in parts for piece in part)
    boxes = tuple((1, 1, rows, LINE) for rows in (layout.queries, tile.keys, tile.keys))
    return KernelSource(
        NAME,
        "ptx",
        text,
        (dtype,) * 4,
        (1,) * (7 if tile.is_shared else 4),
        grid_of(layout),
        constants=(("SHARED", layout.shared), ("EARLY", 1)),
        num_warps=layout.num_warps,
        boxes=(*boxes, moves.RESULT),
    )


NAME = "wgmma_attention"
_REGISTERS = """\
    .reg .pred %p, %any, %is_first, %yes, %no;
    .reg .b32 %queries, %keys, %heads, %thread, %warp, %lane, %group, %start, %batch, %h, %steps;
    .reg .b32 %active, %readers;
    .reg .b32 %base, %bar, %bar_k, %bar_v, %to, %column, %row, %at, %stage_v, %phase_v, %stage_k;
    .reg .b32 %phase_k, %read, %step, %low, %low_a, %low_b, %low_q, %low_k, %low_v, %high;
    .reg .b32 %x<8>, %q<4>, %w<{weights}>;
    .reg .b64 %map<4>, %a, %b, %wide;
    .reg .f32 %s<{scores}>, %o<{results}>, %m<2>, %l<2>, %c<2>, %n<2>, %e<2>, %t<4>, %f<2>;
"""
_START = """\

    griddepcontrol.wait;
    griddepcontrol.launch_dependents;
    ld.param.u32 %queries, [s0];
    ld.param.u32 %keys, [s1];
    ld.param.u32 %heads, [s2];
    mov.u32 %thread, %tid.x;
    and.b32 %lane, %thread, 31;
    shr.u32 %warp, %thread, 5;
    shfl.sync.idx.b32 %warp, %warp, 0, 31, -1;
    mov.u32 %base, memory;
{place}    div.u32 %batch, %x0, %heads;
    mul.lo.u32 %h, %batch, %heads;
    sub.u32 %h, %x0, %h;
    shl.b32 %readers, %active, 2;
    add.u32 %steps, %keys, {step} - 1;
    div.u32 %steps, %steps, {step};
{barriers}"""

# %start: the first query; %active: groups that have some; %x0: batch and head.
_ALIKE = """\
    mov.u32 %active, {groups};
    mov.u32 %x0, %ctaid.x;
    mul.lo.u32 %start, %x0, {rows};
    mov.u32 %x0, %ctaid.y;
"""
_SHARED_OUT = """\
    ld.param.u32 %x1, [s4];
    mov.u32 %active, {groups};
    mov.u32 %x0, %ctaid.x;
    mov.u32 %start, 0;
    setp.lt.u32 %p, %x0, %x1;
    @%p bra placed;
    ld.param.u32 %active, [s5];
    sub.u32 %x0, %x0, %x1;
    div.u32 %x2, {groups}, %active;
    div.u32 %x3, %x0, %x2;
    mul.lo.u32 %x2, %x3, %x2;
    sub.u32 %start, %x0, %x2;
    mul.lo.u32 %start, %start, %active;
    add.u32 %x0, %x3, %x1;
placed:
    add.u32 %x1, %queries, {rows} - 1;
    div.u32 %x1, %x1, {rows};
    div.u32 %x3, %x0, %x1;
    mul.lo.u32 %x2, %x3, %x1;
    sub.u32 %x2, %x0, %x2;
    mad.lo.u32 %start, %x2, {groups}, %start;
    mul.lo.u32 %start, %start, {each};
    mov.u32 %x0, %x3;
    setp.ge.u32 %p, %start, %queries;
    @%p bra done;
"""


def grid_of(layout: WgmmaLayout) -> tuple[Expr, ...]:
    if layout.tile.is_shared:
        return (symbol("s6"),)
    return (symbol("s0") + (layout.queries - 1)) // layout.queries, symbol("s3")


def begin(
    layout: WgmmaLayout, name: str, registers: str, pointers: Sequence[str] = ()
) -> Iterator[str]:
    """The entry of a kernel, and what all of its warps begin with. ``registers`` of that many
    sums."""
    tile = layout.tile
    counts: dict[int, int | str] = {layout.queries_full: 1}
    for n in range(2 * tile.stages):
        at = layout.keys_full + 16 * n
        counts |= {at: 1, at + 8: "%readers"}
    params = dict.fromkeys(("q", "k", "v", "result"), 4)
    place = _SHARED_OUT if tile.is_shared else _ALIKE
    scalars = 7 if tile.is_shared else 4
    yield entry(name, params, pointers, scalars, 32 * layout.num_warps, programs=tile.programs)
    yield (registers + _START).format(
        place=place.format(groups=tile.groups, rows=layout.queries, each=ROWS),
        step=tile.keys,
        scores=tile.keys // 2,
        results=layout.columns // 2,
        weights=tile.keys // 4,
        barriers=barriers(counts),
    )


def wait_for(label: str, first: int, stage: str, phase: str) -> str:
    """Wait for a stage, by the place of the first stage's barrier."""
    return f"    mad.lo.u32 %bar, {stage}, 16, %base;\n    add.u32 %bar, %bar, {first};\n" + wait(
        label, "%bar", phase
    )


def fetch(layout: WgmmaLayout, values: str) -> Iterator[str]:
    """Fetch by one thread: the queries, then keys and values, the last block first, as stages are
    free. ``values`` fetches those of a block, to %x1 if they take as much as its keys."""
    tile = layout.tile
    first, others = 128 * tile.groups, "done"
    if layout.is_single:
        first, others = 128 * (tile.groups - 1), "weigh"
    else:
        yield f"    setp.lt.u32 %p, %thread, {first};\n    @%p bra weigh;\n"
    if layout.hands_over:
        yield f"    setmaxnreg.dec.sync.aligned.u32 {FETCHING};\n"
    yield f"    setp.ne.u32 %p, %thread, {first};\n    @%p bra {others};\n"
    for n, name in enumerate(("q", "k", "v")):
        yield f"    mov.b64 %wide, {name};\n    cvta.param.u64 %map{n}, %wide;\n"
    yield f"    add.u32 %bar, %base, {layout.queries_full};\n"
    yield moves.boxed(layout, 0, "%base", layout.queries, "%start", "%bar")
    yield f"""\
    mov.u32 %step, 0;
    mov.u32 %stage_k, 0;
    mov.u32 %phase_k, 1;
    sub.u32 %row, %steps, 1;
    mul.lo.u32 %row, %row, {tile.keys};
fetch:
    mad.lo.u32 %at, %stage_k, {layout.block}, %base;
    mad.lo.u32 %x0, %stage_k, 16, %base;
    add.u32 %bar_k, %x0, {layout.keys_full};
    add.u32 %bar_v, %x0, {layout.values_full};
    add.u32 %x0, %at, {layout.keys_at};
    add.u32 %x1, %at, {layout.values_at};
"""
    yield wait("keys_are_free", "%bar_k+8", "%phase_k")
    yield moves.boxed(layout, 1, "%x0", tile.keys, "%row", "%bar_k")
    yield wait("values_are_free", "%bar_v+8", "%phase_k")
    yield values
    if not layout.is_single:
        yield f"    sub.u32 %row, %row, {tile.keys};\n    add.u32 %step, %step, 1;\n"
        yield advance(tile.stages, "%stage_k", "%phase_k")
        yield "    setp.lt.u32 %p, %step, %steps;\n    @%p bra fetch;\n    bra done;\n"


def begin_scores(layout: WgmmaLayout, kind: str) -> Iterator[str]:
    """Multiply this group's queries and the keys of stage %stage_k."""
    yield f"    mad.lo.u32 %low, %stage_k, {layout.block // UNIT}, %low_k;\n"
    yield from scores(layout, kind, "%low")
    yield "    wgmma.commit_group.sync.aligned;\n"


def _results(layout: WgmmaLayout, kind: str) -> Iterator[str]:
    """The values of stage %stage_v, weighed, added to the results."""
    yield f"    mad.lo.u32 %low, %stage_v, {layout.block // UNIT}, %low_v;\n"
    yield from weighed(layout, kind, "%low", is_added=True)
    yield "    wgmma.commit_group.sync.aligned;\n"


def scores(layout: moves.Laid, kind: str, keys: str) -> Iterator[str]:
    """Multiply queries and keys. ``keys`` says where those begin."""
    tile, line = layout.tile, LINE_BYTES // UNIT
    for n in range(-(-layout.head // DEPTH)):
        part, rest = divmod(n * DEPTH, LINE)
        within = rest * 2 // UNIT
        yield f"    add.u32 %low_a, %low_q, {part * layout.queries * line + within};\n"
        yield f"    add.u32 %low_b, {keys}, {part * tile.keys * line + within};\n"
        yield "    mov.b64 %a, {%low_a, %high};\n    mov.b64 %b, {%low_b, %high};\n"
        yield product(tile.keys, kind, listed("s", tile.keys // 2), "%a", n > 0)


def weighed(layout: moves.Laid, kind: str, values: str, *, is_added: bool) -> Iterator[str]:
    """Multiply weights and values, and add the products to the results that are there, or not.
    ``values`` says where those begin."""
    for n in range(layout.tile.keys // DEPTH):
        yield f"    add.u32 %low_b, {values}, {n * DEPTH * LINE_BYTES // UNIT};\n"
        yield "    mov.b64 %b, {%low_b, %high};\n"
        results, weights = listed("o", layout.columns // 2), listed("w", 4, 4 * n)
        yield product(layout.columns, kind, results, weights, is_added or n > 0)


def _results_read(layout: WgmmaLayout, stage: str) -> str:
    """Wait until the results of the block whose values are in a stage are read."""
    return "    wgmma.wait_group.sync.aligned 0;\n" + release(layout.values_full, stage, "%x0")


def keys_read(layout: WgmmaLayout) -> str:
    free = release(layout.keys_full, "%stage_k", "%x0")
    return free + advance(layout.tile.stages, "%stage_k", "%phase_k")


def _weigh(layout: WgmmaLayout, factor: str, kind: str) -> Iterator[str]:
    """The last block, which may have fewer keys; a loop over the others; the last results."""
    apart = layout.tile.keys * LINE_BYTES // UNIT  # columns of values, where there are more
    yield from ready(layout, WEIGHING, apart)
    yield wait("queries_are_there", "%bar", "0")
    yield wait_for("last_keys_are_there", layout.keys_full, "%stage_k", "0")
    yield "    wgmma.fence.sync.aligned;\n"
    yield from begin_scores(layout, kind)
    yield "    wgmma.wait_group.sync.aligned 0;\n"
    yield keys_read(layout)
    yield from masked(layout.tile.keys)
    yield from maxima(layout.tile.keys, factor)
    yield "    mov.f32 %m0, %c0;\n    mov.f32 %m1, %c1;\n"
    yield from powers(layout.tile.keys, factor)
    yield "    mov.f32 %l0, %c0;\n    mov.f32 %l1, %c1;\n"
    yield from rounded(layout.tile.keys, kind)
    yield wait_for("last_values_are_there", layout.values_full, "%stage_v", "0")
    if not layout.is_single:
        yield from _loop(layout, factor, kind)
    yield "last:\n    wgmma.fence.sync.aligned;\n"
    yield from _results(layout, kind)
    yield "    wgmma.wait_group.sync.aligned 0;\n"


def ready(layout: WgmmaLayout, weighing: int, apart: int) -> Iterator[str]:
    """Make descriptors, and results of zeros. ``weighing``: registers of a thread that weighs;
    ``apart``: columns of values that do not follow each other, in units."""
    yield "weigh:\n    shr.u32 %group, %warp, 2;\n"
    if layout.tile.is_shared:
        yield "    setp.ge.u32 %p, %group, %active;\n    @%p bra done;\n"
    if layout.hands_over:
        yield f"    setmaxnreg.inc.sync.aligned.u32 {weighing};\n"
    yield f"""\
    setp.eq.u32 %yes, 0, 0;
    setp.ne.u32 %no, 0, 0;
    setp.eq.u32 %is_first, %lane, 0;
    mad.lo.u32 %x0, %group, {ROWS * LINE_BYTES}, %base;
    shr.u32 %low_q, %x0, 4;
    or.b32 %low_q, %low_q, {1 << 16};
    add.u32 %x0, %base, {layout.keys_at};
    shr.u32 %low_k, %x0, 4;
    or.b32 %low_k, %low_k, {1 << 16};
    add.u32 %x0, %base, {layout.values_at};
    shr.u32 %low_v, %x0, 4;
    or.b32 %low_v, %low_v, {apart << 16};
    mov.u32 %high, {HIGH};
    mov.u32 %step, 1;
    mov.u32 %stage_k, 0;
    mov.u32 %phase_k, 0;
    mov.u32 %stage_v, 0;
    mov.u32 %phase_v, 0;
    add.u32 %bar, %base, {layout.queries_full};
"""
    yield from (f"    mov.f32 %o{n}, {f32(0)};\n" for n in range(layout.columns // 2))


def _loop(layout: WgmmaLayout, factor: str, kind: str) -> Iterator[str]:
    """The next block's scores and this one's results are begun together. The assembler moves a wait
    for results in front of the exponentials, unless a jump stands between: a wait for values."""
    yield "    setp.ge.u32 %p, %step, %steps;\n    @%p bra last;\nnext:\n"
    yield wait_for("keys_are_there", layout.keys_full, "%stage_k", "%phase_k")
    yield "    wgmma.fence.sync.aligned;\n"
    yield from begin_scores(layout, kind)
    yield from _results(layout, kind)
    early = layout.tile.early
    yield _results_read(layout, "%stage_v") if early else "    wgmma.wait_group.sync.aligned 1;\n"
    yield from powers(layout.tile.keys, factor)
    if early:
        yield from rounded(layout.tile.keys, kind)
    yield from _if_sums_pass(MOST, "%any", "small")
    yield from _if_sums_pass(TOO_MANY, "%p", "scaled")
    yield from _scores_again(layout, kind)
    yield from maxima(layout.tile.keys, factor)
    yield from _grown()
    yield from powers(layout.tile.keys, factor)
    yield f"    bra {'rescaled' if early else 'small'};\nscaled:\n"
    yield from _weights_scaled(layout)
    if early:
        yield "rescaled:\n"
        yield from rounded(layout.tile.keys, kind)
    yield "small:\n" + keys_read(layout)
    yield "    mov.u32 %read, %stage_v;\n" + advance(layout.tile.stages, "%stage_v", "%phase_v")
    yield wait_for("values_are_there", layout.values_full, "%stage_v", "%phase_v")
    if not early:
        yield _results_read(layout, "%read")
    yield "    @!%any bra level;\n"
    yield from (f"    mul.f32 %l{row}, %l{row}, %e{row};\n" for row in (0, 1))
    yield from (f"    mul.f32 %o{n}, %o{n}, %e{row_of(n)};\n" for n in range(layout.columns // 2))
    yield "level:\n    add.f32 %l0, %l0, %c0;\n    add.f32 %l1, %l1, %c1;\n"
    if not early:
        yield from rounded(layout.tile.keys, kind)
    yield "    add.u32 %step, %step, 1;\n    setp.lt.u32 %p, %step, %steps;\n    @%p bra next;\n"


def row_of(number: int) -> int:
    """A thread has two neighbours of each eight columns, of two rows that are eight apart."""
    return number // 2 % 2


def masked(keys: int) -> Iterator[str]:
    """Minus infinity for what is behind the last key."""
    yield f"""\
    sub.u32 %x1, %steps, 1;
    mad.lo.s32 %x1, %x1, -{keys}, %keys;
    and.b32 %x2, %lane, 3;
    shl.b32 %x2, %x2, 1;
    sub.s32 %x1, %x1, %x2;
"""
    for n in range(keys // 2):
        yield f"    setp.gt.s32 %p, %x1, {n // 4 * 8 + n % 2};\n"
        yield f"    selp.f32 %s{n}, %s{n}, {f32(-math.inf)}, %p;\n"


def of_rows(keys: int, op: str, chains: int) -> Iterator[str]:
    """%c = all scores of a row that this thread has, by ``op``, in some chains side by side."""
    for row in (0, 1):
        scores = [f"%s{n}" for n in range(keys // 2) if row_of(n) == row]
        for n in range(chains):
            yield f"    {op} %t{n}, {scores[2 * n]}, {scores[2 * n + 1]};\n"
        for n, score in enumerate(scores[2 * chains :]):
            yield f"    {op} %t{n % chains}, %t{n % chains}, {score};\n"
        for n in range(1, chains):
            yield f"    {op} %t0, %t0, %t{n};\n"
        yield f"    mov.f32 %c{row}, %t0;\n"


def of_neighbours(name: str, op: str) -> Iterator[str]:
    """Combine a row among the four threads that share it."""
    for distance in (1, 2):
        for row in (0, 1):
            yield f"    shfl.sync.bfly.b32 %f{row}, %{name}{row}, {distance}, 31, -1;\n"
            yield f"    {op} %{name}{row}, %{name}{row}, %f{row};\n"


def maxima(keys: int, factor: str) -> Iterator[str]:
    """Compute in %c the maxima of rows, scaled."""
    yield from of_rows(keys, "max.NaN.f32", 4)
    yield from of_neighbours("c", "max.NaN.f32")
    yield from (f"    mul.f32 %c{row}, %c{row}, {factor};\n" for row in (0, 1))


def _if_sums_pass(most: float, found: str, otherwise: str) -> Iterator[str]:
    """Branch where a sum in %c of this warp is greater, infinite ones among them."""
    yield f"""\
    setp.gt.f32 %p, %c0, {f32(most)};
    setp.gt.or.f32 %p, %c1, {f32(most)}, %p;
    vote.sync.any.pred {found}, %p, -1;
    @!{found} bra {otherwise};
"""


def _weights_scaled(layout: WgmmaLayout) -> Iterator[str]:
    """Scale so that the greatest weight of a row is 1, where it is more: %m gets by as much higher,
    %e what was weighed before is to be multiplied by, and %c the sums."""
    yield from (f"    mov.f32 %n{row}, %c{row};\n" for row in (0, 1))
    yield from of_rows(layout.tile.keys, "max.f32", 2)
    yield from of_neighbours("c", "max.f32")
    for row in (0, 1):
        yield f"""\
    max.f32 %c{row}, %c{row}, {f32(1)};
    lg2.approx.ftz.f32 %c{row}, %c{row};
    add.f32 %m{row}, %m{row}, %c{row};
    neg.f32 %c{row}, %c{row};
    ex2.approx.ftz.f32 %e{row}, %c{row};
    mul.f32 %c{row}, %n{row}, %e{row};
"""
    yield from (f"    mul.f32 %s{n}, %s{n}, %e{row_of(n)};\n" for n in range(layout.tile.keys // 2))


def _grown() -> Iterator[str]:
    """Update %m, all maxima till now, and %e, by which what was weighed before is to be
    multiplied."""
    for row in (0, 1):
        yield f"""\
    max.NaN.f32 %c{row}, %c{row}, %m{row};
    sub.f32 %e{row}, %m{row}, %c{row};
    ex2.approx.ftz.f32 %e{row}, %e{row};
    mov.f32 %m{row}, %c{row};
"""


def _scores_again(layout: WgmmaLayout, kind: str) -> Iterator[str]:
    """This warp's, as they are gone, without the others of its group: by products of one warp. A
    thread reads four neighbours of rows eight apart; %x1 and %x2 say where its first ones are, and
    lines are mixed by the place of a row among eight, which is the same for all of them."""
    tile = layout.tile
    yield f"""\
    shr.u32 %x0, %lane, 2;
    and.b32 %x1, %warp, 3;
    mul.lo.u32 %x1, %x1, {16 * LINE_BYTES};
    mad.lo.u32 %x1, %x0, {LINE_BYTES}, %x1;
    mad.lo.u32 %x1, %group, {ROWS * LINE_BYTES}, %x1;
    add.u32 %x1, %x1, %base;
    mad.lo.u32 %x2, %stage_k, {layout.block}, %base;
    mad.lo.u32 %x2, %x0, {LINE_BYTES}, %x2;
    add.u32 %x2, %x2, {layout.keys_at};
"""
    yield from (f"    mov.f32 %s{n}, {f32(0)};\n" for n in range(tile.keys // 2))
    for n in range(-(-layout.head // DEPTH)):
        part, rest = divmod(n * DEPTH * 2, LINE_BYTES)
        queries, keys = (part * rows * LINE_BYTES for rows in (layout.queries, tile.keys))
        yield from (_place(which, rest // UNIT + which - 3) for which in (3, 4))
        for which, (half, row) in enumerate(((3, 0), (3, 8), (4, 0), (4, 8))):
            yield f"    add.u32 %x7, %x1, %x{half};\n"
            yield f"    ld.shared.b32 %q{which}, [%x7+{queries + row * LINE_BYTES}];\n"
        yield "    add.u32 %x3, %x2, %x3;\n    add.u32 %x4, %x2, %x4;\n"
        for eight in range(tile.keys // 8):
            sums, at = listed("s", 4, 4 * eight), keys + 8 * eight * LINE_BYTES
            yield f"    ld.shared.b32 %x5, [%x3+{at}];\n    ld.shared.b32 %x6, [%x4+{at}];\n"
            yield (
                f"    mma.sync.aligned.m16n8k{DEPTH}.row.col.f32.{kind}.{kind}.f32 "
                f"{sums}, {listed('q', 4)}, {{%x5, %x6}}, {sums};\n"
            )


def _place(which: int, unit: int) -> str:
    """%x of a unit of a line, and of this thread's pair in it; %x0: the row among eight."""
    return f"""\
    xor.b32 %x{which}, %x0, {unit};
    shl.b32 %x{which}, %x{which}, 4;
    and.b32 %x7, %lane, 3;
    mad.lo.u32 %x{which}, %x7, 4, %x{which};
"""


def powers(keys: int, factor: str) -> Iterator[str]:
    """Compute the powers of all scores less their row's maximum, in their place, and their sums in
    %c."""
    yield from (f"    neg.f32 %n{row}, %m{row};\n" for row in (0, 1))
    for n in range(keys // 2):
        yield f"    fma.rn.ftz.f32 %s{n}, %s{n}, {factor}, %n{row_of(n)};\n"
        yield f"    ex2.approx.ftz.f32 %s{n}, %s{n};\n"
    yield from of_rows(keys, "add.f32", 2)


def rounded(keys: int, kind: str) -> Iterator[str]:
    """Round weights: a product's sums lie as the next one's operand."""
    for n in range(keys // 4):
        yield f"    cvt.rn.{kind}x2.f32 %w{n}, %s{2 * n + 1}, %s{2 * n};\n"


def _store(layout: WgmmaLayout, kind: str) -> Iterator[str]:
    yield from divided(layout, kind)
    yield moves.TAKEN + "done:\n    ret;\n}\n"


def divided(layout: moves.Laid, kind: str) -> Iterator[str]:
    """Divide by the sums of rows, on the way to the queries from %start on."""
    yield from of_neighbours("l", "add.f32")
    yield from (f"    rcp.rn.f32 %l{row}, %l{row};\n" for row in (0, 1))
    yield "    mov.b64 %wide, result;\n    cvta.param.u64 %map3, %wide;\n"
    yield from moves.handed_over(layout, kind)
