"""Run every feature of diffusers that can be built from a configuration, and tell what came of it.

    python benchmarks/compatibility.py --write docs/compatibility.md
    python benchmarks/compatibility.py --only flux,DDIMScheduler

Rows are kept in benchmarks/results/compatibility_cpu.json as they come, so that a run which ends
early goes on where it stopped; ``--again`` makes them anew, those that ``--only`` names or all.
"""

from __future__ import annotations

import argparse
import json
import logging
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch

import strop
from strop.bench import compatibility, environment

ROOT = Path(__file__).parents[1]
RESULT = ROOT / "benchmarks" / "results" / "compatibility_cpu.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--write", type=Path, help="the Markdown page")
    parser.add_argument("--only", default="", help="parts of keys, with commas between")
    parser.add_argument("--again", action="store_true", help="make rows anew that are there")
    parser.add_argument("--cache-dir", default=None, help="for compiled kernels")
    parser.add_argument("--rows", type=Path, default=RESULT, help="the JSON that keeps the rows")
    given = parser.parse_args()
    for name in ("diffusers", "transformers", "strop"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    warnings.simplefilter("ignore")
    wanted = [part for part in given.only.split(",") if part]
    rows = json.loads(given.rows.read_text())["rows"] if given.rows.exists() else []
    made: dict[str, Any] = {compatibility.key_of(row): row for row in rows}
    with tempfile.TemporaryDirectory() as folder:
        options = strop.Options(cache_dir=given.cache_dir or folder)
        for task in compatibility.tasks():
            is_wanted = not wanted or any(part in task.key for part in wanted)
            if not is_wanted or (task.key in made and not given.again):
                continue
            torch.manual_seed(0)
            made[task.key] = row = compatibility.as_json([task.make(options)])[0]
            print(task.key, row["status"], row["graphs"], row["decibels"], row["why"], flush=True)
            _write(made, given.rows)
    if given.write:
        given.write.write_text(compatibility.markdown(_write(made, given.rows)))


def _write(made: dict[str, Any], file: Path) -> dict[str, Any]:
    """In the order of the tasks; rows of tasks that are no more are left out."""
    rows = [made[task.key] for task in compatibility.tasks() if task.key in made]
    result = {
        "kind": "compatibility",
        "environment": environment.describe(torch.device("cpu")),
        "rows": rows,
    }
    file.write_text(json.dumps(result, indent=1) + "\n")
    return result


if __name__ == "__main__":
    main()
