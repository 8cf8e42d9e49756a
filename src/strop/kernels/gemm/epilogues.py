"""Do what becomes of a product's sums in PTX: they are added up, gated, rounded, and written in
whole lines."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from strop.ir.contractions import GELU, GELU_TANH, RELU, SILU
from strop.kernels.gemm import column_norm, scaled_codes
from strop.kernels.gemm.places import divided, row_of_thread, warp_of_tile
from strop.kernels.gemm.tile import ACTIVATED, Product
from strop.kernels.ptx import MEETING, ROWS, f32, unpacked

NEXT_TILE = "    add.u32 %id, %id, %stride;\n    setp.lt.u32 %p, %id, %total;\n"


def _pixel(of: Product, row: str) -> str:
    """Compute %place, the first channel of a row's result; %p, if it was true, says that it is in
    the picture."""
    of_box = """\
    ld.param.u32 %place, [s7];
    setp.lt.and.u32 %p, %n3, %place, %p;
"""
    return f"""\
{divided(of, row, "%n2", 0)}\
    add.u32 %n2, %n2, %left;
    setp.lt.and.u32 %p, %n2, %columns, %p;
{divided(of, "%n3", "%n4", 1)}\
    add.u32 %n4, %n4, %top;
    setp.lt.and.u32 %p, %n4, %lines, %p;
{of_box if of.has_box else ""}\
    add.u32 %n3, %n3, %picture;
    setp.lt.and.u32 %p, %n3, %pictures, %p;
    mad.lo.u32 %n3, %n3, %lines, %n4;
    mad.lo.u32 %n3, %n3, %columns, %n2;
    mul.lo.u32 %place, %n3, %outs;
"""


def _address(of: Product, row: str, col: str) -> str:
    """Compute %wide, in bytes from the beginning of the result; %p as above, and in its columns."""
    return (
        _pixel(of, row)
        + f"""\
    add.u32 %n4, {col}, %col;
    setp.lt.and.u32 %p, %n4, %outs, %p;
    add.u32 %n3, %place, %n4;
    mul.wide.u32 %wide, %n3, 2;
"""
    )


# gelu(x) = x * P(normal <= x), and log2 of P(normal <= -|x|) is nearly this polynomial: the same as
# that of ``strop.ir.functions``, highest power first.
CHANCE = tuple(
    map(
        f32,
        (
            -1.16784452e-06,
            5.14027517e-05,
            -8.70034642e-04,
            8.33262074e-03,
            -5.37043910e-02,
            -4.58637588e-01,
            -1.15120849,
            -0.999996922,
        ),
    )
)


def _gelu(x: str) -> Iterator[str]:
    yield f"    abs.f32 %t0, {x};\n    mov.f32 %t1, {CHANCE[0]};\n"
    yield from (f"    fma.rn.f32 %t1, %t1, %t0, {power};\n" for power in CHANCE[1:])
    yield f"""\
    ex2.approx.ftz.f32 %t1, %t1;
    sub.f32 %t2, 0f3F800000, %t1;
    setp.gt.f32 %p, {x}, 0f00000000;
    selp.f32 %t1, %t2, %t1, %p;
    mul.f32 %t1, %t1, {x};
"""


def _silu(x: str) -> Iterator[str]:
    yield f"    mul.f32 %t1, {x}, {f32(-LOG2_E)};\n"
    yield from _over_one_plus_power(x)


def _relu(x: str) -> Iterator[str]:
    yield f"    max.NaN.f32 %t1, {x}, 0f00000000;\n"


def _gelu_tanh(x: str) -> Iterator[str]:
    """Compute the sigmoid of 2 u, which is 0.5 * (1 + tanh(u)), for u by x and its cube."""
    linear, cubic = (f32(-LOG2_E * factor) for factor in (1.5957691216057308, 0.07135481627260025))
    yield f"""\
    mul.f32 %t0, {x}, {x};
    mov.f32 %t1, {linear};
    fma.rn.f32 %t1, %t0, {cubic}, %t1;
    mul.f32 %t1, %t1, {x};
"""
    yield from _over_one_plus_power(x)


def _over_one_plus_power(x: str) -> Iterator[str]:
    """Divide x by 1 + 2^%t1, where an infinite power gives a zero of the sign of x."""
    yield f"""\
    ex2.approx.ftz.f32 %t1, %t1;
    add.f32 %t1, %t1, 0f3F800000;
    rcp.approx.ftz.f32 %t1, %t1;
    mul.f32 %t1, %t1, {x};
"""


LOG2_E = 1.4426950408889634
# Each leaves the activation of a register in %t1.
ACTIVATIONS: Mapping[str, Callable[[str], Iterator[str]]] = {
    GELU: _gelu,
    GELU_TANH: _gelu_tanh,
    SILU: _silu,
    RELU: _relu,
}


# %far: of this thread's first two columns.
_BIASES = """\
    and.b32 %n1, %lane, 3;
    shl.b32 %n1, %n1, 1;
    add.u32 %n1, %n1, %col;
    mul.wide.u32 %wide, %n1, 2;
    add.u64 %far, %other, %wide;
"""


_SECOND_HALF = """\
    mul.wide.u32 %wide, %outs, 2;
    add.u64 %wide, %far, %wide;
"""


def begun(of: Product, kind: str, coordinates: str) -> Iterator[str]:
    """Set what sums begin with: zeros, or biases, the same in all rows."""
    half = of.tile.cols // 2
    if of.scales_pixels:
        yield coordinates + "".join((*scaled_codes.pixels(of), *scaled_codes.brought(of)))
    if not of.begins_with_biases:
        name = scaled_codes.SUMS if of.codes else "o"
        yield from (f"    mov.f32 %{name}{n}, 0f00000000;\n" for n in range(of.blocks * half))
        return
    yield coordinates + _BIASES
    for n in range(of.tile.cols // 8):
        yield f"    ld.global.b32 %n0, [%far+{16 * n}];\n" + unpacked(kind, 0)
        own = (block * half + 4 * n + m for block in range(of.blocks) for m in range(4))
        yield from (f"    mov.f32 %o{into}, %f{into % 2};\n" for into in own)


def _gates(of: Product, kind: str, block: int) -> Iterator[str]:
    """Values and gates of a thread are half of a block's results apart; results lie where the
    first of both did."""
    activation = ACTIVATIONS[of.gate.activation]
    first = block * of.tile.cols // 2
    is_biased = of.has_biases and not of.codes  # whose biases come with scales
    if is_biased:
        yield _BIASES + _SECOND_HALF
    for n in range(of.width // 8):
        if is_biased:
            yield f"    ld.global.b32 %n0, [%far+{16 * n}];\n" + unpacked(kind, 0)
            yield f"    ld.global.b32 %n0, [%wide+{16 * n}];\n" + unpacked(kind, 2)
        for m in range(4):
            own = first + 4 * n + m
            first_half, second_half = f"%o{own}", f"%o{own + of.width // 2}"
            if is_biased:
                yield f"    add.f32 {first_half}, {first_half}, %f{m % 2};\n"
                yield f"    add.f32 {second_half}, {second_half}, %f{2 + m % 2};\n"
            value, gate = (first_half, second_half)[:: -1 if of.gate.is_first else 1]
            yield from activation(gate)
            yield f"    mul.f32 {first_half}, {value}, %t1;\n"


def _activated(of: Product, block: int) -> Iterator[str]:
    half = of.tile.cols // 2
    for own in range(block * half, (block + 1) * half):
        yield from ACTIVATIONS[of.gate.activation](f"%o{own}")
        yield f"    mov.f32 %o{own}, %t1;\n"


TOGETHER = 32  # columns that a warp stores at a time
READ = "    @%is_handing cp.async.bulk.wait_group.read 0;\n"


def handing(of: Product) -> str:
    """Set %is_handing in one thread, which has the tensor memory accelerator take results."""
    return f"""\
    rem.u32 %n0, %thread, {32 * of.team};
    setp.eq.u32 %is_handing, %n0, 0;
    mov.b64 %wide, result;
    cvta.param.u64 %map2, %wide;
"""


def met(of: Product) -> str:
    """All that multiply this tile have come here."""
    if of.tile.apart:
        return f"    add.u32 %n0, %group, 1;\n    bar.sync %n0, {32 * of.team};\n"
    return f"    bar.sync 1, {32 * of.team};\n"


def beyond(of: Product) -> str:
    """Advance to the stage behind those of another tile."""
    return f"""\
    add.u32 %stage, %stage, %steps;
    div.u32 %n0, %stage, {of.tile.stages};
    rem.u32 %stage, %stage, {of.tile.stages};
    and.b32 %n0, %n0, 1;
    xor.b32 %phase, %phase, %n0;
"""


_OF_WINDOW = """\
    and.b32 %n3, %window, 1;
    mad.lo.u32 %n3, %n3, %outs, %col;
    shr.u32 %n4, %window, 1;
"""


def stored(of: Product, kind: str) -> Iterator[str]:
    """Store by way of shared memory, mixed as the accelerator reads it; it leaves out what is not
    in the picture, and adds to what is there if it is to."""
    for block in range(of.blocks):
        if of.codes:
            yield from scaled_codes.scaled(of, kind, block)
        if of.gated:
            yield from _gates(of, kind, block)
        elif of.end == ACTIVATED:
            yield from _activated(of, block)
        elif of.normed:
            yield from column_norm.normed(of, kind, block, ACTIVATIONS.get(of.norm.activation))
        yield from _staged(of, kind, block)
    yield from _by_threads(of) if of.any_width else _by_boxes(of)
    if of.tile.keeps_on:
        yield (beyond(of) + "    add.u32 %id, %id, %stride;\n") if of.tile.apart else ""
        yield NEXT_TILE + "    @%p bra tile;\n"
    yield (READ if of.leaves_by_boxes else "") + "done:\n    ret;\n}\n"


def _by_boxes(of: Product) -> Iterator[str]:
    box, op, what = of.rows * 2 * of.unit, "cp", ""
    if of.adds:
        op, what = "cp.reduce", ".add"
    yield "    fence.proxy.async.shared::cta;\n" + met(of) + "    @!%is_handing bra handed;\n"
    yield f"    mul.lo.u32 %n2, %group, {of.results_apart};\n"
    first, rank, place = "%col", 4, "%n0, %left, %top, %picture"
    if of.has_four_windows:  # pixels of a pair of columns lie like channels of one
        yield _OF_WINDOW
        first, rank, place = "%n3", 5, "%n0, %left, %n4, %top, %picture"
    for n in range(of.width // of.unit):
        yield f"""\
    add.u32 %n0, {first}, {n * of.unit};
    add.u32 %n1, %base, {of.results_at + n * box};
    add.u32 %n1, %n1, %n2;
    {op}.async.bulk.tensor.{rank}d.global.shared::cta{what}.bulk_group \
[%map2, {{{place}}}], [%n1];
"""
    yield "    cp.async.bulk.commit_group;\nhanded:\n"


def _by_threads(of: Product) -> Iterator[str]:
    """Store rows of any width, one warp a row, 32 columns at a time: a row may begin at any
    element, where the accelerator wants multiples of 16 bytes."""
    line, box = 2 * of.unit, of.rows * 2 * of.unit
    yield met(of)
    yield f"""\
    mul.lo.u32 %at, %group, {of.results_apart};
    add.u32 %at, %at, %base;
    shl.b32 %n4, %lane, 1;
{warp_of_tile(of, "%item")}\
rows:
    add.u32 %n2, %left, %item;
    setp.ge.u32 %p, %n2, %columns;
    @%p bra written;
    mul.wide.u32 %far, %n2, %outs;
    add.u32 %n2, %col, %lane;
    cvt.u64.u32 %wide, %n2;
    add.u64 %far, %far, %wide;
    shl.b64 %far, %far, 1;
    add.u64 %far, %out, %far;
    mul.lo.u32 %n0, %item, {line};
    shr.u32 %n3, %n0, 3;
    and.b32 %n3, %n3, {line - 16};
    add.u32 %n0, %n0, %at;
"""
    for first in range(0, of.width, TOGETHER):
        place = of.results_at + first // of.unit * box
        yield f"""\
    add.u32 %n1, %n4, {first % of.unit * 2};
    xor.b32 %n1, %n1, %n3;
    add.u32 %n1, %n1, %n0;
    ld.shared.b16 %h0, [%n1+{place}];
    st.global.b16 [%far+{2 * first}], %h0;
"""
    yield f"""\
    add.u32 %item, %item, {of.team};
    setp.lt.u32 %p, %item, {of.rows};
    @%p bra rows;
written:
"""


def _staged(of: Product, kind: str, block: int) -> Iterator[str]:
    """Boxes of some columns follow each other. In lines of 128, 64 or 32 bytes (not of 16) the
    number of 16 bytes is mixed with as many bits of where the line begins, counted in 128 bytes."""
    line = 2 * of.unit
    yield f"""\
{row_of_thread(of, "%n1")}\
    mad.lo.u32 %at, %n1, {line}, %base;
    mad.lo.u32 %at, %group, {of.results_apart}, %at;
    and.b32 %n1, %lane, 3;
    mad.lo.u32 %at, %n1, 4, %at;
    mul.lo.u32 %n0, %n0, {line};
    shr.u32 %n0, %n0, 3;
    and.b32 %n0, %n0, {line - 16};
"""
    begin = of.results_at + block * ROWS * line
    first = block * of.tile.cols // 2
    for unit in range(of.unit // 8):
        yield f"    xor.b32 %n1, %n0, {16 * unit};\n    add.u32 %n1, %n1, %at;\n"
        for box in range(of.width // of.unit):
            for half in (0, 1):
                own = first + 4 * (box * of.unit // 8 + unit) + 2 * half
                place = begin + (box * of.rows + 8 * half) * line
                yield f"    cvt.rn.{kind}x2.f32 %n2, %o{own + 1}, %o{own};\n"
                yield f"    st.shared.b32 [%n1+{place}], %n2;\n"


def added(of: Product, kind: str) -> Iterator[str]:
    """Add up: write this program's part into its memory, then its share of all results."""
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
    yield MEETING
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
    yield f"    bra added;\ndone:\n{MEETING}added:\n{MEETING}    ret;\n}}\n"


def _sum_of_parts(of: Product, kind: str) -> Iterator[str]:
    """Add the parts in their order, so that a result does not depend on who is first."""
    for part in range(of.tile.split):
        into = "g" if part else "f"
        listed = ", ".join(f"%{into}{n}" for n in range(4))
        yield f"    add.u32 %to, %peer{part}, %from;\n"
        yield f"    ld.shared::cluster.v4.f32 {{{listed}}}, [%to];\n"
        if part:
            yield from (f"    add.f32 %f{n}, %f{n}, %g{n};\n" for n in range(4))
    rounded = f"    cvt.rn.{kind}x2.f32 %n5, %f1, %f0;\n    cvt.rn.{kind}x2.f32 %n6, %f3, %f2;\n"
    yield "    add.u64 %far, %out, %wide;\n"
    if of.normed:
        yield from column_norm.normed_part(of, kind, ACTIVATIONS.get(of.norm.activation))
    if of.adds:
        yield from _with_what_is_there(kind, rounded)
    yield rounded + "    st.global.v2.b32 [%far], {%n5, %n6};\n"


def _with_what_is_there(kind: str, rounded: str) -> Iterator[str]:
    """Biases, of the columns from %n4 on; and what lies at %far, to which rounded sums are
    added."""
    yield """\
    mul.wide.u32 %wide, %n4, 2;
    add.u64 %wide, %other, %wide;
    ld.global.v2.b32 {%n5, %n6}, [%wide];
    ld.global.v2.b32 {%n0, %n1}, [%far];
"""
    plus = "".join(f"    add.f32 %f{n}, %f{n}, %g{n};\n" for n in range(4))
    yield unpacked(kind, 0, "%n5", "g") + unpacked(kind, 2, "%n6", "g") + plus
    yield rounded + unpacked(kind, 0, "%n5") + unpacked(kind, 2, "%n6")
    yield unpacked(kind, 0, "%n0", "g") + unpacked(kind, 2, "%n1", "g") + plus
