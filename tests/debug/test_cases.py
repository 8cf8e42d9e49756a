"""From a failing compile to its cause, with bugs planted on purpose."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

import strop
from strop.cli import app
from strop.debug import case as cases
from strop.debug import repro
from strop.debug.bisect import bisect
from strop.debug.failure import CRASH, WRONG, failure_of
from strop.debug.minify import minify, num_nodes, rebuilt
from strop.ir.graph import compute_nodes
from strop.options import Options
from tests.debug import broken

WRONG_SIGMOID = "1 / (2 + sp::exp(-{0}))"
Plant = Callable[[pytest.MonkeyPatch], None]
# bug -> how it fails, the operator that minify must end with, the part that bisect must name
BUGS: dict[str, tuple[Plant, str, str, str]] = {
    "pass changes values": (
        lambda m: broken.plant_pass(m, "sigmoid", broken.doubles),
        WRONG,
        "sigmoid",
        "wrong_pass",
    ),
    "pass raises": (
        lambda m: broken.plant_pass(m, "sigmoid", broken.raises),
        CRASH,
        "sigmoid",
        "wrong_pass",
    ),
    "row is wrong": (
        lambda m: broken.plant_row(m, "sigmoid", WRONG_SIGMOID),
        WRONG,
        "sigmoid",
        "gate",
    ),
}


@pytest.fixture
def case(dump: Path, cache: Path) -> cases.Case:
    return broken.case_in(dump, cache)


def test_a_case_survives_json(case: cases.Case) -> None:
    text = cases.to_json(case)
    assert cases.to_json(cases.from_json(text)) == text
    before, after = (c.compile().program for c in (case, cases.from_json(text)))
    assert after == before


def test_without_a_bug_nothing_fails(case: cases.Case) -> None:
    assert failure_of(case, cases.random_inputs(case)) is None
    compiled = case.compile(record=True)
    assert [record.graph is None for record in compiled.passes] == [False] * len(compiled.passes)


@pytest.mark.parametrize("bug", BUGS)
def test_bisect_names_the_part(case: cases.Case, monkeypatch: pytest.MonkeyPatch, bug: str) -> None:
    plant, kind, _, part = BUGS[bug]
    plant(monkeypatch)
    arguments = cases.random_inputs(case)
    failure = failure_of(case, arguments)
    assert failure is not None
    assert failure.kind == kind, failure
    culprits = list(bisect(case, arguments, failure))
    assert len(culprits) == 1, list(map(str, culprits))
    assert part in str(culprits[0])


@pytest.mark.parametrize("bug", BUGS)
def test_minify_leaves_the_operator(
    case: cases.Case, monkeypatch: pytest.MonkeyPatch, bug: str
) -> None:
    plant, kind, operator, _ = BUGS[bug]
    plant(monkeypatch)
    failure = failure_of(case, cases.random_inputs(case))
    assert failure is not None
    smallest = minify(case, lambda c: failure.is_like(failure_of(c, cases.random_inputs(c))))
    assert [node.op for node in compute_nodes(smallest.graph)] == [operator]
    assert num_nodes(smallest.graph) < num_nodes(case.graph) / 5
    assert all(size == 1 for size in smallest.env.values())
    found = failure_of(smallest, cases.random_inputs(smallest))
    assert found is not None
    assert found.kind == kind


def test_rebuilt_cuts_and_bypasses(case: cases.Case) -> None:
    graph = case.graph
    silu = next(n for n in graph.nodes if n.op == "silu")
    cut = rebuilt(graph, graph.outputs, {silu.inputs[0]})
    assert len(cut.inputs) == 4, "x, the weight and bias of down, and what was cut"
    assert [n.attrs["index"] for n in cut.inputs] == [0, 1, 2, 3]
    shorter = rebuilt(graph, graph.outputs, instead={silu: silu.inputs[0]})
    assert "silu" not in [n.op for n in shorter.nodes]
    assert len(shorter.inputs) == len(graph.inputs)


def test_repro_is_a_script_that_fails_until_the_bug_is_gone(
    case: cases.Case,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    cache: Path,
) -> None:
    monkeypatch.setenv("STROP_CACHE_DIR", str(cache))
    arguments = cases.random_inputs(case, seed=3)
    with monkeypatch.context() as patch:
        broken.plant_row(patch, "sigmoid", WRONG_SIGMOID)
        failure = failure_of(case, arguments)
        script = repro.write(case, arguments, str(failure), tmp_path / "repro")
        assert repro.reproduce(script.parent) == 1
    assert f"fails: {failure}" in capsys.readouterr().out
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "does not fail" in done.stdout


def test_the_verbs(
    dump: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STROP_CACHE_DIR", str(cache))
    monkeypatch.chdir(tmp_path)
    invoke = CliRunner().invoke
    for verb in ("repro", "minify", "bisect"):
        result = invoke(app, [verb, str(dump)])
        assert result.exit_code == 1, "nothing is broken yet"
        assert "does not fail" in result.output
        assert "--inputs FILE of bisect and repro" in " ".join(result.output.split())
    broken.plant_pass(monkeypatch, "sigmoid", broken.doubles)
    assert "STROP_DISABLE=wrong_pass" in invoke(app, ["bisect", str(dump)]).output
    result = invoke(app, ["minify", str(dump), "-o", "small"])
    assert result.exit_code == 0, result.output
    assert " nodes -> 1\n" in result.output
    assert {p.name for p in (tmp_path / "small").iterdir()} == {
        "graph.json",
        "inputs.safetensors",
        "repro.py",
        "01_graph.txt",
    }
    again = invoke(app, ["repro", str(dump), "-o", "small"])
    assert (again.exit_code, "choose another folder" in again.output) == (1, True)


class Overflows(nn.Module):
    """Wrong only on large values, which random inputs do not have."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(x) + 1


def test_real_inputs_of_a_run_that_went_wrong(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STROP_CACHE_DIR", str(cache))
    monkeypatch.setenv("COLUMNS", "300")
    broken.plant_row(monkeypatch, "sigmoid", "({0} > 50 ? 0 : 1 / (1 + sp::exp(-{0})))")
    options = Options(dump=str(tmp_path), check=True, cache_dir=str(cache))
    module = strop.optimize(Overflows().eval(), options=options)
    with torch.no_grad():
        module(torch.randn(7, 5))
        module(torch.full((9, 5), 60.0))
    (dump,) = tmp_path.iterdir()
    invoke = CliRunner().invoke
    assert "does not fail" in invoke(app, ["bisect", str(dump)]).output
    inputs = ["--inputs", str(dump / "inputs.safetensors")]
    result = invoke(app, ["bisect", str(dump), *inputs])
    assert result.exit_code == 0, result.output
    assert "step 0, pointwise kernel of Overflows, is inaccurate" in result.output
    result = invoke(app, ["repro", str(dump), "-o", str(tmp_path / "repro"), *inputs])
    assert result.exit_code == 0, result.output
    assert repro.reproduce(tmp_path / "repro") == 1
    missing = invoke(app, ["bisect", str(dump), "--inputs", str(tmp_path / "no")])
    assert (missing.exit_code, "STROP_CHECK=1" in missing.output) == (1, True)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: p / "absent", "STROP_DUMP=folder"),
        (lambda p: p, "has no graph.json"),
        (
            lambda p: (p / "graph.json").write_text("{}") and p,
            "graph.json: this is no graph that strop has dumped",
        ),
        (lambda p: (p / "graph.json").write_bytes(b"\xff") and p, "graph.json: 'utf-8' codec"),
        (
            lambda p: (p / "graph.json").write_text('{"format": 9}') and p,
            "graph.json: format 9; this strop reads 1; dump it again",
        ),
    ],
    ids=["absent", "empty", "damaged", "no text", "newer"],
)
def test_a_wrong_dump_is_named(
    tmp_path: Path, make: Callable[[Path], Path], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    result = CliRunner().invoke(app, ["bisect", str(make(tmp_path))])
    assert result.exit_code == 1
    assert message in result.output


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_case_of_another_device(
    case: cases.Case, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STROP_CACHE_DIR", str(cache))
    monkeypatch.setenv("COLUMNS", "300")
    cases.save(replace(case, device="cuda"), tmp_path)
    assert "give --device cpu" in CliRunner().invoke(app, ["bisect", str(tmp_path)]).output
    broken.plant_row(monkeypatch, "sigmoid", WRONG_SIGMOID)
    result = CliRunner().invoke(app, ["bisect", str(tmp_path), "--device", "cpu"])
    assert "step 2, pointwise kernel" in result.output


def test_a_folder_of_dumps_lists_them(dump: Path) -> None:
    result = CliRunner().invoke(app, ["bisect", str(dump.parent)])
    assert result.exit_code == 1
    assert dump.name in result.output
