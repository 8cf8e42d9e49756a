"""Writes the table by which attention is chosen on an H100, from sweeps of its libraries.

    python benchmarks/attention_cases.py benchmarks/results/attn_libraries_h100_*.json

The table is ``src/strop/kernels/tuned/attention_h100.py``; later files take the place of earlier
ones. A contender is left out where it is wrong: its error is above ``WORSE`` times the least, or it
gives another thing than torch's own choice and the formula do for a query without keys.
"""

from __future__ import annotations

import argparse
import ast
import json
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.fitting.attn_libraries import case
from strop.kernels.attention.cases import AttentionCase, MeasuredCase
from strop.kernels.attention.cross import CrossTile
from strop.kernels.attention.short import MaskedTile
from strop.kernels.attention.tma import TmaTile
from strop.kernels.attention.wgmma_tiles import WgmmaTile
from strop.kernels.libraries import SDPA_NAME
from strop.wording import counted

ROOT = Path(__file__).resolve().parents[1]
TABLE = ROOT / "src/strop/kernels/tuned/attention_h100.py"
WORSE = 1.5
TILES: Mapping[str, type] = {
    "wgmma_attention": WgmmaTile,
    "cross_attention": CrossTile,
    "tma_attention": TmaTile,
    "short_attention": MaskedTile,
}
HEAD = '''\
"""Hold what attention takes on an H100, case by case, by each library and by kernels of ours.

`python benchmarks/attention_cases.py SWEEP...` writes this file from the sweeps of
`benchmarks/fit_kernels.py attn_libraries`{of}.
"""

from __future__ import annotations
{imports}
CASES: Cases = ({rows})
'''
IMPORTS = """
import torch

from strop.kernels.attention.cases import AttentionCase, Cases, MeasuredCase
from strop.kernels.attention.cross import CrossTile
from strop.kernels.attention.short import MaskedTile, Masking
from strop.kernels.attention.tma import TmaTile
from strop.kernels.attention.wgmma_tiles import WgmmaTile
"""


def measured(row: Mapping[str, Any]) -> MeasuredCase:
    """Return a row of the table. Raises ValueError where torch's own choice has no time."""
    us: dict[str, float] = {}
    tiles: dict[str, Any] = {}
    for contender, each in row["us"].items():
        name, *numbers = contender.strip("()").split(", ", 1)
        if not is_right(row, contender) or each >= us.get(name, math.inf):
            continue
        us[name] = each
        if numbers:
            tiles[name] = TILES[name](*ast.literal_eval(f"({numbers[0]},)"))
    if SDPA_NAME not in us:
        raise ValueError(f"{row['shape']}: torch's own choice is wrong or was not timed")
    return MeasuredCase(case(tuple(row["shape"])), us, tiles)


def is_right(row: Mapping[str, Any], contender: str) -> bool:
    """Tell whether results are as near to fp64 as others', and 0 without keys, or as torch's."""
    errors = row["errors"]
    least = min(each for each in errors.values() if math.isfinite(each))
    dead, usual = (row["dead"].get(name, "0.0") for name in (contender, SDPA_NAME))
    is_near = contender == SDPA_NAME or errors[contender] <= WORSE * least
    return is_near and dead in ("0.0", usual)


def text_of(rows: Iterable[MeasuredCase], sources: Sequence[str]) -> str:
    lines = [f"    {_row(row)},\n" for row in rows]
    of = ":\n" + ",\n".join(f"`{name}`" for name in sources) if sources else ""
    return HEAD.format(of=of, imports=IMPORTS, rows="\n" + "".join(lines))


def _row(row: MeasuredCase) -> str:
    tiles = f", {dict(row.tiles)!r}" if row.tiles else ""
    return f"MeasuredCase({_case(row.case)}, {dict(row.us)!r}{tiles})"


def _case(of: AttentionCase) -> str:
    sizes = f"{of.batch}, {of.heads}, {of.queries}, {of.keys}, {of.head}"
    kinds = f"Masking.{of.masking.name}, {of.spread!r}, {of.groups}, {of.dtype}"
    return f"AttentionCase({sizes}, {kinds})"


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("sweeps", type=Path, nargs="+")
    parser.add_argument("--table", type=Path, default=TABLE)
    args = parser.parse_args(arguments)
    found: dict[AttentionCase, MeasuredCase] = {}
    for path in args.sweeps:
        report = json.loads(path.read_text())
        if report["kind"] != "attn_libraries":
            parser.error(f"{path} is a sweep of {report['kind']}")
        found |= {row.case: row for row in map(measured, report["rows"])}
    args.table.write_text(text_of(found.values(), [path.name for path in args.sweeps]))
    print(f"{args.table}: {counted(len(found), 'case')}; then `ruff check --fix`, `ruff format`")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
