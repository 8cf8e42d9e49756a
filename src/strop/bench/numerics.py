"""Judge pictures of what changes numerics by name: what prompts ask for, and how far they are from
exact ones.

Each model that ships inside draws the same held-out prompts exactly and by each name, size by size,
so that a slow minute hits them all. A picture is right if everything that its prompt asks for is
in it. The distance to the exact picture is 1 - SSIM (Wang et al. 2004, Image quality assessment:
from error visibility to structural similarity, with its window of 11 x 11 and its constants), 0 for
equal pictures.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

import strop
from strop.bench import eight_bit, environment, report, timer
from strop.bench.accuracy import psnr_db
from strop.debug.explain import explain
from strop.ir.eight_bit import FORMATS
from strop.options import STEP_CACHE, STEP_CACHE_WORDS

EXACT = "exact"
MOST_LOST = 0.01  # of the pictures that are right when they are drawn exactly
NUM_WARM_UP = 2  # prompts of a picture that compiles
_HEADER = (
    "model",
    "numerics",
    "from the cache",
    "right",
    "distance",
    "worst",
    "median dB",
    "s a picture",
    "as fast",
    "rule",
)
_WINDOW, _SIGMA, _C1, _C2 = 11, 1.5, 0.01**2, 0.03**2


@dataclass
class Drawn:
    """Hold the pictures of one pipeline, (3, height, width) each from 0 to 1, and the seconds that
    they took."""

    pipe: Any
    pictures: list[Tensor] = field(default_factory=list)
    seconds: float = 0.0
    num_full: int = 0
    num_cached: int = 0
    errors: eight_bit.LayerErrors | None = None  # of linears in 8 bits


def expanded(names: Sequence[str]) -> list[str]:
    """Return numerics by name; a step cache without a word stands for all three."""
    found = [
        f"{STEP_CACHE}:{word}" if name == STEP_CACHE else name
        for name in names
        for word in (STEP_CACHE_WORDS if name == STEP_CACHE else [""])
    ]
    return list(dict.fromkeys(found))


def run(
    names: Sequence[str],
    out: Path | None = None,
    device: str = "cpu",
    *,
    models: Sequence[str] = ("sprites", "sprites-dit"),
    num_prompts: int = 40,
    budget: float = eight_bit.BUDGET,
    step: Callable[[str], None] = lambda name: None,
) -> tuple[dict[str, Any], list[tuple[str, Tensor, Tensor]]]:
    """Return the judgement, and for each row its title, its worst picture and the exact one. This
    needs the sprites weights of the package. Layers that 8 bits change by more than ``budget`` are
    left exact. ``step`` is told what is drawn. Raises OptionError for numerics that nobody
    knows."""
    where, wanted = torch.device(device), expanded(names)
    result: dict[str, Any] = {
        "case": "numerics-" + "-".join(name.replace(":", "-") for name in names),
        "kind": "infer",
        "environment": environment.describe(where),
        "num_prompts": num_prompts,
        "rows": [],
    }
    worst: list[tuple[str, Tensor, Tensor]] = []
    for model in models:
        drawn, prompts = _draw(model, wanted, where, num_prompts, budget, step)
        for name, its in drawn.items():
            row, place = _judged(its, drawn[EXACT], prompts)
            result["rows"].append({"model": model, "numerics": name} | row)
            if name != EXACT:
                both = its.pictures[place], drawn[EXACT].pictures[place]
                worst.append((f"{model}, {name}: {row['worst_prompt']}", *both))
    result["is_good"] = all(row["is_good"] for row in result["rows"])
    if out is not None:
        result["file"] = str(report.write(result, out, where))
    return result, worst


def rows_of(result: Mapping[str, Any]) -> report.Rows:
    """Return the header, and a line for each model and name."""
    rows: report.Rows = [_HEADER]
    for row in result["rows"]:
        cached, calls = row["num_cached"], row["num_cached"] + row["num_full"]
        rows.append(
            (
                row["model"],
                row["numerics"],
                f"{cached} of {calls} calls" if calls else "",
                f"{row['num_right']} of {result['num_prompts']}",
                f"{row['distance_median']:.4f}",
                f"{row['distance_worst']:.4f}",
                f"{row['psnr_median_db']:.1f}",
                f"{row['seconds_a_picture']:.3f}",
                f"{row['speed']:.2f}",
                "ok" if row["is_good"] else "BROKEN",
            )
        )
    return rows


def layer_rows(result: Mapping[str, Any]) -> report.Rows:
    """Return the header, and a line for each layer in 8 bits."""
    return eight_bit.layer_rows(result["rows"])


def distance(one: Tensor, other: Tensor) -> float:
    """Return 1 - SSIM of two pictures (channels, height, width) from 0 to 1: the mean over all
    windows and channels, in fp64."""
    x, y = (picture.double().unsqueeze(1) for picture in (one, other))
    place = torch.arange(_WINDOW, dtype=torch.float64) - _WINDOW // 2
    line = torch.exp(-(place**2) / (2 * _SIGMA**2))
    window = torch.outer(line, line)[None, None] / line.sum() ** 2

    def mean(values: Tensor) -> Tensor:
        return functional.conv2d(values, window)

    mean_x, mean_y = mean(x), mean(y)
    var_x, var_y = mean(x * x) - mean_x**2, mean(y * y) - mean_y**2
    both = mean(x * y) - mean_x * mean_y
    light = (2 * mean_x * mean_y + _C1) / (mean_x**2 + mean_y**2 + _C1)
    structure = (2 * both + _C2) / (var_x + var_y + _C2)
    return 1.0 - float((light * structure).mean())


def _draw(
    model: str,
    names: Sequence[str],
    device: torch.device,
    num_prompts: int,
    budget: float,
    step: Callable[[str], None],
) -> tuple[dict[str, Drawn], list[str]]:
    """Draw exactly and by each name; return it by name, and the prompts in the pictures' order."""
    from strop.models import sprites
    from strop.models.sprites.evaluate import Options, draw_prompts

    prompts, order = sprites.held_out_prompts(num_prompts), list[str]()
    drawn = dict[str, Drawn]()
    for name in (EXACT, *names):
        step(f"{model}, {name}")
        drawn[name] = _optimised(model, name, device, num_prompts, budget)
    for turn, (width, height) in enumerate(sprites.BUCKETS):
        part = prompts[turn :: len(sprites.BUCKETS)]
        for name, its in drawn.items() if part else ():
            step(f"{model}, {name}, {width}x{height}")
            draw_prompts(its.pipe, prompts[:NUM_WARM_UP], width, height, Options(steps=6))
            full, cached = _steps(its.pipe)
            timer.synchronise(device)
            start = time.perf_counter()
            its.pictures += list(draw_prompts(its.pipe, part, width, height, Options()))
            its.seconds += time.perf_counter() - start
            now_full, now_cached = _steps(its.pipe)
            its.num_full += now_full - full
            its.num_cached += now_cached - cached
        order += part
    return drawn, order


def _optimised(
    model: str, name: str, device: torch.device, num_prompts: int, budget: float
) -> Drawn:
    from strop.models import sprites

    dtype = torch.float16 if device.type == "cuda" else torch.float32
    pipe = (sprites.load if model == "sprites" else sprites.load_dit)(dtype, device)
    pipe.set_progress_bar_config(disable=True)
    own = strop.Options.from_environment(numerics=() if name == EXACT else (name,))
    errors = None
    if name in FORMATS:
        others = sprites.held_out_prompts(num_prompts + eight_bit.NUM_PROMPTS)[num_prompts:]
        errors = eight_bit.errors_of(pipe, name, others, budget)
        own = replace(own, exact_layers=(*own.exact_layers, *errors.above_budget))
    return Drawn(strop.optimize(pipe, options=own), errors=errors)


def _steps(pipe: Any) -> tuple[int, int]:
    """Count the calls of denoisers in full, and those from a step cache."""
    rows = explain(pipe).components
    return sum(row.num_full_steps for row in rows), sum(row.num_cached_steps for row in rows)


def _judged(its: Drawn, exact: Drawn, prompts: Sequence[str]) -> tuple[dict[str, Any], int]:
    """Return a row of the result, and which of the pictures is farthest from the exact one."""
    both = list(zip(its.pictures, exact.pictures, strict=True))
    distances = [distance(a, b) for a, b in both]
    place = max(range(len(distances)), key=distances.__getitem__)
    right, right_exactly = _num_right(its, prompts), _num_right(exact, prompts)
    row = {
        "num_full": its.num_full,
        "num_cached": its.num_cached,
        "num_right": right,
        "distance_median": statistics.median(distances),
        "distance_worst": distances[place],
        "psnr_median_db": statistics.median(min(psnr_db(a, b), 200.0) for a, b in both),
        "worst_prompt": prompts[place],
        "seconds_a_picture": its.seconds / len(both),
        "speed": exact.seconds / its.seconds,
        "is_good": right >= right_exactly - MOST_LOST * len(both),
        "fallbacks": explain(its.pipe).fallbacks,
    }
    if its.errors is not None:
        row |= its.errors.used(its.pipe)
    return row, place


def _num_right(its: Drawn, prompts: Sequence[str]) -> int:
    from strop.models import sprites

    both = zip(its.pictures, prompts, strict=True)
    return sum(sprites.score(picture, prompt).all_right for picture, prompt in both)
