"""Products in PTX whose sums the programs of a cluster share: 3x3 convolutions and linears.

An implicit GEMM (https://arxiv.org/abs/1410.0759): rows are pixels, which the tensor memory
accelerator brings as a box for each place of the window; a linear is a window of one place over a
picture of one line. One warp fetches, groups of four warps multiply 64 rows each. Where there are
fewer tiles than processors the sum is cut into parts, one for each program of a cluster: each
leaves its part, in fp32, in its own shared memory, and adds its share of the results from the parts
of all, in their order. Where there are more, a program goes on to the next tile, whose operands
come while the results of this one leave. Weights that no kernel before it writes are fetched before
the wait for these. Where the sum goes on over a second pair of operands, their lines are half as
long: a rank of 32 is a step of half the bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

import torch

from strop.ir.dims import symbol
from strop.ir.source import KernelSource
from strop.kernels.gemm import column_norm, scaled_codes
from strop.kernels.gemm.epilogues import (
    NEXT_TILE,
    READ,
    added,
    begun,
    beyond,
    handing,
    met,
    stored,
)
from strop.kernels.gemm.places import coordinates
from strop.kernels.gemm.tile import Product
from strop.kernels.ptx import (
    DEPTH,
    HALF,
    HALF_HIGH,
    HIGH,
    KINDS,
    LINE,
    LINE_BYTES,
    ROWS,
    UNIT,
    advance,
    barriers,
    entry,
    listed,
    product,
    release,
    wait,
)


@lru_cache(maxsize=512)  # 150 calls of a UNet have twenty
def wgmma_gemm(of: Product, dtype: torch.dtype) -> KernelSource:
    """out[b, y, x, o] = sum of w[o, i, j, c] * in[b, t * y + i - r, t * x + j - r, c], where
    r = size // 2 and t = stride; of four windows out[b, y, v, x, u, o] = sum of
    w[v, u, o, i, j, c] * in[b, y + i + v - 1, x + j + u - 1, c]; where it is paired the sum goes on
    over further[b, y, x, c] * v[o, c].

    Params: the input (B, H, W, CI), weights (CO, size * size * CI), further input (B, H, W, R) and
    weights (CO, R) where it is paired, the result (B, H / t, W / t, CO), of codes their scales (B *
    H * W,) and (CO,) in fp32, and biases (CO,), or nothing; all dense, of addresses that are
    multiples of 16 bytes; where columns are normalised their means, variances and factors (CO,)
    before biases, which are the shifts then, and behind them what is added, of the result's shape,
    if anything is; the inputs may have gaps, and so may results that leave by boxes. CI is a
    multiple of 64, of a single place 8, of codes 16, and R of 8; CO of 8, where it is gated twice
    ``width``, where it adds ``width``, and where it has an activation, a norm or scales no less
    than ``width``; a linear of any width has at least ``width``, and one part. Codes of a window
    have one part of the sum. Sums are fp32; where it adds they are rounded before they are added to
    what is there, and again with it. Scalars: tiles of columns,
    boxes right, down and of pictures, CI, tiles at work, and 1 where kernels that may still run
    write the weights, else 0; of a window of several places pictures, lines and columns of a box,
    no more than rows in all, and 2^16 by the latter two, rounded up; of a single place how many
    tiles of rows are gone through together.
    """
    tile, kind = of.tile, KINDS[dtype]
    ends = added(of, kind) if of.has_parts else stored(of, kind)
    text = "".join((*_begin(of), *_fetch(of), *_multiply(of, kind), *ends))
    pixels = (0, 0, 0) if of.has_box else (1, 1, of.rows)
    count, *sides = pixels
    placed = (count, sides[0], 1, sides[1]) if of.has_four_windows else pixels
    results = (*placed, of.unit) if of.leaves_by_boxes else ()
    steps = (1, of.stride, of.stride, 1) if of.stride > 1 else ()
    further = ((*pixels, HALF), (of.width, HALF)) if of.paired else ()
    pairs = ((*pixels, of.line), (of.width, of.line), *further)
    operands = torch.uint8 if of.codes else dtype
    beside = (*((torch.float32,) * 2 if of.codes else ()), *(dtype,) * len(_of_columns(of)))
    return KernelSource(
        name_of(of),
        "ptx",
        text,
        (*(operands,) * len(pairs), dtype, *beside),
        (1,) * _scalars(of),
        (symbol("s5") * tile.split,),
        constants=(("SHARED", of.shared), ("EARLY", 1)),
        num_warps=of.num_warps,
        boxes=(*pairs, results, *((),) * len(beside)),
        steps=steps,
    )


# Registers of a thread that fetches and of one that multiplies, of the 168 that 384 begin with.
FETCHING, MULTIPLYING = 24, 240
TURN = 3  # the first of two barriers, by which groups take turns


def _scalars(of: Product) -> int:
    return 12 if of.has_box else 8


def _of_columns(of: Product) -> tuple[str, ...]:
    """Return the pointers to what each column has of its own, biases or a norm, and to what is
    added behind a norm."""
    return column_norm.pointers(of) if of.normed else ("more",)


def name_of(of: Product) -> str:
    return "wgmma_codes" if of.codes else "wgmma_gemm"


_BEGIN = """\
    .reg .pred %p, %yes, %goes_on, %is_first, %is_handing, %follows;
    .reg .b32 %thread, %warp, %lane, %group, %rank, %id, %total, %stride, %col, %left, %top;
    .reg .b32 %picture, %steps, %first, %step, %base, %bar, %stage, %phase, %at, %k, %channel, %x;
    .reg .b32 %y, %end, %to, %from, %low, %low_a, %low_b, %high, %last, %pictures, %lines;
    .reg .b32 %columns, %outs, %ins, %item, %across, %right, %down, %place, %bytes, %n<8>;
    .reg .b32 %peer<{split}>;
    .reg .b64 %map<{maps}>, %a, %b, %out, %other, %wide, %far;
    .reg .b16 %h<2>;
    .reg .f32 %o<{results}>, %f<4>, %g<4>, %t<3>;
{window}
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
{fewer}{shares}    ld.param.u32 %across, [s0];
    ld.param.u32 %right, [s1];
    ld.param.u32 %down, [s2];
    ld.param.u32 %n0, [s3];
    ld.param.u32 %ins, [s4];
    ld.param.u32 %stride, [s5];
    mul.lo.u32 %total, %across, %right;
    mul.lo.u32 %total, %total, %down;
    mul.lo.u32 %total, %total, %n0;
{windows}    mov.u32 %id, %ctaid.x;
    rem.u32 %rank, %id, {split};
    div.u32 %id, %id, {split};
    // steps of this part
    add.u32 %n0, %ins, {line} - 1;
    div.u32 %n0, %n0, {line};
    mul.lo.u32 %n0, %n0, {places};
{further}    add.u32 %n1, %n0, {split} - 1;
    div.u32 %n1, %n1, {split};
    mul.lo.u32 %first, %rank, %n1;
    min.u32 %first, %first, %n0;
    sub.u32 %steps, %n0, %first;
    min.u32 %steps, %steps, %n1;
{halves}{barriers}"""


def _begin(of: Product) -> Iterator[str]:
    tile = of.tile
    counts = {of.barriers + 8 * n: (1, of.team)[n % 2] for n in range(2 * tile.stages)}
    rank = 5 if of.has_four_windows else 4
    params = {"x": 4, "w": 2} | ({"further": 4, "v": 2} if of.paired else {})
    params |= {"result": rank} if of.leaves_by_boxes else {}
    pointers = (*scaled_codes.POINTERS * of.codes, *_of_columns(of))
    pointers = pointers if of.leaves_by_boxes else ("result", *pointers)
    yield entry(name_of(of), params, pointers, _scalars(of), 32 * of.num_warps, cluster=tile.split)
    yield _BEGIN.format(
        split=tile.split,
        results=of.blocks * tile.cols // 2,
        line=of.line,
        places=of.size**2,
        maps=5 if of.paired else 3,
        further=_FURTHER_STEPS if of.paired else "",
        halves=_HALVES if of.paired else "",
        fewer="".join(_shortened(of)),
        shares=_shares(of),
        windows=_WINDOWS if of.has_four_windows else "",
        window=_more_registers(of),
        barriers=barriers(counts),
    )


# Registers of the second pair: which map is read from, where it begins in the sum, how far the box
# lies behind that, and the step that is the first of half the depth.
_PAIR = """\
    .reg .pred %is_further;
    .reg .b64 %which;
    .reg .b32 %edge, %depth, %halved;
"""
_FURTHER_STEPS = f"""\
    mov.u32 %halved, %n0;
    mul.lo.u32 %edge, %n0, {LINE};
    ld.param.u32 %n1, [v_size1];
    add.u32 %n1, %n1, {HALF} - 1;
    div.u32 %n1, %n1, {HALF};
    add.u32 %n0, %n0, %n1;
"""
_HALVES = "    sub.u32 %halved, %halved, %first;\n"


def _more_registers(of: Product) -> str:
    if of.has_four_windows:
        return "    .reg .b32 %window;\n"
    if of.codes:
        return scaled_codes.registers(of)
    if of.normed:
        return column_norm.REGISTERS
    return _PAIR if of.paired else ""


_WINDOWS = "    shl.b32 %total, %total, 2;\n"


def _shares(of: Product) -> str:
    """Columns of the result, of which there are several shares of the weights' rows."""
    bits = 2 if of.has_four_windows else int(of.gated)
    return f"    shr.u32 %outs, %outs, {bits};\n" if bits else ""


def _shortened(of: Product) -> Iterator[str]:
    """Lines and columns of the result, where the input has more."""
    for size in ("%lines", "%columns") if of.stride > 1 else ():
        yield f"    add.u32 {size}, {size}, {of.stride - 1};\n"
        yield f"    div.u32 {size}, {size}, {of.stride};\n"


def _first_place(of: Product) -> str:
    """Compute the place of step %first: places of the window in their order, all channels of one
    before the next."""
    if of.paired:  # all lies along one line
        return _FIRST_OF_PAIRS
    around, stride = of.size // 2, of.stride
    further = f"    mul.lo.u32 %left, %left, {stride};\n    mul.lo.u32 %top, %top, {stride};\n"
    moved = _MOVED if of.has_four_windows else ""
    inside = "    mov.u32 %inside, 0;\n" if of.scales_pixels else ""
    return f"""\
    add.u32 %n1, %ins, {of.line} - 1;
    div.u32 %n1, %n1, {of.line};
    div.u32 %n0, %first, %n1;
    rem.u32 %channel, %first, %n1;
    mul.lo.u32 %channel, %channel, {of.line};
    rem.u32 %x, %n0, {of.size};
    div.u32 %y, %n0, {of.size};
{further if stride > 1 else ""}{moved}\
    sub.u32 %left, %left, {around};
    add.u32 %end, %left, {of.size};
    add.u32 %x, %x, %left;
    add.u32 %y, %y, %top;
    sub.u32 %y, %y, {around};
    mul.lo.u32 %k, %first, {of.line};
{inside}"""


_FIRST_OF_PAIRS = f"""\
    mul.lo.u32 %channel, %first, {LINE};
    max.s32 %n0, %halved, 0;
    sub.u32 %n0, %n0, %halved;
    mul.lo.u32 %n0, %n0, {LINE - HALF};
    sub.u32 %channel, %channel, %n0;
    mov.u32 %k, %channel;
"""
_MOVED = """\
    and.b32 %n2, %window, 1;
    add.u32 %left, %left, %n2;
    shr.u32 %n2, %window, 1;
    add.u32 %top, %top, %n2;
"""


def _stage_bytes(of: Product) -> str:
    """Compute the bytes of a box, whose sizes are in %n1 to %n3, and of weights."""
    return f"""\
    mul.lo.u32 %bytes, %n1, %n2;
    mad.lo.u32 %bytes, %bytes, %n3, {of.tile.cols};
    mul.lo.u32 %bytes, %bytes, {LINE_BYTES};
"""


def _at_stage(of: Product) -> str:
    return f"""\
    mad.lo.u32 %at, %stage, {of.stage}, %base;
    mad.lo.u32 %bar, %stage, 16, %base;
    add.u32 %bar, %bar, {of.barriers};
"""


def _behind(place: str, first: int) -> str:
    """Compute %which map holds a place of the sum, of this one and the one of the second pair, and
    its %depth there."""
    return f"""\
    setp.ge.u32 %is_further, {place}, %edge;
    selp.b64 %which, %map{first + 3}, %map{first}, %is_further;
    sub.u32 %depth, {place}, %edge;
    selp.b32 %depth, %depth, {place}, %is_further;
"""


def _onward(of: Product, place: str) -> str:
    """Go on to the next step's channels: to half as many within the second pair."""
    if of.scales_pixels:
        return scaled_codes.onward(of, place)
    if not of.paired:
        return f"    add.u32 {place}, {place}, {of.line};\n"
    return f"""\
    selp.b32 %depth, {HALF}, {LINE}, %is_further;
    add.u32 {place}, {place}, %depth;
"""


def _expect(of: Product) -> str:
    """Say how many bytes come to stage %bar of step %k."""
    size = "%bytes" if of.has_box else of.stage
    told = f"    mbarrier.arrive.expect_tx.shared::cta.b64 _, [%bar], {size};\n"
    if not of.paired:
        return told
    return f"""\
    setp.ge.u32 %is_further, %k, %edge;
    selp.b32 %depth, {of.stage * HALF // LINE}, {of.stage}, %is_further;
    mbarrier.arrive.expect_tx.shared::cta.b64 _, [%bar], %depth;
"""


def _box(rank: int, to: str, place: str) -> str:
    """Fetch a box by a map and coordinates."""
    op = f"cp.async.bulk.tensor.{rank}d.shared::cluster.global.mbarrier::complete_tx::bytes"
    return f"    {op} [{to}], [{place}], [%bar];\n"


def _weights(of: Product) -> Iterator[str]:
    """Fetch the weights of step %k into stage %at; those of gates behind those of values."""
    place, lines = "%map1, {%k, %n5}", of.rows * LINE_BYTES
    if of.paired:
        yield _behind("%k", 1)
        place = "%which, {%depth, %n5}"
    for n in range(2 if of.gated else 1):
        behind = n * of.width * LINE_BYTES
        yield f"    add.u32 %to, %at, {lines + behind};\n"
        if of.paired and behind:
            yield f"    @%is_further add.u32 %to, %at, {lines + behind * HALF // LINE};\n"
        share = "%window" if of.has_four_windows else n
        yield f"    mad.lo.u32 %n5, %outs, {share}, %col;\n"
        yield _box(2, "%to", place)
    yield _onward(of, "%k")


_NEXT_PIXELS = """\
    add.u32 %channel, %channel, {line};
    setp.ge.u32 %p, %channel, %ins;
    @%p mov.u32 %channel, 0;
    @%p add.u32 %x, %x, 1;
    setp.eq.and.u32 %p, %x, %end, %p;
    @%p mov.u32 %x, %left;
    @%p add.u32 %y, %y, 1;
"""


def _pixels(of: Product) -> str:
    """Fetch the box of this step's pixels, or the rows of either pair."""
    if not of.paired:
        place = "%map0, {%channel, %x, %y, %picture}"
        return _box(4, "%at", place) + _NEXT_PIXELS.format(line=of.line)
    place = "%which, {%depth, %left, %top, %picture}"
    return _behind("%channel", 0) + _box(4, "%at", place) + _onward(of, "%channel")


_MAPS_OF_PAIRS = """\
    mov.b64 %wide, further;
    cvta.param.u64 %map3, %wide;
    mov.b64 %wide, v;
    cvta.param.u64 %map4, %wide;
"""


def _registers(of: Product, op: str, count: int) -> str:
    return f"    setmaxnreg.{op}.sync.aligned.u32 {count};\n" if of.moves_registers else ""


def _fetch(of: Product) -> Iterator[str]:
    """Fetch by one thread. A stage that was never used is free: its barrier is behind phase 1."""
    expect, weights, pixels = _expect(of), "".join(_weights(of)), _pixels(of)
    onward = advance(of.tile.stages, "%stage", "%phase")
    yield f"""\
    setp.lt.u32 %p, %warp, {4 * of.tile.groups};
    @%p bra multiply;
{_registers(of, "dec", FETCHING)}\
    setp.ne.u32 %p, %thread, {of.threads};
    @%p bra done;
    mov.b64 %wide, x;
    cvta.param.u64 %map0, %wide;
    mov.b64 %wide, w;
    cvta.param.u64 %map1, %wide;
{_MAPS_OF_PAIRS if of.paired else ""}"""
    yield coordinates(of) + (_stage_bytes(of) if of.has_box else "") + _first_place(of)
    # what does not depend on the kernel before this one: weights for all stages
    yield """\
    ld.param.u32 %n0, [s6];
    setp.eq.u32 %p, %n0, 0;
    @%p bra steady;
    griddepcontrol.wait;
steady:
"""
    yield f"    min.u32 %n6, %steps, {of.tile.stages};\n    mov.u32 %stage, 0;\nearly:\n"
    yield _at_stage(of) + expect + weights
    yield "    add.u32 %stage, %stage, 1;\n    setp.lt.u32 %p, %stage, %n6;\n    @%p bra early;\n"
    yield "    griddepcontrol.wait;\n    mov.u32 %step, 0;\n    mov.u32 %stage, 0;\n"
    yield ("    mov.u32 %phase, 1;\nfollow:\n" + _at_stage(of) + pixels + onward)
    yield "    add.u32 %step, %step, 1;\n    setp.lt.u32 %p, %step, %n6;\n    @%p bra follow;\n"
    yield "    setp.ge.u32 %p, %step, %steps;\n    @%p bra fetched;\nfetch:\n" + _at_stage(of)
    yield wait("free", "%bar+8", "%phase")
    yield expect + pixels + weights + onward
    yield "    add.u32 %step, %step, 1;\n    setp.lt.u32 %p, %step, %steps;\n    @%p bra fetch;\n"
    yield "fetched:\n"
    if of.tile.keeps_on:
        yield NEXT_TILE + "    @!%p bra done;\n"
        yield coordinates(of) + _first_place(of) + "    mov.u32 %step, 0;\n    bra fetch;\n"
    else:
        yield "    bra done;\n"


_COMMIT = "    wgmma.commit_group.sync.aligned;\n"


def _step(of: Product, kind: str) -> Iterator[str]:
    """Multiply what a stage holds. Each way ends its own group of products: the assembler gives
    products that end elsewhere groups of their own, for which the next step would wait."""
    if of.paired:
        yield "    setp.ge.s32 %p, %step, %halved;\n    @%p bra half;\n"
        yield f"    mov.u32 %high, {HIGH};\n"
    yield from (*_products(of, kind, LINE), _COMMIT)
    if of.paired:
        group = 0 if of.tile.apart else ROWS * 2 * HALF // UNIT
        yield f"""\
    bra multiplied;
half:
    mov.u32 %high, {HALF_HIGH};
    mad.lo.u32 %from, %group, {group}, %low;
"""
        yield from (*_products(of, kind, HALF), _COMMIT, "multiplied:\n")


def _products(of: Product, kind: str, depth: int) -> Iterator[str]:
    """Multiply lines of so many elements."""
    cols, line = of.tile.cols, 2 * depth // UNIT
    for n in range(depth // DEPTH):
        yield f"    add.u32 %low_b, %low, {of.rows * LINE_BYTES // UNIT + 2 * n};\n"
        yield "    mov.b64 %b, {%low_b, %high};\n"
        for block in range(of.blocks):
            yield f"    add.u32 %low_a, %from, {block * ROWS * line + 2 * n};\n"
            yield "    mov.b64 %a, {%low_a, %high};\n"
            yield product(cols, kind, listed("o", cols // 2, block * cols // 2), "%a", True)


def _apart(of: Product) -> str:
    """The second group begins with the second tile, whose steps come behind those of the first."""
    if not of.tile.apart:
        return ""
    return f"""\
    setp.ne.u32 %follows, %group, 0;
    @!%follows bra tile;
    add.u32 %id, %id, %stride;
    setp.ge.u32 %p, %id, %total;
    @%p bra done;
{beyond(of)}"""


def _turn(of: Product) -> str:
    """Steps of this tile begin when the other group has seen all of the tile before: barriers tell
    two rounds of stages apart, not three."""
    if not of.tile.apart:
        return ""
    return f"""\
    add.u32 %n0, %group, {TURN};
    @%follows bar.sync %n0, {of.threads};
    setp.eq.u32 %follows, 0, 0;
"""


def _turned(of: Product) -> str:
    """It is the other group's turn, if there is a tile for it."""
    if not of.tile.apart:
        return ""
    return f"""\
    add.u32 %n0, %id, %stride;
    setp.lt.u32 %p, %n0, %total;
    sub.u32 %n0, {TURN + 1}, %group;
    @%p bar.arrive %n0, {of.threads};
"""


def _multiply(of: Product, kind: str) -> Iterator[str]:
    """A stage is free when the products of the next one are on their way."""
    out = handing(of) if of.leaves_by_boxes else "    ld.param.u64 %out, [result];\n"
    released = release(of.barriers, "%last", "%n0")
    yield f"""\
multiply:
{_registers(of, "inc", MULTIPLYING)}\
    griddepcontrol.wait;
{out}    ld.param.u64 %other, [more];
    setp.eq.u32 %yes, 0, 0;
    setp.eq.u32 %is_first, %lane, 0;
    shr.u32 %group, %warp, 2;
    mov.u32 %high, {HIGH};
    mov.u32 %stage, 0;
    mov.u32 %phase, 0;
{scaled_codes.begun(of) if of.codes else ""}{_apart(of)}tile:
{_turn(of)}"""
    yield from begun(of, kind, coordinates(of))
    yield "    mov.u32 %step, 0;\nnext:\n" + _at_stage(of)
    yield wait("come", "%bar", "%phase")
    yield f"""\
    shr.u32 %low, %at, 4;
    or.b32 %low, %low, {1 << 16};
    mad.lo.u32 %from, %group, {0 if of.tile.apart else ROWS * LINE_BYTES // UNIT}, %low;
    setp.ne.u32 %goes_on, %step, 0;
    wgmma.fence.sync.aligned;
"""
    yield from scaled_codes.products(of) if of.codes else _step(of, kind)
    if of.scales_pixels:
        yield scaled_codes.scales_of_place(of)
    elif not of.begins_with_biases:  # where results go is worked out while the first products are
        brought = "".join(scaled_codes.brought(of)) if of.codes else ""
        brought += "".join(column_norm.brought(of, kind)) if of.normed else ""
        yield f"    @%goes_on bra onward;\n{coordinates(of)}{brought}onward:\n"
    if of.codes:
        yield from scaled_codes.summed_up(of)
    else:
        yield "    wgmma.wait_group.sync.aligned 1;\n    @!%goes_on bra kept;\n"
        yield released + "kept:\n    mov.u32 %last, %stage;\n"
    yield advance(of.tile.stages, "%stage", "%phase")
    yield "    add.u32 %step, %step, 1;\n    setp.lt.u32 %p, %step, %steps;\n    @%p bra next;\n"
    yield _turned(of)
    if not of.codes:
        yield "    wgmma.wait_group.sync.aligned 0;\n" + released * of.tile.keeps_on
    if of.tile.keeps_on and of.leaves_by_boxes:  # results of the tile before have left
        yield READ
    yield scaled_codes.COME if of.codes else ""
    # results go where the operands of all groups were, or those of the tile before
    yield met(of)
