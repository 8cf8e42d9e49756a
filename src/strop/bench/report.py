"""Write results as JSON files and as tables."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from strop.bench import environment
from strop.errors import OptionError

RESULTS = Path("benchmarks/results")
Rows = list[tuple[str, ...]]


def write(result: Mapping[str, Any], folder: Path, device: torch.device) -> Path:
    """Write atomically, as <case>_<gpu>_<date>.json; the compile times of a case as
    <case>-compile."""
    suffix = "" if result["kind"] == "infer" else f"-{result['kind']}"
    return _write_as(f"{result['case']}{suffix}", result, folder, device)


def write_row(result: Mapping[str, Any], folder: Path, device: torch.device) -> Path:
    """Write a row of ``strop bench infer`` or ``train``, as <row>_<gpu>_<date>.json."""
    return _write_as(row_name(result), result, folder, device)


def row_name(result: Mapping[str, Any]) -> str:
    """Return the name of a row for files: with its processes where there are several, and with a
    batch that was asked for."""
    several = result.get("processes", 1)
    batch = result.get("batch") if result["kind"] == "train" else None
    return "".join(
        [
            result["row"],
            "-tiny" if result["is_tiny"] else "",
            f"-{several}gpu" if several > 1 else "",
            f"-b{batch}" if batch is not None else "",
        ]
    )


def title_of(result: Mapping[str, Any], first: Mapping[str, Any]) -> str:
    """Return the title of a row for a table, with its GPU if the first row has another."""
    own, usual = (each["environment"].get("gpu") or "a CPU" for each in (result, first))
    return result["title"] if own == usual else f"{result['title']} ({own})"


def _write_as(name: str, result: Mapping[str, Any], folder: Path, device: torch.device) -> Path:
    date = result["environment"]["date"][:10]
    return write_json(result, folder / f"{name}_{environment.device_label(device)}_{date}.json")


def write_json(value: Any, path: Path) -> Path:
    """Write so that a reader sees the old file or the new one, never a piece. Raises OSError where
    that cannot be, and leaves nothing behind."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, suffix=".part")
    part = Path(name)
    try:
        with os.fdopen(handle, "w") as file:
            json.dump(value, file, indent=1)
            file.write("\n")
        part.chmod(0o644)  # mkstemp lets nobody else read
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
    return path


def newest_rows(
    paths: Iterable[Path],
    kind: str,
    names: Sequence[str],
    is_whole: Callable[[dict[str, Any]], bool] = bool,
    takes: Callable[[dict[str, Any]], bool] = bool,
) -> list[dict[str, Any]]:
    """Return the newest result of this kind for each row, measured without options from the
    environment, in the order of ``names``, preferring one that ``is_whole``, of those that it
    ``takes``. ``paths`` may be files of any kind. Raises OptionError for a damaged file."""

    def rank(result: dict[str, Any]) -> tuple[bool, str]:
        return is_whole(result), _date(result)

    newest: dict[str, dict[str, Any]] = {}
    for path in paths:
        result = _read(path)
        if result.get("kind") != kind or result.get("row") not in names:
            continue
        if not isinstance(result.get("contenders"), dict) or not _date(result):
            raise OptionError(
                f"{path} lacks its contenders or its date: measure it again, or"
                " take it out of the folder"
            )
        if result["environment"].get("switches") or not takes(result):
            continue
        old = newest.get(result["row"])
        if old is None or rank(old) <= rank(result):
            newest[result["row"]] = result
    return sorted(newest.values(), key=lambda result: names.index(result["row"]))


def _read(path: Path) -> dict[str, Any]:
    """Read a file; the result is empty where the JSON is a list or a number, which no result is."""
    try:
        found = json.loads(path.read_text())
    except (ValueError, OSError) as error:  # half a file, or no text
        raise OptionError(
            f"{path} cannot be read ({error}): measure it again, or take it out of the folder"
        ) from error
    return found if isinstance(found, dict) else {}


def _date(result: Mapping[str, Any]) -> str:
    environment = result.get("environment")
    return str(environment.get("date", "")) if isinstance(environment, dict) else ""


def compile_rows_of(result: Mapping[str, Any]) -> Rows:
    """Return the table of a ``compile`` result."""
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
    """Return the same without rich, for logs."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )
