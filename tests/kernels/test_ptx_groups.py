"""Groups of warps and clusters in the machine that runs PTX: products, turns, neighbours."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch

from strop.ir.source import KernelSource
from tests.kernels.ptx_kernel import (
    BF16,
    F16,
    F32,
    FETCH,
    I32,
    STORED,
    caught,
    kernel,
    refused,
    run,
    words,
)

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
    said = [caught(source, words(64), seed) for seed in seeds]
    found = [each for each in said if each]
    assert found
    assert len(seeds) > 3 or len(found) == 3
    assert all(re.search(match, each) for each in found), found


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


# The first of two programs brings one box to both; each waits for its own copy.
SHARED_FETCH = """
    mov.b64 %a, p0;
    cvta.param.u64 %map0, %a;
    add.u32 %x9, %base, 2048;
    mov.u32 %x2, %cluster_ctarank;
    setp.ne.u32 %p, %t, 0;
    @%p bra begun;
    mbarrier.init.shared::cta.b64 [%x9], 1;
    fence.mbarrier_init.release.cluster;
    mbarrier.arrive.expect_tx.shared::cta.b64 _, [%x9], 2048;
begun:
    barrier.cluster.arrive.release.aligned;
    barrier.cluster.wait.acquire.aligned;
    or.b32 %x3, %t, %x2;
    setp.ne.u32 %p, %x3, 0;
    @%p bra come;
    mov.u32 %x0, 0;
    mov.u32 %x1, 2;
    mov.b16 %h0, 3;
    cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster \
[%base], [%map0, {%x0, %x1}], [%x9], %h0;
come:
    mbarrier.try_wait.parity.shared::cta.b64 %p, [%x9], 0;
    @!%p bra come;
    mul.lo.u32 %x1, %t, 16;
    add.u32 %x3, %x1, %base;
    mad.lo.u32 %x1, %x2, 2048, %x1;
    cvt.u64.u32 %wide, %x1;
    add.u64 %out, %out, %wide;
    ld.shared.v4.b32 {%x4, %x5, %x6, %x7}, [%x3];
    st.global.v4.b32 [%out], {%x4, %x5, %x6, %x7};
    barrier.cluster.arrive;
    barrier.cluster.wait;
"""


def multicast(body: str) -> KernelSource:
    shape: dict[str, Any] = {"params": (F16,), "boxes": ((16, 64),), "out": F16}
    return kernel(body, threads=128, cluster=2, shared=2056, programs=2, **shape)


def test_a_box_for_two_programs() -> None:
    x = torch.randn(18, 64).half()
    for seed in range(3):
        out = run(multicast(SHARED_FETCH), torch.zeros(2, 16, 64, dtype=F16), x, seed=seed)
        assert torch.equal(out[0], out[1])
        assert torch.equal(out[0, 0], x[2])  # the first line is not mixed
    refused(
        multicast(SHARED_FETCH.replace("%h0, 3", "%h0, 5")),
        torch.zeros(2, 16, 64, dtype=F16),
        x,
        match="multicast to programs 0b101 of 2",
    )


def test_order_is_the_seeds_own() -> None:
    """The same seed finds the same."""
    text = kernel(
        AROUND.replace("arrive.release", "arrive.relaxed"),
        threads=64,
        cluster=3,
        shared=256,
        programs=3,
    )
    said = {caught(text, words(192), seed=3) for _ in range(3)}
    assert len(said) == 1
    assert all(said)
