"""Probe 5: fp16 attention backends at the SD1.5 and VAE shapes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from common import Ctx, Fn, attempt, device_kernels, sets_for, short, try_us
from torch.nn.attention import SDPBackend, sdpa_kernel

BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}
SELF = ((4096, 40), (1024, 80), (256, 160), (64, 160))
# Each is batch, heads, queries, keys, head size.
SHAPES = (
    [(2, 8, s, s, d) for s, d in SELF]
    + [(2, 8, s, 77, d) for s, d in SELF]
    + [(1, 1, 4096, 4096, 512), (2, 8, 4096, 4096, 64)]
)
Qkv = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def heads_view(x: torch.Tensor, heads: int) -> torch.Tensor:
    b, s, width = x.shape
    return x.view(b, s, heads, width // heads).transpose(1, 2)


def inputs(shape: tuple[int, ...], merged: bool) -> Qkv:
    """q, k, v as [B,H,S,d] views of [B,S,H*d] buffers, or of one merged buffer."""
    b, heads, s, skv, d = shape
    half = {"device": "cuda", "dtype": torch.float16}
    width = heads * d
    if merged and s == skv:
        parts = torch.randn(b, s, 3 * width, **half).split(width, -1)
    elif merged:
        parts = (torch.randn(b, s, width, **half),)
        parts += torch.randn(b, skv, 2 * width, **half).split(width, -1)
    else:
        parts = tuple(torch.randn(b, n, width, **half) for n in (s, skv, skv))
    q, k, v = (heads_view(p, heads) for p in parts)
    return q, k, v


def attend(backend: SDPBackend, x: Qkv) -> torch.Tensor:
    with sdpa_kernel(backend):
        return torch.nn.functional.scaled_dot_product_attention(*x)


def layout(fn: Callable[[], torch.Tensor]) -> str:
    out = fn()
    text = "BSHD" if out.transpose(1, 2).is_contiguous() else "other"
    return f"{text}{tuple(out.stride())}"


def error(backend: SDPBackend, x: Qkv) -> float:
    q, k, v = (t[:1, :1].double() for t in x)
    ref = torch.softmax(q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5, -1) @ v
    out = attend(backend, x)[:1, :1].double()
    return round(float((out - ref).norm() / ref.norm()), 6)


def run(ctx: Ctx) -> dict[str, Any]:
    rows: list[dict[str, Any]] = []
    probes: list[Fn] = []
    ctx.row("  us: (B H S Skv d) | backend | us | merged-buffer us | TF/s | error | layout")
    for shape in SHAPES:
        b, heads, s, skv, d = shape
        count = sets_for(2 * b * heads * d * (2 * s + 2 * skv), most=6)
        plain = [inputs(shape, False) for _ in range(count)]
        merged = [inputs(shape, True) for _ in range(count)]
        for name, backend in BACKENDS.items():
            if ctx.left() < 4:
                ctx.row("  (out of time)")
                break
            row: dict[str, Any] = {"shape": shape, "backend": name}
            row["us"] = try_us([lambda x=x, k=backend: attend(k, x) for x in plain], calls=12)
            rows.append(row)
            if not isinstance(row["us"], float):
                ctx.row(f"    {shape} | {name} | {row['us'][:110]}")
                continue
            row["merged_us"] = try_us(
                [lambda x=x, k=backend: attend(k, x) for x in merged], calls=12
            )
            row["tflops"] = round(4e-6 * b * heads * s * skv * d / row["us"], 1)
            row["error"] = attempt(lambda k=backend, x=merged[0]: error(k, x))
            row["layout"] = attempt(lambda k=backend, x=plain[0]: layout(lambda: attend(k, x)))
            row["probe"] = len(probes)
            probes += [
                lambda k=backend, x=plain[0]: attend(k, x),
                lambda k=backend, x=merged[0]: attend(k, x),
            ]
            ctx.row(
                f"    {shape} | {name} | {row['us']} | {row['merged_us']} | {row['tflops']} | "
                f"{row['error']} | {row['layout']}"
            )
        del plain, merged
    seen = attempt(lambda: device_kernels(probes))
    for row in rows:
        index = row.pop("probe", None)
        if index is None or not isinstance(seen, list):
            continue
        row["kernels"] = seen[index : index + 2]
        if row["shape"][2] in (4096, 256):
            text = [[short(name) for name, _ in group] for group in row["kernels"]]
            ctx.row(f"    kernels {row['shape']} {row['backend']}: plain, merged: {text}")
    return {"rows": rows, "profiler": seen if isinstance(seen, str) else "ok"}
