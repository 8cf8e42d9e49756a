"""Plots of ``strop bench infer``, made from its JSON and from nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from strop.bench.infer_contenders import is_there

Result = Mapping[str, Any]
OURS, THEIRS = "#3465a4", "#b8bcc2"


def draw(result: Result, folder: Path) -> list[Path]:
    """All plots that the JSON of a row has the numbers for, as SVG."""
    stem = Path(result["file"]).stem if "file" in result else result["row"]
    found = []
    for kind, function in (("times", _times), ("random", _random), ("ladder", _ladder)):
        figure = function(result)
        if figure is not None:
            folder.mkdir(parents=True, exist_ok=True)
            found.append(folder / f"{stem}-{kind}.svg")
            figure.savefig(found[-1])
    return found


def _scale(result: Result) -> float:
    return 1.0 if result["unit"] == "ms" else 1e-3


def _timed(contenders: Result) -> dict[str, Any]:
    return {name: c for name, c in contenders.items() if is_there(c) and "p50_ms" in c}


def _bars(timed: Mapping[str, Any], scale: float, title: str, unit: str) -> Any:
    """p50 as bars, p20 to p80 as whiskers."""
    from matplotlib.figure import Figure

    names = list(timed)
    middle = [timed[name]["p50_ms"] * scale for name in names]
    low = [(timed[n]["p50_ms"] - timed[n]["p20_ms"]) * scale for n in names]
    high = [(timed[n]["p80_ms"] - timed[n]["p50_ms"]) * scale for n in names]
    figure = Figure(figsize=(7, 1.2 + 0.35 * len(names)), layout="constrained")
    axes = figure.add_subplot()
    colours = [OURS if name in ("strop", "all on") else THEIRS for name in names]
    bars = axes.barh(names, middle, xerr=[low, high], color=colours)
    axes.bar_label(bars, fmt="%.3g", padding=4)
    axes.invert_yaxis()
    axes.margins(x=0.15)
    axes.set(xlabel=unit, title=title)
    return figure


def _times(result: Result) -> Any:
    timed = _timed(result["contenders"])
    if not timed:
        return None
    figure = _bars(timed, _scale(result), result["title"], f"{result['unit']} a call")
    for name, style in (("must", "--"), ("stretch", ":")):
        if result[name] is not None and not result["is_tiny"]:
            figure.axes[0].axvline(result[name], linestyle=style, color="black", label=name)
            figure.axes[0].legend()
    return figure


def _random(result: Result) -> Any:
    """How many times as long the peer takes, by the number of pixels."""
    from matplotlib.figure import Figure

    shapes = [s for s in result.get("random", {}).get("shapes", ()) if is_there(s)]
    if not shapes:
        return None
    figure = Figure(figsize=(7, 3), layout="constrained")
    axes = figure.add_subplot()
    pixels = [s["batch"] * s["size"][0] * s["size"][1] / 1e6 for s in shapes]
    axes.scatter(pixels, [s["ratio"] for s in shapes], color=OURS)
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set(xscale="log", xlabel="megapixels, whole batch", title=result["title"],
             ylabel=f"times as fast as {result['random']['peer']}")  # fmt: skip
    return figure


def _ladder(result: Result) -> Any:
    timed = _timed(result.get("switches", {}).get("switches", {}))
    if not timed:
        return None
    title = f"{result['title']}: each switch alone off"
    return _bars(timed, _scale(result), title, f"{result['unit']} a call")
