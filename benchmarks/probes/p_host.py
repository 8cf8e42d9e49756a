"""Probes 9 and 10: facts about the host, and the eager baseline."""

from __future__ import annotations

import multiprocessing
import operator
import os
import pathlib
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import cubin
import torch
from common import Ctx, attempt, cpu_us, graph_us

IMPORTS = ("torch", "triton", "diffusers", "diffusers.UNet2DConditionModel", "transformers")


def command(*words: str) -> str:
    done = subprocess.run(words, capture_output=True, text=True, timeout=30, check=False)
    return (done.stdout or done.stderr).strip()


def import_seconds(name: str) -> float:
    """Seconds of one import in a fresh interpreter (triton and diffusers after torch)."""
    before = "" if name in ("torch", "triton") else "import torch; "
    module, _, attribute = name.partition(".")
    what = f"from {module} import {attribute}" if attribute else f"import {module}"
    code = f"import time; {before}t = time.perf_counter(); {what}; print(time.perf_counter() - t)"
    return round(float(command(sys.executable, "-c", code).splitlines()[-1]), 2)


def cpu_model() -> dict[str, Any]:
    text = pathlib.Path("/proc/cpuinfo").read_text()
    model = [line.split(":")[1].strip() for line in text.splitlines() if "model name" in line]
    return {"cpu": model[:1], "cores": os.cpu_count(), "python": platform.python_version()}


def tools() -> dict[str, Any]:
    import triton

    clocks = "clocks.sm,clocks.mem,clocks.max.sm,clocks.max.mem,power.limit,temperature.gpu"
    query = f"--query-gpu=name,driver_version,{clocks}"
    ptxas = pathlib.Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"
    return {
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cuda": torch.version.cuda,
        "gcc": shutil.which("gcc"),
        "gxx": shutil.which("g++"),
        "nvcc": shutil.which("nvcc"),
        "triton_ptxas": ptxas.exists(),
        "smi": attempt(lambda: command("nvidia-smi", query, "--format=csv,noheader")),
    }


def compile_seconds(workers: int = 12, kernels: int = 48) -> dict[str, float]:
    """Triton compile seconds, serial in this process and in spawned workers, cold caches."""
    folder = pathlib.Path(tempfile.mkdtemp())
    path = folder / "pw.py"
    cubin.write_module(path, [cubin.pointwise(i) for i in range(kernels + 8)])
    before = os.environ.get("TRITON_CACHE_DIR")
    os.environ["TRITON_CACHE_DIR"] = str(folder / "cache")
    try:
        serial = [cubin.build_pointwise(str(path), kernels + i) for i in range(8)]
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(workers, mp_context=context) as pool:
            start = time.perf_counter()
            each = list(pool.map(cubin.build_pointwise, [str(path)] * kernels, range(kernels)))
            cold = time.perf_counter() - start
    finally:
        os.environ.pop("TRITON_CACHE_DIR")
        if before is not None:
            os.environ["TRITON_CACHE_DIR"] = before
    return {
        "serial_first_s": round(serial[0], 3),
        "serial_each_s": round(sum(serial[1:]) / 7, 3),
        "pool_total_s": round(cold, 2),
        "pool_each_s": round(sum(each) / kernels, 3),
    }


def sweeps(model: torch.nn.Module) -> dict[str, Any]:
    """Microseconds of what a call's front door does over all parameters."""
    params = list(model.parameters())
    owners = [
        (m._parameters, n)
        for m in model.modules()
        for n, v in m._parameters.items()
        if v is not None
    ]
    tables = [table for table, _ in owners]
    names = [name for _, name in owners]
    bound = list(map(dict.__getitem__, tables, names))
    device = params[0].device
    base = torch.randn(2, 320, 64, 64, device=device).half()
    other = torch.empty_like(base)

    def same() -> bool:
        return all(map(operator.is_, map(dict.__getitem__, tables, names), bound))

    return {
        "params": len(params),
        "data_ptr_us": cpu_us(lambda: [p.data_ptr() for p in params], calls=20),
        "dict_sweep_us": cpu_us(lambda: list(map(dict.__getitem__, tables, names)), calls=20),
        "identity_us": cpu_us(same, calls=20),
        "version_us": cpu_us(lambda: [p._version for p in params], calls=20),
        "empty_us": cpu_us(lambda: torch.empty((2, 4, 64, 64), device=device), calls=100),
        "empty_like_us": cpu_us(lambda: torch.empty_like(base), calls=100),
        "clone_us": cpu_us(lambda: base.clone(), calls=50),
        "copy_us": cpu_us(lambda: other.copy_(base), calls=50),
        "view_us": cpu_us(lambda: base.view(2, 320, 8, 8, 64), calls=100),
    }


def run(ctx: Ctx) -> dict[str, Any]:
    result: dict[str, Any] = {}

    def note(name: str, call: Any) -> None:
        result[name] = attempt(call) if ctx.left() > 2 else "skipped, no time"
        ctx.row(f"  {name}: {result[name]}")

    note("cpu", cpu_model)
    note("tools", tools)
    note("sweeps", lambda: sweeps(ctx.unet()))
    note("compile", compile_seconds)
    for name in IMPORTS:
        note(f"import {name} s", lambda n=name: import_seconds(n))
    return result


def top_kernels(call: Any) -> list[tuple[str, int, float]]:
    """(name, count, us) of one call, the largest first."""
    from common import device_kernels

    sums: dict[str, list[float]] = {}
    for name, us in device_kernels([call])[0]:
        entry = sums.setdefault(name, [0, 0.0])
        entry[0] += 1
        entry[1] += us
    rows = [(name, int(count), round(us, 1)) for name, (count, us) in sums.items()]
    return sorted(rows, key=lambda row: -row[2])


def event_ms(call: Any, repeats: int = 9) -> float:
    times = []
    for _ in range(3):
        call()
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        begin.record()
        call()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return round(sorted(times)[repeats // 2], 3)


def timed_unet(ctx: Ctx, benchmark: bool) -> tuple[dict[str, Any], Any]:
    """Eager and graph ms of the UNet, and the call; the first call of a process picks the plans."""
    torch.backends.cudnn.benchmark = benchmark
    model = ctx.unet()
    half = {"device": "cuda", "dtype": torch.float16}
    x = torch.randn(2, 4, 64, 64, **half).to(memory_format=torch.channels_last)
    t = torch.full((2,), 500.0, device="cuda")
    e = torch.randn(2, 77, 768, **half)

    def call() -> object:
        with torch.no_grad():
            return model(x, t, e, return_dict=False)[0]

    start = time.perf_counter()
    call()
    torch.cuda.synchronize()
    result: dict[str, Any] = {"first call s": round(time.perf_counter() - start, 2)}
    result["eager ms"] = attempt(lambda: event_ms(call))
    result["graph ms"] = attempt(lambda: graph_us([call], calls=1) / 1e3)
    torch.backends.cudnn.benchmark = False
    return result, call


def searched_unet() -> dict[str, Any]:
    """timed_unet with cudnn.benchmark, for a fresh process."""
    return timed_unet(Ctx(end=float("inf")), True)[0]


def run_baseline(ctx: Ctx) -> dict[str, Any]:
    result, call = timed_unet(ctx, False)
    result["kernels"] = attempt(lambda: top_kernels(call))
    pool = ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"))
    with pool:
        result["cudnn.benchmark"] = attempt(lambda: pool.submit(searched_unet).result())
    ctx.row(f"  UNet 512 b2: { {k: v for k, v in result.items() if k != 'kernels'} }")
    kernels = result["kernels"]
    if isinstance(kernels, list):
        total, count = sum(k[2] for k in kernels), sum(k[1] for k in kernels)
        ctx.row(f"  {count} kernels, {total:.0f} us busy; the largest:")
        for name, number, us in kernels[:14]:
            ctx.row(f"    {us:8.1f} us x{number:<4d} {name[:90]}")
    else:
        ctx.row(f"  profiler: {kernels}")
    return result
