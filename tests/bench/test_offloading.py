"""``benchmarks/offloading.py`` measures tiny pipelines, and keeps what it has measured."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_tiny_pictures(tmp_path: Path) -> None:
    out = tmp_path / "rows.json"
    script = [sys.executable, str(ROOT / "benchmarks/offloading.py"), "--out", str(out)]
    few = ["--tiny", "--model", "sd15", "--steps", "2", "--pictures", "2"]
    for name in ("eager", "strop"):
        subprocess.run([*script, *few, "--contenders", name], check=True, timeout=300)
    result = json.loads(out.read_text())
    assert result["kind"] == "offloading"
    assert {*result["rows"]} == {"eager", "strop"}
    for row in result["rows"].values():
        kinds = ("resident", "model_offload")
        medians = [row[kind]["timing"]["p50_ms"] for kind in kinds]
        assert all(len(row[kind]["pictures_ms"]) == 1 for kind in kinds)
        assert row["ratio"] == pytest.approx(medians[1] / medians[0], rel=1e-3)
    assert set(result["rows"]["strop"]["eager_calls"].values()) == {0}
    other = subprocess.run([*script, "--tiny", "--model", "sdxl"], capture_output=True, text=True)
    assert "results of something else" in other.stderr
