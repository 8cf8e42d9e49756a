"""The machine that runs PTX on a CPU: right kernels run, none that lacks an instruction does."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from strop.ir.source import KernelSource
from tests.kernels.ptx_kernel import (
    BF16,
    F16,
    F32,
    FETCH,
    I32,
    STORED,
    kernel,
    refused,
    run,
    words,
)
from tests.kernels.ptx_text import PtxError

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


AWAITED = """
    ld.param.u64 %in, [p0];
    add.u64 %in, %in, %wide;
    shl.b32 %x1, %t, 2;
    add.u32 %x1, %x1, %base;
    cp.async.ca.shared.global [%x1], [%in], 4;
    cp.async.wait_all;
    bar.warp.sync 0xffffffff;
    xor.b32 %x2, %x1, 4;
    ld.shared.b32 %x0, [%x2];
"""


def test_copies_are_there_when_their_threads_have_waited() -> None:
    given, seeds = torch.arange(32, dtype=I32), range(8)
    whole = kernel(AWAITED + STORED, shared=128, params=(I32,))
    swapped = given.view(-1, 2).flip(1).flatten()
    assert all(torch.equal(run(whole, words(), given, seed=seed), swapped) for seed in seeds)
    for left_out in ("    cp.async.wait_all;\n", "    bar.warp.sync 0xffffffff;\n"):
        source = replace(whole, text=whole.text.replace(left_out, ""))
        assert any(not _is_swapped(source, given, swapped, seed) for seed in seeds), left_out


def _is_swapped(source: KernelSource, given: Tensor, swapped: Tensor, seed: int) -> bool:
    try:
        return torch.equal(run(source, words(), given, seed=seed), swapped)
    except PtxError:
        return False
