"""Draws a picture with a pipeline and times each stage."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from strop.api import dispatchers_of, optimize
from strop.cli.stages import StageSeconds, compiling, progress_bar, spinner
from strop.drawing import draw as drawing
from strop.drawing.request import PictureRequest
from strop.wording import counted


@dataclass(frozen=True)
class Drawn:
    """Hold a picture [3, height, width] from 0 to 1, and seconds by stage.

    "sampling" is the first run after the warm-up; ``fastest`` is the shortest of all runs.
    """

    pixels: Tensor
    seconds: dict[str, float]
    fastest: float


Step = Callable[[], None]
_REPEATS_S = 10.0  # a comparison repeats its runs for at most so long


def draw(pipe: Any, request: PictureRequest, on_step: Step = lambda: None) -> Tensor:
    """Draw one call of the pipeline. Raises NotFiniteError for a picture that is not finite."""
    return drawing.draw(pipe, [request], lambda _: on_step())[0]


def warm_up(pipe: Any, request: PictureRequest) -> None:
    """Run two steps at the wanted size, so that everything that only a first call does is done.

    Twice on a GPU, where the second use of a shape captures a CUDA graph.
    """
    for _ in range(2 if pipe.device.type == "cuda" else 1):
        draw(pipe, replace(request, steps=2))


def draw_eager(pipe: Any, request: PictureRequest, runs: int = 1) -> Drawn:
    """Draw with a pipeline as it is: a warm-up, then the timed runs."""
    clock = StageSeconds()
    with clock.stage("warm-up"), spinner("warming up torch"):
        warm_up(pipe, request)
    return _draw_timed(pipe, request, clock, "sampling in eager", runs)


def draw_optimized(pipe: Any, request: PictureRequest, runs: int = 1, **how: Any) -> Drawn:
    """Put Strop in front of ``pipe``, compile, then the timed runs. ``how`` is what ``optimize``
    takes."""
    clock = StageSeconds()
    with clock.stage("compile"):
        optimize(pipe, **how)
        with compiling(pipe):
            warm_up(pipe, request)
    return _draw_timed(pipe, request, clock, "sampling", runs)


def _draw_timed(
    pipe: Any, request: PictureRequest, clock: StageSeconds, text: str, runs: int
) -> Drawn:
    with progress_bar() as bar:
        task = bar.add_task(text, total=request.steps * runs, note=f"{request.size}")
        with clock.stage("sampling"):
            pixels = draw(pipe, request, lambda: bar.advance(task))
        times = [clock.seconds["sampling"]]
        while len(times) < runs and sum(times) < _REPEATS_S:
            start = time.perf_counter()
            draw(pipe, request, lambda: bar.advance(task))
            times.append(time.perf_counter() - start)
    return Drawn(pixels, clock.seconds, min(times))


def compiled_text(pipe: Any) -> str:
    """Return graphs and kernels of an optimised pipeline, and where they came from."""
    dispatchers = dispatchers_of(pipe).values()
    variants = [v for d in dispatchers for v in d.variants.all]
    kernels = len({s for v in variants for s in v.program.sources})
    stored = sum(v.from_disk for v in variants)
    graphs = counted(len(variants), "graph")
    text = f"{graphs}, {stored} of them from the cache, {counted(kernels, 'kernel')}"
    checked = sum(d.counters.checked_steps for d in dispatchers)
    found = sum(len(d.counters.findings) for d in dispatchers)
    findings = counted(found, "finding")
    return f"{text}; {counted(checked, 'step')} checked, {findings}" if checked else text


def step_cache_texts(pipe: Any) -> list[str]:
    """Say how many calls of denoisers were computed in full, the warm-up's among them, where there
    is a step cache."""
    return [
        f"{name}: {text}"
        for name, d in dispatchers_of(pipe).items()
        if d.options.step_cache
        for text in d.texts
    ]


def fallbacks(pipe: Any) -> list[str]:
    """Return the reasons why calls ran in eager after all, or on one GPU alone."""
    alone = [
        f"{name}, {counted(count, 'time')} on one GPU: {why}"
        for name, d in dispatchers_of(pipe).items()
        for why, count in d.alone.items()
    ]
    return alone + [
        f"{name}, {counted(count, 'time')}: {why}"
        for name, d in dispatchers_of(pipe).items()
        for why, count in d.counters.fallbacks.items()
    ]
