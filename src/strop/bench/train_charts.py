"""Draw the runs of a row on a machine: speeds, scaling, memory, time per module, and logs."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from strop.bench.train_loop import PARTS
from strop.bench.train_plots import COLOURS
from strop.bench.train_runs import Run, Runs
from strop.wording import counted

HUES = {"strop": "#3465a4", "inductor": "#c4572e", "eager": "#9a9a9a", "diffusers": "#d9a441"}
_OTHER_HUE = "#7a9a3a"
_BAR, _HEAD = 0.34, 1.3  # inches a bar, and beside them
_DPI = 110
Value = Callable[[Run], float | None]


def draw(group: Sequence[Run], runs: Runs, folder: Path) -> list[Path]:
    """Draw all charts that the runs have the numbers for, as PNG files in ``folder``."""
    measured = [run for run in group if run.img_s]
    if not measured:
        return []
    stem = _stem(group[0])
    drawn = {
        "speed": _speeds(measured, runs),
        "modules": _modules(measured),
        "log": _logs(measured),
    }
    paths = []
    folder.mkdir(parents=True, exist_ok=True)
    for kind, figure in drawn.items():
        if figure is not None:
            paths.append(folder / f"{stem}-{kind}.png")
            figure.savefig(paths[-1], dpi=_DPI)
    return paths


def _stem(run: Run) -> str:
    machine = re.sub(r"[^a-z0-9]+", "-", run.machine.lower()).strip("-")
    return f"{run.row}{'-tiny' if run.is_tiny else ''}_{machine}"


def label_of(run: Run) -> str:
    """Return how a run is called beside those of its row."""
    places = counted(run.processes, "GPU" if run.is_on_gpu else "process")
    return f"{run.contender}, {places}, batch {run.batch}"


def _speeds(measured: Sequence[Run], runs: Runs) -> Any:
    from matplotlib.figure import Figure

    panels: list[tuple[str, Value, str]] = [
        ("pictures a second, of all", lambda run: run.img_s, "{:.1f}"),
        (f"times as fast as {measured[0].against}", runs.speed_up, "{:.2f} x"),
        ("scaling efficiency", _several(runs.efficiency), "{:.0%}"),
        ("peak memory of a GPU, GiB", _gib, "{:.1f}"),
    ]
    panels = [panel for panel in panels if any(panel[1](run) is not None for run in measured)]
    height = _HEAD + _BAR * len(measured)
    figure = Figure(figsize=(4.6 + 3.2 * len(panels), height), layout="constrained")
    axes = figure.subplots(1, len(panels), squeeze=False, sharey=True)[0]
    for place, (axis, (title, value, form)) in enumerate(zip(axes, panels, strict=True)):
        _bars(axis, measured, value, form, is_first=place == 0)
        axis.set_title(title, fontsize=10)
    axes[0].set_yticks(range(len(measured)), [label_of(run) for run in measured], fontsize=9)
    axes[0].invert_yaxis()
    return figure


def _bars(axis: Any, measured: Sequence[Run], value: Value, form: str, *, is_first: bool) -> None:
    values = [value(run) or 0.0 for run in measured]
    hues = [HUES.get(run.compiler, _OTHER_HUE) for run in measured]
    whiskers = None
    if is_first:  # from the slowest series to the fastest
        ends = [
            (min(run.series or (v,)), max(run.series or (v,)))
            for run, v in zip(measured, values, strict=True)
        ]
        whiskers = [
            [max(v - low, 0.0) for v, (low, _) in zip(values, ends, strict=True)],
            [max(high - v, 0.0) for v, (_, high) in zip(values, ends, strict=True)],
        ]
    drawn = axis.barh(range(len(values)), values, 0.72, color=hues, xerr=whiskers)
    texts = [
        "-" if value(run) is None else form.format(v)
        for run, v in zip(measured, values, strict=True)
    ]
    axis.bar_label(drawn, texts, padding=5, fontsize=9)
    axis.margins(x=0.25)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)


def _several(value: Value) -> Value:
    return lambda run: value(run) if run.processes > 1 else None


def _gib(run: Run) -> float | None:
    return run.peak_bytes / 2**30 if run.peak_bytes else None


def _modules(measured: Sequence[Run]) -> Any:
    """Draw stacked milliseconds a picture and GPU, so that batches compare."""
    from matplotlib.figure import Figure

    split = [run for run in measured if run.split_ms]
    if not split:
        return None
    figure = Figure(figsize=(13, _HEAD + 0.5 + _BAR * len(split)), layout="constrained")
    axis = figure.subplots()
    start = [0.0] * len(split)
    for part in PARTS:
        widths = [run.split_ms.get(part, 0.0) / run.batch for run in split]
        if any(widths):
            axis.barh(range(len(split)), widths, 0.72, left=start, color=COLOURS[part], label=part)
            start = [a + b for a, b in zip(start, widths, strict=True)]
    axis.set_yticks(range(len(split)), [label_of(run) for run in split], fontsize=9)
    axis.invert_yaxis()
    axis.set_xlabel("ms a picture on its GPU")
    axis.set_title("time per module", fontsize=10)
    figure.legend(fontsize=8, ncols=7, loc="outside lower right")
    return figure


def _logs(measured: Sequence[Run]) -> Any:
    from matplotlib.figure import Figure

    logged = [run for run in measured if len(run.log) > 1]
    if not logged:
        return None
    figure = Figure(figsize=(13, 3.6), layout="constrained")
    for axis, name, title in zip(
        figure.subplots(1, 2),
        ("images_per_s", "loss"),
        ("pictures a second, by step", "loss of rank 0, by step"),
        strict=True,
    ):
        for run in logged:
            steps = [line["step"] for line in run.log]
            style = "-" if run.processes == 1 else "--"
            axis.plot(
                steps,
                [line[name] for line in run.log],
                style,
                color=HUES.get(run.compiler, _OTHER_HUE),
                label=label_of(run),
            )
        axis.set_title(title, fontsize=10)
        axis.set_xlabel("step")
        axis.set_ylim(bottom=0)
    axis.legend(fontsize=7, loc="lower left")
    return figure
