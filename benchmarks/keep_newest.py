"""Takes superseded files out of a folder of results: python benchmarks/keep_newest.py [FOLDER]

Of each row and device the newest file stays. What takes a process of its own, random shapes and
switches, moves into the file of its row from the newest one that has it, with that one's date.
"""

from __future__ import annotations

import json
import re
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from strop.bench import infer_report, train_report
from strop.bench.report import write_json

RESULTS = Path(__file__).resolve().parent / "results"
DATED = re.compile(r"(?P<case>.+)_(?P<device>[^_]+)_(?P<date>\d{4}-\d\d-\d\d)")


def keep_newest(folder: Path) -> list[Path]:
    """Delete the superseded files of ``folder``, and their plots; return them."""
    by_row: dict[tuple[str, str], list[Path]] = defaultdict(list)
    for file in sorted(folder.glob("*.json"), key=_date_of):
        if named := DATED.fullmatch(file.stem):
            by_row[_row_of(file, named["case"]), named["device"]].append(file)
    gone: list[Path] = []
    for (row, device), files in by_row.items():
        kept = _joined(row, device, files)
        gone += [found for f in files if f != kept for found in folder.glob(f"{f.stem}.*")]
    for file in gone:
        file.unlink()
    return gone


def _date_of(file: Path) -> str:
    return file.stem.rpartition("_")[2]


def _row_of(file: Path, case: str) -> str:
    """The row that it has a result of; a file named P1-random holds a part of P1."""
    row = json.loads(file.read_text()).get("row")
    return row if isinstance(row, str) and case.startswith(row) else case


def _joined(row: str, device: str, files: list[Path]) -> Path:
    """The file of a row that stays, with what only others have."""
    if len(files) > 1:
        for result in (*infer_report.load(files), *train_report.load(files)):
            date = result["environment"]["date"][:10]
            return write_json(result, files[0].parent / f"{row}_{device}_{date}.json")
    return files[-1]


def main(arguments: Sequence[str]) -> int:
    for file in keep_newest(Path(arguments[0]) if arguments else RESULTS):
        print(f"superseded: {file.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
