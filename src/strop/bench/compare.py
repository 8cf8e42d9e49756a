"""Say what has changed between two results of ``strop bench infer`` or ``train`` beyond noise.

The noise of a time is the larger spread of the two: of the series of steps where a file has
several, else from p20 to p80 of its samples; and never less than half a percent, as clocks and
neighbours differ from run to run by that much. A number that was taken once, such as a first call,
has no spread: it is shown and not judged.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from strop.bench.report import Rows
from strop.bench.train_runs import read_result
from strop.errors import OptionError

Result = Mapping[str, Any]
LEAST_NOISE = 0.005  # of a time
LEAST_BYTES = 0.01  # of a peak that counts as a change: allocators round
_PLACES = (
    *("gpu", "cpu", "torch", "triton", "diffusers", "driver_version", "strop", "commit"),
    "switches",
)
_SAME = {
    "kind": "kinds",
    "row": "rows",
    "unit": "mixed units",
    "is_tiny": "tiny and full models",
    "measures": "measures",
    "dtype": "types",
    "processes": "numbers of processes",
    "batch": "batches",
}


@dataclass(frozen=True, slots=True)
class Change:
    """Hold a number of a contender in both files. ``ratio`` is after / before; ``noise`` is a
    share, None where a number was taken once. ``verdict`` is "slower", "faster", "more", "less",
    "same", "not judged", "lost" (it has no times any more) or "new"."""

    contender: str
    what: str
    before: float | None
    after: float | None
    noise: float | None
    verdict: str
    note: str = ""

    @property
    def ratio(self) -> float | None:
        return self.after / self.before if self.before and self.after is not None else None

    @property
    def is_worse(self) -> bool:
        """Tell whether ``--fail-on-slower`` counts it."""
        return self.verdict in ("slower", "lost", "wrong")


def compare(before: Path, after: Path) -> tuple[list[Change], list[str]]:
    """Return all changes of two files, and in what else they differ: machine, versions, commit.
    Raises OptionError for files that are damaged, or are not of the same row, unit, batch and
    number of processes."""
    first, second = (_checked(path) for path in (before, after))
    for key, what in _SAME.items():
        default = 1 if key == "processes" else None
        a, b = first.get(key, default), second.get(key, default)
        if a != b:
            raise OptionError(f"{what}: {key} is {a} in {before} and {b} in {after}")
    changes: list[Change] = []
    names = dict.fromkeys([*first["contenders"], *second["contenders"]])
    for name in names:
        pair = (first["contenders"].get(name), second["contenders"].get(name))
        changes += _changes_of(name, *pair)
    return changes, _places(first, second)


def _checked(path: Path) -> dict[str, Any]:
    result = read_result(path)
    if result.get("kind") not in ("infer", "train") or not isinstance(
        result.get("contenders"), dict
    ):
        raise OptionError(f"{path} is no result of strop bench infer or strop bench train")
    return result


def _places(first: Result, second: Result) -> list[str]:
    a, b = first.get("environment", {}), second.get("environment", {})
    return [
        f"{name}: {a.get(name)} -> {b.get(name)}" for name in _PLACES if a.get(name) != b.get(name)
    ]


def _changes_of(name: str, first: Result | None, second: Result | None) -> Iterable[Change]:
    had, has = _is_measured(first), _is_measured(second)
    if not had or not has:
        if had or has:
            reason = _reason(second if had else first)
            yield Change(name, "", None, None, None, "lost" if had else "new", reason)
        return
    assert first is not None
    assert second is not None
    if first.get("work") != second.get("work"):
        raise OptionError(f"{name} does other work in one file: {first['work']}, {second['work']}")
    if _is_right(first) and not _is_right(second):
        yield Change(name, "loss", first.get("loss"), second.get("loss"), None, "wrong")
    if "p50_ms" in first and "p50_ms" in second:
        yield _time(name, first, second)
    for key, what in (("peak_bytes", "peak GiB"),):
        a, b = first.get(key), second.get(key)
        if a and b:
            moved = b / a - 1
            verdict = "same" if abs(moved) <= LEAST_BYTES else "more" if moved > 0 else "less"
            yield Change(name, what, a / 2**30, b / 2**30, LEAST_BYTES, verdict)
    if first.get("first_s") and second.get("first_s"):
        a, b = first["first_s"], second["first_s"]
        yield Change(name, "first call s", a, b, None, "not judged", "taken once")


def _is_measured(found: Result | None) -> bool:
    return found is not None and any(found.get(key) for key in ("p50_ms", "first_s"))


def _is_right(found: Result) -> bool:
    return bool(found.get("loss_ok", True) and found.get("weights_agree", True))


def _reason(found: Result | None) -> str:
    if found is None:
        return "not in the file"
    return str(found.get("failed") or found.get("skipped") or "no times")


def _time(name: str, first: Result, second: Result) -> Change:
    """Compare the milliseconds that decide the number of a row."""
    a, b = _ms(first), _ms(second)
    noise = max(_noise(first), _noise(second), LEAST_NOISE)
    moved = b / a - 1
    verdict = "same" if abs(moved) <= noise else "slower" if moved > 0 else "faster"
    return Change(name, "ms", a, b, noise, verdict)


def _ms(found: Result) -> float:
    """Return p50, or with a loader, whose bursts p50 would hide, the mean."""
    return float(found["mean_ms"] if "wait_ms" in found else found["p50_ms"])


def _noise(found: Result) -> float:
    series = found.get("img_s_series", ())
    if len(series) > 1:
        return float((max(series) - min(series)) / statistics.median(series))
    return float((found["p80_ms"] - found["p20_ms"]) / found["p50_ms"])


def rows_of(changes: Iterable[Change]) -> Rows:
    """Return a table, the header first."""
    table: Rows = [("contender", "what", "before", "after", "change", "noise", "verdict", "")]
    for change in changes:
        numbers = [f"{v:.3f}" if v is not None else "" for v in (change.before, change.after)]
        ratio, noise = change.ratio, change.noise
        moved = "" if ratio is None else f"{ratio - 1:+.1%}"
        kind = "" if noise is None else f"{noise:.1%}"
        row = (change.contender, change.what, *numbers, moved, kind, change.verdict, change.note)
        table.append(row)
    return table
