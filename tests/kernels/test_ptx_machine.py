"""The machine that runs PTX on a CPU: right kernels run, none that lacks an instruction does."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from strop.ir.dims import const
from strop.ir.source import KernelSource
from tests.kernels.ptx_machine import PtxError, launch

F16, BF16, F32, I32 = torch.float16, torch.bfloat16, torch.float32, torch.int32
REGISTERS = """
    .reg .pred %p, %q, %r;
    .reg .b16 %h<8>;
    .reg .b32 %t, %lane, %warp, %base, %x<16>, %low<2>, %high;
    .reg .b64 %out, %in, %wide, %map<2>, %a, %b, %d<4>;
    .reg .f32 %f<16>, %o<128>;
    mov.u32 %t, %tid.x;
    and.b32 %lane, %t, 31;
    shr.u32 %warp, %t, 5;
    mov.u32 %base, memory;
    ld.param.u64 %out, [out];
    mul.wide.u32 %wide, %t, 4;
"""


def kernel(
    body: str,
    *,
    threads: int = 32,
    cluster: int = 1,
    shared: int = 0,
    programs: int = 1,
    params: Sequence[torch.dtype] = (),
    boxes: Sequence[tuple[int, ...]] = (),
    out: torch.dtype = I32,
) -> KernelSource:
    """Params: p0, p1, ..., each with a box or none, then ``out``. %wide: a word for each thread."""
    listed, boxes = list[str](), (*boxes, *[()] * (len(params) + 1 - len(boxes)))
    for n, box in enumerate(boxes[:-1]):
        listed.append(f".param .align 64 .b8 p{n}[128]" if box else f".param .u64 p{n}")
        listed += [f".param .u32 p{n}_size{i}" for i in range(len(box))]
        listed += [f".param .u64 p{n}_stride{i}" for i in range(len(box))]
    listed += [".param .u64 out", ".param .u64 unused0", ".param .u64 unused1"]
    text = f"""\
.version 8.3
.target sm_90a
.address_size 64
.extern .shared .align 1024 .b8 memory[];
.visible .entry kernel({", ".join(listed)})
.reqntid {threads}
.reqnctapercluster {cluster}
{{{REGISTERS}{body}
    ret;
}}
"""
    return KernelSource(
        "kernel",
        "ptx",
        text,
        (*params, out),
        (),
        (const(programs),),
        constants=(("SHARED", shared),),
        num_warps=threads // 32,
        boxes=boxes,
    )


def run(source: KernelSource, out: Tensor, *tensors: Tensor, seed: int = 0) -> Tensor:
    launch(source, (*tensors, out), (), seed=seed)
    return out


def words(count: int = 32) -> Tensor:
    return torch.full((count,), -1, dtype=I32)


STORED = "add.u64 %out, %out, %wide;\nst.global.b32 [%out], %x0;\n"
LOADED = """
    ld.param.u64 %in, [p0];
    add.u64 %in, %in, %wide;
    ld.global.b32 %x1, [%in];
    ld.global.b32 %x2, [%in+128];
    mov.b32 %f1, %x1;
    mov.b32 %f2, %x2;
    mov.b32 {%h1, %h2}, %x1;
"""


def integers() -> Tensor:
    torch.manual_seed(0)
    found = torch.randint(-(2**31), 2**31 - 1, (64,), dtype=torch.int64)
    found[32:40], found[0], found[1] = torch.arange(1, 9), -1, 7
    found[40:44] = torch.tensor([31, 32, 33, 40])
    return found.to(I32)


def u32(x: int) -> int:
    return x & 0xFFFFFFFF


ON_INTEGERS: dict[str, Callable[[int, int], int]] = {
    "add.u32 %x0, %x1, %x2;": lambda a, b: a + b,
    "sub.s32 %x0, %x1, %x2;": lambda a, b: a - b,
    "mul.lo.u32 %x0, %x1, %x2;": lambda a, b: a * b,
    "mad.lo.s32 %x0, %x1, -80, %x2;": lambda a, b: a * -80 + b,
    "mul.wide.s32 %a, %x1, %x2;\n shr.u64 %a, %a, 32;\n cvt.u32.u64 %x0, %a;": lambda a, b: (
        a * b >> 32
    ),
    "mul.wide.u32 %a, %x1, %x2;\n mov.b64 {%x3, %x0}, %a;": lambda a, b: u32(a) * u32(b) >> 32,
    "div.u32 %x0, %x1, %x2;": lambda a, b: u32(a) // u32(b),
    "rem.u32 %x0, %x1, %x2;": lambda a, b: u32(a) % u32(b),
    "div.s32 %x0, %x1, %x2;": lambda a, b: math.trunc(a / b),
    "rem.s32 %x0, %x1, %x2;": lambda a, b: int(math.fmod(a, b)),
    "min.s32 %x0, %x1, %x2;": min,
    "max.u32 %x0, %x1, %x2;": lambda a, b: max(u32(a), u32(b)),
    "and.b32 %x0, %x1, 160 - 1;": lambda a, b: a & 159,
    "or.b32 %x0, %x1, 0x10000;": lambda a, b: a | 1 << 16,
    "xor.b32 %x0, %x1, %x2;": lambda a, b: a ^ b,
    "shl.b32 %x0, %x1, %x2;": lambda a, b: a << min(u32(b), 32),
    "shr.u32 %x0, %x1, %x2;": lambda a, b: u32(a) >> min(u32(b), 32),
    "shr.s32 %x0, %x1, %x2;": lambda a, b: a >> min(u32(b), 31),
    "setp.lt.u32 %p, %x1, %x2;\n selp.b32 %x0, 5, %x2, %p;": lambda a, b: (
        5 if u32(a) < u32(b) else b
    ),
    (
        "setp.ge.s32 %q, %x1, 0;\n setp.lt.and.s32 %p, %x1, %x2, !%q;\n selp.b32 %x0, 1, 0, %p;"
    ): lambda a, b: a < 0 and a < b,
    (
        "mov.u32 %x0, 1;\n setp.lt.s32 %p, %x1, 0;\n @%p bra less;\n add.u32 %x0, %x0, %x2;\nless:"
    ): lambda a, b: 1 if a < 0 else 1 + b,
    "mov.u32 %x0, %x1;\n setp.gt.s32 %p, %x2, 0;\n @!%p neg.s32 %x0, %x1;": lambda a, b: (
        a if b > 0 else -a
    ),
    "cvt.u16.u32 %h0, %x1;\n mov.b32 %x0, {%h0, %h2};": lambda a, b: a,
    "cvt.u16.u32 %h0, %x1;\n cvt.u32.u16 %x0, %h0;": lambda a, b: a & 0xFFFF,
    "cvt.rn.f32.s32 %f0, %x1;\n cvt.rzi.s32.f32 %x0, %f0;": lambda a, b: min(
        int(np.float32(a)), 2**31 - 1
    ),
}


@pytest.mark.parametrize("text", ON_INTEGERS)
def test_integers(text: str) -> None:
    given = integers()
    found = run(kernel(LOADED + text + STORED, params=(I32,)), words(), given)
    a, b = given.view(2, 32).tolist()
    wanted = [u32(ON_INTEGERS[text](x, y)) for x, y in zip(a, b, strict=True)]
    assert [u32(x) for x in found.tolist()] == wanted


def halves(dtype: torch.dtype) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda a, b: torch.stack((b, a), -1).to(dtype).view(I32).flatten()


ON_FLOATS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sub.f32 %f0, %f1, %f2;": lambda a, b: a - b,
    "mul.f32 %f0, %f1, 0fC0000000;": lambda a, b: a * -2,
    "fma.rn.f32 %f0, %f1, %f2, %f1;": lambda a, b: (a.double() * b + a).float(),
    "max.f32 %f0, %f1, %f2;": torch.fmax,
    "max.NaN.f32 %f0, %f1, %f2;": torch.maximum,
    "min.f32 %f0, %f1, %f2;": torch.fmin,
    "neg.f32 %f0, %f1;": lambda a, b: -a,
    "abs.f32 %f0, %f1;": lambda a, b: a.abs(),
    "copysign.f32 %f0, %f1, %f2;": lambda a, b: torch.copysign(b, a),
    "rcp.rn.f32 %f0, %f1;": lambda a, b: 1 / a,
    "ex2.approx.ftz.f32 %f0, %f1;": lambda a, b: a.exp2(),
    "cvt.rn.f16x2.f32 %f0, %f1, %f2;": halves(F16),
    "cvt.rn.bf16x2.f32 %f0, %f1, %f2;": halves(BF16),
    "cvt.rn.f16.f32 %h0, %f1;\n cvt.f32.f16 %f0, %h0;": lambda a, b: a.half().float(),
    "cvt.rn.bf16.f32 %h0, %f1;\n cvt.f32.bf16 %f0, %h0;": lambda a, b: a.bfloat16().float(),
    "setp.lt.f32 %p, %f1, %f2;\n selp.f32 %f0, %f1, %f2, %p;": lambda a, b: torch.where(
        a < b, a, b
    ),
    "setp.ltu.f32 %p, %f1, %f2;\n selp.f32 %f0, %f1, %f2, %p;": lambda a, b: torch.where(
        (a < b) | a.isnan() | b.isnan(), a, b
    ),
    "setp.neu.f32 %p|%q, %f1, %f1;\n selp.f32 %f0, %f1, %f2, %q;": lambda a, b: torch.where(
        a.isnan(), b, a
    ),
}


@pytest.mark.parametrize("text", ON_FLOATS)
def test_floats(text: str) -> None:
    torch.manual_seed(0)
    given = torch.randn(64) * 3
    given[:3], given[33], given[4] = torch.tensor([float("nan"), 1.0, float("inf")]), math.nan, 0.0
    found = run(
        kernel(LOADED + text + "mov.b32 %x0, %f0;\n" + STORED, params=(F32,)), words(), given
    )
    wanted = ON_FLOATS[text](*given.view(2, 32))
    wanted = wanted if wanted.dtype == I32 else wanted.view(I32)
    numbers, right = found.view(F32), wanted.view(F32)
    if "16x2" in text:  # NaN of either half may have other bits
        half = BF16 if "bf16" in text else F16
        numbers, right = found.view(half).float(), wanted.view(half).float()
    torch.testing.assert_close(numbers, right, equal_nan=True, rtol=1e-6 * ("ex2" in text), atol=0)


def test_lanes_exchange() -> None:
    """Of each eight lanes the largest number, by rounds, then lane 5's; a vote; an election."""
    rounds = "".join(
        f"shfl.sync.bfly.b32 %x2, %x0, {n}, 31, -1;\nmax.u32 %x0, %x0, %x2;\n" for n in (1, 2, 4)
    )
    found = run(kernel("mov.u32 %x0, %lane;\n" + rounds + STORED), words())
    assert found.tolist() == [n | 7 for n in range(32)]
    found = run(kernel("shfl.sync.idx.b32 %x0, %lane, 5, 31, -1;\n" + STORED), words())
    assert found.tolist() == [5] * 32
    found = run(kernel("shfl.sync.down.b32 %x0, %lane, 3, 31, -1;\n" + STORED), words())
    assert found.tolist() == [n + 3 if n < 29 else n for n in range(32)]
    vote = """
    setp.eq.u32 %p, %lane, 9;
    vote.sync.any.pred %q, %p, -1;
    vote.sync.all.pred %r, %p, -1;
    setp.eq.and.u32 %q, 0, 0, %q;
    selp.b32 %x0, 1, 0, %q;
    @%r mov.u32 %x0, 7;
    vote.sync.ballot.b32 %x1, %p, -1;
    add.u32 %x0, %x0, %x1;
    elect.sync _|%p, -1;
    @%p mov.u32 %x0, 0;
"""
    assert run(kernel(vote + STORED), words()).tolist() == [0] + [513] * 31


# One thread brings a box of p0 to the beginning of memory; all wait for it.
FETCH = """
    mov.b64 %a, p0;
    cvta.param.u64 %map0, %a;
    add.u32 %x9, %base, {at};
    setp.ne.u32 %p, %t, 0;
    @%p bra begun;
    mbarrier.init.shared::cta.b64 [%x9], 1;
    fence.mbarrier_init.release.cluster;
    mbarrier.arrive.expect_tx.shared::cta.b64 _, [%x9], {bytes};
    mov.u32 %x0, {col};
    mov.u32 %x1, {row};
    cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes \
[%base], [%map0, {{%x0, %x1}}], [%x9];
begun:
    bar.sync 0;
come:
    mbarrier.try_wait.parity.shared::cta.b64 %p, [%x9], 0;
    @!%p bra come;
"""
COPIED = """
    mul.lo.u32 %x1, %t, 16;
    add.u32 %x2, %x1, %base;
    cvt.u64.u32 %wide, %x1;
    add.u64 %out, %out, %wide;
    ld.shared.v4.b32 {%x4, %x5, %x6, %x7}, [%x2];
    st.global.v4.b32 [%out], {%x4, %x5, %x6, %x7};
"""


@pytest.mark.parametrize(("row", "col"), [(0, 0), (3, 8), (-2, -8), (5, 40), (90, 0)])
def test_boxes_are_mixed_and_zero_outside(row: int, col: int) -> None:
    """16 lines of 64: chunk c of line n of 128 bytes lies at chunk c ^ n % 8."""
    x = torch.arange(1, 12 * 72 + 1, dtype=torch.int16).view(F16).view(12, 72)
    body = FETCH.format(at=2048, bytes=2048, row=row, col=col) + COPIED
    source = kernel(body, threads=128, shared=2056, params=(F16,), boxes=((16, 64),), out=F16)
    found = run(source, torch.zeros(16, 64, dtype=F16), x, seed=row + 2).view(torch.int16)
    inside = F.pad(x.view(torch.int16).int(), (64, 64, 200, 200))
    wanted = inside[row + 200 : row + 216, col + 64 : col + 128].short()
    for line in range(16):
        for n in range(8):
            place = 8 * (n ^ line % 8)
            assert torch.equal(found[line, place : place + 8], wanted[line, 8 * n : 8 * n + 8])


def test_boxes_on_their_way_out() -> None:
    """Back to another place of the tensor's copy, parts of it outside; all in time."""
    again = """
    setp.ne.u32 %p, %t, 0;
    @%p bra end;
    mov.b64 %a, p1;
    cvta.param.u64 %map1, %a;
    mov.u32 %x0, 8;
    mov.u32 %x1, -3;
    cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%map1, {%x0, %x1}], [%base];
    cp.async.bulk.commit_group;
    cp.async.bulk.wait_group.read 0;
end:
"""
    body = FETCH.format(at=2048, bytes=2048, row=1, col=0) + again
    boxes = ((16, 64), (16, 64))
    source = kernel(body, threads=32, shared=2056, params=(F16, F16), boxes=boxes)
    x, y = torch.randn(20, 64).half(), torch.zeros(20, 64).half()
    for seed in range(3):
        run(source, words(), x, y.zero_(), seed=seed)
        assert torch.equal(y[:13, 8:], x[4:17, :56])
        assert not y[13:].any()
        assert not y[:, :8].any()
    refused(
        replace(source, text=source.text.replace("cp.async.bulk.wait_group.read 0;", "")),
        words(),
        x,
        y,
        match="bulk stores may read",
    )
    place = "cp.async.bulk.commit"
    touched = source.text.replace(place, "st.shared.b32 [%base], %x0;\n" + place)
    refused(replace(source, text=touched), words(), x, y, match="bulk store may still read")
    early = source.text.replace("mov.b64 %a, p1;", "mov.b64 %a, p1;\nst.shared.b32 [%base], %t;")
    refused(replace(source, text=early), words(), x, y, match=r"fence\.proxy\.async")
    run(
        replace(source, text=early.replace("%t;\n", "%t;\nfence.proxy.async.shared::cta;\n")),
        words(),
        x,
        y,
    )


def refused(source: KernelSource, out: Tensor, *tensors: Tensor, match: str) -> None:
    for seed in range(4):
        with pytest.raises(PtxError, match=match):
            run(source, out, *tensors, seed=seed)


WAIT = "wgmma.wait_group.sync.aligned 0;\n"
COMMIT = "wgmma.commit_group.sync.aligned;\n"
FENCE = "wgmma.fence.sync.aligned;\n"


def fragments(step: int) -> str:
    """16 columns of a, as a product has them: two neighbours, of two rows, then eight further on;
    chunks of 16 bytes are where lines are mixed to."""
    return "".join(
        f"""
    shr.u32 %x2, %lane, 2;
    mad.lo.u32 %x2, %warp, 16, %x2;
    add.u32 %x2, %x2, {8 * (i % 2)};
    and.b32 %x3, %x2, 7;
    xor.b32 %x3, %x3, {2 * step + i // 2};
    mul.lo.u32 %x2, %x2, 128;
    mad.lo.u32 %x2, %x3, 16, %x2;
    and.b32 %x3, %lane, 3;
    mad.lo.u32 %x2, %x3, 4, %x2;
    add.u32 %x2, %x2, %base;
    ld.shared.b32 %x3, [%x2];
    mov.b32 %o{100 + 4 * step + i}, %x3;
"""
        for i in range(4)
    )


def product(cols: int, kind: str, is_across: bool, in_registers: bool) -> str:
    """out (64, cols) in fp32 = a (64, 64) @ b: of (cols, 64), or across it, in lines of 64."""
    parts = -(-cols // 64) if is_across else 1
    rows = 64 if is_across else cols
    b_at, high = 8192, 64 | 1 << 30
    end = b_at + parts * rows * 128
    text = FETCH.format(at=end, bytes=8192 + parts * rows * 128, row=0, col=0)
    copies = "mov.b64 %a, p1;\n cvta.param.u64 %map1, %a;\n mov.u32 %x1, 0;\n"
    for n in range(parts):
        copies += f"mov.u32 %x0, {64 * n};\n add.u32 %x2, %base, {b_at + n * rows * 128};\n"
        copies += (
            "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes "
            "[%x2], [%map1, {%x0, %x1}], [%x9];\n"
        )
    text = text.replace("begun:", copies + "begun:")
    sums = "{" + ", ".join(f"%o{n}" for n in range(cols // 2)) + "}"
    text += f"mov.u32 %high, {high};\n setp.eq.u32 %p, 0, 0;\n setp.ne.u32 %q, 0, 0;\n"
    text += "".join(map(fragments, range(4))) if in_registers else ""
    text += FENCE
    for n in range(4):
        step = n * 16 * 128 if is_across else 32 * n
        leading = rows * 128 // 16 if is_across else 1
        a = (
            "{" + ", ".join(f"%o{100 + 4 * n + i}" for i in range(4)) + "}"
            if in_registers
            else "%a"
        )
        text += f"add.u32 %x0, %base, {32 * n};\n shr.u32 %low0, %x0, 4;\n"
        text += f"add.u32 %x0, %base, {b_at + step};\n shr.u32 %low1, %x0, 4;\n"
        text += f"or.b32 %low1, %low1, {leading << 16};\n"
        text += "mov.b64 %a, {%low0, %high};\n mov.b64 %b, {%low1, %high};\n"
        flags = "1, 1, " + ("" if in_registers else "0, ") + str(int(is_across))
        text += (
            f"wgmma.mma_async.sync.aligned.m64n{cols}k16.f32.{kind}.{kind} {sums}, {a}, %b, "
            f"{'%p' if n else '%q'}, {flags};\n"
        )
    text += COMMIT + WAIT
    text += "shr.u32 %x0, %lane, 2;\n mad.lo.u32 %x0, %warp, 16, %x0;\n and.b32 %x1, %lane, 3;\n"
    text += f"mul.lo.u32 %x0, %x0, {4 * cols};\n mad.lo.u32 %x0, %x1, 8, %x0;\n"
    text += "cvt.u64.u32 %wide, %x0;\n add.u64 %out, %out, %wide;\n"
    for n in range(0, cols // 2, 2):
        place = n // 4 * 32 + n // 2 % 2 * 8 * 4 * cols
        text += f"st.global.v2.f32 [%out+{place}], {{%o{n}, %o{n + 1}}};\n"
    return text


@pytest.mark.parametrize("in_registers", [False, True])
@pytest.mark.parametrize(
    ("cols", "kind", "is_across"),
    [
        (8, "f16", False),
        (80, "bf16", False),
        (64, "bf16", True),
        (40, "f16", True),
        (120, "f16", True),
        (160, "f16", False),
    ],
)
def test_products(cols: int, kind: str, is_across: bool, in_registers: bool) -> None:
    text = product(cols, kind, is_across, in_registers)
    dtype = {"f16": F16, "bf16": BF16}[kind]
    torch.manual_seed(cols)
    a = torch.randn(64, 64).to(dtype)
    b = torch.randn(64, cols).to(dtype) if is_across else torch.randn(cols, 64).to(dtype)
    rows = 64 if is_across else cols
    shared = 8192 + (-(-cols // 64) if is_across else 1) * rows * 128 + 8
    source = kernel(
        text,
        threads=128,
        shared=shared,
        params=(dtype, dtype),
        boxes=((64, 64), (rows, 64)),
        out=F32,
    )
    found = run(source, torch.full((64, cols), math.nan), a, b, seed=cols)
    wanted = a.double() @ (b.double() if is_across else b.double().T)
    torch.testing.assert_close(found.double(), wanted, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize(
    ("before", "after", "match"),
    [
        (WAIT, f"mov.f32 %o0, 0f00000000;\n{WAIT}", "%o0 belongs to a product"),
        (WAIT, f"add.f32 %f0, %o3, %o3;\n{WAIT}", "%o3 belongs to a product"),
        (WAIT, f"mov.b32 %x0, %o100;\n{WAIT}", "%o100 belongs to a product"),
        (COMMIT, "", "belongs to a product"),
        (FENCE, f"{FENCE} mov.f32 %o0, 0f00000000;\n", "no wgmma.fence between an access to %o0"),
        (FENCE, "", "no wgmma.fence before"),
        ("%q, 1, 1", "%p, 1, 1", "%o0 was not written"),
    ],
)
def test_registers_of_products(before: str, after: str, match: str) -> None:
    text = product(40, "f16", False, True)
    assert before in text
    source = kernel(
        text.replace(before, after),
        threads=128,
        shared=8192 + 40 * 128 + 8,
        params=(F16, F16),
        boxes=((64, 64), (40, 64)),
        out=F32,
    )
    a, b = torch.randn(64, 64).half(), torch.randn(40, 64).half()
    refused(source, torch.zeros(64, 40), a, b, match=match)


ALTERNATE = """
    add.u32 %x9, %base, 0;
    setp.ne.u32 %p, %t, 0;
    @%p bra begun;
    mbarrier.init.shared::cta.b64 [%x9], 1;
    mbarrier.init.shared::cta.b64 [%x9+8], {count};
begun:
    bar.sync 0;
    add.u32 %x1, %base, 16;
    mov.u32 %x2, 0;
    mov.u32 %x0, 0;
    setp.ge.u32 %p, %t, 32;
    @%p bra read;
write:
    and.b32 %x3, %x2, 1;
    xor.b32 %x3, %x3, 1;
free:
    mbarrier.try_wait.parity.shared::cta.b64 %p, [%x9+8], %x3;
    @!%p bra free;
    mad.lo.u32 %x4, %lane, 4, %x1;
    mad.lo.u32 %x5, %x2, 100, %lane;
    st.shared.b32 [%x4], %x5;
    bar.warp.sync -1;
    setp.eq.u32 %p, %lane, 0;
    @%p mbarrier.arrive.shared::cta.b64 _, [%x9];
    add.u32 %x2, %x2, 1;
    setp.lt.u32 %p, %x2, 5;
    @%p bra write;
    bra done;
read:
    and.b32 %x3, %x2, 1;
full:
    mbarrier.try_wait.parity.shared::cta.b64 %p, [%x9], %x3;
    @!%p bra full;
    xor.b32 %x4, %lane, 31;
    mad.lo.u32 %x4, %x4, 4, %x1;
    ld.shared.b32 %x5, [%x4];
    add.u32 %x0, %x0, %x5;
    mbarrier.arrive.shared::cta.b64 _, [%x9+8];
    add.u32 %x2, %x2, 1;
    setp.lt.u32 %p, %x2, 5;
    @%p bra read;
done:
"""


@pytest.mark.parametrize("seed", range(6))
def test_two_warps_take_turns(seed: int) -> None:
    """By two barriers, of one arrival and of 32, whose phases alternate."""
    source = kernel(ALTERNATE.format(count=32) + STORED, threads=64, shared=16 + 128)
    found = run(source, words(64), seed=seed)
    assert found[32:].tolist() == [1000 + 5 * (31 - n) for n in range(32)]


@pytest.mark.parametrize(
    ("before", "after", "match"),
    [
        ("b64 [%x9+8], 32", "b64 [%x9+8], 33", "standstill"),
        ("b64 [%x9+8], 32", "b64 [%x9+8], 16", "race|standstill"),
        ("    @!%p bra full;\n", "", "race|standstill"),
        ("    @!%p bra free;\n", "", "race|more arrivals|standstill"),
        ("    bar.sync 0;\n", "", "no barrier"),
        ("    xor.b32 %x3, %x3, 1;\n", "", "standstill"),
        ("@%p mbarrier.arrive", "mbarrier.arrive", "more arrivals|race|standstill"),
        ("    mbarrier.arrive.shared::cta.b64 _, [%x9+8];\n", "", "standstill"),
        ("[%x9+8], %x3;", "[%x9+24], %x3;", "no barrier"),
        ("add.u32 %x1, %base, 16", "add.u32 %x1, %base, 8", "touches a barrier"),
    ],
)
def test_turns_that_are_not_kept(before: str, after: str, match: str) -> None:
    text = ALTERNATE.format(count=32)
    assert before in text
    source = kernel(text.replace(before, after) + STORED, threads=64, shared=16 + 128)
    seeds = range(6) if before == "    bar.sync 0;\n" else range(3)
    caught = [_caught(source, words(64), seed) for seed in seeds]
    found = [each for each in caught if each]
    assert found
    assert len(seeds) > 3 or len(found) == 3
    assert all(re.search(match, each) for each in found), found


def _caught(source: KernelSource, out: Tensor, seed: int) -> str:
    try:
        run(source, out, seed=seed)
    except PtxError as error:
        return str(error)
    return ""


AROUND = """
    mad.lo.u32 %x1, %t, 4, %base;
    mov.u32 %x2, %cluster_ctarank;
    mad.lo.u32 %x3, %x2, 100, %t;
    st.shared.b32 [%x1], %x3;
    barrier.cluster.arrive.release.aligned;
    barrier.cluster.wait.acquire.aligned;
    add.u32 %x4, %x2, 1;
    rem.u32 %x4, %x4, 3;
    mapa.shared::cluster.u32 %x5, %x1, %x4;
    ld.shared::cluster.b32 %x0, [%x5];
    ld.shared::cluster.b32 %x7, [%x1];
    sub.u32 %x7, %x7, %x3;
    add.u32 %x0, %x0, %x7;
    barrier.cluster.arrive;
    barrier.cluster.wait;
    mov.u32 %x6, %ctaid.x;
    mad.lo.u32 %x6, %x6, 64, %t;
    mul.wide.u32 %wide, %x6, 4;
"""


def test_neighbours_of_a_cluster() -> None:
    """Each program reads what the next one of three wrote, and its own by its plain address."""
    source = kernel(AROUND + STORED, threads=64, cluster=3, shared=256, programs=6)
    for seed in range(4):
        found = run(source, words(6 * 64), seed=seed).view(2, 3, 64)
        for rank in range(3):
            wanted = torch.arange(64, dtype=I32) + (rank + 1) % 3 * 100
            assert torch.equal(found[:, rank], wanted.expand(2, 64))


@pytest.mark.parametrize(
    ("before", "after", "match"),
    [
        (
            "    barrier.cluster.arrive.release.aligned;\n"
            "    barrier.cluster.wait.acquire.aligned;\n",
            "",
            "race|has ended|may not have begun",
        ),
        (
            "    barrier.cluster.arrive;\n    barrier.cluster.wait;\n",
            "",
            "another one may still touch|has ended",
        ),
        ("arrive.release.aligned", "arrive.relaxed.aligned", "race"),
        ("    barrier.cluster.wait;\n", "", "another one may still touch|has ended"),
        ("barrier.cluster.arrive.release.aligned;", "", "before the arrival"),
        ("rem.u32 %x4, %x4, 3;", "rem.u32 %x4, %x4, 4;", "in no program"),
    ],
)
def test_neighbours_that_do_not_wait(before: str, after: str, match: str) -> None:
    assert before in AROUND
    body = AROUND.replace(before, after) + STORED
    source = kernel(body, threads=64, cluster=3, shared=256, programs=3)
    refused(source, words(3 * 64), match=match)


WRONG = {
    "%x0 is read": "add.u32 %x0, %x0, 1;",
    "%x1 is read": "setp.lt.u32 %p, %t, 9;\n @%p mov.u32 %x1, 1;\n add.u32 %x0, %x1, 1;",
    "%p was not written": "@%p mov.u32 %x0, 1;",
    "no multiple of 16": "add.u64 %out, %out, 4;\n mov.u32 %x0, 0;\n"
    "st.global.v4.b32 [%out], {%x0, %x0, %x0, %x0};",
    "of a tensor's memory": "mov.u32 %x0, 1;\n st.global.b32 [%out+512], %x0;",
    "in no tensor": "mov.u32 %x0, 1;\n mov.u64 %a, 64;\n st.global.b32 [%a], %x0;",
    "two threads store": "mov.u32 %x0, 1;\n st.global.b32 [%out], %x0;",
    "another thread of this launch": "mov.u32 %x0, 1;\n add.u64 %a, %out, %wide;\n"
    "st.global.b32 [%a], %x0;\n ld.global.b32 %x0, [%out];",
    "leave shared memory": "ld.shared.b32 %x0, [%base+4096];",
    "no bar.warp.sync": "mad.lo.u32 %x1, %t, 4, %base;\n st.shared.b32 [%x1], %t;\n"
    "xor.b32 %x1, %x1, 4;\n ld.shared.b32 %x0, [%x1];",
    "race: another warp": "xor.b32 %x1, %t, 32;\n mad.lo.u32 %x1, %x1, 4, %base;\n"
    "mad.lo.u32 %x2, %t, 4, %base;\n st.shared.b32 [%x2], %t;\n"
    "ld.shared.b32 %x0, [%x1];",
    "standstill": "setp.eq.u32 %p, %warp, 0;\n @%p bar.sync 1, 64;",
    "change nothing": "again:\n bra again;",
    "with threads at a barrier": "setp.eq.u32 %p, %warp, 0;\n @%p bar.arrive 1, 64;",
    "of which there are fewer": "bar.sync 1, 96;",
    "here of 32|standstill": "setp.eq.u32 %p, %warp, 0;\n @%p bar.sync 1, 64;\n"
    "@!%p bar.sync 1, 32;",
    "a barrier of 40": "bar.sync 1, 40;",
    "a part of the lanes": "setp.lt.u32 %p, %lane, 5;\n @%p bar.sync 0;",
    "unknown instruction": "bfind.u32 %x0, %t;",
    "unknown modifier": "add.sat.s32 %x0, %t, %t;",
    "has 64 bits": "add.u32 %x0, %a, 1;",
    "unknown name": "add.u32 %x0, nothing, 1;",
    "no such label": "bra nowhere;",
    "division by zero": "div.u32 %x0, %t, 0;",
}


@pytest.mark.parametrize("match", WRONG)
def test_what_is_wrong_is_said(match: str) -> None:
    source = kernel(WRONG[match], threads=64, shared=4096)
    refused(source, words(128), match=match)


def test_order_is_the_seeds_own() -> None:
    """The same seed finds the same."""
    text = kernel(
        AROUND.replace("arrive.release", "arrive.relaxed"),
        threads=64,
        cluster=3,
        shared=256,
        programs=3,
    )
    said = {_caught(text, words(192), seed=3) for _ in range(3)}
    assert len(said) == 1
    assert all(said)
