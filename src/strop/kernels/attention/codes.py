"""Compute attention whose weights and values are e4m3 codes, in PTX: by products at twice the rate
of halves, and without exponentials, whose unit has an eighth of the others' rate.

As ``wgmma``, with a group's next scores computed while it weighs the values of this block. What
differs:

- Scores are exact. Codes of queries and keys make more of an error than all the rest, and the more,
  the larger scores are: an error of a score is one of the logarithm of a weight.
- Results of a block are multiplied by the scale of its values, and added to the others in fp32, as
  Hopper's tensor cores keep some 14 bits of a sum of products of codes
  (https://arxiv.org/abs/2412.19437, section 3.3.2).
- The byte of an e4m3 number is its logarithm, but for chords between powers of two: as Schraudolph
  computes exponentials (https://doi.org/10.1162/089976699300016467), a weight's code is eight times
  the logarithm of the weight, rounded to a whole number. A chord is up to 6 % above the power, 3 %
  to either side once a row is divided by its sum; to round to e4m3 is up to 6 % alone. The
  conversion to half precision rounds: the least subnormal halves are whole numbers, and the low
  byte of NaN is NaN.
- A block's greatest weight has the code 126 (448). Weights below its 2^-15 are zeros.
- A sum of a row is that of its rounded weights: a column of ones, behind those of the values.
- Codes of values lie with their keys along lines, as products of codes want them, and keys are in
  an order (``key_at``) in which a thread's scores lie as the next product's operand.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from strop.ir.source import KernelSource
from strop.kernels.attention import moves
from strop.kernels.attention.wgmma import (
    WgmmaLayout,
    begin,
    begin_scores,
    fetch,
    grid_of,
    keys_read,
    masked,
    of_neighbours,
    of_rows,
    ready,
    row_of,
    wait_for,
)
from strop.kernels.attention.wgmma_tiles import WgmmaTile
from strop.kernels.ptx import (
    CODES_DEPTH,
    HALF_HIGH,
    HIGH,
    KINDS,
    LINE,
    LINE_BYTES,
    UNIT,
    advance,
    f32,
    listed,
    product_of_codes,
    release,
    wait,
)

NAME = "code_attention"
MOST_HEAD, HEADS = 128, 8  # the largest head, and what heads are multiples of
KEYS = (64, 128)  # of a block: lines of values have as many bytes
ONES = 8  # more columns of values, of which the first is ones
TOP = 126  # the code of the greatest weight
STEPS = 8  # of codes, between two powers of two
# Registers of a thread that weighs, by the number of groups, where a program has a processor for
# itself.
WEIGHING = {2: 240, 3: 160, 4: 112}
UNIT_OF_CODES = 2.0**-24  # the least subnormal half


def key_at(place: int) -> int:
    """Return the key whose codes of values stand at a place, of each sixteen. A thread has two
    neighbours of each eight scores, and wants four neighbours of each sixteen codes."""
    return place // 2 % 2 * 8 + place // 4 * 2 + place % 2


@dataclass(frozen=True, slots=True)
class CodeLayout(WgmmaLayout):
    """Lay out queries, keys, codes of values, barriers. Results are where a warp's queries were."""

    @property
    def rows(self) -> int:
        """Return the rows of values, which are columns of the result, and of the ones."""
        return self.columns + ONES

    @property
    def of_values(self) -> int:
        """Return the bytes of the values of a step, where lines of the next one may begin."""
        return -(-self.rows * self.tile.keys // 1024) * 1024

    @property
    def queries_full(self) -> int:
        return self.values_at + self.tile.stages * self.of_values

    @property
    def hands_over(self) -> bool:
        """Tell whether warps that fetch leave registers to those that weigh."""
        return self.tile.programs == 1 and self.tile.groups in WEIGHING

    @property
    def num_warps(self) -> int:
        return 4 * self.tile.groups + (4 if self.hands_over else 1)


def code_attention(head: int, scale: float, tile: WgmmaTile, dtype: torch.dtype) -> KernelSource:
    """out[b, h, i] = sum_j softmax_j(scale * q[b, h, i] . k[b, h, j]) v[b, h, j], scale > 0, of
    values that codes stand for.

    Params: q and k, (B, H, S, D) of ``dtype``; bytes of v, (B, H, D + 8, keys), whose keys are
    padded to whole blocks of ``tile.keys``, in the order of ``key_at``, with zeros, and whose row D
    is ones; the result, dense as (B, S, H, D); scales of v in fp32, (B, H, blocks). D: a multiple
    of 8. Strides, in bytes, are multiples of 16. Scalars: queries, keys, H, B * H, and those of the
    shares, if there are. NaN or +inf in a row of scores gives NaN, and so does -inf alone in the
    last block.
    """
    assert tile.keys in KEYS
    assert tile.stages > 1
    layout, kind = CodeLayout(head, tile), KINDS[dtype]
    factor = f32(UNIT_OF_CODES * STEPS * scale * math.log2(math.e))
    parts = (
        begin(layout, NAME, _registers(layout), (_SCALES,)),
        fetch(layout, _values(layout)),
        _weigh(layout, factor, kind),
        _store(layout, kind),
    )
    text = "".join(piece for part in parts for piece in part)
    boxes = (
        *((1, 1, rows, LINE) for rows in (layout.queries, tile.keys)),
        (1, 1, layout.rows, tile.keys),
        moves.RESULT,
        (),
    )
    return KernelSource(
        NAME,
        "ptx",
        text,
        (dtype, dtype, torch.uint8, dtype, torch.float32),
        (1,) * (7 if tile.is_shared else 4),
        grid_of(layout),
        constants=(("SHARED", layout.shared), ("EARLY", 1)),
        num_warps=layout.num_warps,
        boxes=boxes,
    )


_SCALES = "of_values"


def _registers(layout: CodeLayout) -> str:
    return f"""\
    .reg .pred %p, %any, %is_first, %yes, %no;
    .reg .b32 %queries, %keys, %heads, %thread, %warp, %lane, %group, %start, %batch, %h, %steps;
    .reg .b32 %active, %readers;
    .reg .b32 %base, %bar, %bar_k, %bar_v, %to, %column, %row, %at, %stage_v, %phase_v, %stage_k;
    .reg .b32 %phase_k, %read, %step, %left, %low, %low_a, %low_b, %low_q, %low_k, %low_v;
    .reg .b32 %high, %high_v, %x<4>, %w<{layout.tile.keys // 8}>, %y<{{weights}}>;
    .reg .b64 %map<4>, %a, %b, %wide, %scales;
    .reg .f32 %s<{{scores}}>, %r<{layout.rows // 2}>, %o<{{results}}>, %m<2>, %l<2>, %c<2>, %n<2>;
    .reg .f32 %e<2>, %t<4>, %f<2>, %d<2>, %scale, %next_scale, %far_scale;
"""


def _values(layout: CodeLayout) -> str:
    """Fetch codes of a block's values."""
    return f"""\
    mad.lo.u32 %x1, %stage_k, {layout.of_values}, %base;
    add.u32 %x1, %x1, {layout.values_at};
    mbarrier.arrive.expect_tx.shared::cta.b64 _, [%bar_v], {layout.rows * layout.tile.keys};
    mov.u32 %column, 0;
    cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes \
[%x1], [%map2, {{%row, %column, %h, %batch}}], [%bar_v];
"""


def _results(layout: CodeLayout) -> Iterator[str]:
    """Multiply weights and the values of stage %stage_v, and the ones."""
    yield f"    mad.lo.u32 %low, %stage_v, {layout.of_values // UNIT}, %low_v;\n"
    for n in range(layout.tile.keys // CODES_DEPTH):
        yield f"    add.u32 %low_b, %low, {n * CODES_DEPTH // UNIT};\n"
        yield "    mov.b64 %b, {%low_b, %high_v};\n"
        sums, weights = listed("r", layout.rows // 2), listed("w", 4, 4 * n)
        yield product_of_codes(layout.rows, sums, "%yes" if n else "%no", weights)
    yield "    wgmma.commit_group.sync.aligned;\n"


def _weigh(layout: CodeLayout, factor: str, kind: str) -> Iterator[str]:
    """The last block, which may have fewer keys; a loop over the others; the last results."""
    keys = layout.tile.keys
    yield from ready(layout, WEIGHING.get(layout.tile.groups, 0), 1)
    yield _scales(layout)
    yield wait("queries_are_there", "%bar", "0")
    yield wait_for("last_keys_are_there", layout.keys_full, "%stage_k", "0")
    yield "    wgmma.fence.sync.aligned;\n"
    yield from begin_scores(layout, kind)
    yield _scale_of_block("%scale") + _scale_of_block("%next_scale")
    yield "    wgmma.wait_group.sync.aligned 0;\n"
    yield keys_read(layout)
    yield from masked(keys)
    yield from _maxima(keys, factor)
    yield from (f"    mov.f32 %m{row}, %c{row};\n" for row in (0, 1))
    yield from _logarithms(keys, factor)
    yield from _weights(keys)
    yield "    setp.ne.u32 %any, 0, 0;\n"
    yield wait_for("last_values_are_there", layout.values_full, "%stage_v", "0")
    yield from _loop(layout, factor, kind)
    yield "last:\n    wgmma.fence.sync.aligned;\n"
    yield from _results(layout)
    yield "    wgmma.wait_group.sync.aligned 0;\n"
    yield from _added(layout, "end")


def _scales(layout: CodeLayout) -> str:
    """Find the scales of values. %left: blocks whose scales, at %scales, have not been read."""
    return f"""\
    mov.u32 %high_v, {HIGH if layout.tile.keys == LINE_BYTES else HALF_HIGH};
    mov.u32 %left, %steps;
    mad.lo.u32 %x0, %batch, %heads, %h;
    mul.lo.u32 %x0, %x0, %steps;
    ld.param.u64 %scales, [{_SCALES}];
    mul.wide.u32 %wide, %x0, 4;
    add.u64 %scales, %scales, %wide;
    mov.f32 %l0, {f32(0)};
    mov.f32 %l1, {f32(0)};
"""


def _scale_of_block(into: str) -> str:
    """Read the scale of the next block, while others are multiplied; behind the first block, its
    own again, which nothing reads."""
    return f"""\
    max.u32 %left, %left, 1;
    sub.u32 %left, %left, 1;
    mul.wide.u32 %wide, %left, 4;
    add.u64 %wide, %scales, %wide;
    ld.global.f32 {into}, [%wide];
"""


def _loop(layout: CodeLayout, factor: str, kind: str) -> Iterator[str]:
    """The next block's scores and this one's results are begun together. The assembler moves a wait
    for results in front of what follows the scores, unless a jump stands between: a wait for
    values."""
    keys = layout.tile.keys
    yield "    setp.ge.u32 %p, %step, %steps;\n    @%p bra last;\nnext:\n"
    yield wait_for("keys_are_there", layout.keys_full, "%stage_k", "%phase_k")
    yield "    wgmma.fence.sync.aligned;\n"
    yield from begin_scores(layout, kind)
    yield from _results(layout)
    yield _scale_of_block("%far_scale")
    yield "    wgmma.wait_group.sync.aligned 1;\n"
    yield keys_read(layout)
    yield from _maxima(keys, factor)
    for row in (0, 1):
        yield f"""\
    max.NaN.f32 %c{row}, %c{row}, %m{row};
    sub.f32 %d{row}, %m{row}, %c{row};
    mov.f32 %m{row}, %c{row};
"""
    yield from _logarithms(keys, factor)
    yield "    mov.u32 %read, %stage_v;\n" + advance(layout.tile.stages, "%stage_v", "%phase_v")
    yield wait_for("values_are_there", layout.values_full, "%stage_v", "%phase_v")
    yield "    wgmma.wait_group.sync.aligned 0;\n"
    yield release(layout.values_full, "%read", "%x0")
    yield from _added(layout, "level")
    yield from _weights(keys)
    yield from _grown()
    yield "    mov.f32 %scale, %next_scale;\n    mov.f32 %next_scale, %far_scale;\n"
    yield "    add.u32 %step, %step, 1;\n    setp.lt.u32 %p, %step, %steps;\n    @%p bra next;\n"


def _maxima(keys: int, factor: str) -> Iterator[str]:
    """Compute in %c the maxima of rows, as logarithms in units of codes."""
    yield from of_rows(keys, "max.NaN.f32", 4)
    yield from of_neighbours("c", "max.NaN.f32")
    yield from (f"    mul.f32 %c{row}, %c{row}, {factor};\n" for row in (0, 1))


def _logarithms(keys: int, factor: str) -> Iterator[str]:
    """Make pairs of halves %y of all scores, whose low bytes are the codes of weights: 0 where the
    logarithm is too low for one."""
    yield from (f"    sub.f32 %n{row}, {f32(TOP * UNIT_OF_CODES)}, %m{row};\n" for row in (0, 1))
    for n in range(keys // 4):
        for own in (2 * n, 2 * n + 1):
            yield f"    fma.rn.f32 %s{own}, %s{own}, {factor}, %n{row_of(own)};\n"
        yield f"    cvt.rn.relu.f16x2.f32 %y{n}, %s{2 * n + 1}, %s{2 * n};\n"


def _weights(keys: int) -> Iterator[str]:
    """Put four codes of a row together: two of eight keys, and two of the next eight."""
    for n in range(keys // 8):
        step, half, row = n // 4, n // 2 % 2, n % 2
        first = 8 * step + 4 * half + row
        yield f"    prmt.b32 %w{n}, %y{first}, %y{first + 2}, 0x6420;\n"


def _grown() -> Iterator[str]:
    """Compute %e, by which what was weighed before is to be multiplied, and whether it is less than
    1 in any row of this warp."""
    for row in (0, 1):
        yield f"    mul.f32 %d{row}, %d{row}, {f32(1 / (STEPS * UNIT_OF_CODES))};\n"
        yield f"    ex2.approx.ftz.f32 %e{row}, %d{row};\n"
    yield f"""\
    setp.lt.f32 %p, %d0, {f32(0)};
    setp.lt.or.f32 %p, %d1, {f32(0)}, %p;
    vote.sync.any.pred %any, %p, -1;
"""


def _added(layout: CodeLayout, label: str) -> Iterator[str]:
    """Add what a block has given to the results, which are scaled first where a row's maximum has
    grown. Sums of weights are columns behind the values."""
    sums = layout.columns // 2
    yield f"    @!%any bra {label};\n"
    yield from (f"    mul.f32 %l{row}, %l{row}, %e{row};\n" for row in (0, 1))
    yield from (f"    mul.f32 %o{n}, %o{n}, %e{row_of(n)};\n" for n in range(sums))
    yield f"{label}:\n"
    yield from (f"    add.f32 %l{row}, %l{row}, %r{sums + 2 * row};\n" for row in (0, 1))
    yield from (f"    fma.rn.f32 %o{n}, %r{n}, %scale, %o{n};\n" for n in range(sums))


def _store(layout: CodeLayout, kind: str) -> Iterator[str]:
    """Divide by the sums, which one of four threads has."""
    yield "    and.b32 %x0, %lane, 28;\n"
    for row in (0, 1):
        yield f"    shfl.sync.idx.b32 %l{row}, %l{row}, %x0, 31, -1;\n"
        yield f"    rcp.rn.f32 %l{row}, %l{row};\n"
    yield "    mov.b64 %wide, result;\n    cvta.param.u64 %map3, %wide;\n"
    yield from moves.handed_over(layout, kind)
    yield moves.TAKEN + "done:\n    ret;\n}\n"
