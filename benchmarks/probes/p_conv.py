"""Probe 4: cuDNN convolution, channels_last fp16, at the shapes of the SD1.5 UNet."""

from __future__ import annotations

import multiprocessing
import time
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import torch
from common import Ctx, Fn, attempt, device_kernels, meta_unet, sets_for, short, try_us

Shape = tuple[int, int, int, int, int, int]
CL = torch.channels_last


def conv_shapes(batch: int = 2) -> dict[Shape, int]:
    """(cin, cout, h, w, stride, kernel) to its count, from hooks on a meta run."""
    model = meta_unet()
    found: dict[Shape, int] = {}

    def hook(module: torch.nn.Module, args: tuple[torch.Tensor, ...], out: torch.Tensor) -> None:
        assert isinstance(module, torch.nn.Conv2d)
        x = args[0]
        key = (x.shape[1], out.shape[1], x.shape[2], x.shape[3])
        full = (*key, module.stride[0], module.kernel_size[0])
        found[full] = found.get(full, 0) + 1

    for module in model.modules():
        if isinstance(module, torch.nn.Conv2d):
            module.register_forward_hook(hook)
    half = {"device": "meta", "dtype": torch.float16}
    with torch.no_grad():
        e = torch.empty(batch, 77, 768, **half)
        model(torch.empty(batch, 4, 64, 64, **half), torch.empty(batch, device="meta"), e)
    return found


def make_sets(shape: Shape) -> list[dict[str, torch.Tensor]]:
    ci, co, h, w, stride, kernel = shape
    half = {"device": "cuda", "dtype": torch.float16}
    nbytes = 2 * (2 * ci * h * w + ci * co * kernel**2 + 2 * co * h * w // stride**2)
    sets = []
    for _ in range(sets_for(nbytes, most=8)):
        weight = torch.randn(co, ci, kernel, kernel, **half) * (ci * kernel**2) ** -0.5
        out = torch.empty(2, co, h // stride, w // stride, **half)
        sets.append(
            {
                "x": torch.randn(2, ci, h, w, **half).to(memory_format=CL),
                "w": weight.to(memory_format=CL),
                "wn": weight,
                "b": torch.randn(co, **half),
                "o": out.to(memory_format=CL),
            }
        )
    return sets


def aten(s: dict[str, torch.Tensor], shape: Shape, w: str = "w", bias: bool = False) -> object:
    stride, pad = shape[4], shape[5] // 2
    b = s["b"] if bias else None
    return torch.ops.aten.convolution.default(
        s["x"], s[w], b, [stride] * 2, [pad] * 2, [1, 1], False, [0, 0], 1
    )


def direct(s: dict[str, torch.Tensor], shape: Shape, benchmark: bool) -> object:
    stride, pad = shape[4], shape[5] // 2
    return torch.ops.aten.cudnn_convolution.out(
        s["x"], s["w"], [pad] * 2, [stride] * 2, [1, 1], 1, benchmark, False, True, out=s["o"]
    )


def first_seconds(fn: Fn) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    fn()
    torch.cuda.synchronize()
    return round(time.perf_counter() - start, 4)


def out_check(s: dict[str, torch.Tensor], shape: Shape) -> dict[str, Any]:
    """Whether the .out overload writes into the given tensor, and its error against fp64."""
    s["o"].fill_(float("nan"))
    pointer, strides = s["o"].data_ptr(), s["o"].stride()
    returned = direct(s, shape, False)
    torch.cuda.synchronize()
    x, w = s["x"][:1].double().cpu(), s["w"][:8].double().cpu()
    ref = torch.nn.functional.conv2d(x, w, None, shape[4], shape[5] // 2)
    got = s["o"][:1, :8].double().cpu()
    assert isinstance(returned, torch.Tensor)
    return {
        "same_tensor": returned.data_ptr() == pointer and s["o"].data_ptr() == pointer,
        "strides_kept": s["o"].stride() == strides,
        "error": float((got - ref).norm() / ref.norm()),
    }


def one_shape(shape: Shape, probes: list[Fn]) -> dict[str, Any]:
    sets = make_sets(shape)
    row: dict[str, Any] = {}
    torch.backends.cudnn.benchmark = False
    row["plan_s"] = attempt(lambda: first_seconds(lambda: direct(sets[0], shape, False)))
    row["aten"] = try_us([lambda s=s: aten(s, shape) for s in sets], calls=16)
    row["w_nchw"] = try_us([lambda s=s: aten(s, shape, "wn") for s in sets], calls=16)
    row["out"] = try_us([lambda s=s: direct(s, shape, False) for s in sets], calls=16)
    row["bias"] = try_us([lambda s=s: aten(s, shape, bias=True) for s in sets], calls=16)
    first = {k: v.clone(memory_format=torch.preserve_format) for k, v in sets[0].items()}
    probes += [
        lambda: aten(first, shape),
        lambda: aten(first, shape, "wn"),
        lambda: direct(first, shape, False),
        lambda: aten(first, shape, bias=True),
    ]
    return row


def searched(shapes: list[Shape], seconds: float) -> list[dict[str, Any]]:
    """Search seconds, us and kernels per shape with benchmark=True.

    Runs in a process of its own: the plan cache's key leaves the flag out, so in one process the
    first call of a shape decides its plan for good.
    """
    end = time.monotonic() + seconds
    rows, probes = [], []
    for shape in shapes:
        if time.monotonic() > end:
            break
        sets = make_sets(shape)
        row: dict[str, Any] = {"shape": shape}
        row["search_s"] = attempt(lambda: first_seconds(lambda: direct(sets[0], shape, True)))  # noqa: B023
        row["us"] = try_us([lambda s=s, k=shape: direct(s, k, True) for s in sets], calls=16)
        probes.append(lambda s=sets[0], k=shape: direct(s, k, True))
        rows.append(row)
    seen = attempt(lambda: device_kernels(probes))
    for index, row in enumerate(rows):
        row["kernels"] = seen[index] if isinstance(seen, list) else seen
    return rows


def search_rows(ctx: Ctx, shapes: list[Shape], plain: list[dict[str, Any]]) -> Any:
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        found = attempt(lambda: pool.submit(searched, shapes, ctx.left() - 12).result())
    if isinstance(found, str):
        ctx.row(f"    search: {found}")
        return found
    ctx.row("  benchmark search in a fresh process: shape | search s | us | us without")
    for row, other in zip(found, plain, strict=False):
        ctx.row(f"    {row['shape']} | {row['search_s']} | {row['us']} | {other['out']}")
    return found


def one_pointwise(shape: Shape) -> dict[str, Any]:
    """A 1x1 convolution: cuDNN with bias against addmm on the NHWC view."""
    sets = make_sets(shape)
    ci, co = shape[:2]

    def gemm(s: dict[str, torch.Tensor]) -> object:
        x = s["x"].permute(0, 2, 3, 1).reshape(-1, ci)
        o = s["o"].permute(0, 2, 3, 1).view(-1, co)
        return torch.addmm(s["b"], x, s["w"].view(co, ci).t(), out=o)

    return {
        "cudnn_bias": try_us([lambda s=s: aten(s, shape, bias=True) for s in sets], calls=16),
        "cudnn": try_us([lambda s=s: direct(s, shape, False) for s in sets], calls=16),
        "addmm": try_us([lambda s=s: gemm(s) for s in sets], calls=16),
    }


def run(ctx: Ctx) -> dict[str, Any]:
    found = conv_shapes()
    big = sorted((s for s in found if s[5] == 3), key=lambda s: -s[0] * s[1] * s[2] * s[3])
    names = ("aten", "w_nchw", "out", "bias", "plan_s")
    ctx.row(f"  {len(big)} 3x3 shapes; cuDNN {torch.backends.cudnn.version()}")
    ctx.row("  us: (ci co h w stride k) xcount | " + " | ".join(names) + " | TF/s out")
    checked = attempt(lambda: out_check(make_sets(big[0])[0], big[0]))
    ctx.row(f"  cudnn_convolution.out: {checked}")
    rows, probes = [], []
    for shape in big:
        if ctx.left() < 8:
            ctx.row("  (out of time)")
            break
        row = one_shape(shape, probes)
        ci, co, h, w, stride, _ = shape
        flops = 2 * 2 * 9 * ci * co * h * w / stride**2
        best = row["out"]
        row |= {"shape": shape, "count": found[shape]}
        row["tflops"] = round(flops / best * 1e-6, 1) if isinstance(best, float) else None
        rows.append(row)
        cells = " | ".join(str(row[name]) for name in names)
        ctx.row(f"    {shape} x{found[shape]} | {cells} | {row['tflops']}")
    seen = attempt(lambda: device_kernels(probes))
    if isinstance(seen, list):
        for row, index in zip(rows, range(0, len(seen), 4), strict=False):
            row["kernels"] = seen[index : index + 4]
        for row in rows[:3] + rows[-2:]:
            text = [[short(name) for name, _ in group] for group in row["kernels"]]
            ctx.row(f"    kernels {row['shape']}: aten, w_nchw, out, bias: {text}")
        counts = sorted({tuple(len(g) for g in row["kernels"]) for row in rows})
        ctx.row(f"    kernels per call (aten, w_nchw, out, bias): {counts}")
    else:
        ctx.row(f"    profiler: {seen}")
    found_plans = search_rows(ctx, big, rows)
    points = []
    ctx.row("  1x1 us: shape | cudnn+bias | cudnn.out | addmm.out on the NHWC view")
    for shape in sorted(s for s in found if s[5] == 1):
        if ctx.left() < 2:
            break
        row = one_pointwise(shape) | {"shape": shape, "count": found[shape]}
        points.append(row)
        cells = f"{row['cudnn_bias']} | {row['cudnn']} | {row['addmm']}"
        ctx.row(f"    {shape[:4]} x{found[shape]} | {cells}")
    return {"out_check": checked, "rows": rows, "searched": found_plans, "pointwise": points}
