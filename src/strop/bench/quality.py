"""Compare pictures of ours with eager's: the sprites model follows its prompt."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import strop
from strop.bench import environment, report, timer
from strop.bench.accuracy import full_precision, psnr_db
from strop.bench.infer_variants import variants
from strop.bench.models import Size
from strop.debug.explain import explain

MakePipe = Callable[[torch.dtype, torch.device], Any]
Judge = Callable[[Sequence[Tensor]], dict[str, Any]]  # of ours
NUM_PROMPTS = 20
NUM_SIZES = 4


def run(
    out: Path | None = None,
    device: str = "cpu",
    *,
    options: strop.Options | None = None,
    num_sizes: int = NUM_SIZES,
    ablate: bool = False,
    step: Callable[[str], None] = lambda name: None,
) -> dict[str, Any]:
    """Draw 20 held-out prompts at some sizes and judge the pictures; this needs the sprites weights
    of the package. ``ablate`` draws with each switch alone as well, and ``step`` is told of
    each."""
    from strop.models import sprites

    where = torch.device(device)
    sizes = [(height, width) for width, height in sprites.BUCKETS[:num_sizes]]
    prompts = sprites.held_out_prompts(NUM_PROMPTS, 0)
    result: dict[str, Any] = {
        "case": "sprites",
        "kind": "infer",
        "environment": environment.describe(where),
    }
    result |= compare(
        sprites.load, prompts, sizes, where, options=options, ablate=ablate, step=step
    )
    if out is not None:
        result["file"] = str(report.write(result, out, where))
    return result


def rows_of(result: Mapping[str, Any]) -> report.Rows:
    """Return the header, the default options, then a line per switch."""
    found = {"default": result, **result.get("switches", {})}
    rows: report.Rows = [("switches", "median dB", "eager's", "worst", "rule", "fallbacks")]
    for name, judged in found.items():
        control = judged.get("control_median_db")
        worst = judged["psnr_worst_db"] if control is None else judged["worst_difference_db"]
        rows.append(
            (
                name,
                f"{judged['psnr_median_db']:.2f}",
                "" if control is None else f"{control:.2f}",
                f"{worst:.2f}",
                "ok" if judged["is_good"] else "BROKEN",
                ", ".join(judged.get("fallbacks", ())) or "none",
            )
        )
    return rows


def compare(
    make: MakePipe,
    prompts: Sequence[str],
    sizes: Sequence[Size],
    device: torch.device,
    *,
    steps: int = 20,
    options: strop.Options | None = None,
    ablate: bool = False,
    step: Callable[[str], None] = lambda name: None,
) -> dict[str, Any]:
    """Compare on a CPU in fp32 with eager, and on a GPU both fp16 results with eager in fp32."""
    dtype = torch.float16 if device.type == "cuda" else torch.float32
    drawn = partial(_drawn, prompts=prompts, sizes=sizes, device=device, steps=steps)
    pipes = {"eager": make(dtype, device), "strop": make(dtype, device)}
    strop.optimize(pipes["strop"], options=options)
    draw(pipes["strop"], prompts[:2], sizes[0], device, 2)  # compiles
    made, seconds = _in_turns(pipes, prompts, sizes, device, steps)
    if device.type == "cuda":
        with full_precision():
            right = drawn(make(torch.float32, device))
        judge: Judge = partial(_against_control, eager=made["eager"], exact=right)
    else:
        judge = partial(_against_eager, eager=made["eager"])
    found = judge(made["strop"])
    if ablate:
        chosen = options or strop.Options.from_environment()
        found["switches"] = _switches(partial(make, dtype, device), drawn, judge, chosen, step)
    total = {name: round(sum(times), 3) for name, times in seconds.items()}
    return found | {
        "seconds": total,
        "seconds_by_size": seconds,
        "num_pictures": len(made["strop"]),
    }


def _switches(
    make: Callable[[], Any],
    drawn: Callable[[Any], list[Tensor]],
    judge: Judge,
    options: strop.Options,
    step: Callable[[str], None],
) -> dict[str, dict[str, Any]]:
    """Return all options on, then each switch of ``Options`` off alone, and all off, by name."""
    found: dict[str, dict[str, Any]] = {}

    def judged(name: str, chosen: strop.Options) -> Any:
        step(name)
        pipe = make()
        strop.optimize(pipe, options=chosen)
        found[name] = judge(drawn(pipe)) | {"fallbacks": explain(pipe).fallbacks}
        return pipe

    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as cache:
        fresh = replace(options, cache_dir=cache)  # stored plans do not name passes
        for name, chosen in variants(fresh, judged("all on", fresh), "picture").items():
            judged(name, chosen)
    return found


def _drawn(
    pipe: Any, prompts: Sequence[str], sizes: Sequence[Size], device: torch.device, steps: int
) -> list[Tensor]:
    return [picture for size in sizes for picture in draw(pipe, prompts, size, device, steps)]


def _in_turns(
    pipes: Mapping[str, Any],
    prompts: Sequence[str],
    sizes: Sequence[Size],
    device: torch.device,
    steps: int,
) -> tuple[dict[str, list[Tensor]], dict[str, list[float]]]:
    """Return pictures and seconds of every pipeline, size by size: a slow minute then hits them
    all.

    Each size is drawn twice, the second time in the other order, and the shorter time counts.
    """
    pictures: dict[str, list[Tensor]] = {name: [] for name in pipes}
    seconds: dict[str, list[float]] = {name: [] for name in pipes}
    for size in sizes:
        found: dict[str, list[float]] = {name: [] for name in pipes}
        for names in (list(pipes), list(pipes)[::-1]):
            for name in names:
                timer.synchronise(device)
                start = time.perf_counter()
                drawn = draw(pipes[name], prompts, size, device, steps)
                found[name].append(time.perf_counter() - start)
                if len(found[name]) == 1:
                    pictures[name] += drawn
        for name, times in found.items():
            seconds[name].append(round(min(times), 3))
    return pictures, seconds


def draw(
    pipe: Any, prompts: Sequence[str], size: Size, device: torch.device, steps: int
) -> list[Tensor]:
    """Draw pictures (3, H, W) on the CPU, with one seed per prompt."""
    pipe.set_progress_bar_config(disable=True)
    made = pipe(
        list(prompts),
        height=size[0],
        width=size[1],
        num_inference_steps=steps,
        guidance_scale=4.0,
        generator=[torch.Generator().manual_seed(seed) for seed in range(len(prompts))],
        output_type="pt",
    ).images
    return list(made.float().cpu())


def _against_eager(ours: Sequence[Tensor], eager: Sequence[Tensor]) -> dict[str, Any]:
    found = [min(psnr_db(a, b), 200.0) for a, b in zip(ours, eager, strict=True)]
    return {
        "psnr_median_db": statistics.median(found),
        "psnr_worst_db": min(found),
        "is_good": min(found) >= 60,
    }


def _against_control(
    ours: Sequence[Tensor], eager: Sequence[Tensor], exact: Sequence[Tensor]
) -> dict[str, Any]:
    """Compare with eager's own drift in half precision: what counts is whether ours is further off
    than eager."""
    mine = [min(psnr_db(a, b), 200.0) for a, b in zip(ours, exact, strict=True)]
    control = [min(psnr_db(a, b), 200.0) for a, b in zip(eager, exact, strict=True)]
    worst = min(a - b for a, b in zip(mine, control, strict=True))
    median, median_control = statistics.median(mine), statistics.median(control)
    return {
        "psnr_median_db": median,
        "control_median_db": median_control,
        "worst_difference_db": worst,
        "is_good": median >= median_control - 1 and worst >= -6,
    }
