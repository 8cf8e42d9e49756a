"""What becomes of a product's sums in PTX: added up, gated, rounded, and written in whole lines."""

from __future__ import annotations

from collections.abc import Iterator

from strop.kernels.product_layout import Product
from strop.kernels.ptx import f32

NEXT_TILE = "    add.u32 %id, %id, %stride;\n    setp.lt.u32 %p, %id, %total;\n"


def _pixel(of: Product, row: str) -> str:
    """%place: of the first channel of a row's result; %p, if it was true: it is in the picture."""
    of_box = """\
    ld.param.u32 %place, [s7];
    setp.lt.and.u32 %p, %n3, %place, %p;
"""
    return f"""\
{_divided(of, row, "%n2", 0)}\
    add.u32 %n2, %n2, %left;
    setp.lt.and.u32 %p, %n2, %columns, %p;
{_divided(of, "%n3", "%n4", 1)}\
    add.u32 %n4, %n4, %top;
    setp.lt.and.u32 %p, %n4, %lines, %p;
{of_box if of.has_box else ""}\
    add.u32 %n3, %n3, %picture;
    setp.lt.and.u32 %p, %n3, %pictures, %p;
    mad.lo.u32 %n3, %n3, %lines, %n4;
    mad.lo.u32 %n3, %n3, %columns, %n2;
    mul.lo.u32 %place, %n3, %outs;
"""


def _divided(of: Product, by_what: str, rest: str, which: int) -> str:
    """%n3 and ``rest``: by columns (0) or lines (1) of the box. Of numbers up to 256 a quotient is
    exact by way of 2^16."""
    if not of.has_box:
        size = (of.rows, 1)[which]
        return f"    rem.u32 {rest}, {by_what}, {size};\n    div.u32 %n3, {by_what}, {size};\n"
    return f"""\
    ld.param.u32 %place, [s{11 - which}];
    mul.lo.u32 %place, {by_what}, %place;
    shr.u32 %place, %place, 16;
    ld.param.u32 {rest}, [s{9 - which}];
    mul.lo.u32 {rest}, %place, {rest};
    sub.u32 {rest}, {by_what}, {rest};
    mov.u32 %n3, %place;
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


def _own_rows(of: Product) -> str:
    """%to: of the results of this warp, on their way out."""
    return f"""\
    mad.lo.u32 %to, %warp, {16 * of.half_row}, %base;
    add.u32 %to, %to, {of.results_at};
"""


def _own_pairs(row: int, pair: int, begin: str) -> str:
    """%at: of this thread's first two sums, in a warp's rows of so many bytes, two in ``pair``."""
    return f"""\
    shr.u32 %n0, %lane, 2;
    mad.lo.u32 %at, %n0, {row}, {begin};
    and.b32 %n1, %lane, 3;
    mad.lo.u32 %at, %n1, {pair}, %at;
"""


def _moved(of: Product) -> Iterator[str]:
    """%from and %wide: each 16 bytes of a warp's results, there and in memory; %p: if they are."""
    chunks = of.width // 8
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
{_address(of, "%n0", "%n1")}"""


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


def stored(of: Product, kind: str) -> Iterator[str]:
    """Sixteen rows of a warp by way of shared memory, so that they are written in whole lines."""
    if of.gated:
        yield from _gates(of, kind)
    yield _own_rows(of) + _own_pairs(of.half_row, 4, "%to")
    for n in range(0, of.width // 2, 2):
        place = n // 4 * 16 + n // 2 % 2 * 8 * of.half_row
        yield f"    cvt.rn.{kind}x2.f32 %n0, %o{n + 1}, %o{n};\n"
        yield f"    st.shared.b32 [%at+{place}], %n0;\n"
    yield "    bar.warp.sync -1;\n"
    for where in _moved(of):
        yield where
        yield """\
    add.u64 %far, %out, %wide;
    @%p ld.shared.v4.b32 {%n4, %n5, %n6, %n7}, [%from];
    @%p st.global.v4.b32 [%far], {%n4, %n5, %n6, %n7};
"""
    if of.tile.keeps_on:
        yield NEXT_TILE + "    @%p bra tile;\n"
    yield "done:\n    ret;\n}\n"


_TOGETHER = "    barrier.cluster.arrive;\n    barrier.cluster.wait;\n"


def added(of: Product, kind: str) -> Iterator[str]:
    """This program's part into its memory, then its share of all results."""
    tile = of.tile
    chunks = tile.cols // 4  # of 16 bytes
    share = -(-of.rows * chunks // tile.split)
    yield f"""\
    mad.lo.u32 %at, %warp, {16 * of.part_row}, %base;
"""
    yield _own_pairs(of.part_row, 8, "%at")
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
    yield f"""\
    add.u64 %far, %out, %wide;
    cvt.rn.{kind}x2.f32 %n5, %f1, %f0;
    cvt.rn.{kind}x2.f32 %n6, %f3, %f2;
    st.global.v2.b32 [%far], {{%n5, %n6}};
"""
