"""Probes 6 and 7: GroupNorm+SiLU in NHWC, and the Triton NHWC convolution against cuDNN."""

from __future__ import annotations

import itertools
from typing import Any

import torch
import triton
from common import PEAK_GBS, Ctx, Fn, attempt, graph_us, sets_for, try_us
from kernels import conv3x3, gn_apply, gn_coop, gn_stats

F = torch.nn.functional
CL = torch.channels_last
GROUPS = 32
SHAPES = (
    (2, 320, 64, 64),
    (2, 640, 32, 32),
    (2, 1280, 16, 16),
    (2, 1280, 8, 8),
    (2, 960, 64, 64),
    (2, 1920, 32, 32),
    (2, 2560, 8, 8),
    (1, 128, 512, 512),
    (1, 512, 128, 128),
)
TILES = ((64, 32, 4), (64, 64, 4), (128, 32, 8))
Set = dict[str, torch.Tensor]


def make_set(shape: tuple[int, ...], mean: float = 0.5) -> Set:
    c = shape[1]
    half = {"device": "cuda", "dtype": torch.float16}
    x = (torch.randn(shape, device="cuda") + mean).half().contiguous(memory_format=CL)
    out = torch.full_like(x, float("nan"))
    return {"x": x, "w": torch.randn(c, **half), "b": torch.randn(c, **half), "o": out}


class Plan:
    """One choice of tile and split with its scratch, for the two-kernel and cooperative forms."""

    def __init__(self, shape: tuple[int, ...], tile: tuple[int, int, int], programs: int) -> None:
        self.n, self.c, h, w = shape
        self.hw = h * w
        self.bc, self.bhw, self.warps = tile
        self.blocks = triton.cdiv(self.c, self.bc)
        want = max(1, programs // (self.blocks * self.n))
        limit = 8192 // triton.next_power_of_2(self.c // GROUPS)
        self.split = max(1, min(want, triton.cdiv(self.hw, self.bhw), limit))
        self.per = triton.cdiv(triton.cdiv(self.hw, self.split), self.bhw) * self.bhw
        self.split = triton.cdiv(self.hw, self.per)
        k = triton.next_power_of_2(self.c // GROUPS * self.split)
        self.const = {"C": self.c, "G": GROUPS, "BC": self.bc, "BHW": self.bhw}
        self.fold = {"GB": max(1, min(GROUPS, 4096 // k)), "K": k}
        self.p = torch.empty(self.n, self.split, 2, self.c, device="cuda")
        self.st = torch.empty(self.n, GROUPS, 2, device="cuda")
        self.counter = torch.zeros(self.n, dtype=torch.int32, device="cuda")
        self.counter3 = torch.zeros(self.n, 3, dtype=torch.int32, device="cuda")

    def __str__(self) -> str:
        return f"{self.bc}x{self.bhw}w{self.warps}/s{self.split}"

    def stats(self, s: Set) -> None:
        gn_stats[(self.blocks, self.split, self.n)](
            s["x"],
            self.p,
            self.st,
            self.counter,
            self.hw,
            self.per,
            1e-5,
            **self.const,
            **self.fold,
            num_warps=self.warps,
        )

    def apply(self, s: Set) -> None:
        gn_apply[(self.blocks, triton.cdiv(self.hw, self.bhw), self.n)](
            s["x"], s["w"], s["b"], self.st, s["o"], self.hw, **self.const, num_warps=self.warps
        )

    def two(self, s: Set) -> None:
        self.stats(s)
        self.apply(s)

    def coop(self, s: Set) -> None:
        gn_coop[(self.blocks, self.split, self.n)](
            s["x"],
            s["w"],
            s["b"],
            self.p,
            self.st,
            self.counter3,
            s["o"],
            self.hw,
            self.per,
            1e-5,
            **self.const,
            **self.fold,
            num_warps=self.warps,
            launch_cooperative_grid=True,
        )


def reference(s: Set) -> torch.Tensor:
    x, w, b = (s[k].double() for k in ("x", "w", "b"))
    return F.silu(F.group_norm(x, GROUPS, w, b, 1e-5))


def error_of(s: Set, run: Any) -> float:
    """Relative error after two runs (the second shows that the counters were reset)."""
    for _ in range(2):
        s["o"].fill_(float("nan"))
        run(s)
    torch.cuda.synchronize()
    ref = reference(s)
    return round(float((s["o"].double() - ref).norm() / ref.norm()), 7)


def eager_error(s: Set) -> float:
    ref = reference(s)
    out = F.silu(F.group_norm(s["x"], GROUPS, s["w"], s["b"], 1e-5))
    return round(float((out.double() - ref).norm() / ref.norm()), 7)


def best_of(plans: list[Plan], sets: list[Set], form: str, ctx: Ctx) -> dict[str, Any]:
    trials: dict[str, Any] = {}
    for plan in plans:
        if ctx.left() < 2:
            break
        if str(plan) in trials:
            continue
        call = getattr(plan, form)
        error = attempt(lambda c=call: error_of(sets[0], c))
        us = try_us([lambda s=s, c=call: c(s) for s in sets], calls=16)
        trials[str(plan)] = {"us": us, "error": error}
        if form == "two" and isinstance(us, float):
            calls: list[Fn] = [lambda s=s, p=plan: p.stats(s) for s in sets]
            trials[str(plan)]["stats_us"] = try_us(calls, calls=16)
    good = {
        k: v
        for k, v in trials.items()
        if isinstance(v["us"], float) and isinstance(v["error"], float) and v["error"] < 1e-3
    }
    name = min(good, key=lambda k: good[k]["us"], default="")
    return {"best": name, **good.get(name, {}), "trials": trials}


def one_norm(shape: tuple[int, ...], ctx: Ctx) -> dict[str, Any]:
    nbytes = 2 * shape[0] * shape[1] * shape[2] * shape[3]
    sets = [make_set(shape) for _ in range(sets_for(2 * nbytes, most=8))]
    row: dict[str, Any] = {"shape": shape, "mb": round(nbytes / 1e6, 2)}
    grid = list(itertools.product(TILES, (132, 396)))
    row["two"] = best_of([Plan(shape, t, p) for t, p in grid], sets, "two", ctx)
    small = list(itertools.product(TILES[:2], (132, 264)))
    row["coop"] = best_of([Plan(shape, t, p) for t, p in small], sets, "coop", ctx)

    def eager(s: Set, channels_last: bool) -> object:
        x = s["x"] if channels_last else s["o"]
        return F.silu(F.group_norm(x, GROUPS, s["w"], s["b"], 1e-5))

    row["eager_nhwc"] = try_us([lambda s=s: eager(s, True) for s in sets[:3]], calls=12)
    nchw = [s | {"o": s["x"].contiguous()} for s in sets[:3]]
    row["eager_nchw"] = try_us([lambda s=s: eager(s, False) for s in nchw], calls=12)
    hard = make_set(shape, mean=30.0)
    plan = Plan(shape, TILES[1], 132)
    row["hard_error"] = attempt(lambda: error_of(hard, plan.two))
    row["hard_eager_error"] = attempt(lambda: eager_error(hard))
    for form in ("two", "coop"):
        us = row[form].get("us")
        row[f"{form}_frac"] = round(2 * nbytes / us / 1e3 / PEAK_GBS, 3) if us else None
    return row


def run(ctx: Ctx) -> dict[str, Any]:
    rows = []
    ctx.row("  us: shape | two (stats) choice frac | coop choice frac | eager NHWC | NCHW | errors")
    ctx.row("    frac = (read once + write once) over 3.0 TB/s; errors: two, mean-30 two, eager")
    for shape in SHAPES:
        if ctx.left() < 3:
            ctx.row("  (out of time)")
            break
        row = attempt(lambda s=shape: one_norm(s, ctx))
        rows.append(row)
        if isinstance(row, str):
            ctx.row(f"    {shape} | {row}")
            continue
        two, coop = row["two"], row["coop"]
        first = next(iter(coop["trials"].values()), {})
        fallback = f"{first.get('us')} err {first.get('error')}"
        ctx.row(
            f"    {shape} | {two.get('us')} ({two.get('stats_us')}) {two['best']} "
            f"{row['two_frac']} | {coop.get('us', fallback)} {coop['best']} {row['coop_frac']} | "
            f"{row['eager_nhwc']} | {row['eager_nchw']} | {two.get('error')} "
            f"{row['hard_error']} {row['hard_eager_error']}"
        )
    return {"rows": rows}


CONVS = ((320, 320, 64), (640, 640, 32), (1280, 1280, 16), (1280, 1280, 8), (640, 320, 64))
CONFIGS = ((128, 128, 64, 8, 3), (128, 64, 64, 4, 4), (64, 64, 64, 4, 4), (128, 128, 64, 4, 4))


def triton_conv(s: Set, config: tuple[int, ...], ci: int, co: int, size: int) -> None:
    bm, bn, bk, warps, stages = config
    m = 2 * size * size
    conv3x3[(triton.cdiv(m, bm) * triton.cdiv(co, bn),)](
        s["x"],
        s["w"],
        s["b"],
        s["o"],
        m,
        size,
        size,
        CI=ci,
        CO=co,
        BM=bm,
        BN=bn,
        BK=bk,
        GM=8,
        num_warps=warps,
        num_stages=stages,
    )


def one_conv(ci: int, co: int, size: int, ctx: Ctx) -> dict[str, Any]:
    from p_conv import direct, make_sets

    shape = (ci, co, size, size, 1, 3)
    sets = make_sets(shape)
    first = sets[0]
    ref = F.conv2d(first["x"].double(), first["w"].double(), first["b"].double(), padding=1)
    row: dict[str, Any] = {"shape": (ci, co, size), "trials": {}}
    row["cudnn"] = try_us([lambda s=s: direct(s, shape, True) for s in sets], calls=16)
    for config in CONFIGS:
        if ctx.left() < 1:
            break

        def trial(c: tuple[int, ...] = config) -> tuple[float, float]:
            first["o"].fill_(float("nan"))
            triton_conv(first, c, ci, co, size)
            error = float((first["o"].double() - ref).norm() / ref.norm())
            us = graph_us([lambda s=s: triton_conv(s, c, ci, co, size) for s in sets], calls=16)
            return us, round(error, 6)

        row["trials"][str(config)] = attempt(trial)
    return row


def run_conv(ctx: Ctx) -> dict[str, Any]:
    rows = []
    ctx.row("  us: (ci co size) | cuDNN, no bias | Triton with bias (us, error) per config")
    for ci, co, size in CONVS:
        if ctx.left() < 2:
            ctx.row("  (out of time)")
            break
        row = attempt(lambda a=ci, b=co, c=size: one_conv(a, b, c, ctx))
        rows.append(row)
        text = f"{row['cudnn']} | {row['trials']}" if isinstance(row, dict) else row
        ctx.row(f"    {(ci, co, size)} | {text}")
    return {"rows": rows}
