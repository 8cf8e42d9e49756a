"""Draw the plots of ``strop bench train`` from its JSON and from nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from strop.bench.infer_plots import OURS, THEIRS
from strop.bench.train_loop import PARTS
from strop.bench.train_report import reason, speed_of

Result = Mapping[str, Any]
PUBLISHED = "#d9a441"
COLOURS = dict(
    zip(
        PARTS,
        (
            "#7f7f7f",
            "#7f7f7f",
            "#4a4a4a",
            "#8c6bb1",
            "#9ebcda",
            "#3465a4",
            "#1f3f6e",
            "#e377c2",
            "#d9a441",
            "#c4572e",
            "#b04a8b",
            "#7a9a3a",
            "#2a9d8f",
            "#c8c8c8",
        ),
        strict=True,
    )
)
_HEIGHT, _HEAD = 0.42, 1.6  # inches a bar, and beside them


def draw(result: Result, folder: Path) -> Path | None:
    """Draw pictures per second with memory, and the split of a step, as one PNG; nothing if no
    contender has run."""
    from matplotlib.figure import Figure

    contenders = result["contenders"]
    if not any("img_s" in found for found in contenders.values()):
        return None
    stem = Path(result["file"]).stem if "file" in result else result["row"]
    height = _HEAD + _HEIGHT * (len(contenders) + bool(result["published_split_ms"]))
    figure = Figure(figsize=(13, height), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(1.2, 1.0))
    _speeds(left, result)
    _split(right, result)
    device = result["environment"].get("gpu") or result["environment"].get("cpu", "")
    tiny = ", tiny model: its speed says nothing" if result["is_tiny"] else ""
    figure.suptitle(f"{result['title']} ({device}{tiny})")
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{stem}.png"
    figure.savefig(path, dpi=130)
    return path


def _speeds(axes: Any, result: Result) -> None:
    """Draw ours below, the published one above, and how much memory a rung takes."""
    contenders = result["contenders"]
    has_published = any(found.get("published") for found in contenders.values())
    thickness = 0.4 if has_published else 0.7
    offset = thickness / 2 if has_published else 0.0
    speeds = [speed_of(result, found) if "img_s" in found else 0.0 for found in contenders.values()]
    places = [place - offset for place in range(len(speeds))]
    colours = [OURS if _is_ours(found) else THEIRS for found in contenders.values()]
    bars = axes.barh(places, speeds, thickness, color=colours)
    axes.bar_label(
        bars,
        [_speed_text(found, v) for found, v in zip(contenders.values(), speeds, strict=True)],
        padding=4,
        fontsize=8,
    )
    if has_published:
        published = [found.get("published") or 0.0 for found in contenders.values()]
        bars = axes.barh(
            [p + 2 * offset for p in places],
            published,
            thickness,
            color=PUBLISHED,
            label="published, A100",
        )
        axes.bar_label(bars, [f"{p:.2f}" if p else "" for p in published], padding=4, fontsize=8)
        axes.legend(loc="lower right")
    axes.set_yticks(range(len(contenders)), list(contenders))
    axes.invert_yaxis()
    axes.margins(x=0.3)
    axes.set(xlabel="pictures a second", title="speed and peak memory")


def _is_ours(found: Result) -> bool:
    return bool(found.get("setup", {}).get("compiler") == "strop")


def _speed_text(found: Result, img_s: float) -> str:
    if "img_s" not in found:
        return reason(found).partition(":")[0]
    peak = found.get("peak_bytes")
    return f"{img_s:.1f}" + (f", {peak / 2**30:.1f} GiB" if peak else "")


def _split(axes: Any, result: Result) -> None:
    """Draw stacked milliseconds per picture, so that batches compare."""
    lines = {
        name: (found["split_ms"], found["work"]["batch"])
        for name, found in result["contenders"].items()
        if "split_ms" in found
    }
    if result["published_split_ms"]:
        lines = {"published, A100": (result["published_split_ms"], 8), **lines}
    names = list(lines)
    start = [0.0] * len(names)
    for part in PARTS:
        widths = [split.get(part, 0.0) / batch for split, batch in lines.values()]
        if any(widths):
            axes.barh(names, widths, left=start, color=COLOURS[part], label=part)
            start = [a + b for a, b in zip(start, widths, strict=True)]
    axes.invert_yaxis()
    axes.set(title="where a step's time goes, ms a picture")
    figure = axes.get_figure()
    figure.legend(
        *axes.get_legend_handles_labels(), fontsize=8, ncols=10, loc="outside lower right"
    )
