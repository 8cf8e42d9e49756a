"""Results as JSON files, as a table and as a plot."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from strop.bench import environment

RESULTS = Path("benchmarks/results")
Rows = list[tuple[str, ...]]


def write(result: Mapping[str, Any], folder: Path, device: torch.device) -> Path:
    """Atomically, as <case>_<gpu>_<date>.json; the compile times of a case as <case>-compile."""
    suffix = "" if result["kind"] == "infer" else f"-{result['kind']}"
    date = result["environment"]["date"][:10]
    name = f"{result['case']}{suffix}_{environment.device_label(device)}_{date}.json"
    return write_json(result, folder / name)


def write_json(value: Any, path: Path) -> Path:
    """A reader sees the old file or the new one, never a piece."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, part = tempfile.mkstemp(dir=path.parent, suffix=".part")
    with os.fdopen(handle, "w") as file:
        json.dump(value, file, indent=1)
        file.write("\n")
    Path(part).replace(path)
    return path


def rows_of(result: Mapping[str, Any]) -> Rows:
    """The table of an ``infer`` result: header, then one row a shape and contender."""
    rows: Rows = [("shape", "run", "p20 ms", "p50 ms", "p80 ms", "of eager", "error")]
    for number, row in enumerate(result["rows"]):
        times = dict(row["times"])
        failed = {}
        for name, peer in result["peers_apart"].items():
            if "rows" in peer:
                times[name] = peer["rows"][number]
            else:
                failed[name] = peer["failed"]
        base = times.get("eager", {}).get("p50_ms")
        shape = f"{row['size'][0]}x{row['size'][1]} b{row['batch']}"
        for name, t in times.items():
            ratio = f"{base / t['p50_ms']:.2f}x" if base else ""
            error = _error_text(row["error"]) if name == "strop" else ""
            spread = (f"{t[p]:.3f}" for p in ("p20_ms", "p50_ms", "p80_ms"))
            rows.append((shape, name, *spread, ratio, error))
        rows += [(shape, name, "", "", "", "", reason) for name, reason in failed.items()]
    return rows


def _error_text(error: Mapping[str, Any]) -> str:
    if "rms" not in error:
        return f"{error['psnr_to_eager_db']:.1f} dB to eager"
    verdict = "ok" if error["is_good"] else "BAD"
    return f"{verdict} rms {error['rms']:.2e} (eager {error['rms_eager']:.2e})"


def compile_rows_of(result: Mapping[str, Any]) -> Rows:
    """The table of a ``compile`` result."""
    rows: Rows = [("start", "first s", "second s", "graphs", "recompiles", "kernels")]
    for name in ("cold", "cached"):
        found = result.get(name)
        if found is None:
            continue
        if "failed" in found:
            rows.append((name, found["failed"], "", "", "", ""))
            continue
        counts = found["counts"]
        seconds = (f"{found['shapes'][0][k]:.2f}" for k in ("first_s", "second_s"))
        numbers = (str(counts[k]) for k in ("num_graphs", "num_recompiles", "num_kernels"))
        rows.append((name, *seconds, *numbers))
    return rows


def print_table(rows: Sequence[Sequence[str]], title: str = "") -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(*rows[0], title=title)
    for row in rows[1:]:
        table.add_row(*row)
    Console().print(table)


def plain_table(rows: Sequence[Sequence[str]]) -> str:
    """The same without rich, for logs."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


def plot(result: Mapping[str, Any], path: Path) -> Path:
    """Bars of the p50 times of an ``infer`` result, with p20..p80 as whiskers."""
    from matplotlib.figure import Figure

    rows = [row for row in rows_of(result)[1:] if row[3]]
    middle = [float(row[3]) for row in rows]
    low = [m - float(row[2]) for m, row in zip(middle, rows, strict=True)]
    high = [float(row[4]) - m for m, row in zip(middle, rows, strict=True)]
    figure = Figure(figsize=(7, 1 + 0.3 * len(rows)), layout="constrained")
    axes = figure.add_subplot()
    axes.barh([f"{row[0]}  {row[1]}" for row in rows], middle, xerr=[low, high])
    axes.invert_yaxis()
    axes.set(xlabel="ms a call", title=str(result["case"]))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    return path
