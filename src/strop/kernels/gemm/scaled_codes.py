"""Multiply e4m3 codes in PTX: sums are promoted, and scaled by row and by column.

Hopper's tensor cores keep some 14 bits of a sum of products of e4m3 codes
(https://arxiv.org/abs/2412.19437, section 3.3.2). So they sum up one line of 128 codes, which is
added in fp32 to what came before, while the next block of rows is multiplied. Codes lie in shared
memory as halves do, two in the place of one.
"""

from __future__ import annotations

from collections.abc import Iterator

from strop.kernels.gemm.tile import Product
from strop.kernels.ptx import (
    CODES_DEPTH,
    LINE_BYTES,
    ROWS,
    UNIT,
    listed,
    product_of_codes,
    release,
    unpacked,
)

POINTERS = ("of_rows", "of_columns")  # scales, in fp32
SUMS = "s"  # registers in which sums are added up


def registers(of: Product) -> str:
    count = of.blocks * of.tile.cols // 2
    return f"    .reg .pred %no;\n    .reg .f32 %{SUMS}<{count}>, %r<2>;\n"


def products(of: Product) -> Iterator[str]:
    """Multiply what a stage holds, each block of rows in a group of its own."""
    half, line = of.tile.cols // 2, LINE_BYTES // UNIT
    yield "    setp.ne.u32 %no, 0, 0;\n"
    for block in range(of.blocks):
        for n in range(LINE_BYTES // CODES_DEPTH):
            yield f"""\
    add.u32 %low_b, %low, {of.rows * line + 2 * n};
    mov.b64 %b, {{%low_b, %high}};
    add.u32 %low_a, %from, {block * ROWS * line + 2 * n};
    mov.b64 %a, {{%low_a, %high}};
"""
            yield product_of_codes(of.tile.cols, listed("o", half, block * half), n > 0)
        yield "    wgmma.commit_group.sync.aligned;\n"


def summed_up(of: Product) -> Iterator[str]:
    """Add what has been multiplied, and give the stage free when all of it has."""
    half = of.tile.cols // 2
    for block in range(of.blocks):
        left = of.blocks - 1 - block
        yield f"    wgmma.wait_group.sync.aligned {left};\n"
        if not left:
            yield release(of.barriers, "%stage", "%n0")
        for n in range(block * half, (block + 1) * half):
            yield f"    add.f32 %{SUMS}{n}, %{SUMS}{n}, %o{n};\n"


def scaled(of: Product, kind: str, block: int) -> Iterator[str]:
    """Multiply sums of a block by their scales, and add the biases. Rows behind the last one have
    its scale: what comes of them leaves nothing."""
    first = block * of.tile.cols // 2
    yield f"""\
    shr.u32 %n0, %lane, 2;
    and.b32 %n2, %warp, {of.team - 1 if of.tile.apart else 31};
    mad.lo.u32 %n1, %n2, 16, %n0;
    add.u32 %n1, %n1, {block * ROWS};
    add.u32 %n1, %n1, %left;
    sub.u32 %n2, %columns, 1;
    ld.param.u64 %far, [{POINTERS[0]}];
"""
    for n in range(2):
        yield f"""\
    min.u32 %n0, %n1, %n2;
    mul.wide.u32 %wide, %n0, 4;
    add.u64 %wide, %far, %wide;
    ld.global.f32 %r{n}, [%wide];
    add.u32 %n1, %n1, 8;
"""
    yield f"""\
    and.b32 %n1, %lane, 3;
    shl.b32 %n1, %n1, 1;
    add.u32 %n1, %n1, %col;
    ld.param.u64 %far, [{POINTERS[1]}];
    mul.wide.u32 %wide, %n1, 4;
    add.u64 %far, %far, %wide;
    mul.wide.u32 %wide, %n1, 2;
    add.u64 %wide, %other, %wide;
"""
    for n in range(of.tile.cols // 8):
        yield f"    ld.global.v2.f32 {{%f0, %f1}}, [%far+{32 * n}];\n"
        if of.has_biases:
            yield f"    ld.global.b32 %n0, [%wide+{16 * n}];\n" + unpacked(kind, 2)
        for m in range(4):
            own = first + 4 * n + m
            yield f"    mul.f32 %t0, %r{m // 2}, %f{m % 2};\n"
            if of.has_biases:
                yield f"    fma.rn.f32 %o{own}, %{SUMS}{own}, %t0, %f{2 + m % 2};\n"
            else:
                yield f"    mul.f32 %o{own}, %{SUMS}{own}, %t0;\n"
