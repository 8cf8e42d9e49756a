"""Compare pictures of the sprites models in 8 bits with exact ones: are they as right, how far are
they off, and which layers err most (``strop bench pictures --numerics int8``)."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import strop
from strop.bench import environment, report
from strop.bench.accuracy import psnr_db
from strop.debug.explain import explain
from strop.ir.eight_bit import NAMED
from strop.testing import eight_bit_errors

BUDGET = 0.1  # of a layer: RMS of the error over that of the result
MOST_LOST = 0.01  # of all prompts may be wrong that exact pictures have right
CALIBRATION = 4  # prompts that layers are judged by
NUM_PROMPTS, STEPS, BATCH = 200, 20, 50
MOST_DB = 200.0
_WINDOW = 8  # pixels


def run(
    numerics: str,
    out: Path | None = None,
    device: str = "cpu",
    *,
    budget: float = BUDGET,
    num_prompts: int = NUM_PROMPTS,
    step: Callable[[str], None] = lambda name: None,
) -> dict[str, Any]:
    """Draw held-out prompts with each sprites model, exact and in 8 bits, and judge both.

    Layers whose error is above ``budget``, for a few other prompts, are left exact. ``step`` is
    told of what begins. On a GPU models are in fp16, on a CPU in fp32.
    """
    from strop.models import sprites

    where = torch.device(device)
    makers = {"sprites": sprites.load, "sprites-dit": sprites.load_dit}
    result: dict[str, Any] = {
        "case": f"sprites-{numerics}",
        "kind": "infer",
        "environment": environment.describe(where),
        "numerics": numerics,
        "budget": budget,
        "models": {
            name: _compared(name, make, numerics, where, budget, num_prompts, step)
            for name, make in makers.items()
        },
    }
    result["is_good"] = all(found["is_good"] for found in result["models"].values())
    if out is not None:
        result["file"] = str(report.write(result, out, where))
    return result


def rows_of(result: Mapping[str, Any]) -> report.Rows:
    """Return the header, and a line for each model."""
    header = ("model", "prompts", "right exact", f"right {result['numerics']}", "alike")
    rows: report.Rows = [(*header, "PSNR dB", "SSIM", "worst dB", "layers", "refused", "rule")]
    for name, found in result["models"].items():
        rows.append(
            (
                name,
                str(found["num_prompts"]),
                f"{found['right_exact']:.1%}",
                f"{found['right']:.1%}",
                f"{found['judged_alike']:.1%}",
                f"{found['psnr_median_db']:.1f}",
                f"{found['ssim_median']:.4f}",
                f"{found['psnr_worst_db']:.1f}",
                str(len(found["layers"])),
                str(len(found["refused"])),
                "ok" if found["is_good"] else "BROKEN",
            )
        )
    return rows


def layer_rows(result: Mapping[str, Any]) -> report.Rows:
    """Return the header, and each model's layers in 8 bits, those with the largest errors first."""
    rows: report.Rows = [("model", "layer", "error")]
    for name, found in result["models"].items():
        ordered = sorted(found["layers"].items(), key=lambda item: -item[1])
        rows += [(name, layer, f"{error:.2%}") for layer, error in ordered]
        rows += [
            (name, layer, f"{error:.2%}, above the budget: exact")
            for layer, error in found["refused"].items()
        ]
    return rows


def _compared(
    name: str,
    make: Callable[..., Any],
    numerics: str,
    device: torch.device,
    budget: float,
    num_prompts: int,
    step: Callable[[str], None],
) -> dict[str, Any]:
    from strop.models.sprites.specs import held_out_prompts

    dtype = torch.float16 if device.type == "cuda" else torch.float32
    prompts = held_out_prompts(num_prompts + CALIBRATION, 0)
    step(f"{name}: errors of layers")
    errors = _errors(make(dtype, device), numerics, prompts[num_prompts:])
    options = strop.Options.from_environment()
    eight = replace(
        options,
        numerics=(*options.exactly.numerics, numerics),
        exact_layers=tuple(path for path, error in errors.items() if not error <= budget),
    )
    drawn, seconds, layers = dict[str, list[Tensor]](), dict[str, float](), set[str]()
    named = set[str]()
    for kind, chosen in (("exact", options.exactly), (numerics, eight)):
        step(f"{name}: {kind}")
        pipe = make(dtype, device)
        strop.optimize(pipe, options=chosen)
        start = time.perf_counter()
        drawn[kind] = _drawn(pipe, prompts[:num_prompts])
        seconds[kind] = round(time.perf_counter() - start, 2)
        graphs = explain(pipe).graphs
        layers |= {weight.removesuffix(".weight") for g in graphs for weight in g.eight_bit}
        named |= {path for g in graphs for path, why in g.exact if why == NAMED}
    return judged(prompts, drawn["exact"], drawn[numerics]) | {
        "seconds": seconds,
        "layers": {path: error for path, error in errors.items() if path in layers},
        "refused": {path: error for path, error in errors.items() if path in named},
    }


def _errors(pipe: Any, numerics: str, prompts: Sequence[str]) -> dict[str, float]:
    denoiser = pipe.unet if hasattr(pipe, "unet") else pipe.transformer
    return eight_bit_errors(denoiser, numerics, lambda: _drawn(pipe, prompts))


def _drawn(pipe: Any, prompts: Sequence[str]) -> list[Tensor]:
    """Draw the prompts, one noise each, the picture sizes taking turns."""
    from strop.models.sprites import evaluate
    from strop.models.sprites.grammar import BUCKETS

    pipe.set_progress_bar_config(disable=True)
    settings = evaluate.Options(steps=STEPS)
    made: dict[int, Tensor] = {}
    for turn, (width, height) in enumerate(BUCKETS):
        places = range(turn, len(prompts), len(BUCKETS))
        for start in range(0, len(places), BATCH):
            part = places[start : start + BATCH]
            some = [prompts[place] for place in part]
            pictures = evaluate.draw_prompts(pipe, some, width, height, settings)
            made |= dict(zip(part, pictures, strict=True))
    return [made[place] for place in range(len(prompts))]


def judged(
    prompts: Sequence[str], exact: Sequence[Tensor], ours: Sequence[Tensor]
) -> dict[str, Any]:
    """Judge pictures (3, H, W) from 0 to 1 by their prompts, and by the exact ones."""
    from strop.models.sprites.score import score

    right = [
        [score(picture, prompt).all_right for picture, prompt in zip(some, prompts, strict=False)]
        for some in (exact, ours)
    ]
    shares = [sum(some) / len(some) for some in right]
    pairs = [*zip(exact, ours, strict=True)]
    found = [min(psnr_db(one, other), MOST_DB) for one, other in pairs]
    return {
        "num_prompts": len(exact),
        "right_exact": shares[0],
        "right": shares[1],
        "judged_alike": sum(map(bool.__eq__, *right)) / len(exact),
        "psnr_median_db": statistics.median(found),
        "psnr_worst_db": min(found),
        "ssim_median": statistics.median(structural_similarity(*pair) for pair in pairs),
        "is_good": shares[1] >= shares[0] - MOST_LOST,
    }


def structural_similarity(one: Tensor, other: Tensor) -> float:
    """Return the mean SSIM of two pictures (3, H, W) from 0 to 1 over windows of 8 x 8 pixels,
    1 for equal ones (Wang et al., "Image quality assessment", 2004, with uniform windows)."""
    x, y = (picture.double()[None] for picture in (one, other))

    def mean(value: Tensor) -> Tensor:
        return F.avg_pool2d(value, _WINDOW, 1)

    mx, my = mean(x), mean(y)
    vx, vy, both = mean(x * x) - mx**2, mean(y * y) - my**2, mean(x * y) - mx * my
    small, less = 0.01**2, 0.03**2
    found = (2 * mx * my + small) * (2 * both + less)
    return float((found / ((mx**2 + my**2 + small) * (vx + vy + less))).mean())
