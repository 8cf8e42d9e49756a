"""Print in PTX where a thread's rows of a tile lie, and where a row lies in a box of pixels."""

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
