"""The files of Options.dump, and the program that runs from them alone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import strop
from strop import passes
from strop.debug import case as cases
from strop.debug.listing import graph_text
from strop.debug.standalone import run_folder
from strop.errors import OptionError
from tests.debug import broken


def test_every_stage_has_its_file(dump: Path) -> None:
    names = [step.__name__ for step in passes.steps("cpu")]
    stages = [f"{n:02d}_after_{name}.txt" for n, name in enumerate(names, start=2)]
    wanted = {
        "graph.json",
        "00_fx.txt",
        "01_graph.txt",
        *stages,
        "plan.txt",
        "program.json",
        "program.txt",
        "kernels",
        "run.py",
    }
    assert {p.name for p in dump.iterdir()} == wanted
    assert dump.name == "000_Model"
    assert "silu" in (dump / "00_fx.txt").read_text()
    sources = {p.read_text() for p in (dump / "kernels").iterdir()}
    compiled = cases.load(dump).compile()
    assert sources == {s.text for s in compiled.program.sources}
    assert (dump / stages[-1]).read_text() == graph_text(compiled.graph)
    assert "refused edges:" in (dump / "plan.txt").read_text()


def test_a_new_node_renames_nothing_in_other_modules(
    dump: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken.plant_pass(monkeypatch, "sigmoid", broken.doubles)
    _, changed, *_ = cases.load(dump).compile(record=True).passes
    assert changed.graph is not None
    before = (dump / "02_after_canonicalize.txt").read_text().splitlines()
    after = graph_text(changed.graph).splitlines()
    assert len(set(after) - set(before)) == 2, "the new node and its reader"


def test_run_py_runs_alone(dump: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STROP_CACHE_DIR", str(cache))
    done = subprocess.run(
        [sys.executable, dump / "run.py"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "result 0: torch.float32 (3, 16) mean" in done.stdout


def test_other_sizes_run_too(dump: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STROP_CACHE_DIR", str(cache))
    (result,) = run_folder(dump, {"b": 7})
    assert result.shape == (7, 16)
    with pytest.raises(OptionError, match="SIZES"):
        run_folder(dump, {"n": 7})


def test_a_failed_compile_leaves_graph_and_error(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken.plant_pass(monkeypatch, "sigmoid", broken.raises)
    with pytest.raises(LookupError, match="no rule for sigmoid"):
        broken.dumped(tmp_path, cache)
    (folder,) = tmp_path.iterdir()
    assert "no rule for sigmoid" in (folder / "error.txt").read_text()
    with pytest.raises(LookupError, match="no rule for sigmoid"):
        cases.load(folder).compile()


def test_graphs_of_torch_compile_are_dumped(tmp_path: Path, cache: Path) -> None:
    options = {"dump": str(tmp_path), "cache_dir": str(cache)}
    compiled = torch.compile(broken.model(), backend="strop", options=options)
    with torch.no_grad():
        compiled(torch.randn(3, 16))
    (folder,) = tmp_path.iterdir()
    assert folder.name == "000_Model"
    assert (folder / "program.json").is_file()


def test_a_stored_plan_is_compiled_again_for_the_dump(tmp_path: Path, cache: Path) -> None:
    for name in ("first", "second"):
        broken.dumped(tmp_path / name, cache)
    first, second = (
        sorted((tmp_path / n / "000_Model").glob("*.txt")) for n in ("first", "second")
    )
    assert [p.read_text() for p in first] == [p.read_text() for p in second]
    module = strop.optimize(broken.model(), options=strop.Options(cache_dir=str(cache)))
    with torch.no_grad():
        module(torch.randn(3, 16))
    assert strop.explain(module).graphs[0].from_disk, "without a dump the stored plan serves"
