"""``benchmarks/memory_table.py`` measures cells by themselves, and keeps what it has measured."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import memory_table

ROOT = Path(__file__).parents[2]


def run(out: Path, *words: str) -> subprocess.CompletedProcess[str]:
    script = [sys.executable, str(ROOT / "benchmarks/memory_table.py"), "--out", str(out)]
    few = ["--tiny", "--model", "sd15", "--steps", "2", "--pictures", "2"]
    return subprocess.run(
        [*script, *few, *words], capture_output=True, text=True, timeout=300, check=False
    )


def cells_of(out: Path) -> dict[str, Any]:
    found = json.loads(out.read_text())
    assert found["kind"] == "memory_table"
    cells: dict[str, Any] = found["cells"]
    return cells


def check_cell(cell: dict[str, Any]) -> None:
    assert len(cell["pictures_ms"]) == 1
    assert cell["weights_bytes"] > 0
    assert cell["compile_s"] < cell["first_s"]
    assert cell["run"].startswith("20")  # the day


def test_cells_of_eager_are_measured_once(tmp_path: Path) -> None:
    out, few = tmp_path / "table.json", ["--schemes", "int8-plain", "--contenders", "eager"]
    done = run(out, *few, "--placements", "model_offload,budget")
    assert done.returncode == 0, done.stderr
    cells = cells_of(out)
    check_cell(cells["model_offload/int8-plain/eager"])
    assert cells["budget/int8-plain/eager"] == {"skipped": "a budget is Strop's"}
    again = run(out, *few, "--placements", "model_offload")
    assert again.returncode == 0
    assert not again.stdout
    assert cells_of(out) == cells
    other = run(out, *few, "--steps", "4")
    assert "results of something else" in other.stderr


@pytest.mark.parametrize(
    ("word", "value"), [("--schemes", "int3"), ("--placements", "attic"), ("--pictures", "1")]
)
def test_what_is_not_there_is_refused(
    tmp_path: Path,
    word: str,
    value: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["--out", str(tmp_path / "table.json"), "--tiny", "--pictures", "2", word, value]
    monkeypatch.setattr(sys, "argv", ["memory_table.py", *words])
    with pytest.raises(SystemExit) as ended:
        memory_table.main()
    assert ended.value.code == 2
    assert word in capsys.readouterr().err


@pytest.mark.slow
def test_cells_of_compilers(tmp_path: Path) -> None:
    out = tmp_path / "table.json"
    run(out, "--schemes", "bf16", "--contenders", "compile,strop", "--placements", "resident")
    cells = cells_of(out)
    for contender in ("compile", "strop"):
        check_cell(cells[f"resident/bf16/{contender}"])
    assert set(cells["resident/bf16/strop"]["eager_calls"].values()) == {0}
