"""Probe 3: fp16 GEMM at the shapes of the SD1.5 UNet."""

from __future__ import annotations

from typing import Any

import torch
from common import Ctx, Fn, attempt, device_kernels, sets_for, short, try_us

LEVELS = ((8192, 320), (2048, 640), (512, 1280), (128, 1280))
KV_WIDTH = 2 * (5 * 320 + 5 * 640 + 6 * 1280)


def shapes() -> list[tuple[int, int, int]]:
    """(M, K, N): projection, merged QKV, GEGLU, feed-forward out per level; merged cross K/V."""
    found = []
    for m, c in LEVELS:
        found += [(m, c, c), (m, c, 3 * c), (m, c, 8 * c), (m, 4 * c, c)]
    return [*found, (154, 768, KV_WIDTH), (2, 1280, 1280)]


def variants(m: int, k: int, n: int) -> dict[str, list[Fn]]:
    half = {"device": "cuda", "dtype": torch.float16}
    sets = []
    for _ in range(sets_for(2 * (m * k + k * n + m * n))):
        x, w = torch.randn(m, k, **half), torch.randn(n, k, **half) * k**-0.5
        sets.append((x, w.t(), torch.randn(n, **half), torch.empty(m, n, **half)))
    return {
        "addmm": [lambda s=s: torch.addmm(s[2], s[0], s[1], out=s[3]) for s in sets],
        "mm": [lambda s=s: torch.mm(s[0], s[1], out=s[3]) for s in sets],
    }


def run(ctx: Ctx) -> dict[str, Any]:
    rows: list[dict[str, Any]] = []
    probes: list[Fn] = []
    ctx.row("  us/call in a graph, M K N | addmm.out | mm.out | mm.out cublasLt | TFLOP/s of addmm")
    for m, k, n in shapes():
        if ctx.left() < 4:
            ctx.row("  (out of time)")
            break
        fns = variants(m, k, n)
        row: dict[str, Any] = {"shape": (m, k, n)}
        row.update({name: try_us(calls) for name, calls in fns.items()})

        def lt(calls: list[Fn] = fns["mm"]) -> Any:
            before = torch.backends.cuda.preferred_blas_library()
            torch.backends.cuda.preferred_blas_library("cublaslt")
            try:
                return try_us(calls)
            finally:
                torch.backends.cuda.preferred_blas_library(before)

        row["mm_lt"] = attempt(lt)
        if isinstance(row["addmm"], float):
            row["tflops"] = round(2e-6 * m * n * k / row["addmm"], 1)
        probes += [fns["addmm"][0], fns["mm"][0]]
        rows.append(row)
    seen = attempt(lambda: device_kernels(probes))
    for index, row in enumerate(rows):
        for offset, name in enumerate(("addmm", "mm")):
            row[f"{name}_kernels"] = seen[2 * index + offset] if isinstance(seen, list) else seen
        kernels = row["addmm_kernels"]
        plain = row["mm_kernels"]
        names = [short(name) for name, _ in kernels] if isinstance(kernels, list) else kernels
        ctx.row(
            f"    {row['shape']} | {row['addmm']} | {row['mm']} | {row['mm_lt']} | "
            f"{row.get('tflops')} | kernels {len(kernels)}/{len(plain)} {names}"
        )
    return {"rows": rows}
