"""The folder of results has one file for each row and device, and each says what it is of."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from benchmarks import keep_newest

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
FILES = sorted(RESULTS.glob("*.json"))
ENVIRONMENT = ("date", "strop", "python", "torch", "triton", "cpu", "commit")
NAME = re.compile(
    r"(?P<row>[\w-]+)_(?P<device>h[12]00(-as-sm\d+)?|cpu)(_(?P<date>\d{4}-\d\d-\d\d))?"
)
LACKS = {
    file: set(lacks.split(", "))
    for file, lacks in re.findall(
        r"^\| `([\w.-]+)` \| ([\w, ]+) \|", (RESULTS / "README.md").read_text(), re.M
    )
}


def has_spread(part: Any) -> bool:
    """Whether percentiles, or all samples, lie anywhere in it."""
    if isinstance(part, dict):
        is_spread = {"p20", "p80"} <= {key[:3] for key in part}
        return (
            is_spread
            or any(isinstance(part.get(key), dict | list) for key in ("samples", "samples_ms"))
            or has_spread([*part.values()])
        )
    return isinstance(part, list) and any(map(has_spread, part))


def lacks(file: Path) -> set[str]:
    result = json.loads(file.read_text())
    environment = result.get("environment") or {}
    wanted = ENVIRONMENT if "_cpu" in file.name else (*ENVIRONMENT, "gpu")
    found = set() if isinstance(result.get("kind"), str) else {"kind"}
    found |= set() if all(environment.get(key) for key in wanted) else {"environment"}
    return found | (set() if has_spread(result) else {"spread"})


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_result_says_what_it_is_of(file: Path) -> None:
    assert lacks(file) == LACKS.get(file.name, set())


def test_what_is_said_to_lack_something_is_there() -> None:
    assert LACKS.keys() <= {file.name for file in FILES}


def test_one_result_for_each_row_and_device() -> None:
    named = [NAME.fullmatch(file.stem) for file in FILES]
    assert all(named), [f.name for f, n in zip(FILES, named, strict=True) if n is None]
    rows = [(name["row"], name["device"]) for name in named if name]
    assert len(rows) == len(set(rows)), sorted(row for row in rows if rows.count(row) > 1)


def test_a_plot_is_of_a_result() -> None:
    files = {file.stem for file in FILES}
    assert {file.stem for file in RESULTS.iterdir() if file.name != "README.md"} <= files


def test_the_tool_keeps_the_newest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An older file of a row goes; random shapes and switches that only it has stay."""
    for name in ("P1_h100_2026-11-25.json", "attn_wgmma_h100_2026-11-24.json"):
        shutil.copy(RESULTS / name, tmp_path)
    newest = json.loads((RESULTS / "P1_h100_2026-11-25.json").read_text())
    random, switches = newest.pop("random"), newest.pop("switches")
    random["from"] = newest["environment"]["date"]
    alone = newest | {"random": random, "contenders": {"strop": newest["contenders"]["strop"]}}
    (tmp_path / "P1-random_h100_2026-11-26.json").write_text(json.dumps(alone))
    newest["environment"]["date"] = "2030-01-02T00:00:00+00:00"
    (tmp_path / "P1_h100_2030-01-02.json").write_text(json.dumps(newest))
    (tmp_path / "attn_wgmma_h100_2030-01-02.json").write_text('{"kind": "attn_wgmma"}')
    (tmp_path / "attn_wgmma_cpu_2026-11-24.json").write_text('{"kind": "attn_wgmma"}')
    assert keep_newest.main([str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "P1_h100_2030-01-02.json",
        "attn_wgmma_cpu_2026-11-24.json",
        "attn_wgmma_h100_2030-01-02.json",
    ]
    assert "attn_wgmma_h100_2026-11-24.json" in said
    kept = json.loads((tmp_path / "P1_h100_2030-01-02.json").read_text())
    for part, had in (("random", random), ("switches", switches)):
        assert kept[part]["from"] == had["from"]
        assert kept[part] == had
