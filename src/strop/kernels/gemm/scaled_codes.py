"""Multiply e4m3 codes in PTX: sums are promoted, and scaled by row and by column.

Hopper's tensor cores keep some 14 bits of a sum of products of e4m3 codes
(https://arxiv.org/abs/2412.19437, section 3.3.2). So they sum up a few lines of 128 codes, which
are added in fp32 to what came before; the products of a line begin while those of the line before
are on their way. Codes lie in shared memory as halves do, two in the place of one.

A row of a convolution sums over pixels, whose scales differ. A line is of one place of the window,
so a sum ends with its place, and what is added is multiplied by the scale of that place's pixel,
which is read while the products of the place's first line are on their way.
"""

from __future__ import annotations

from collections.abc import Iterator

from strop.kernels.gemm.places import divided, row_of_thread
from strop.kernels.gemm.tile import Product
from strop.kernels.ptx import (
    CODES_DEPTH,
    LINE_BYTES,
    ROWS,
    UNIT,
    f32,
    listed,
    product_of_codes,
    release,
    unpacked,
)

POINTERS = ("of_rows", "of_columns")  # scales, in fp32
SUMS = "s"  # registers in which sums are added up
# Lines that tensor cores sum up: at most, 20 products of 32 codes are rounded to their 14 bits one
# after the other. To add up is what tensor cores wait for. Pictures have multiples of 5 lines.
MOST_LINES = 5


# A thread has results in two rows of a block, eight rows apart.
_ROWS_APART = (0, 8)
_WINDOW = 3  # places along a side of a window


def _num_rows(of: Product) -> int:
    return len(_ROWS_APART) * of.blocks if of.scales_pixels else len(_ROWS_APART)


def registers(of: Product) -> str:
    count, rows = of.blocks * of.tile.cols // 2, _num_rows(of)
    of_pixels = f"""\
    .reg .b32 %inside, %inner, %lines_each, %tap, %shift, %pixel<{rows}>, %valid<{rows}>;
    .reg .b64 %scales;
"""
    return f"""\
    .reg .pred %adds, %ends, %behind;
    .reg .b32 %summed;
    .reg .f32 %{SUMS}<{count}>, %r<{rows}>;
{of_pixels if of.scales_pixels else ""}"""


def onward(of: Product, place: str) -> str:
    """Go on to the weights of the next step. The last line of a place may hold codes of the next
    place, too, beside zeros of pixels."""
    return f"""\
    add.u32 {place}, {place}, {of.line};
    add.u32 %inside, %inside, {of.line};
    setp.ge.u32 %p, %inside, %ins;
    sub.u32 %n5, %inside, %ins;
    @%p sub.u32 {place}, {place}, %n5;
    @%p mov.u32 %inside, 0;
"""


def pixels(of: Product) -> Iterator[str]:
    """Compute, for each row of a thread, the number of its pixel at the first place of the window,
    %pixel, and bits that say which places lie within the picture, %valid."""
    yield f"""\
    ld.param.u64 %scales, [{POINTERS[0]}];
    add.u32 %lines_each, %ins, {of.line - 1};
    div.u32 %lines_each, %lines_each, {of.line};
    mov.u32 %inner, 0;
    mov.u32 %tap, 0;
    mov.u32 %shift, 0;
"""
    for n in range(_num_rows(of)):
        row = n // 2 * ROWS + _ROWS_APART[n % 2]
        yield _place_in_box(of, row) + _first_pixel(of, n)
        yield from _places_within(n)


def _place_in_box(of: Product, row: int) -> str:
    """Compute the column %n2, the line %n4 and the picture %n3 of a row, within the box."""
    return f"""\
{row_of_thread(of, "%n0")}\
    add.u32 %n0, %n0, {row};
{divided(of, "%n0", "%n2", 0)}\
{divided(of, "%n3", "%n4", 1)}"""


def _first_pixel(of: Product, n: int) -> str:
    """Compute the column %n2, the line %n4 and the number of the pixel at the first place. What
    lies left of the picture or above it is a large number."""
    around = _WINDOW // 2
    return f"""\
    add.u32 %n2, %n2, %left;
    mul.lo.u32 %n2, %n2, {of.stride};
    sub.u32 %n2, %n2, {around};
    add.u32 %n4, %n4, %top;
    mul.lo.u32 %n4, %n4, {of.stride};
    sub.u32 %n4, %n4, {around};
    add.u32 %n3, %n3, %picture;
    ld.param.u32 %n1, [x_size1];
    mad.lo.u32 %n0, %n3, %n1, %n4;
    ld.param.u32 %n1, [x_size2];
    mad.lo.u32 %pixel{n}, %n0, %n1, %n2;
"""


def _places_within(n: int) -> Iterator[str]:
    """Set the bits of places that are in the picture: of their columns, and of their lines."""
    yield f"    mov.u32 %valid{n}, 0;\n    mov.u32 %n5, 0;\n"
    column = sum(1 << _WINDOW * line for line in range(_WINDOW))
    line = (1 << _WINDOW) - 1
    sides = (("%n2", "x_size2", f"%valid{n}", column, 1), ("%n4", "x_size1", "%n5", line, _WINDOW))
    for place, size, found, bits, apart in sides:
        yield f"    ld.param.u32 %n1, [{size}];\n"
        for m in range(_WINDOW):
            yield f"""\
    add.u32 %n0, {place}, {m};
    setp.lt.u32 %p, %n0, %n1;
    selp.b32 %n0, {bits << m * apart}, 0, %p;
    or.b32 {found}, {found}, %n0;
"""
    yield f"""\
    setp.lt.u32 %p, %n3, %pictures;
    selp.b32 %n5, %n5, 0, %p;
    and.b32 %valid{n}, %valid{n}, %n5;
"""


def scales_of_place(of: Product) -> str:
    """Read the scales of a place's pixels when its first line is multiplied: 0 where there is no
    pixel, whose codes are zeros."""
    read = "".join(
        f"""\
    shr.u32 %n0, %valid{n}, %tap;
    and.b32 %n0, %n0, 1;
    setp.ne.u32 %p, %n0, 0;
    add.u32 %n0, %pixel{n}, %shift;
    mul.wide.u32 %wide, %n0, 4;
    add.u64 %wide, %scales, %wide;
    mov.f32 %r{n}, 0f00000000;
    @%p ld.global.f32 %r{n}, [%wide];
"""
        for n in range(_num_rows(of))
    )
    return f"""\
    setp.ne.u32 %p, %inner, 0;
    @%p bra same_place;
{read}    add.u32 %tap, %tap, 1;
    add.u32 %shift, %shift, 1;
    rem.u32 %n0, %tap, {_WINDOW};
    setp.eq.u32 %p, %n0, 0;
    ld.param.u32 %n1, [x_size2];
    sub.u32 %n1, %n1, {_WINDOW};
    @%p add.u32 %shift, %shift, %n1;
same_place:
    add.u32 %inner, %inner, 1;
    setp.eq.u32 %p, %inner, %lines_each;
    @%p mov.u32 %inner, 0;
"""


def products(of: Product) -> Iterator[str]:
    """Multiply what a stage holds, and add it to the lines before if it %adds."""
    half, line = of.tile.cols // 2, LINE_BYTES // UNIT
    for block in range(of.blocks):
        for n in range(LINE_BYTES // CODES_DEPTH):
            yield f"""\
    add.u32 %low_b, %low, {of.rows * line + 2 * n};
    mov.b64 %b, {{%low_b, %high}};
    add.u32 %low_a, %from, {block * ROWS * line + 2 * n};
    mov.b64 %a, {{%low_a, %high}};
"""
            added = "%yes" if n else "%adds"
            yield product_of_codes(of.tile.cols, listed("o", half, block * half), added)
    yield "    wgmma.commit_group.sync.aligned;\n"


def begun(of: Product) -> str:
    """Nothing has been summed up. The registers of sums have values, which are never read: what has
    none, the assembler defines while products are on their way, and lets them wait."""
    defined = "".join(
        f"    mov.f32 %o{n}, {f32(0.0)};\n" for n in range(of.blocks * of.tile.cols // 2)
    )
    return f"    setp.ne.u32 %adds, 0, 0;\n    mov.u32 %summed, 0;\n{defined}"


def _ends(of: Product) -> str:
    """Find out whether a sum %ends: with its place, with the tile, or where it has enough lines."""
    is_last = "    setp.eq.u32 %p, %inner, 0;\n"
    if not of.scales_pixels:
        is_last = "    add.u32 %n0, %step, 1;\n    setp.eq.u32 %p, %n0, %steps;\n"
    return f"""\
    add.u32 %summed, %summed, 1;
{is_last}\
    setp.eq.or.u32 %ends, %summed, {MOST_LINES}, %p;
    @%ends mov.u32 %summed, 0;
"""


def summed_up(of: Product) -> Iterator[str]:
    """Give the stage of the line before free, and add the sum to what came before if it ends."""
    half = of.tile.cols // 2
    released = release(of.barriers, "%last", "%n0")
    yield f"""\
{_ends(of)}\
    wgmma.wait_group.sync.aligned 1;
    @!%adds bra kept;
{released}\
kept:
    mov.u32 %last, %stage;
    not.pred %adds, %ends;
    @%adds bra summed;
    wgmma.wait_group.sync.aligned 0;
{released}"""
    for block in range(of.blocks):
        for n in range(half):
            own = block * half + n
            if of.scales_pixels:
                scale = f"%r{2 * block + n % 4 // 2}"
                yield f"    fma.rn.f32 %{SUMS}{own}, %o{own}, {scale}, %{SUMS}{own};\n"
            else:
                yield f"    add.f32 %{SUMS}{own}, %{SUMS}{own}, %o{own};\n"
    yield "summed:\n"


def brought(of: Product) -> Iterator[str]:
    """Have the scales and biases of this tile copied to shared memory while it is multiplied, by
    all who do so: 4 bytes each at a time, which nobody waits for here. Those of a second half of
    columns, as of gates, lie behind all of the first."""
    threads = 32 * of.team
    yield f"""\
    rem.u32 %n0, %thread, {threads};
    mul.lo.u32 %n1, %group, {of.scales_apart};
    add.u32 %n1, %n1, %base;
    mad.lo.u32 %n1, %n0, 4, %n1;
"""
    place = of.scales_at
    for what, size in of.scales.items():
        for first in range(0, size // 4, threads):
            yield from _numbers(of, what, first, size // 4)
            yield f"""\
    add.u32 %n3, %n1, {place + 4 * first};
    @%p cp.async.ca.shared.global [%n3], [%far], 4;
"""
        place += size


def _numbers(of: Product, what: str, first: int, count: int) -> Iterator[str]:
    """Compute where number %n0 + ``first`` lies, %far, and whether there is one, %p. Biases count
    two columns. Rows behind the last one have its scale: what comes of them leaves nothing."""
    yield f"    add.u32 %n2, %n0, {first};\n    setp.lt.u32 %p, %n2, {count};\n"
    if what == "rows":
        yield f"""\
    add.u32 %n2, %n2, %left;
    sub.u32 %n3, %columns, 1;
    min.u32 %n2, %n2, %n3;
    ld.param.u64 %far, [{POINTERS[0]}];
"""
    else:
        each = 2 if what == "biases" else 1
        yield f"    mad.lo.u32 %n2, %n2, {each}, %col;\n" + _of_halves(of, each)
        yield f"    ld.param.u64 %far, [{POINTERS[1]}];\n" if each == 1 else _OF_BIASES
    yield "    mul.wide.u32 %wide, %n2, 4;\n    add.u64 %far, %far, %wide;\n"


_OF_BIASES = "    shr.u32 %n2, %n2, 1;\n    mov.u64 %far, %other;\n"


def _of_halves(of: Product, each: int) -> str:
    """Go on from this tile's columns to those of the columns' other half."""
    if not of.gated:
        return ""
    return f"""\
    add.u32 %n3, %col, {of.width};
    setp.ge.u32 %behind, %n2, %n3;
    sub.u32 %n3, %outs, {of.width};
    @%behind add.u32 %n2, %n2, %n3;
"""


COME = "    cp.async.wait_all;\n"  # a barrier of all who multiply is behind it


def scaled(of: Product, kind: str, block: int) -> Iterator[str]:
    """Multiply sums of a block by their scales, and add the biases."""
    first, place = block * of.tile.cols // 2, of.scales_at
    biases = place + of.scales["columns"]
    yield f"""\
    mul.lo.u32 %n4, %group, {of.scales_apart};
    add.u32 %n4, %n4, %base;
"""
    if not of.scales_pixels:
        yield from _scales_of_rows(of, block, biases + of.scales["biases"])
    yield """\
    and.b32 %n1, %lane, 3;
    mad.lo.u32 %n3, %n1, 4, %n4;
    mad.lo.u32 %n1, %n1, 8, %n4;
"""
    for n in range(of.tile.cols // 8):
        yield f"    ld.shared.v2.f32 {{%f0, %f1}}, [%n1+{place + 32 * n}];\n"
        if of.has_biases:
            yield f"    ld.shared.b32 %n0, [%n3+{biases + 16 * n}];\n" + unpacked(kind, 2)
        for m in range(4):
            own, scale = first + 4 * n + m, f"%f{m % 2}"
            if not of.scales_pixels:
                yield f"    mul.f32 %t0, %r{m // 2}, {scale};\n"
                scale = "%t0"
            if of.has_biases:
                yield f"    fma.rn.f32 %o{own}, %{SUMS}{own}, {scale}, %f{2 + m % 2};\n"
            else:
                yield f"    mul.f32 %o{own}, %{SUMS}{own}, {scale};\n"


def _scales_of_rows(of: Product, block: int, place: int) -> Iterator[str]:
    """Read the scales of this thread's two rows of a block."""
    yield f"""\
{row_of_thread(of, "%n1")}\
    mad.lo.u32 %n1, %n1, 4, %n4;
"""
    for n, apart in enumerate(_ROWS_APART):
        yield f"    ld.shared.f32 %r{n}, [%n1+{place + 4 * (block * ROWS + apart)}];\n"
