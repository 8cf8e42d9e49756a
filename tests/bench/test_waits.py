"""What a user waits for behind a change: the script that times it, with tiny pipelines on a CPU."""

from __future__ import annotations

import gc
import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import waits
from strop.bench import adapted_loops
from strop.bench.wait_changes import CHANGES, LORA
from strop.bench.wait_models import MODELS
from strop.bench.wait_profile import profiled

Row = dict[str, Any]
Run = Callable[..., tuple[list[Row], str]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> Run:
    """Run the script in this process, whose children measure. Return the rows of its file, and what
    it has printed."""
    out = tmp_path / "waits_cpu_2026-11-26.json"
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))

    def rows_after(*words: str) -> tuple[list[Row], str]:
        given = ["waits.py", "--tiny", "--steps=2", "--repeats=1", f"--out={out}", *words]
        monkeypatch.setattr(sys, "argv", given)
        waits.main()
        result = json.loads(out.read_text())
        assert result["kind"] == "waits"
        assert {"date", "torch", "commit", "cpu"} <= result["environment"].keys()
        return result["rows"], capsys.readouterr().out

    return rows_after


def assert_timed(rows: list[Row]) -> None:
    for row in rows:
        assert "wait_s" in row, row
        assert 0 <= row["wait_s"] <= row["change_s"] + row["picture_s"]
        assert row["steady_s"] == min(row["samples"]) > 0


@pytest.mark.slow
def test_runs_are_put_together(run: Run) -> None:
    backend = "--backend=eager"
    rows, _ = run("--models=sd15", "--ways=eager,compile-blocks", "--changes=size", backend)
    names = ["the first picture", "another size"]
    assert [row["change"] for row in rows] == names * 2
    assert_timed(rows)
    eager, compiled = rows[:2], rows[2:]
    assert not any(row["done"] or row["done_later"] for row in eager)
    assert compiled[0]["done"]["graph"] >= 1
    assert compiled[0]["done"]["compile_s"] > 0

    had = rows
    rows, printed = run("--models=flux", "--ways=eager", "--changes=batch", backend)
    assert rows[: len(had)] == had
    assert_timed(rows)
    added = [(row["model"], row["change"]) for row in rows[len(had) :]]
    assert added == [("flux", names[0]), ("flux", "two pictures")]
    for model, name in [*(("sd15", name) for name in names), *added]:
        assert f"| {model} | {name} | " in printed

    had = rows
    rows, _ = run("--models=sd15", "--ways=eager", "--changes=size,lora", "--minutes=0", backend)
    kept = [row for row in rows if "skipped" not in row]
    assert kept == had  # what time was too short for takes nothing's place
    of_loras = {change.name for change in CHANGES if change.group == LORA}
    assert {row["change"] for row in rows if row not in kept} == of_loras


def test_another_kind_of_run_is_refused(run: Run, tmp_path: Path) -> None:
    (tmp_path / "waits_cpu_2026-11-26.json").write_text(
        json.dumps({"environment": {}, "steps": 30, "rows": []})
    )
    with pytest.raises(SystemExit, match="steps is 30 there and 2 here"):
        run()


def test_waits_that_a_profile_makes_longer_go_to_no_file(run: Run, capsys: Any) -> None:
    with pytest.raises(SystemExit):
        run("--profile=profiles")
    assert "--profile makes waits longer" in capsys.readouterr().err


def test_a_profile_lists_functions_and_collections(tmp_path: Path) -> None:
    file = tmp_path / "sd15_strop" / "LoRA_unloaded.txt"
    with profiled(file):
        json.dumps({"a": [1, 2, 3]})
        gc.collect()
    text = file.read_text()
    number = re.match(r"(\d+) garbage collections? took \d+\.\d+ s", text)
    assert number is not None
    assert int(number[1]) >= 1
    assert text.count("dumps") == 2, "by the time of all that it calls, and by its own"
    before = list(gc.callbacks)
    with pytest.raises(KeyError), profiled(file):
        raise KeyError
    assert gc.callbacks == before


def test_a_cell() -> None:
    row = {"wait_s": 1.234, "steady_s": 0.5, "done": {"graph": 2, "kernel": 1, "compile_s": 7.6}}
    assert waits.cell(row) == "1.23 (2 graphs, 1 kernel, 8 s of compiling) + 0.50"
    assert waits.cell({"wait_s": 0.1, "steady_s": 0.5, "done": {}}) == "0.10 + 0.50"
    assert waits.cell({"skipped": "time was over"}) == "time was over"


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_strop_traces_nothing_for_loras(run: Run, model: str) -> None:
    rows, _ = run(f"--models={model}", "--ways=strop")
    assert [row["change"] for row in rows] == [change.name for change in CHANGES]
    assert_timed(rows)
    adapted = [row for row in rows if re.search("LoRA|scale|unloaded", row["change"])]
    assert len(adapted) == 11
    for row in adapted:
        done = row["done"] | row["done_later"]
        assert not done.keys() & {"graph", "eager call"}, row
    unloaded = [row["done"] for row in adapted if row["change"].endswith("unloaded")]
    # Flux.1 reads one layer without an adapter in one piece with others that have one: it moves
    assert [done.get("binding", 0) for done in unloaded] == [int(model == "flux"), 0]


@pytest.mark.slow
def test_hot_swap_begins_with_a_lora(run: Run) -> None:
    words = ("--ways=hotswap-blocks", "--changes=lora", "--backend=eager")
    rows, _ = run("--models=sd15", *words)
    assert [row["change"] for row in rows] == [c.name for c in CHANGES if c.group == LORA]
    assert_timed(rows)
    by_name = {row["change"]: row["done"] for row in rows}
    assert by_name["the first LoRA"]["graph"] >= 1
    assert not by_name["another LoRA in its place"]  # compiled for it


@pytest.mark.slow
def test_steps_of_a_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STROP_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(adapted_loops, "PICTURES", 1)
    found = adapted_loops.loop_steps(
        MODELS["sd15"], torch.device("cpu"), (2, 6), rank=2, is_tiny=True, turns=2
    )
    assert found["eager_calls"] == 0
    assert found["step_ms"].keys() == {"without", "with two"}
    for part in (*found["step_ms"].values(), found["ratio"]):
        assert len(part["samples"]) == 2
        assert part["p20"] <= part["p50"] <= part["p80"]
