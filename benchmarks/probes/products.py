"""Products in PTX whose sums the programs of a cluster share: 3x3 convolutions and linears.

An implicit GEMM (https://arxiv.org/abs/1410.0759): rows are pixels, which the tensor memory
accelerator brings as a box for each place of the window; a linear is a window of one place over a
picture of one line. One warp fetches, groups of four warps multiply 64 rows each. Where there are
fewer tiles than processors the sum is cut into parts, one for each program of a cluster: each
leaves its part, in fp32, in its own shared memory, and adds its share of the results from the parts
of all, in their order. Where there are more, a program goes on to the next tile, whose operands
come while the results of this one leave. Weights are fetched before the wait for the kernel before.

Instructions are those of the ISA's manual
(https://docs.nvidia.com/cuda/parallel-thread-execution/), ``wgmma`` with its layouts among them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from strop.ir.dims import symbol
from strop.ir.source import KernelSource
from strop.kernels.group_attention import f32

ROWS = 64  # of a group: those of a product
LINE, LINE_BYTES = 64, 128  # of shared memory, which is mixed in units of 128 bytes
DEPTH = 16  # of a product
KINDS = {torch.float16: "f16", torch.bfloat16: "bf16"}
MOST_SHARED = 227 * 1024  # of a program
SMS = 132


@dataclass(frozen=True, slots=True)
class Tile:
    """``groups`` of 64 rows, ``cols`` of the product, ``stages`` of 64 channels on the way. The sum
    in ``split`` parts; or programs that ``keep_on``, one a processor."""

    groups: int
    cols: int
    stages: int
    split: int = 1
    keeps_on: bool = False


@dataclass(frozen=True, slots=True)
class Product:
    """``size`` of the window, 1 or odd; ``box`` of rows: pictures, lines and columns of pixels.
    ``gated``: the result is value * gelu(gate), of two halves of the weights' rows, with biases.
    ``adds``: something is added that lies like the result."""

    tile: Tile
    size: int
    box: tuple[int, int, int]
    gated: bool = False
    adds: bool = False

    @property
    def rows(self) -> int:
        return ROWS * self.tile.groups

    @property
    def width(self) -> int:
        """Columns of the result."""
        return self.tile.cols // 2 if self.gated else self.tile.cols

    @property
    def threads(self) -> int:
        """That multiply."""
        return 2 * self.rows

    @property
    def stage(self) -> int:
        return (self.rows + self.tile.cols) * LINE_BYTES

    @property
    def barriers(self) -> int:
        """The first stage's, which tells that it is there; behind it the one that tells that it is
        free again; then those of the others."""
        return self.tile.stages * self.stage

    @property
    def half_row(self) -> int:
        """Bytes of a row of results on their way out: eight rows meet no bank twice."""
        return 2 * self.width + 16

    @property
    def part_row(self) -> int:
        """Bytes of a row of a part: four rows of 32 bytes meet no bank twice."""
        return 4 * self.tile.cols + (32 if self.tile.cols % 16 == 0 else 0)

    @property
    def results_at(self) -> int:
        """Where results are on their way out: where operands were, unless others come there."""
        return self.barriers + 16 * self.tile.stages if self.tile.keeps_on else 0

    @property
    def shared(self) -> int:
        staged = self.rows * (self.part_row if self.tile.split > 1 else self.half_row)
        return max(self.barriers + 16 * self.tile.stages, self.results_at + staged)


def source_of(of: Product, dtype: torch.dtype) -> KernelSource:
    """out[b, y, x, o] = sum of w[o, i, j, c] * in[b, y + i - r, x + j - r, c], r = size // 2.

    Params: the input (B, H, W, CI), weights (CO, size * size * CI), the result (B, H, W, CO), and
    what is added, or biases (CO,), or nothing; all dense, of addresses that are multiples of 16
    bytes. CI is a multiple of 64, of a single place 8; CO of 8, where it is gated twice ``width``.
    Sums are fp32. Scalars: tiles of columns, boxes right, down and of pictures, CI, tiles at work.
    """
    tile, kind = of.tile, KINDS[dtype]
    ends = _added(of, kind) if tile.split > 1 else _stored(of, kind)
    text = "".join((_begin(of), *_fetch(of), *_multiply(of, kind), *ends))
    weights = (of.width, LINE)  # twice, where there are gates
    return KernelSource(
        NAME, "ptx", text, (dtype,) * 4, (1,) * 6, (symbol("s5") * tile.split,),
        constants=(("SHARED", of.shared), ("EARLY", 1)), num_warps=4 * tile.groups + 1,
        boxes=((*of.box, LINE), weights, (), ()),
    )  # fmt: skip


NAME = "group_product"
_BEGIN = """\
.version 8.3
.target sm_90a
.address_size 64
.extern .shared .align 1024 .b8 memory[];
.visible .entry {name}(
{params}
)
.reqntid {all_threads}
.minnctapersm 1
{cluster}{{
    .reg .pred %p, %yes, %no, %is_first;
    .reg .b32 %thread, %warp, %lane, %group, %rank, %id, %total, %stride, %col, %left, %top;
    .reg .b32 %picture, %steps, %first, %step, %base, %bar, %stage, %phase, %at, %k, %channel, %x;
    .reg .b32 %y, %end, %to, %from, %low, %low_a, %low_b, %high, %last, %pictures, %lines;
    .reg .b32 %columns, %outs, %ins, %item, %across, %right, %down, %place, %n<8>;
    .reg .b32 %peer<{split}>;
    .reg .b64 %map<2>, %a, %b, %out, %other, %wide, %far;
    .reg .b16 %h<2>;
    .reg .f32 %o<{results}>, %f<4>, %g<4>, %t<3>;

    griddepcontrol.launch_dependents;
    mov.u32 %thread, %tid.x;
    and.b32 %lane, %thread, 31;
    shr.u32 %warp, %thread, 5;
    shfl.sync.idx.b32 %warp, %warp, 0, 31, -1;
    mov.u32 %base, memory;
    ld.param.u32 %pictures, [x_size0];
    ld.param.u32 %lines, [x_size1];
    ld.param.u32 %columns, [x_size2];
    ld.param.u32 %outs, [w_size0];
{halves}    ld.param.u32 %across, [s0];
    ld.param.u32 %right, [s1];
    ld.param.u32 %down, [s2];
    ld.param.u32 %n0, [s3];
    ld.param.u32 %ins, [s4];
    ld.param.u32 %stride, [s5];
    mul.lo.u32 %total, %across, %right;
    mul.lo.u32 %total, %total, %down;
    mul.lo.u32 %total, %total, %n0;
    mov.u32 %id, %ctaid.x;
    rem.u32 %rank, %id, {split};
    div.u32 %id, %id, {split};
    // steps of this part
    add.u32 %n0, %ins, {line} - 1;
    div.u32 %n0, %n0, {line};
    mul.lo.u32 %n0, %n0, {places};
    add.u32 %n1, %n0, {split} - 1;
    div.u32 %n1, %n1, {split};
    mul.lo.u32 %first, %rank, %n1;
    min.u32 %first, %first, %n0;
    sub.u32 %steps, %n0, %first;
    min.u32 %steps, %steps, %n1;
    setp.ne.u32 %p, %thread, 0;
    @%p bra begun;
{barriers}    fence.mbarrier_init.release.cluster;
begun:
    bar.sync 0;
"""


def _begin(of: Product) -> str:
    tile, params = of.tile, []
    for name, rank in (("x", 4), ("w", 2)):
        params.append(f".param .align 64 .b8 {name}[128]")
        params += [f".param .u32 {name}_size{n}" for n in range(rank)]
        params += [f".param .u64 {name}_stride{n}" for n in range(rank)]
    params += [".param .u64 result", ".param .u64 more", *(f".param .u32 s{n}" for n in range(6))]
    params += [".param .u64 unused0", ".param .u64 unused1"]
    cluster = f".explicitcluster\n.reqnctapercluster {tile.split}\n" if tile.split > 1 else ""
    counts = {of.barriers + 8 * n: (1, 4 * tile.groups)[n % 2] for n in range(2 * tile.stages)}
    return _BEGIN.format(
        name=NAME, params=",\n".join(params), all_threads=of.threads + 32, cluster=cluster,
        split=tile.split, results=tile.cols // 2, line=LINE, places=of.size**2,
        halves="    shr.u32 %outs, %outs, 1;\n" if of.gated else "",
        barriers="".join(f"    mbarrier.init.shared::cta.b64 [%base+{at}], {count};\n"
                         for at, count in counts.items()),
    )  # fmt: skip


def _coordinates(of: Product) -> str:
    """Of tile %id: those with the same pixels are neighbours."""
    count, height, width = of.box
    return f"""\
    rem.u32 %col, %id, %across;
    div.u32 %n0, %id, %across;
    mul.lo.u32 %col, %col, {of.width};
    rem.u32 %left, %n0, %right;
    div.u32 %n0, %n0, %right;
    mul.lo.u32 %left, %left, {width};
    rem.u32 %top, %n0, %down;
    div.u32 %n0, %n0, %down;
    mul.lo.u32 %top, %top, {height};
    mul.lo.u32 %picture, %n0, {count};
"""


_NEXT_TILE = "    add.u32 %id, %id, %stride;\n    setp.lt.u32 %p, %id, %total;\n"


def _first_place(of: Product) -> str:
    """Of step %first: places of the window in their order, all channels of one before the next."""
    around = of.size // 2
    return f"""\
    add.u32 %n1, %ins, {LINE} - 1;
    div.u32 %n1, %n1, {LINE};
    div.u32 %n0, %first, %n1;
    rem.u32 %channel, %first, %n1;
    mul.lo.u32 %channel, %channel, {LINE};
    rem.u32 %x, %n0, {of.size};
    div.u32 %y, %n0, {of.size};
    sub.u32 %left, %left, {around};
    add.u32 %end, %left, {of.size};
    add.u32 %x, %x, %left;
    add.u32 %y, %y, %top;
    sub.u32 %y, %y, {around};
    mul.lo.u32 %k, %first, {LINE};
"""


def _at_stage(of: Product) -> str:
    return f"""\
    mad.lo.u32 %at, %stage, {of.stage}, %base;
    mad.lo.u32 %bar, %stage, 16, %base;
    add.u32 %bar, %bar, {of.barriers};
"""


def _advance(of: Product) -> str:
    return f"""\
    add.u32 %stage, %stage, 1;
    setp.eq.u32 %p, %stage, {of.tile.stages};
    @%p mov.u32 %stage, 0;
    @%p xor.b32 %phase, %phase, 1;
"""


def _weights(of: Product) -> Iterator[str]:
    """Of step %k, into stage %at; those of gates behind those of values."""
    for n in range(2 if of.gated else 1):
        yield f"    add.u32 %to, %at, {(of.rows + n * of.width) * LINE_BYTES};\n"
        yield f"    mad.lo.u32 %n5, %outs, {n}, %col;\n"
        yield """\
    cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes \
[%to], [%map1, {%k, %n5}], [%bar];
"""
    yield f"    add.u32 %k, %k, {LINE};\n"


_PIXELS = f"""\
    cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes \
[%at], [%map0, {{%channel, %x, %y, %picture}}], [%bar];
    add.u32 %channel, %channel, {LINE};
    setp.ge.u32 %p, %channel, %ins;
    @%p mov.u32 %channel, 0;
    @%p add.u32 %x, %x, 1;
    setp.eq.and.u32 %p, %x, %end, %p;
    @%p mov.u32 %x, %left;
    @%p add.u32 %y, %y, 1;
"""


def _fetch(of: Product) -> Iterator[str]:
    """One thread. A stage that was never used is free: its barrier is behind phase 1."""
    expect = f"    mbarrier.arrive.expect_tx.shared::cta.b64 _, [%bar], {of.stage};\n"
    weights = "".join(_weights(of))
    yield f"""\
    setp.lt.u32 %p, %warp, {4 * of.tile.groups};
    @%p bra multiply;
    setp.ne.u32 %p, %lane, 0;
    @%p bra done;
    mov.b64 %wide, x;
    cvta.param.u64 %map0, %wide;
    mov.b64 %wide, w;
    cvta.param.u64 %map1, %wide;
"""
    yield _coordinates(of) + _first_place(of)
    # what does not depend on the kernel before this one: weights for all stages
    yield f"    min.u32 %n6, %steps, {of.tile.stages};\n    mov.u32 %stage, 0;\nearly:\n"
    yield _at_stage(of) + expect + weights
    yield "    add.u32 %stage, %stage, 1;\n    setp.lt.u32 %p, %stage, %n6;\n    @%p bra early;\n"
    yield "    griddepcontrol.wait;\n    mov.u32 %step, 0;\n    mov.u32 %stage, 0;\n"
    yield "    mov.u32 %phase, 1;\nfollow:\n" + _at_stage(of) + _PIXELS + _advance(of)
    yield "    add.u32 %step, %step, 1;\n    setp.lt.u32 %p, %step, %n6;\n    @%p bra follow;\n"
    yield "    setp.ge.u32 %p, %step, %steps;\n    @%p bra fetched;\nfetch:\n" + _at_stage(of)
    yield """\
free:
    mbarrier.try_wait.parity.shared::cta.b64 %p, [%bar+8], %phase;
    @!%p bra free;
"""
    yield expect + _PIXELS + weights + _advance(of)
    yield "    add.u32 %step, %step, 1;\n    setp.lt.u32 %p, %step, %steps;\n    @%p bra fetch;\n"
    yield "fetched:\n"
    if of.tile.keeps_on:
        yield _NEXT_TILE + "    @!%p bra done;\n"
        yield _coordinates(of) + _first_place(of) + "    mov.u32 %step, 0;\n    bra fetch;\n"
    else:
        yield "    bra done;\n"


def _products(of: Product, kind: str) -> Iterator[str]:
    """Descriptors count 16 bytes. Eight lines are 1024 bytes apart, lines are mixed by 128."""
    cols = of.tile.cols
    results = "{" + ", ".join(f"%o{n}" for n in range(cols // 2)) + "}"
    for n in range(LINE // DEPTH):
        yield f"    add.u32 %low_a, %from, {2 * n};\n"
        yield f"    add.u32 %low_b, %low, {of.rows * LINE_BYTES // 16 + 2 * n};\n"
        yield "    mov.b64 %a, {%low_a, %high};\n    mov.b64 %b, {%low_b, %high};\n"
        op = f"wgmma.mma_async.sync.aligned.m64n{cols}k{DEPTH}.f32.{kind}.{kind}"
        yield f"    {op} {results}, %a, %b, %yes, 1, 1, 0, 0;\n"


def _released(of: Product) -> str:
    """This warp has read stage %last."""
    return f"""\
    mad.lo.u32 %n0, %last, 16, %base;
    @%is_first mbarrier.arrive.shared::cta.b64 _, [%n0+{of.barriers + 8}];
"""


def _multiply(of: Product, kind: str) -> Iterator[str]:
    """A stage is free when the products of the next one are on their way."""
    yield f"""\
multiply:
    griddepcontrol.wait;
    ld.param.u64 %out, [result];
    ld.param.u64 %other, [more];
    setp.eq.u32 %yes, 0, 0;
    setp.eq.u32 %is_first, %lane, 0;
    shr.u32 %group, %warp, 2;
    mov.u32 %high, {64 | 1 << 30};
    mov.u32 %stage, 0;
    mov.u32 %phase, 0;
tile:
"""
    yield _coordinates(of)
    yield from (f"    mov.f32 %o{n}, 0f00000000;\n" for n in range(of.tile.cols // 2))
    yield "    mov.u32 %step, 0;\nnext:\n" + _at_stage(of)
    yield f"""\
come:
    mbarrier.try_wait.parity.shared::cta.b64 %p, [%bar], %phase;
    @!%p bra come;
    shr.u32 %low, %at, 4;
    or.b32 %low, %low, {1 << 16};
    mad.lo.u32 %from, %group, {ROWS * LINE_BYTES // 16}, %low;
    wgmma.fence.sync.aligned;
"""
    yield from _products(of, kind)
    yield """\
    wgmma.commit_group.sync.aligned;
    wgmma.wait_group.sync.aligned 1;
    setp.eq.u32 %p, %step, 0;
    @%p bra kept;
"""
    yield _released(of) + "kept:\n    mov.u32 %last, %stage;\n" + _advance(of)
    yield "    add.u32 %step, %step, 1;\n    setp.lt.u32 %p, %step, %steps;\n    @%p bra next;\n"
    yield "    wgmma.wait_group.sync.aligned 0;\n"
    if of.tile.keeps_on:
        yield _released(of) + "    bar.warp.sync -1;\n"
    else:  # results go where the operands of all groups were
        yield f"    bar.sync 1, {of.threads};\n"


def _pixel(of: Product, row: str) -> str:
    """%place: of the first channel of a row's result; %p, if it was true: it is in the picture."""
    _, height, width = of.box
    return f"""\
    rem.u32 %n2, {row}, {width};
    div.u32 %n3, {row}, {width};
    add.u32 %n2, %n2, %left;
    setp.lt.and.u32 %p, %n2, %columns, %p;
    rem.u32 %n4, %n3, {height};
    div.u32 %n3, %n3, {height};
    add.u32 %n4, %n4, %top;
    setp.lt.and.u32 %p, %n4, %lines, %p;
    add.u32 %n3, %n3, %picture;
    setp.lt.and.u32 %p, %n3, %pictures, %p;
    mad.lo.u32 %n3, %n3, %lines, %n4;
    mad.lo.u32 %n3, %n3, %columns, %n2;
    mul.lo.u32 %place, %n3, %outs;
"""


def _address(of: Product, row: str, col: str) -> str:
    """%wide: in bytes from the beginning of the result; %p as above, and in its columns."""
    return (
        _pixel(of, row)
        + f"""\
    add.u32 %n4, {col}, %col;
    setp.lt.and.u32 %p, %n4, %outs, %p;
    add.u32 %n3, %place, %n4;
    mul.wide.u32 %wide, %n3, 2;
"""
    )


def _loaded(kind: str, into: int) -> str:
    """Two numbers of %n0 as %f<into> and the next."""
    return (
        "    mov.b32 {%h0, %h1}, %n0;\n"
        f"    cvt.f32.{kind} %f{into}, %h0;\n    cvt.f32.{kind} %f{into + 1}, %h1;\n"
    )


def _sums(of: Product, kind: str) -> Iterator[str]:
    """Add what lies where this thread's results go: two columns of each eight, of two rows."""
    for half in (0, 1):
        yield f"""\
    shr.u32 %n0, %lane, 2;
    mad.lo.u32 %n0, %warp, 16, %n0;
    add.u32 %n0, %n0, {8 * half};
    and.b32 %n1, %lane, 3;
    shl.b32 %n1, %n1, 1;
    add.u32 %item, %n1, %col;
    setp.eq.u32 %p, 0, 0;
{_address(of, "%n0", "%n1")}\
    @!%p bra no_sums{half};
    add.u64 %far, %other, %wide;
"""
        for n in range(of.width // 8):
            first = 4 * n + 2 * half
            yield f"    add.u32 %n1, %item, {8 * n};\n    setp.lt.u32 %p, %n1, %outs;\n"
            yield "    mov.u32 %n0, 0;\n"
            yield f"    @%p ld.global.b32 %n0, [%far+{16 * n}];\n" + _loaded(kind, 0)
            yield f"    add.f32 %o{first}, %o{first}, %f0;\n"
            yield f"    add.f32 %o{first + 1}, %o{first + 1}, %f1;\n"
        yield f"no_sums{half}:\n"


# gelu(x) = x * P(normal <= x), and log2 of P(normal <= -|x|) is nearly this polynomial: the same as
# that of ``strop.ir.functions``, highest power first.
CHANCE = tuple(map(f32, (
    -1.16784452e-06, 5.14027517e-05, -8.70034642e-04, 8.33262074e-03, -5.37043910e-02,
    -4.58637588e-01, -1.15120849, -0.999996922,
)))  # fmt: skip


def _gate(value: str, gate: str) -> Iterator[str]:
    yield f"    abs.f32 %t0, {gate};\n    mov.f32 %t1, {CHANCE[0]};\n"
    yield from (f"    fma.rn.f32 %t1, %t1, %t0, {power};\n" for power in CHANCE[1:])
    yield f"""\
    ex2.approx.ftz.f32 %t1, %t1;
    sub.f32 %t2, 0f3F800000, %t1;
    setp.gt.f32 %p, {gate}, 0f00000000;
    selp.f32 %t1, %t2, %t1, %p;
    mul.f32 %t1, %t1, {gate};
    mul.f32 {value}, {value}, %t1;
"""


def _gates(of: Product, kind: str) -> Iterator[str]:
    """Values and gates of a thread are half of its results apart."""
    yield """\
    and.b32 %n1, %lane, 3;
    shl.b32 %n1, %n1, 1;
    add.u32 %n1, %n1, %col;
    mul.wide.u32 %wide, %n1, 2;
    add.u64 %far, %other, %wide;
    mul.wide.u32 %wide, %outs, 2;
    add.u64 %wide, %far, %wide;
"""
    for n in range(of.width // 8):
        yield f"    ld.global.b32 %n0, [%far+{16 * n}];\n" + _loaded(kind, 0)
        yield f"    ld.global.b32 %n0, [%wide+{16 * n}];\n" + _loaded(kind, 2)
        for m in range(4):
            value, gate = f"%o{4 * n + m}", f"%o{4 * n + m + of.width // 2}"
            yield f"    add.f32 {value}, {value}, %f{m % 2};\n"
            yield f"    add.f32 {gate}, {gate}, %f{2 + m % 2};\n"
            yield from _gate(value, gate)


def _stored(of: Product, kind: str) -> Iterator[str]:
    """Sixteen rows of a warp by way of shared memory, so that they are written in whole lines."""
    if of.gated:
        yield from _gates(of, kind)
    if of.adds:
        yield from _sums(of, kind)
    yield f"""\
    mad.lo.u32 %to, %warp, {16 * of.half_row}, %base;
    add.u32 %to, %to, {of.results_at};
    shr.u32 %n0, %lane, 2;
    mad.lo.u32 %at, %n0, {of.half_row}, %to;
    and.b32 %n1, %lane, 3;
    mad.lo.u32 %at, %n1, 4, %at;
"""
    for n in range(0, of.width // 2, 2):
        place = n // 4 * 16 + n // 2 % 2 * 8 * of.half_row
        yield f"    cvt.rn.{kind}x2.f32 %n0, %o{n + 1}, %o{n};\n"
        yield f"    st.shared.b32 [%at+{place}], %n0;\n"
    yield "    bar.warp.sync -1;\n"
    chunks = of.width // 8  # of 16 bytes
    for n in range(-(-16 * chunks // 32)):
        yield f"""\
    add.u32 %item, %lane, {32 * n};
    setp.lt.u32 %p, %item, {16 * chunks};
    div.u32 %n0, %item, {chunks};
    rem.u32 %n1, %item, {chunks};
    mad.lo.u32 %from, %n0, {of.half_row}, %to;
    mad.lo.u32 %from, %n1, 16, %from;
    mad.lo.u32 %n0, %warp, 16, %n0;
    shl.b32 %n1, %n1, 3;
{_address(of, "%n0", "%n1")}\
    add.u64 %far, %out, %wide;
    @%p ld.shared.v4.b32 {{%n4, %n5, %n6, %n7}}, [%from];
    @%p st.global.v4.b32 [%far], {{%n4, %n5, %n6, %n7}};
"""
    if of.tile.keeps_on:
        yield _NEXT_TILE + "    @%p bra tile;\n"
    yield "done:\n    ret;\n}\n"


_TOGETHER = "    barrier.cluster.arrive;\n    barrier.cluster.wait;\n"


def _added(of: Product, kind: str) -> Iterator[str]:
    """This program's part into its memory, then its share of all results."""
    tile = of.tile
    chunks = tile.cols // 4  # of 16 bytes
    share = -(-of.rows * chunks // tile.split)
    yield f"""\
    mad.lo.u32 %at, %warp, {16 * of.part_row}, %base;
    shr.u32 %n0, %lane, 2;
    mad.lo.u32 %at, %n0, {of.part_row}, %at;
    and.b32 %n1, %lane, 3;
    mad.lo.u32 %at, %n1, 8, %at;
"""
    for n in range(0, tile.cols // 2, 2):
        place = n // 4 * 32 + n // 2 % 2 * 8 * of.part_row
        yield f"    st.shared.v2.f32 [%at+{place}], {{%o{n}, %o{n + 1}}};\n"
    yield _TOGETHER
    for part in range(tile.split):
        yield f"    mapa.shared::cluster.u32 %peer{part}, %base, {part};\n"
    yield f"    mul.lo.u32 %step, %rank, {share};\n"
    yield f"    add.u32 %end, %step, {share};\n    min.u32 %end, %end, {of.rows * chunks};\n"
    for n in range(-(-share // of.threads)):
        yield f"""\
    add.u32 %item, %thread, {of.threads * n};
    add.u32 %item, %item, %step;
    setp.lt.u32 %p, %item, %end;
    div.u32 %n0, %item, {chunks};
    rem.u32 %n1, %item, {chunks};
    mul.lo.u32 %from, %n0, {of.part_row};
    mad.lo.u32 %from, %n1, 16, %from;
    shl.b32 %n1, %n1, 2;
{_address(of, "%n0", "%n1")}\
    @!%p bra left_out{n};
"""
        yield from _sum_of_parts(of, kind)
        yield f"left_out{n}:\n"
    yield f"    bra added;\ndone:\n{_TOGETHER}added:\n{_TOGETHER}    ret;\n}}\n"


def _sum_of_parts(of: Product, kind: str) -> Iterator[str]:
    """In their order, so that a result does not depend on who is first."""
    for part in range(of.tile.split):
        into = "g" if part else "f"
        listed = ", ".join(f"%{into}{n}" for n in range(4))
        yield f"    add.u32 %to, %peer{part}, %from;\n"
        yield f"    ld.shared::cluster.v4.f32 {{{listed}}}, [%to];\n"
        if part:
            yield from (f"    add.f32 %f{n}, %f{n}, %g{n};\n" for n in range(4))
    if of.adds:
        yield "    add.u64 %far, %other, %wide;\n    ld.global.v2.b32 {%n5, %n6}, [%far];\n"
        for n, name in enumerate(("%n5", "%n6")):
            yield f"    mov.b32 {{%h0, %h1}}, {name};\n"
            for m in (0, 1):
                yield f"    cvt.f32.{kind} %g0, %h{m};\n"
                yield f"    add.f32 %f{2 * n + m}, %f{2 * n + m}, %g0;\n"
    yield f"""\
    add.u64 %far, %out, %wide;
    cvt.rn.{kind}x2.f32 %n5, %f1, %f0;
    cvt.rn.{kind}x2.f32 %n6, %f3, %f2;
    st.global.v2.b32 [%far], {{%n5, %n6}};
"""
