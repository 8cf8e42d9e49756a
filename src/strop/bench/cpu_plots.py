"""Draw the plots of ``strop bench cpu``: times as fast as eager, from its JSON alone."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from strop.bench.cpu_rows import EAGER, OURS
from strop.bench.infer_plots import OURS as OUR_COLOUR
from strop.bench.infer_plots import THEIRS

DPI, COLOURS = 60, 16


def draw(results: Sequence[Mapping[str, Any]], folder: Path) -> list[Path]:
    """Draw a plot for each model of the results, as PNG files; return them. A plot has the name of
    the first row's file."""
    from matplotlib.figure import Figure

    found = []
    for model in dict.fromkeys(result["row"].rpartition("-")[0] for result in results):
        some = [result for result in results if result["row"].rpartition("-")[0] == model]
        names = [name for name in some[0]["contenders"] if name != EAGER]
        height = 0.8 + 0.26 * len(names)
        figure = Figure(figsize=(4.0 * len(some), height), layout="constrained")
        axes = figure.subplots(1, len(some), squeeze=False, sharey=True)[0]
        for place, result in zip(axes, some, strict=True):
            _bars(place, result, names)
        folder.mkdir(parents=True, exist_ok=True)
        stem = Path(some[0].get("file", f"cpu-{some[0]['row']}")).stem
        found.append(folder / f"{stem}.png")
        _save(figure, found[-1])
    return found


def _save(figure: Any, path: Path) -> None:
    """Write a PNG file of few colours, which is a third as large."""
    from PIL import Image

    whole = io.BytesIO()
    figure.savefig(whole, dpi=DPI)
    Image.open(whole).convert("RGB").quantize(COLOURS).save(path, optimize=True)


def _bars(axes: Any, result: Mapping[str, Any], names: Sequence[str]) -> None:
    contenders = result["contenders"]
    ratios = [contenders.get(name, {}).get("over_eager", 0.0) for name in names]
    colours = [OUR_COLOUR if name.startswith(OURS) else THEIRS for name in names]
    bars = axes.barh(names, ratios, color=colours)
    axes.bar_label(bars, [f"{each:.2f}" if each else "not run" for each in ratios], padding=3)
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.set(title=result["row"], xlabel="times as fast as eager in fp32")
    axes.margins(x=0.2)
    if not axes.yaxis_inverted():
        axes.invert_yaxis()
