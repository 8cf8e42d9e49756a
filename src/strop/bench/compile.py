"""Measure the seconds to the first result, with an empty cache and with a full one (``strop bench
compile``).

Each measurement has a fresh process. The clock starts when imports and weights are there and
stops when the first result is on the device.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import strop
from strop.bench import environment, peers, report, timer
from strop.bench.cases import BenchCase
from strop.bench.worker import run_apart


def run(
    case: BenchCase,
    out: Path | None = None,
    device: str = "cuda",
    *,
    limit_s: float = 600.0,
    num_shapes: int = 0,
    cache_dir: Path | None = None,
) -> dict[str, Any]:
    """Measure a cold and a cached start of ``case`` over its first ``num_shapes`` shapes (0: all).

    The cache is a new folder, or ``cache_dir``, which has to be empty, and which is kept.
    """
    where = torch.device(device)
    result: dict[str, Any] = {
        "case": case.name,
        "kind": "compile",
        "environment": environment.describe(where),
    }
    with tempfile.TemporaryDirectory() as folder:
        cache = cache_dir or Path(folder)
        task = {
            "do": "compile",
            "case": case.name,
            "device": device,
            "cache_dir": str(cache),
            "num_shapes": num_shapes,
        }
        result["cold"] = run_apart(task, limit_s)
        result["cache_bytes"] = sum(f.stat().st_size for f in cache.rglob("*") if f.is_file())
        if "failed" not in result["cold"]:
            result["cached"] = run_apart(task, limit_s)
    if out is not None:
        result["file"] = str(report.write(result, out, where))
    return result


def measure_here(
    case: BenchCase, device: torch.device, cache_dir: str, num_shapes: int
) -> dict[str, Any]:
    """Measure in this process every shape's first and second call, stages, kernels and graphs."""
    from strop.debug.explain import explain

    workload = case.build(device)
    shapes = case.shapes[: num_shapes or None]
    calls = [peers.caller(workload, size, batch) for size, batch in shapes]
    timer.synchronise(device)
    rows = []
    start = time.perf_counter()
    strop.optimize(workload.target, options=strop.Options.from_environment(cache_dir=cache_dir))
    for (size, batch), call in zip(shapes, calls, strict=True):
        seconds = []
        for _ in range(2):
            call()
            timer.synchronise(device)
            now = time.perf_counter()
            seconds.append(round(now - start, 4))
            start = now
        rows.append({"size": size, "batch": batch, "first_s": seconds[0], "second_s": seconds[1]})
    found = explain(workload.target)
    return {
        "first_s": rows[0]["first_s"],
        "shapes": rows,
        "counts": found.summary(),
        "stages_s": found.stage_seconds(),
    }
