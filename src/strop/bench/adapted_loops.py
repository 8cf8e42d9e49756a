"""Time a step of a pipeline's own denoise loop, with two LoRAs and without, in turns."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

import strop
from strop.api import dispatchers_of
from strop.bench.timer import timing_of, wall_ms
from strop.bench.wait_changes import add_lora, load_first_lora
from strop.bench.wait_models import WaitModel
from strop.bench.wait_scene import Scene, lora

WITHOUT, WITH = "without", "with two"
TURNS, PICTURES = 6, 3  # pictures of each number of steps, in a turn


def loop_steps(
    model: WaitModel,
    device: torch.device,
    steps: tuple[int, int],
    *,
    rank: int,
    is_tiny: bool,
    turns: int = TURNS,
) -> dict[str, Any]:
    """Return the milliseconds of a step in each turn, and how many times as long it takes with
    adapters. A step's time is what ``steps`` more of them take, as all else in a picture is the
    same. Without adapters nothing of them is left in the model."""
    scene = Scene.of(model, device, is_tiny=is_tiny, steps=steps[0], rank=rank)
    files = [lora(scene, seed) for seed in (1, 2)]
    strop.optimize(scene.pipe)
    found: dict[str, list[float]] = {WITHOUT: [], WITH: []}
    is_adapted = False
    for _ in range(turns):
        for wanted in (is_adapted, not is_adapted):  # the next turn begins as this one ends
            if wanted and not is_adapted:
                load_first_lora(scene, files[0])
                add_lora(scene, files[1])
            elif is_adapted and not wanted:
                scene.pipe.unload_lora_weights()
            is_adapted = wanted
            found[WITH if wanted else WITHOUT].append(_step_ms(scene, steps))
    ratios = [one / other for one, other in zip(found[WITH], found[WITHOUT], strict=True)]
    counters = [d.counters for d in dispatchers_of(scene.pipe).values()]
    return {
        "steps": list(steps),
        "step_ms": {name: _summary(values) for name, values in found.items()},
        "ratio": _summary(ratios),
        "eager_calls": sum(one.eager_calls for one in counters),
    }


def _step_ms(scene: Scene, steps: tuple[int, int]) -> float:
    """Return the milliseconds of a step, from the medians of pictures with few steps and with
    many."""
    few, many = steps
    draw = {n: partial(scene.draw, num_inference_steps=n, output_type="latent") for n in steps}
    with torch.no_grad():
        for count in steps:
            draw[count]()
        short, long = (
            statistics.median(wall_ms(draw[count], scene.device) for _ in range(PICTURES))
            for count in steps
        )
    return (long - short) / (many - few)


def _summary(values: Sequence[float]) -> dict[str, Any]:
    p20, p50, p80, _ = timing_of(values).to_dict().values()
    return {"p20": p20, "p50": p50, "p80": p80, "samples": [round(v, 4) for v in values]}
