"""What came of every case, in a file of the repository.

A line is one operator, way, direction and layout with the types that have the same outcome:

    operator  way  direction  layout  digest  passed/opaque/rule/failed  types  first reason

with tabs between. A column but the last one that is empty says what the line above says. The digest
is that of torch's version and the sources at the run.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import astuple, dataclass, fields
from itertools import zip_longest
from pathlib import Path

import torch

ROOT = Path(__file__).parents[2]
LEDGER = Path(__file__).with_name("ledger.tsv")
HEADER = f"# torch {torch.__version__.partition('+')[0]}; docs/operators.md says what this is"
# What these do, no case depends on.
_APART = ("bench", "cli", "debug", "diffusion", "models", "train")


@dataclass(frozen=True, order=True)
class Key:
    operator: str
    way: str
    direction: str
    layout: str
    dtype: str


@dataclass(frozen=True)
class Counts:
    """Samples: equal to eager and compiled; equal, with torch running some of it; different by a
    rule; different."""

    passed: int = 0
    opaque: int = 0
    rule: int = 0
    failed: int = 0

    def __add__(self, other: Counts) -> Counts:
        return Counts(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))


@dataclass(frozen=True)
class Row:
    digest: str
    counts: Counts
    reason: str = ""


Rows = Mapping[Key, Row]


def digest() -> str:
    """Of torch's version and all sources that compile or judge."""
    source = ROOT / "src" / "strop"
    files = [
        f
        for kind in ("*.py", "*.h")
        for f in source.rglob(kind)
        if f.relative_to(source).parts[0] not in _APART
    ]
    found = hashlib.sha256(torch.__version__.encode())
    for file in sorted([*files, *Path(__file__).parent.glob("*.py")]):
        found.update(file.read_bytes())
    return found.hexdigest()[:8]


def read(path: Path = LEDGER) -> dict[Key, Row]:
    rows: dict[Key, Row] = {}
    above: list[str] = []
    for line in path.read_text().splitlines() if path.exists() else ():
        if line.startswith("#"):
            continue
        *start, reason = line.split("\t")
        above = [cell or repeated for cell, repeated in zip_longest(start, above)]
        operator, way, direction, layout, made, counts, dtypes = above
        row = Row(made, Counts(*map(int, counts.split("/"))), reason)
        for dtype in dtypes.split(" "):
            rows[Key(operator, way, direction, layout, dtype)] = row
    return rows


def write(rows: Rows, path: Path = LEDGER) -> None:
    """In one step: who reads it meanwhile finds the former one."""
    lines: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for key, row in sorted(rows.items()):
        counts = "/".join(map(str, astuple(row.counts)))
        where = (key.operator, key.way, key.direction, key.layout)
        lines[*where, row.digest, counts, row.reason].append(key.dtype)
    text = f"{HEADER}\n"
    above: list[str] = []
    for (*start, reason), dtypes in lines.items():
        cells = [*start, " ".join(dtypes)]
        kept = ["" if cell == repeated else cell for cell, repeated in zip_longest(cells, above)]
        text += "\t".join([*kept, reason]) + "\n"
        above = cells
    fresh = path.with_suffix(f".{os.getpid()}")
    fresh.write_text(text)
    fresh.replace(path)


def update(rows: Rows, path: Path = LEDGER) -> None:
    """Adds rows to the file, which other shards may add to as well."""
    (ROOT / "build").mkdir(exist_ok=True)
    with (ROOT / "build" / f"{path.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        write({**read(path), **rows}, path)


def summary(rows: Rows) -> str:
    """How many samples of each outcome, by way and direction and by type."""
    groups: dict[str, Counts] = defaultdict(Counts)
    for key, row in rows.items():
        groups[f"{key.way} {key.direction}"] += row.counts
        groups[key.dtype] += row.counts
        groups["all"] += row.counts
    names = [f.name for f in fields(Counts)]
    lines = [f"{'':20}" + "".join(f"{name:>10}" for name in names)]
    for name, counts in groups.items():
        lines.append(f"{name:20}" + "".join(f"{n:10}" for n in astuple(counts)))
    return "\n".join(lines)


def failures(rows: Rows) -> list[str]:
    """A line for each case that has some."""
    return [
        f"{' '.join(astuple(key))}: {row.reason}" for key, row in rows.items() if row.counts.failed
    ]
