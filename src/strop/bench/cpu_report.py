"""Make tables of results of ``strop bench cpu``, and say which musts hold."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from strop.bench.cpu_rows import MODELS, OURS, ROWS, text_of
from strop.bench.report import Rows
from strop.errors import OptionError
from strop.wording import counted

Result = Mapping[str, Any]
HEADER = ("row", "contender", "ms", "p20 to p80", "x eager", "error", "first call s", "note")
LONGEST = 160  # letters of an example on a page
MARK = "cpu"  # of the page that the table is written into


def load(folder: Path) -> list[dict[str, Any]]:
    """Return the newest result of each row of a folder, in the order of the rows. Raises
    OptionError for a damaged file."""
    found: dict[str, dict[str, Any]] = {}
    for path in sorted(folder.glob("cpu-*_cpu_*.json"), key=lambda path: path.stem[-10:]):
        try:
            result = json.loads(path.read_text())
        except ValueError as error:
            raise OptionError(f"{path} cannot be read ({error}): measure it again") from error
        if result.get("kind") == "cpu":
            found[result["row"]] = {**result, "file": str(path)}
    return [found[row.name] for row in ROWS if row.name in found]


def rows_of(results: Iterable[Result]) -> Rows:
    """Return the table, its header first."""
    rows: Rows = [HEADER]
    for result in results:
        for name, each in result["contenders"].items():
            rows.append((result["row"], name, *_cells(each)))
    return rows


def _cells(contender: Mapping[str, Any]) -> tuple[str, ...]:
    if "p50_ms" not in contender:
        return ("", "", "", "", "", text_of(contender))
    return (
        f"{contender['p50_ms']:.2f}",
        f"{contender['p20_ms']:.2f} to {contender['p80_ms']:.2f}",
        f"{contender['over_eager']:.2f}",
        f"{contender['error']:.1e}",
        f"{contender['first_call_s']:.1f}",
        "",
    )


def verdicts(results: Iterable[Result]) -> list[str]:
    """Return a line for each must of each row, and a sum."""
    lines, counts = [], {True: 0, False: 0, None: 0}
    for result in results:
        for must in result["musts"]:
            counts[must["holds"]] += 1
            lines.append(f"{result['row']}: {must['must']}: {_said(must)}")
    total = f"{counts[True]} hold, {counts[False]} missed, {counts[None]} not judged"
    return [*lines, f"{counted(sum(counts.values()), 'must')}: {total}"] if lines else []


def _said(must: Mapping[str, Any]) -> str:
    if must["holds"] is None:
        return f"not judged, {must['why']}"
    return f"{must['found']:g}, {'holds' if must['holds'] else 'MISSED'}"


def markdown(results: Sequence[Result]) -> str:
    """Return a table for each group of contenders: times as fast as eager in fp32, by rows."""
    parts = []
    for title, names in _groups().items():
        some = [result for result in results if result["row"].rpartition("-")[0] in names]
        if some:
            parts.append(f"**{title}**\n\n{_table(some)}")
    return "\n\n".join([*parts, _environment(results[0])]) if results else ""


def _groups() -> dict[str, tuple[str, ...]]:
    ragged = tuple(name for name, model in MODELS.items() if model.is_ragged)
    return {
        "A step of the sprites UNet, two pictures": ("unet",),
        "BERT-mini": ("bert",),
        "Recommendation models with ragged features": ragged,
    }


def _table(results: Sequence[Result]) -> str:
    names = list(dict.fromkeys(name for result in results for name in result["contenders"]))
    lines = ["| row | eager fp32, ms | " + " | ".join(names[1:]) + " | musts |"]
    lines.append("| --- " * (len(names) + 2) + "|")
    for result in results:
        contenders = result["contenders"]
        cells = [_over_eager(contenders.get(name, {}), name) for name in names[1:]]
        times = f"{contenders[names[0]]['p50_ms']:.2f}"
        lines.append(f"| {result['row']} | {times} | {' | '.join(cells)} | {_holding(result)} |")
    return "\n".join([*lines, *(f"\n{note}" for note in _notes(results, names))])


def _notes(results: Sequence[Result], names: Sequence[str]) -> Iterator[str]:
    """Yield a line for each contender that lacks results; the JSON files say why for each row."""
    for name in names:
        said = [text_of(result["contenders"].get(name, {})) for result in results]
        if some := [text for text in said if text]:
            rows = counted(len(some), "row")
            yield f"{name} has no result in {rows}, for example: `{some[0][:LONGEST]}`"


def _over_eager(contender: Mapping[str, Any], name: str) -> str:
    if "over_eager" not in contender:
        return "-"
    text = f"{contender['over_eager']:.2f}"
    return f"**{text}**" if name.startswith(OURS) else text


def _holding(result: Result) -> str:
    judged = [must["holds"] for must in result["musts"]]
    return f"{judged.count(True)} of {len(judged)}" if judged else "-"


def _environment(result: Result) -> str:
    found = result["environment"]
    rates = ", ".join(f"{name} {rate}" for name, rate in found["product_gops"].items())
    names = ("torch", "openvino", "nncf", "onnxruntime", "torchao")
    versions = ", ".join(f"{name} {found[name]}" for name in names)
    return (
        f"One core of {found['cpu']} ({found['instructions']}; products by libraries in"
        f" GOP/s: {rates}), {found['date'][:10]}, {versions}."
    )
