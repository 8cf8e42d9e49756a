"""The Triton kernels the probes time: GroupNorm+SiLU in NHWC and an NHWC 3x3 convolution."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def tiny(x, n, PDL: tl.constexpr, BLOCK: tl.constexpr):
    if PDL:
        tl.extra.cuda.gdc_wait()
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    v = tl.load(x + i, mask=i < n)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    tl.store(x + i, v + 1, mask=i < n)


@triton.jit
def slice_stats(
    x, p, n, ci, si, split, HW, per, C: tl.constexpr, BC: tl.constexpr, BHW: tl.constexpr
):
    """Mean and M2 of one [per, BC] slice per channel, shifted by the slice's first row."""
    c = ci * BC + tl.arange(0, BC)
    cm = c < C
    h0 = si * per
    h1 = tl.minimum(h0 + per, HW)
    base = x + n * HW * C
    shift = tl.load(base + h0 * C + c, mask=cm, other=0.0).to(tl.float32)
    s = tl.zeros((BHW, BC), tl.float32)
    q = tl.zeros((BHW, BC), tl.float32)
    for h in range(h0, h1, BHW):
        r = h + tl.arange(0, BHW)
        m = (r[:, None] < h1) & cm[None, :]
        v = tl.load(base + r[:, None] * C + c[None, :], mask=m, other=0.0).to(tl.float32)
        d = tl.where(m, v - shift[None, :], 0.0)
        s += d
        q += d * d
    count = (h1 - h0).to(tl.float32)
    ds = tl.sum(s, 0)
    o = p + (n * split + si) * 2 * C + c
    tl.store(o, shift + ds / count, mask=cm)
    tl.store(o + C, tl.sum(q, 0) - ds * ds / count, mask=cm)


@triton.jit
def fold(
    p,
    st,
    n,
    split,
    HW,
    per,
    eps,
    C: tl.constexpr,
    G: tl.constexpr,
    GB: tl.constexpr,
    K: tl.constexpr,
):
    """Chan-merge the per-channel partials of image n into mean and rstd per group."""
    cg: tl.constexpr = C // G
    k = tl.arange(0, K)
    si = k // cg
    ok = si < split
    count = tl.where(ok, (tl.minimum(si * per + per, HW) - si * per).to(tl.float32), 0.0)
    total = (HW * cg).to(tl.float32)
    for g0 in range(0, G, GB):
        g = g0 + tl.arange(0, GB)
        o = p + (n * split + si[None, :]) * 2 * C + g[:, None] * cg + (k % cg)[None, :]
        mean = tl.load(o, mask=ok[None, :], other=0.0, cache_modifier=".cg")
        m2 = tl.load(o + C, mask=ok[None, :], other=0.0, cache_modifier=".cg")
        mu = tl.sum(mean * count[None, :], 1) / total
        d = mean - mu[:, None]
        var = tl.sum(m2 + d * d * count[None, :], 1) / total
        tl.store(st + (n * G + g) * 2, mu)
        tl.store(st + (n * G + g) * 2 + 1, tl.rsqrt(var + eps))


@triton.jit
def apply_tile(
    x,
    w,
    b,
    st,
    o,
    n,
    ci,
    h,
    h1,
    HW,
    C: tl.constexpr,
    G: tl.constexpr,
    BC: tl.constexpr,
    BHW: tl.constexpr,
):
    c = ci * BC + tl.arange(0, BC)
    cm = c < C
    g = c // (C // G)
    mu = tl.load(st + (n * G + g) * 2, mask=cm, other=0.0, cache_modifier=".cg")
    rs = tl.load(st + (n * G + g) * 2 + 1, mask=cm, other=0.0, cache_modifier=".cg")
    a = tl.load(w + c, mask=cm, other=0.0).to(tl.float32) * rs
    d = tl.load(b + c, mask=cm, other=0.0).to(tl.float32)
    r = h + tl.arange(0, BHW)
    m = (r[:, None] < h1) & cm[None, :]
    i = n * HW * C + r[:, None] * C + c[None, :]
    v = tl.load(x + i, mask=m, other=0.0).to(tl.float32)
    y = (v - mu[None, :]) * a[None, :] + d[None, :]
    tl.store(o + i, (y * tl.sigmoid(y)).to(o.dtype.element_ty), mask=m)


@triton.jit
def gn_stats(
    x,
    p,
    st,
    counter,
    HW,
    per,
    eps,
    C: tl.constexpr,
    G: tl.constexpr,
    BC: tl.constexpr,
    BHW: tl.constexpr,
    GB: tl.constexpr,
    K: tl.constexpr,
):
    """grid (C/BC, split, N); the last program to arrive per image folds its partials."""
    n = tl.program_id(2)
    split = tl.num_programs(1)
    slice_stats(x, p, n, tl.program_id(0), tl.program_id(1), split, HW, per, C, BC, BHW)
    tl.debug_barrier()
    seen = tl.atomic_add(counter + n, 1, sem="acq_rel", scope="gpu")
    tl.debug_barrier()
    if seen == tl.num_programs(0) * split - 1:
        fold(p, st, n, split, HW, per, eps, C, G, GB, K)
        tl.store(counter + n, 0)


@triton.jit
def gn_apply(
    x,
    w,
    b,
    st,
    o,
    HW,
    C: tl.constexpr,
    G: tl.constexpr,
    BC: tl.constexpr,
    BHW: tl.constexpr,
):
    """grid (C/BC, HW/BHW, N)."""
    h = tl.program_id(1) * BHW
    apply_tile(x, w, b, st, o, tl.program_id(2), tl.program_id(0), h, HW, HW, C, G, BC, BHW)


@triton.jit
def gn_coop(
    x,
    w,
    b,
    p,
    st,
    counter,
    o,
    HW,
    per,
    eps,
    C: tl.constexpr,
    G: tl.constexpr,
    BC: tl.constexpr,
    BHW: tl.constexpr,
    GB: tl.constexpr,
    K: tl.constexpr,
):
    """gn_stats and gn_apply in one launch; counter holds (arrived, ready, left) per image."""
    n = tl.program_id(2)
    ci = tl.program_id(0)
    split = tl.num_programs(1)
    members = tl.num_programs(0) * split
    slice_stats(x, p, n, ci, tl.program_id(1), split, HW, per, C, BC, BHW)
    tl.debug_barrier()
    seen = tl.atomic_add(counter + n * 3, 1, sem="acq_rel", scope="gpu")
    tl.debug_barrier()
    if seen == members - 1:
        fold(p, st, n, split, HW, per, eps, C, G, GB, K)
        tl.debug_barrier()
        tl.atomic_xchg(counter + n * 3 + 1, 1, sem="release", scope="gpu")
    ready = tl.atomic_add(counter + n * 3 + 1, 0, sem="acquire", scope="gpu")
    spins = 0
    while (ready == 0) & (spins < 200000):
        ready = tl.atomic_add(counter + n * 3 + 1, 0, sem="acquire", scope="gpu")
        spins += 1
    tl.debug_barrier()
    h0 = tl.program_id(1) * per
    h1 = tl.minimum(h0 + per, HW)
    for h in range(h0, h1, BHW):
        apply_tile(x, w, b, st, o, n, ci, h, h1, HW, C, G, BC, BHW)
    gone = tl.atomic_add(counter + n * 3 + 2, 1, sem="acq_rel", scope="gpu")
    if gone == members - 1:
        tl.store(counter + n * 3, 0)
        tl.store(counter + n * 3 + 1, 0)
        tl.store(counter + n * 3 + 2, 0)


@triton.jit
def conv3x3(
    x,
    w,
    b,
    o,
    M,
    H,
    W,
    CI: tl.constexpr,
    CO: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GM: tl.constexpr,
):
    """Implicit GEMM, stride 1, padding 1: x [N,H,W,CI], w [CO,3,3,CI], o [N,H,W,CO]."""
    pid = tl.program_id(0)
    nm = tl.cdiv(M, BM)
    nn: tl.constexpr = (CO + BN - 1) // BN
    first = pid // (GM * nn) * GM
    rows = tl.minimum(nm - first, GM)
    pm = first + pid % (GM * nn) % rows
    pn = pid % (GM * nn) // rows
    m = pm * BM + tl.arange(0, BM)
    co = pn * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    xw = m % W
    xh = m // W % H
    steps: tl.constexpr = CI // BK
    acc = tl.zeros((BM, BN), tl.float32)
    for i in range(0, 9 * steps):
        tap = i // steps
        c = (i % steps) * BK
        dy = tap // 3 - 1
        dx = tap % 3 - 1
        inside = (m < M) & (xh + dy >= 0) & (xh + dy < H) & (xw + dx >= 0) & (xw + dx < W)
        at = x + (m + dy * W + dx)[:, None] * CI + c + k[None, :]
        a = tl.load(at, mask=inside[:, None], other=0.0)
        bt = w + co[None, :] * (9 * CI) + tap * CI + c + k[:, None]
        acc = tl.dot(a, tl.load(bt, mask=co[None, :] < CO, other=0.0), acc)
    acc += tl.load(b + co, mask=co < CO, other=0.0).to(tl.float32)[None, :]
    om = (m < M)[:, None] & (co < CO)[None, :]
    tl.store(o + m[:, None] * CO + co[None, :], acc.to(o.dtype.element_ty), mask=om)
