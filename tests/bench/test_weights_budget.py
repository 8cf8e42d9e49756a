"""``benchmarks/weights_budget.py`` measures tiny steps, and holds them against their bounds."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import weights_budget
from strop.bench.infer_contenders import Deadline
from strop.bench.infer_rows import chosen_rows
from tests.budgeted import lend_memory

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_tiny_steps(tmp_path: Path) -> None:
    out = tmp_path / "rows.json"
    script = [sys.executable, str(ROOT / "benchmarks/weights_budget.py"), "--out", str(out)]
    for names in ("eager,strop", "strop-budget,group,strop-group"):
        few = ["--tiny", "--samples", "2", "--contenders", names]
        subprocess.run([*script, *few], check=True, timeout=300)
    result = json.loads(out.read_text())
    assert result["kind"] == "weights_budget"
    assert {*result["rows"]} == {"eager", "strop", "strop-budget", "group", "strop-group"}
    for row in result["rows"].values():
        assert len(row["samples_ms"]) == 2
        assert row["weights_bytes"] > 0
    assert result["rows"]["strop"]["eager_calls"] == 0
    assert result["rows"]["strop"]["distance"] < 1e-4
    other = subprocess.run([*script, "--budget-gib", "3"], capture_output=True, text=True)
    assert "results of something else" in other.stderr


@pytest.mark.parametrize("model", ["flux", "sdxl"])
def test_what_is_stated(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU's memory stands for a GPU's."""
    counted = lend_memory(monkeypatch)
    (step,) = chosen_rows([weights_budget.STEPS[model]], tiny=True)
    device, clock = torch.device("cpu"), Deadline.of(300)
    rows = {}
    trial = weights_budget.Trial(step, device, budget_bytes=1 << 40, samples=2)
    rows["eager"] = weights_budget.row_of("eager", trial, clock)
    trial.budget_bytes = int(0.8 * rows["eager"]["weights_bytes"])
    row = weights_budget.row_of("strop-budget", trial, clock)
    assert "failed" not in row, row
    assert row["distance"] < 1e-4
    assert row["eager_calls"] == 0
    assert counted.most <= trial.budget_bytes
    assert row["held_bytes"] <= trial.budget_bytes
    assert 0 < row["streamed_bytes"] < row["weights_bytes"] <= row["streamed_bytes"] + counted.most
    assert row["stated_peak_bytes"] > row["held_bytes"]
    counted.most = counted.now
    row = weights_budget.row_of("strop-group", trial, clock)
    assert "failed" not in row, row
    assert row["distance"] < 1e-4
    assert row["eager_calls"] == 0
    assert 0 < counted.most <= row["held_bytes"] < row["weights_bytes"]
    assert row["streamed_bytes"] > 0
    assert "enable_group_offload, block_level of 1" in row["stated"]


def row_of_ms(p50_ms: float, **more: Any) -> dict[str, Any]:
    return {"timing": {"p50_ms": p50_ms}, **more}


@pytest.mark.parametrize(("resident_ms", "longer_ms"), [(120.0, 200.0), (250.0, 250.0)])
def test_the_longer_bound_counts(resident_ms: float, longer_ms: float) -> None:
    rows = {
        "strop": row_of_ms(resident_ms),
        "strop-budget": row_of_ms(300.0, streamed_bytes=10_000_000_000),
    }
    weights_budget.add_bounds("strop-budget", rows, 50.0)
    row = rows["strop-budget"]
    assert row["bounds"]["resident_ms"] == resident_ms
    assert row["bounds"]["bus_ms"] == 200.0
    assert row["bounds"]["limit_ms"] == pytest.approx(1.08 * longer_ms)
    assert row["ratio"] == pytest.approx(300.0 / longer_ms)


def test_a_peak_that_is_not_the_stated_one() -> None:
    assert weights_budget.is_misstated({"peak_to_stated": 1.051})
    assert weights_budget.is_misstated({"peak_to_stated": 0.949})
    assert not weights_budget.is_misstated({"peak_to_stated": 0.951})
    assert not weights_budget.is_misstated({})
