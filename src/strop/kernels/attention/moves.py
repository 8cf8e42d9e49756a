"""Move what attention in PTX moves: queries, keys and values into shared memory, and results out of
it.

The tensor memory accelerator brings and takes boxes, whose lines of 128 bytes it mixes. Results
leave by it, too: stores of the registers that they are in would be of 16 bytes of a row each, of
which attention to a prompt's words took half its time.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from strop.kernels.ptx import LINE, LINE_BYTES, ROWS, UNIT

RESULT = (1, 1, 16, LINE)  # the box that a warp hands over


class Tiled(Protocol):
    """``groups`` of 64 queries, ``keys`` of a step."""

    @property
    def groups(self) -> int: ...
    @property
    def keys(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Laid(ABC):
    """Say where things lie in shared memory, in bytes. A head is cut into columns of 64, whose
    blocks follow each other."""

    head: int
    tile: Tiled

    @property
    def parts(self) -> int:
        return -(-self.head // LINE)

    @property
    def queries(self) -> int:
        return ROWS * self.tile.groups

    @property
    def block(self) -> int:
        """Keys, or values, of a step."""
        return self.parts * self.tile.keys * LINE_BYTES

    @property
    def columns(self) -> int:
        """Return the columns of the result, as products have them."""
        return -(-self.head // 8) * 8

    @property
    @abstractmethod
    def results_at(self) -> int:
        """Return where results are on their way out."""


def boxed(layout: Laid, tensor: int, to: str, rows: int, at: str, barrier: str) -> str:
    """All columns of a block, by the accelerator; the barrier counts the bytes that come."""
    text = (
        f"    mbarrier.arrive.expect_tx.shared::cta.b64 _, [{barrier}], "
        f"{layout.parts * rows * LINE_BYTES};\n"
    )
    for n in range(layout.parts):
        text += f"""\
    mov.u32 %column, {n * LINE};
    add.u32 %to, {to}, {n * rows * LINE_BYTES};
    cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes \
[%to], [%map{tensor}, {{%column, {at}, %h, %batch}}], [{barrier}];
"""
    return text


def handed_over(layout: Laid, kind: str) -> Iterator[str]:
    """Results %o by the sums of rows %l: each warp writes 16 rows to shared memory, mixed as the
    accelerator reads them, which takes them to the queries from %start on."""
    yield f"""\
    and.b32 %x0, %warp, 3;
    shl.b32 %x0, %x0, 4;
    mad.lo.u32 %x0, %group, {ROWS}, %x0;
    add.u32 %row, %start, %x0;
    mad.lo.u32 %to, %x0, {LINE_BYTES}, %base;
    shr.u32 %x1, %lane, 2;
    mad.lo.u32 %at, %x1, {LINE_BYTES}, %to;
    and.b32 %x2, %lane, 3;
    mad.lo.u32 %at, %x2, 4, %at;
    shl.b32 %x1, %x1, 4;
"""
    apart = layout.queries * LINE_BYTES
    for n in range(layout.columns // 8):
        part, unit = divmod(n, LINE // 8)
        yield f"    xor.b32 %x2, %x1, {unit * UNIT};\n    add.u32 %x2, %x2, %at;\n"
        for half in (0, 1):
            first, at = 4 * n + 2 * half, layout.results_at + part * apart + half * 8 * LINE_BYTES
            yield f"""\
    mul.f32 %f0, %o{first}, %l{half};
    mul.f32 %f1, %o{first + 1}, %l{half};
    cvt.rn.{kind}x2.f32 %x3, %f1, %f0;
    st.shared.b32 [%x2+{at}], %x3;
"""
    yield "    fence.proxy.async.shared::cta;\n    bar.warp.sync -1;\n    @!%is_first bra handed;\n"
    for part in range(layout.parts):
        yield f"""\
    mov.u32 %column, {part * LINE};
    add.u32 %x2, %to, {layout.results_at + part * apart};
    cp.async.bulk.tensor.4d.global.shared::cta.bulk_group \
[%map3, {{%column, %row, %h, %batch}}], [%x2];
"""
    yield "    cp.async.bulk.commit_group;\nhanded:\n"


# Read, before its memory is gone; that it is written is told by the end of the kernel.
TAKEN = "    @%is_first cp.async.bulk.wait_group.read 0;\n"
READ = "    @%is_first cp.async.bulk.wait_group.read 0;\n    bar.warp.sync -1;\n"
