"""Draw the plots of ``strop bench infer`` from its JSON and from nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from strop.bench.infer_contenders import is_there

Result = Mapping[str, Any]
PERCENTILES = ("p20_ms", "p50_ms", "p80_ms")
OURS, THEIRS = "#3465a4", "#b8bcc2"
USUAL = "all on"  # of switches


def draw(result: Result, folder: Path) -> list[Path]:
    """Draw all plots that the JSON of a row has the numbers for, as SVG."""
    stem = Path(result["file"]).stem if "file" in result else result["row"]
    found = []
    kinds = {"times": _times, "peaks": _peaks, "random": _random, "ladder": _ladder}
    for kind, function in kinds.items():
        figure = function(result)
        if figure is not None:
            folder.mkdir(parents=True, exist_ok=True)
            found.append(folder / f"{stem}-{kind}.svg")
            _save(figure, found[-1])
    return found


def _save(figure: Any, file: Path) -> None:
    """Write an SVG whose texts are texts: outlines of letters are half of such a file, and nobody
    finds a word in them."""
    import matplotlib as mpl

    with mpl.rc_context({"svg.fonttype": "none"}):
        figure.savefig(file)


def _timed(contenders: Result, unit: str) -> dict[str, tuple[float, ...]]:
    """Return p20, p50 and p80 of those that have run, in the unit of the row."""
    scale = 1.0 if unit == "ms" else 1e-3
    return {
        name: tuple(found[key] * scale for key in PERCENTILES)
        for name, found in contenders.items()
        if is_there(found) and "p50_ms" in found
    }


def _bars(bars: Mapping[str, tuple[float, ...]], title: str, unit: str, beside: str = "") -> Any:
    """Draw each bar from 0 to its middle, with whiskers from its low to its high. ``beside`` names
    the bar that the others are compared with."""
    from matplotlib.figure import Figure

    names, middle = list(bars), [bar[1] for bar in bars.values()]
    whiskers = [
        [bar[1] - bar[0] for bar in bars.values()],
        [bar[2] - bar[1] for bar in bars.values()],
    ]
    figure = Figure(figsize=(7, 1.2 + 0.35 * len(names)), layout="constrained")
    axes = figure.add_subplot()
    colours = [OURS if name in ("strop", USUAL) else THEIRS for name in names]
    drawn = axes.barh(names, middle, xerr=whiskers, color=colours)
    usual = bars[beside][1] if beside in bars else 0.0
    texts = [
        f"{ms:.3g}" + (f" ({ms / usual - 1:+.1%})" if usual and name != beside else "")
        for name, ms in zip(names, middle, strict=True)
    ]
    axes.bar_label(drawn, texts, padding=4)
    axes.invert_yaxis()
    axes.margins(x=0.35 if usual else 0.15)
    axes.set(xlabel=unit, title=title)
    return figure


def _times(result: Result) -> Any:
    timed = _timed(result["contenders"], result["unit"])
    if not timed:
        return None
    figure = _bars(timed, result["title"], f"{result['unit']} a call")
    for name, style in (("must", "--"), ("stretch", ":")):
        if result[name] is not None and not result["is_tiny"]:
            figure.axes[0].axvline(result[name], linestyle=style, color="black", label=name)
            figure.axes[0].legend()
    return figure


def _peaks(result: Result) -> Any:
    found = {
        name: (c["peak_bytes"] / 2**30,) * 3
        for name, c in result["contenders"].items()
        if result["measures"] == "memory" and c.get("peak_bytes")
    }
    return _bars(found, result["title"], "GiB") if found else None


def _random(result: Result) -> Any:
    """Plot how many times as long the peer takes, by the number of pixels."""
    from matplotlib.figure import Figure

    shapes = [s for s in result.get("random", {}).get("shapes", ()) if is_there(s)]
    if not shapes:
        return None
    figure = Figure(figsize=(7, 3), layout="constrained")
    axes = figure.add_subplot()
    pixels = [s["batch"] * s["size"][0] * s["size"][1] / 1e6 for s in shapes]
    axes.scatter(pixels, [s["ratio"] for s in shapes], color=OURS)
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set(
        xlabel="megapixels, whole batch",
        title=f"{result['model']}, random shapes",
        ylabel=f"times as fast as {result['random']['peer']}",
    )
    return figure


def _ladder(result: Result) -> Any:
    timed = _timed(result.get("switches", {}).get("switches", {}), result["unit"])
    if not timed:
        return None
    title = f"{result['title']}: each switch alone off"
    return _bars(timed, title, f"{result['unit']} a call", USUAL)
