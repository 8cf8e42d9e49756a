"""Normalise a product's columns in PTX: each has a factor and a shift, made of statistics that are
known, as a batch norm's are in evaluation mode.

Weights stay as they are, and so do the four vectors of the norm: whoever writes to one of them is
seen by the next call. While the first products of a tile are on their way, those who multiply
compute factors and shifts of its columns in fp32 (https://arxiv.org/abs/1502.03167, section 3.1),
and leave them in shared memory. The sums have not been rounded before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from strop.kernels.gemm.places import row_of_thread
from strop.kernels.gemm.tile import Product
from strop.kernels.ptx import ROWS, f32, unpacked

POINTERS = ("of_mean", "of_variance", "of_factor", "more")  # the last: of the shift
ADDED = "addend"  # of the value that is added
_ROWS_APART = (0, 8)  # a thread has results in two rows of a block
Activation = Callable[[str], Iterator[str]]
_PAIR = 8  # bytes of a factor and a shift

REGISTERS = """\
    .reg .f32 %m<8>;
    .reg .b64 %rows<2>;
"""


def pointers(of: Product) -> tuple[str, ...]:
    return (*POINTERS, ADDED) if of.norm.adds else POINTERS


def brought(of: Product, kind: str) -> Iterator[str]:
    """Leave factor and shift of each column of this tile in shared memory. A column behind the last
    one gets the last one's, whose results leave nothing."""
    threads = 32 * of.team
    yield f"""\
    rem.u32 %n0, %thread, {threads};
    mul.lo.u32 %n1, %group, {of.scales_apart};
    add.u32 %n1, %n1, %base;
    mad.lo.u32 %n1, %n0, {_PAIR}, %n1;
"""
    for first in range(0, of.tile.cols, threads):
        yield f"""\
    add.u32 %n2, %n0, {first};
    setp.lt.u32 %p, %n2, {of.tile.cols};
    add.u32 %n2, %n2, %col;
    sub.u32 %n3, %outs, 1;
    min.u32 %n2, %n2, %n3;
    mul.wide.u32 %wide, %n2, 2;
"""
        for n, pointer in enumerate(POINTERS):
            yield f"""\
    ld.param.u64 %far, [{pointer}];
    add.u64 %far, %far, %wide;
    ld.global.b16 %h0, [%far];
    cvt.f32.{kind} %m{n}, %h0;
"""
        yield f"""\
    add.f32 %m1, %m1, {f32(of.norm.eps)};
    rsqrt.approx.f32 %m1, %m1;
    mul.f32 %m1, %m1, %m2;
    neg.f32 %m0, %m0;
    fma.rn.f32 %m0, %m0, %m1, %m3;
    @%p st.shared.v2.f32 [%n1+{of.scales_at + _PAIR * first}], {{%m1, %m0}};
"""


def normed(of: Product, kind: str, block: int, activation: Activation | None) -> Iterator[str]:
    """Normalise the sums of a block of a tile, and add what is to be added. ``activation`` prints
    what leaves its result for a register in %t1."""
    yield f"""\
    mul.lo.u32 %n4, %group, {of.scales_apart};
    add.u32 %n4, %n4, %base;
    and.b32 %n3, %lane, 3;
    mad.lo.u32 %n3, %n3, {2 * _PAIR}, %n4;
"""
    if of.norm.adds:
        yield from _added_rows(of, block)
    first = block * of.tile.cols // 2
    for n in range(of.tile.cols // 8):
        yield f"    ld.shared.v4.f32 {{%m0, %m1, %m2, %m3}}, [%n3+{of.scales_at + 64 * n}];\n"
        for half in (0, 1) if of.norm.adds else ():
            yield f"    ld.global.b32 %n0, [%rows{half}+{16 * n}];\n"
            yield unpacked(kind, 2 * half)
        for m in range(4):
            side = m % 2 * 2
            own = f"%o{first + 4 * n + m}"
            yield from _ended(of, own, f"%m{side}", f"%m{side + 1}", f"%f{m}", activation)


def _added_rows(of: Product, block: int) -> Iterator[str]:
    """Compute where this thread's first two columns of its rows lie in what is added. A row behind
    the last one is the last one."""
    yield row_of_thread(of, "%n1")
    for n, apart in enumerate(_ROWS_APART):
        yield f"""\
    add.u32 %n0, %n1, {block * ROWS + apart};
    add.u32 %n0, %n0, %left;
    sub.u32 %n2, %columns, 1;
    min.u32 %n0, %n0, %n2;
    mul.wide.u32 %wide, %n0, %outs;
    and.b32 %n2, %lane, 3;
    mad.lo.u32 %n2, %n2, 2, %col;
    cvt.u64.u32 %far, %n2;
    add.u64 %wide, %wide, %far;
    shl.b64 %wide, %wide, 1;
    ld.param.u64 %far, [{ADDED}];
    add.u64 %rows{n}, %far, %wide;
"""


def _ended(
    of: Product, value: str, factor: str, shift: str, addend: str, activation: Activation | None
) -> Iterator[str]:
    yield f"    fma.rn.f32 {value}, {value}, {factor}, {shift};\n"
    if of.norm.adds:
        yield f"    add.f32 {value}, {value}, {addend};\n"
    if activation:
        yield from activation(value)
        yield f"    mov.f32 {value}, %t1;\n"


def normed_part(of: Product, kind: str, activation: Activation | None) -> Iterator[str]:
    """Do so with the sums of four columns, %f0 to %f3, the first of which is column %n4, and the
    first of whose results lies %wide bytes behind the beginning."""
    yield f"    sub.u32 %to, %n4, %col;\n    mad.lo.u32 %to, %to, {_PAIR}, %base;\n"
    for n in (0, 1):
        listed = ", ".join(f"%m{4 * n + m}" for m in range(4))
        place = of.scales_at + 2 * _PAIR * n
        yield f"    ld.shared.v4.f32 {{{listed}}}, [%to+{place}];\n"
    if of.norm.adds:
        yield f"""\
    ld.param.u64 %rows0, [{ADDED}];
    add.u64 %rows0, %rows0, %wide;
    ld.global.v2.b32 {{%n5, %n6}}, [%rows0];
"""
        yield unpacked(kind, 0, "%n5", "g") + unpacked(kind, 2, "%n6", "g")
    for n in range(4):
        yield from _ended(of, f"%f{n}", f"%m{2 * n}", f"%m{2 * n + 1}", f"%g{n}", activation)
