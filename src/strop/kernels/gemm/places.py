"""Print in PTX where tiles lie, a thread's rows of one, and a row in a box of pixels."""

from __future__ import annotations

from strop.kernels.gemm.tile import Product


def warp_of_tile(of: Product, into: str) -> str:
    """Compute the number of this warp among those that multiply one tile."""
    return f"    and.b32 {into}, %warp, {of.team - 1 if of.tile.apart else 31};\n"


def row_of_thread(of: Product, into: str) -> str:
    """Compute the first row of this thread within a tile. %n2 is overwritten, and %n0 holds its
    row within those of a warp, unless it is where the result goes."""
    return f"""\
    shr.u32 %n0, %lane, 2;
{warp_of_tile(of, "%n2")}\
    mad.lo.u32 {into}, %n2, 16, %n0;
"""


def divided(of: Product, by_what: str, rest: str, which: int) -> str:
    """Divide by columns (0) or lines (1) of the box: %n3 and ``rest``. The quotient of numbers up
    to 256 is exact by way of 2^16. %place is overwritten."""
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


def coordinates(of: Product) -> str:
    """Compute the coordinates of tile %id. The last columns may be some of the tile's before, too,
    which come out the same: loads are slow where a tensor ends."""
    windows = _OF_WINDOWS if of.has_four_windows else ""
    return (_OF_BOXES if of.has_box else _OF_A_LINE).format(of=of, windows=windows)


_COLUMNS = """\
    mul.lo.u32 %col, %col, {of.width};
    sub.u32 %n0, %outs, {of.width};
    min.u32 %col, %col, %n0;
"""
# Those with the same pixels are neighbours.
_OF_BOXES = f"""\
    ld.param.u32 %n1, [s7];
    ld.param.u32 %n2, [s8];
    ld.param.u32 %n3, [s9];
    rem.u32 %col, %id, %across;
{_COLUMNS}\
    div.u32 %n0, %id, %across;
    rem.u32 %left, %n0, %right;
    div.u32 %n0, %n0, %right;
    mul.lo.u32 %left, %left, %n3;
    rem.u32 %top, %n0, %down;
    div.u32 %n0, %n0, %down;
    mul.lo.u32 %top, %top, %n2;
{{windows}}\
    mul.lo.u32 %picture, %n0, %n1;
"""
# All boxes of a window come before the next one's: programs at work read the same weights.
_OF_WINDOWS = """\
    ld.param.u32 %n4, [s3];
    div.u32 %window, %n0, %n4;
    rem.u32 %n0, %n0, %n4;
"""
# Those with the same columns are neighbours, up to so many rows: what all programs read at a time
# is little of both operands then, and comes from memory once.
_OF_A_LINE = f"""\
    ld.param.u32 %n1, [s7];
    mul.lo.u32 %n2, %n1, %across;
    div.u32 %n3, %id, %n2;
    mul.lo.u32 %n2, %n3, %n2;
    sub.u32 %n2, %id, %n2;
    mul.lo.u32 %n3, %n3, %n1;
    sub.u32 %n4, %right, %n3;
    min.u32 %n1, %n1, %n4;
    div.u32 %col, %n2, %n1;
    mul.lo.u32 %n4, %col, %n1;
    sub.u32 %n4, %n2, %n4;
    add.u32 %left, %n3, %n4;
{_COLUMNS}\
    mul.lo.u32 %left, %left, {{of.rows}};
    mov.u32 %top, 0;
    mov.u32 %picture, 0;
"""
