"""Go on with a row of ``strop bench train`` that an earlier run has begun on the same machine: one
that its budget, or somebody, has cut."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from strop.bench.train_rows import row_named
from strop.bench.train_work import TrainRow
from strop.errors import OptionError

Result = dict[str, Any]
# Numbers side by side have these in common. A checkout may be at another commit: each says its own.
SAME = ("gpu", "cpu", "strop", "torch", "triton", "diffusers", "driver_version")


def read(paths: Sequence[Path], rows: Sequence[TrainRow]) -> dict[str, Result]:
    """Read what was measured before, by row. Raises OptionError for files of anything else."""
    found: dict[str, Result] = {}
    for path in paths:
        try:
            result = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise OptionError(f"cannot go on with {path}: {error}") from error
        if not isinstance(result, dict) or result.get("kind") != "train":
            raise OptionError(f"{path} was not written by 'strop bench train'")
        row = next((row for row in rows if row.name == result["row"]), None)
        if row is None:
            raise OptionError(
                f"{path} is of {result['row']}, which is not asked for; there are "
                f"{', '.join(row.name for row in rows)}"
            )
        if row.is_tiny != result["is_tiny"]:
            raise OptionError(f"{path} is of {'tiny' if result['is_tiny'] else 'full'} models")
        found[row.name] = result
    return found


def check_same(result: Result, environment: Mapping[str, Any]) -> None:
    """Raise OptionError if it was measured elsewhere: then the two cannot stand in one table."""
    before = result["environment"]
    other = [
        f"{name} {before.get(name)} then, {environment.get(name)} now"
        for name in SAME
        if before.get(name) != environment.get(name)
    ]
    if other:
        raise OptionError(
            f"{result['row']} was measured elsewhere ({'; '.join(other)}); start anew"
        )


def left_of(row: TrainRow, result: Result | None) -> TrainRow:
    """Return the row without the contenders that have their times."""
    had = result["contenders"] if result is not None else {}
    left = [c for c in row.contenders if "img_s" not in had.get(c.name, {})]
    return replace(row, contenders=tuple(left))


def in_order(result: Result) -> None:
    """Put the contenders into the order of the row, whenever they were measured."""
    names = [c.name for c in row_named(result["row"]).contenders]
    found = result["contenders"]
    result["contenders"] = {name: found[name] for name in sorted(found, key=names.index)}
