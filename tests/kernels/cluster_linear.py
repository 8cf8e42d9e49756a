"""A linear in PTX whose programs share what they read, in clusters: what the machine for PTX must
know of these.

Each program of a cluster fetches a share of the rows that its row of programs needs, and of the
columns, and the tensor memory accelerator hands it to all of them. Nothing that Strop launches does
so: on an H100 it was no faster than programs that fetch alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from strop.ir.dims import symbol
from strop.ir.source import KernelSource

LINE, LINE_BYTES, DEPTH = 64, 128, 16


@dataclass(frozen=True, slots=True)
class Tile:
    """``groups`` of 64 rows, some columns, and ``stages`` on the way. A cluster has so many
    programs ``down`` its rows and ``across`` its columns."""

    groups: int
    cols: int
    stages: int
    down: int = 1
    across: int = 1

    @property
    def rows(self) -> int:
        return 64 * self.groups

    @property
    def stage(self) -> int:
        return (self.rows + self.cols) * LINE_BYTES

    @property
    def row_bytes(self) -> int:
        """Of results on their way out: so much more that eight rows meet no bank twice."""
        return 2 * self.cols + 16

    @property
    def shared(self) -> int:
        return self.stages * (self.stage + 16)


_BEGIN = """\
.version 8.3
.target sm_90a
.address_size 64
.extern .shared .align 1024 .b8 memory[];
.visible .entry cluster_linear(
{params}
)
.reqntid {threads}
.minnctapersm 1
.explicitcluster
.reqnctapercluster {cluster}
{{
    .reg .pred %p, %yes, %no, %is_releasing;
    .reg .b32 %thread, %warp, %lane, %group, %rank, %down, %across, %row, %col, %steps, %step;
    .reg .b32 %base, %bar, %stage, %phase, %at, %k, %to, %from, %low, %low_a, %low_b, %high, %rows;
    .reg .b32 %cols, %peer, %last, %x<8>;
    .reg .b16 %mask_a, %mask_b;
    .reg .b64 %map<2>, %a, %b, %out, %wide;
    .reg .f32 %o<{results}>;

    griddepcontrol.launch_dependents;
    mov.u32 %thread, %tid.x;
    and.b32 %lane, %thread, 31;
    shr.u32 %warp, %thread, 5;
    shfl.sync.idx.b32 %warp, %warp, 0, 31, -1;
    mov.u32 %base, memory;
    ld.param.u32 %rows, [s0];
    ld.param.u32 %cols, [s1];
    ld.param.u32 %steps, [s2];
    mov.u32 %rank, %cluster_ctarank;
    rem.u32 %down, %rank, {down};
    div.u32 %across, %rank, {down};
    ld.param.u32 %x1, [s3];
    mov.u32 %x0, %ctaid.x;
    div.u32 %x0, %x0, {cluster};
    rem.u32 %x2, %x0, %x1;
    div.u32 %x3, %x0, %x1;
    mad.lo.u32 %row, %x2, {down}, %down;
    mad.lo.u32 %col, %x3, {wide}, %across;
    mul.lo.u32 %row, %row, {tile_rows};
    mul.lo.u32 %col, %col, {tile_cols};
    setp.ne.u32 %p, %thread, 0;
    @%p bra begun;
{barriers}    fence.mbarrier_init.release.cluster;
begun:
{together}    setp.lt.u32 %p, %warp, {fetcher};
    @%p bra multiply;
    setp.ne.u32 %p, %lane, 0;
    @%p bra done;
    mov.b64 %wide, x;
    cvta.param.u64 %map0, %wide;
    mov.b64 %wide, w;
    cvta.param.u64 %map1, %wide;
    mov.u32 %x0, {mask_a};
    shl.b32 %x0, %x0, %down;
    cvt.u16.u32 %mask_a, %x0;
    mul.lo.u32 %x1, %across, {down};
    mov.u32 %x0, {mask_b};
    shl.b32 %x0, %x0, %x1;
    cvt.u16.u32 %mask_b, %x0;
    mad.lo.u32 %row, %across, {share_a}, %row;
    mad.lo.u32 %col, %down, {share_b}, %col;
    // what does not depend on the kernel before this one: weights for all stages
    min.u32 %x6, %steps, {stages};
    mov.u32 %stage, 0;
    mov.u32 %k, 0;
early:
    mad.lo.u32 %bar, %stage, 16, %base;
    add.u32 %bar, %bar, {full};
    mbarrier.arrive.expect_tx.shared::cta.b64 _, [%bar], {bytes};
    mad.lo.u32 %at, %stage, {bytes}, %base;
    mad.lo.u32 %to, %down, {share_b_bytes}, %at;
    add.u32 %to, %to, {b_at};
    cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes{multi_b} \
[%to], [%map1, {{%k, %col}}], [%bar]{with_b};
    add.u32 %k, %k, {line};
    add.u32 %stage, %stage, 1;
    setp.lt.u32 %p, %stage, %x6;
    @%p bra early;
    griddepcontrol.wait;
    mov.u32 %stage, 0;
    mov.u32 %k, 0;
follow:
    mad.lo.u32 %bar, %stage, 16, %base;
    add.u32 %bar, %bar, {full};
    mad.lo.u32 %at, %stage, {bytes}, %base;
    mad.lo.u32 %to, %across, {share_a_bytes}, %at;
    cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes{multi_a} \
[%to], [%map0, {{%k, %row}}], [%bar]{with_a};
    add.u32 %k, %k, {line};
    add.u32 %stage, %stage, 1;
    setp.lt.u32 %p, %stage, %x6;
    @%p bra follow;
    mov.u32 %step, %x6;
    mov.u32 %stage, 0;
    mov.u32 %phase, 0;
    setp.ge.u32 %p, %step, %steps;
    @%p bra done;
fetch:
    mad.lo.u32 %bar, %stage, 16, %base;
    add.u32 %bar, %bar, {full};
free:
    mbarrier.try_wait.parity.shared::cta.b64 %p, [%bar+8], %phase;
    @!%p bra free;
    mbarrier.arrive.expect_tx.shared::cta.b64 _, [%bar], {bytes};
    mad.lo.u32 %at, %stage, {bytes}, %base;
    mad.lo.u32 %to, %across, {share_a_bytes}, %at;
    cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes{multi_a} \
[%to], [%map0, {{%k, %row}}], [%bar]{with_a};
    mad.lo.u32 %to, %down, {share_b_bytes}, %at;
    add.u32 %to, %to, {b_at};
    cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes{multi_b} \
[%to], [%map1, {{%k, %col}}], [%bar]{with_b};
    add.u32 %k, %k, {line};
    add.u32 %stage, %stage, 1;
    setp.eq.u32 %p, %stage, {stages};
    @%p mov.u32 %stage, 0;
    @%p xor.b32 %phase, %phase, 1;
    add.u32 %step, %step, 1;
    setp.lt.u32 %p, %step, %steps;
    @%p bra fetch;
    bra done;
multiply:
    griddepcontrol.wait;
    setp.eq.u32 %yes, 0, 0;
    setp.ne.u32 %no, 0, 0;
    shr.u32 %group, %warp, 2;
    mov.u32 %high, {high};
    setp.lt.u32 %is_releasing, %lane, {readers};
    // lanes: programs of this column first, then the others of this row
    mul.lo.u32 %x0, %across, {down};
    add.u32 %peer, %x0, %lane;
    setp.lt.u32 %p, %lane, {down};
    @%p bra named;
    sub.u32 %x1, %lane, {down};
    setp.ge.u32 %p, %x1, %across;
    @%p add.u32 %x1, %x1, 1;
    mad.lo.u32 %peer, %x1, {down}, %down;
named:
    mov.u32 %step, 0;
    mov.u32 %stage, 0;
    mov.u32 %phase, 0;
    mov.u32 %last, 0;
{zeros}next:
    mad.lo.u32 %bar, %stage, 16, %base;
    add.u32 %bar, %bar, {full};
come:
    mbarrier.try_wait.parity.shared::cta.b64 %p, [%bar], %phase;
    @!%p bra come;
    mad.lo.u32 %at, %stage, {bytes}, %base;
    shr.u32 %low, %at, 4;
    or.b32 %low, %low, 0x10000;
    mad.lo.u32 %from, %group, {group_lines}, %low;
    wgmma.fence.sync.aligned;
{products}    wgmma.commit_group.sync.aligned;
    wgmma.wait_group.sync.aligned 1;
    setp.eq.u32 %p, %step, 0;
    @%p bra kept;
    mad.lo.u32 %x0, %last, 16, %base;
    add.u32 %x0, %x0, {full} + 8;
    mapa.shared::cluster.u32 %x1, %x0, %peer;
    @%is_releasing mbarrier.arrive.shared::cluster.b64 _, [%x1];
kept:
    mov.u32 %last, %stage;
    add.u32 %stage, %stage, 1;
    setp.eq.u32 %p, %stage, {stages};
    @%p mov.u32 %stage, 0;
    @%p xor.b32 %phase, %phase, 1;
    add.u32 %step, %step, 1;
    setp.lt.u32 %p, %step, %steps;
    @%p bra next;
    wgmma.wait_group.sync.aligned 0;
    ld.param.u64 %out, [result];
    bar.sync 1, {weighing};
    // sixteen rows of this warp by way of shared memory, so that they are written in whole lines
    mad.lo.u32 %to, %warp, {warp_bytes}, %base;
    shr.u32 %x0, %lane, 2;
    mad.lo.u32 %at, %x0, {row_bytes}, %to;
    and.b32 %x1, %lane, 3;
    mad.lo.u32 %at, %x1, 4, %at;
"""


_TOGETHER = """\
    barrier.cluster.arrive.relaxed.aligned;
    barrier.cluster.wait.acquire.aligned;
"""


def _params() -> str:
    found = []
    for name in ("x", "w"):
        found.append(f".param .align 64 .b8 {name}[128]")
        found += [f".param .u32 {name}_size{n}" for n in range(2)]
        found += [f".param .u64 {name}_stride{n}" for n in range(2)]
    found += [".param .u64 result", *(f".param .u32 s{n}" for n in range(5))]
    return ",\n".join((*found, ".param .u64 unused0", ".param .u64 unused1"))


def _stored(tile: Tile) -> Iterator[str]:
    chunks = tile.cols // 8  # of 16 bytes
    for n in range(0, tile.cols // 2, 2):
        place = n // 4 * 16 + n // 2 % 2 * 8 * tile.row_bytes
        yield f"    cvt.rn.f16x2.f32 %x4, %o{n + 1}, %o{n};\n"
        yield f"    st.shared.b32 [%at+{place}], %x4;\n"
    yield "    bar.warp.sync -1;\n    mad.lo.u32 %row, %warp, 16, %row;\n"
    for n in range(chunks // 2):
        yield f"""\
    add.u32 %x0, %lane, {32 * n};
    div.u32 %x1, %x0, {chunks};
    rem.u32 %x2, %x0, {chunks};
    mad.lo.u32 %from, %x1, {tile.row_bytes}, %to;
    mad.lo.u32 %from, %x2, 16, %from;
    ld.shared.v4.b32 {{%x4, %x5, %x6, %x7}}, [%from];
    add.u32 %x1, %x1, %row;
    mad.lo.u32 %x2, %x2, 8, %col;
    setp.lt.u32 %p, %x1, %rows;
    setp.lt.and.u32 %p, %x2, %cols, %p;
    mad.lo.u32 %x3, %x1, %cols, %x2;
    mul.wide.u32 %wide, %x3, 2;
    add.u64 %wide, %wide, %out;
    @%p st.global.v4.b32 [%wide], {{%x4, %x5, %x6, %x7}};
"""


def _products(tile: Tile) -> Iterator[str]:
    results = "{" + ", ".join(f"%o{n}" for n in range(tile.cols // 2)) + "}"
    for n in range(LINE // DEPTH):
        yield f"    add.u32 %low_a, %from, {2 * n};\n"
        yield f"    add.u32 %low_b, %low, {tile.rows * LINE_BYTES // 16 + 2 * n};\n"
        yield "    mov.b64 %a, {%low_a, %high};\n    mov.b64 %b, {%low_b, %high};\n"
        op = f"wgmma.mma_async.sync.aligned.m64n{tile.cols}k16.f32.f16.f16"
        yield f"    {op} {results}, %a, %b, %yes, 1, 1, 0, 0;\n"


def _text(tile: Tile) -> str:
    cluster, full = tile.down * tile.across, tile.stages * tile.stage
    readers = tile.down + tile.across - 1
    share_a, share_b = tile.rows // tile.across, tile.cols // tile.down
    barriers = "".join(
        f"    mbarrier.init.shared::cta.b64 [%base+{full + 16 * n}], 1;\n"
        f"    mbarrier.init.shared::cta.b64 [%base+{full + 16 * n + 8}], "
        f"{4 * tile.groups * readers};\n"
        for n in range(tile.stages)
    )
    text = _BEGIN.format(
        params=_params(),
        threads=128 * tile.groups + 32,
        cluster=cluster,
        results=tile.cols // 2,
        down=tile.down,
        wide=tile.across,
        tile_rows=tile.rows,
        tile_cols=tile.cols,
        barriers=barriers,
        fetcher=4 * tile.groups,
        full=full,
        bytes=tile.stage,
        mask_a=sum(1 << n * tile.down for n in range(tile.across)),
        mask_b=(1 << tile.down) - 1,
        weighing=128 * tile.groups,
        warp_bytes=16 * tile.row_bytes,
        row_bytes=tile.row_bytes,
        together=_TOGETHER if cluster > 1 else "    bar.sync 0;\n",
        share_a=share_a,
        share_b=share_b,
        share_a_bytes=share_a * LINE_BYTES,
        share_b_bytes=share_b * LINE_BYTES,
        b_at=tile.rows * LINE_BYTES,
        line=LINE,
        multi_a=".multicast::cluster" if tile.across > 1 else "",
        with_a=", %mask_a" if tile.across > 1 else "",
        multi_b=".multicast::cluster" if tile.down > 1 else "",
        with_b=", %mask_b" if tile.down > 1 else "",
        stages=tile.stages,
        high=64 | 1 << 30,
        readers=readers,
        group_lines=64 * LINE_BYTES // 16,
        zeros="".join(f"    mov.f32 %o{n}, 0f00000000;\n" for n in range(tile.cols // 2)),
        products="".join(_products(tile)),
    )
    text += "".join(_stored(tile)) + "done:\n"
    text += (_TOGETHER.replace(".aligned", "") if cluster > 1 else "") + "    ret;\n}\n"
    return text


def cluster_linear(tile: Tile) -> KernelSource:
    """x (M, K) w (N, K)^T in fp16.

    Params: x, w and the result (M, N), dense. Scalars: M, N, steps of 64 channels, clusters along
    M, and clusters along N times the programs of one.
    """
    half = torch.float16
    return KernelSource(
        "cluster_linear",
        "ptx",
        _text(tile),
        (half,) * 3,
        (1,) * 5,
        (symbol("s3") * symbol("s4"),),
        constants=(("SHARED", tile.shared), ("EARLY", 1)),
        num_warps=4 * tile.groups + 1,
        boxes=((tile.rows // tile.across, LINE), (tile.cols // tile.down, LINE), ()),
    )
