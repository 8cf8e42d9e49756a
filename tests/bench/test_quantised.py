"""``benchmarks/quantised.py`` tells the stages of its contenders, cuts those that take too long,
and keeps what it has measured."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from benchmarks.prepared_apart import prepared
from benchmarks.quantised import STAGES
from benchmarks.quantised_schemes import SCHEMES, linears, quantise

ROOT = Path(__file__).parents[2]
Words = Callable[[Path], list[str]]
BEGIN = """
from pathlib import Path
import sys, time
from benchmarks import prepared_apart as apart
apart.show_stack_when_asked()
apart.reached("imported")
"""
READY = 'apart.wait_for_turn()\napart.answer(Path(sys.argv[1]), {"threads": THREADS})\n'
THREADS = 'apart.os.environ["TORCHINDUCTOR_COMPILE_THREADS"]'


@pytest.fixture(autouse=True)
def path_of_children(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), *filter(None, sys.path)]))


def python(code: str) -> Words:
    return lambda folder: [sys.executable, "-c", BEGIN + code, str(folder)]


def found_by(codes: Mapping[str, str], folder: Path, limit_s: float) -> dict[str, Any]:
    commands = {("a-scheme", name): python(code) for name, code in codes.items()}
    with prepared(commands, folder, ("imported", "built"), limit_s, 3) as contenders:
        found = {each.name: each.measure(limit_s) for each in contenders}
    assert all(each.process.poll() is not None for each in contenders)
    return found


def test_one_slow_contender_is_cut_and_others_measure(tmp_path: Path, capsys: Any) -> None:
    ready = READY.replace("THREADS", THREADS)
    codes = {
        "hangs": "def stuck():\n    time.sleep(600)\nstuck()",
        "works": 'apart.reached("built")\n' + ready,
        "fails": 'raise SystemExit("no such library")',
        "late": ready.replace("\napart.answer", "\ntime.sleep(600)\napart.answer"),
    }
    begin = time.monotonic()
    found = found_by(codes, tmp_path, 6)
    assert time.monotonic() - begin < 60
    assert found["hangs"]["failed"] == "took more than 6 s to get ready: stage 'built'"
    assert any("stuck" in line for line in found["hangs"]["stack"])
    assert [*found["hangs"]["prepare_s"]] == ["imported"]
    assert found["works"]["threads"] == "3"
    assert [*found["works"]["prepare_s"]] == ["imported", "built"]
    assert found["fails"]["failed"] == "no such library"
    assert found["late"]["failed"].startswith("took more than 6 s to measure")
    told = capsys.readouterr().err
    assert "a-scheme works: built" in told
    assert "a-scheme hangs: took more than 6 s" in told


def test_nobody_measures_before_all_are_ready(tmp_path: Path) -> None:
    code = 'time.sleep(WAIT)\napart.wait_for_turn()\napart.answer(Path(sys.argv[1]), {"at": NOW})\n'
    code = code.replace("NOW", "time.time()")
    names = {"first": "0", "last": "3"}
    codes = {name: code.replace("WAIT", wait) for name, wait in names.items()}
    begin = time.time()
    found = found_by(codes, tmp_path, 60)
    assert all(each["at"] - begin >= 3 for each in found.values())


def test_children_of_a_contender_end_with_it(tmp_path: Path) -> None:
    code = "import subprocess\nprint(subprocess.Popen(['sleep', '600']).pid, file=sys.stderr)\n"
    commands = {("a-scheme", "one"): python(code + READY.replace("THREADS", "0"))}
    with prepared(commands, tmp_path, (), 60, 1) as (contender,):
        child = int(contender.errors()[-1])
        assert has_process(child)
        assert contender.measure(60)["threads"] == 0
    for _ in range(50):  # it is reaped by another process
        if not has_process(child):
            return
        time.sleep(0.1)
    raise AssertionError("the child of the contender still runs")


def has_process(number: int) -> bool:
    state = Path(f"/proc/{number}/stat")
    return state.is_file() and state.read_text().split()[2] != "Z"


@pytest.mark.filterwarnings("ignore")  # of the libraries
@pytest.mark.parametrize("name", SCHEMES)
def test_schemes_change_nothing_but_linears(name: str) -> None:
    """Layers infer, and Inductor's settings of the process are as before."""
    scheme = SCHEMES[name]
    if any(importlib.util.find_spec(package) is None for package in scheme.needs):
        pytest.skip("the library is not installed")
    if scheme.capability > (0, 0):
        pytest.skip("needs a GPU")
    from torch._inductor import config

    before = config.save_config_portable()
    model = nn.Sequential(nn.Linear(256, 256)).eval().requires_grad_(False)
    quantise(model, scheme, list(linears(model)))
    assert config.save_config_portable() == before
    assert not any(part.training for part in model.modules())


@pytest.mark.slow
def test_tiny_rows(tmp_path: Path) -> None:
    out = tmp_path / "rows.json"
    script = [sys.executable, str(ROOT / "benchmarks/quantised.py"), "--out", str(out)]
    few = ["--tiny", "--samples", "2", "--schemes", "int8-plain,torchao-fp8-dynamic"]

    def run(contenders: str) -> tuple[dict[str, Any], str]:
        words = [*script, *few, "--contenders", contenders]
        done = subprocess.run(words, check=True, timeout=300, capture_output=True, text=True)
        return json.loads(out.read_text()), done.stderr

    result, _ = run("eager")
    assert result["kind"] == "quantised"
    assert "skipped" in result["rows"]["torchao-fp8-dynamic"]
    result, told = run("strop,eager")
    assert "int8-plain eager: imported" in told  # once more, since errors are judged by it
    row = result["rows"]["int8-plain"]["contenders"]
    assert {*row} == {"eager", "strop"}
    for found in row.values():
        assert [*found["prepare_s"]] == [*STAGES]
        assert found["timing"]["samples"] == 2
        assert found["error"]["rms"] > 0
    assert not row["strop"]["counts"]["num_opaque_calls"]
    again, told = run("strop,eager")
    assert not told
    assert again["rows"] == result["rows"]
    other = subprocess.run([*script, "--tiny", "--model", "sdxl"], capture_output=True, text=True)
    assert "results of something else" in other.stderr
