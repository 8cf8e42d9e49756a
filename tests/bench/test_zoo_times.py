"""``strop bench models --times``: models of the zoo beside their peers, and the table of it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from strop.bench import census, zoo_runs, zoo_times
from strop.bench.zoo import ZOO
from strop.bench.zoo_times import TimesPlan
from strop.cli import app
from strop.errors import OptionError
from strop.options import Options

DLRM = [model for model in ZOO if model.name == "dlrm"]


@pytest.fixture
def plan(tmp_path: Path) -> TimesPlan:
    return TimesPlan("cpu", Options(cache_dir=str(tmp_path)), (1, 3), samples=3, num_shapes=1)


def rows_of(result: dict[str, Any]) -> dict[str, Any]:
    return {row["name"]: row for row in result["models"]}


def test_a_model_is_judged_and_timed_at_each_batch(plan: TimesPlan) -> None:
    threads, heard = torch.get_num_threads(), list[tuple[str, Any]]()
    result = zoo_runs.run(DLRM, plan, {}, lambda *what: heard.append(what))
    assert [name for name, _ in heard] == ["dlrm"]
    assert heard[0][1]["models"] == result["models"], "it can be written at once"
    assert (result["num_models"], result["num_good"]) == (1, 1)
    times = rows_of(result)["dlrm"]["times"]
    assert len(times["strop_ms"]) == 2
    assert min(times["strop_ms"]) > 0
    for low, middle, high in zip(
        *(times["eager"][key] for key in ("p20", "p50", "p80")), strict=True
    ):
        assert 0 < low <= middle <= high
    assert torch.get_num_threads() == threads


def test_what_is_done_stays(plan: TimesPlan) -> None:
    """Of models that are not asked for this time as well."""
    rows = [
        {"name": n, "is_good": True, "times": {"strop_ms": [1.0, 2.0]}} for n in ("vgg", "dlrm")
    ]
    heard, done = list[str](), {row["name"]: row for row in rows}
    result = zoo_runs.run(DLRM, plan, done, lambda name, _: heard.append(name))
    assert (result["models"], heard) == (rows, [])


def test_a_model_that_cannot_run_says_why_and_the_others_go_on(
    plan: TimesPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise ValueError("its rows are not aligned\nof the GPU")

    monkeypatch.setattr(zoo_times, "_calls", refuse)
    result = zoo_runs.run(DLRM, plan, {})
    assert rows_of(result)["dlrm"]["times"] == {"failed": "ValueError: its rows are not aligned"}
    assert zoo_times.verdict(result)[-1] == (
        "Could not be timed: dlrm (ValueError: its rows are not aligned)."
    )


def test_every_model_takes_batches_of_one_and_sixteen() -> None:
    for model in ZOO:
        for batch in (1, 16):
            given = zoo_times.given_to(model, batch, torch.device("cpu"))
            leaves = torch.utils._pytree.tree_leaves(given)
            assert any(batch in x.shape for x in leaves if isinstance(x, torch.Tensor)), model.name


def test_what_the_budget_has_no_time_for_is_named(plan: TimesPlan) -> None:
    result = zoo_runs.run(DLRM, replace(plan, budget_s=0.0), {})
    assert (result["models"], result["not_begun"]) == ([], ["dlrm"])
    assert zoo_times.verdict(result)[-1] == "Not begun, as the budget was over: dlrm."


def test_a_peer_that_raises_says_so(plan: TimesPlan, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise ValueError("it reads a number\nof the GPU")

    monkeypatch.setattr(zoo_times, "_peer", refuse)
    found = rows_of(zoo_runs.run(DLRM, plan, {}))["dlrm"]["times"]
    assert min(found["strop_ms"]) > 0
    assert found["eager"]["failed"] == "ValueError: it reads a number"
    assert found["eager"]["p50"] == [None, None]
    assert zoo_times.verdict(result_of({"one": found}))[0] == "Nothing was timed beside eager."


@pytest.mark.nightly
def test_models_are_prepared_at_the_same_time(plan: TimesPlan) -> None:
    models = [model for model in ZOO if model.name in ("dlrm", "mlp-mixer")]
    found = rows_of(zoo_runs.run(models, replace(plan, jobs=2), {}))
    assert [*found] == ["mlp-mixer", "dlrm"]
    assert all(min(row["times"]["eager"]["p50"]) > 0 for row in found.values())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_a_gpu_has_peers_in_graphs(plan: TimesPlan) -> None:
    on_gpu = replace(plan, device="cuda", peers=zoo_times.PEERS["cuda"])
    times = rows_of(zoo_runs.run(DLRM, on_gpu, {}))["dlrm"]["times"]
    assert all(min(times[peer]["p50"]) > 0 for peer in zoo_times.PEERS["cuda"])
    assert len(times["graph_ms"]) == 2
    assert min(times["graph_ms"]) > 0


def test_peers_of_another_device_are_refused() -> None:
    asked = ("eager", "inductor-graph")
    assert zoo_times.peers_on("cpu", asked) == ("eager",)
    assert zoo_times.peers_on("cuda", asked) == asked
    with pytest.raises(OptionError, match="peers of --times are eager on this device"):
        zoo_times.peers_on("cpu", ("inductor-graph",))


def result_of(times: dict[str, zoo_times.Found]) -> dict[str, Any]:
    told = {"batches": [1, 4], "peers": ["eager", "inductor-graph"], "samples": 3}
    models = [{"name": name, "times": found} for name, found in times.items()]
    return {"times": told, "models": models, "environment": {}}


def test_the_columns_and_who_is_slower() -> None:
    one = {
        "strop_ms": [1.0, 1.0],
        "eager": {"p20": [1.9, 0.8], "p50": [2.0, 0.9], "p80": [2.1, 1.0]},
        "inductor-graph": {"p20": [None, 1.9], "p50": [None, 2.0], "p80": [None, 2.1]},
    }
    result = result_of({"one": one, "two": {"failed": "ValueError: its size"}})
    assert zoo_times.header(result) == (
        "times eager's speed at 1, 4",
        "times inductor-graph's speed at 1, 4",
    )
    assert zoo_times.cells(result, result["models"][0]) == ("2.00, 0.90", "-, 2.00")
    assert zoo_times.cells(result, result["models"][1]) == ("", "")
    assert zoo_times.verdict(result) == [
        "Beside eager, 2 rows: median 1.45 times as fast, least 0.90. Slower: one at 4 (0.90).",
        "Beside inductor-graph, 1 row: median 2.00 times as fast, least 2.00. Slower: none.",
        "Could not be timed: two (ValueError: its size).",
    ]
    result["models"][0]["times"]["graph_ms"] = [0.5, 0.8]
    assert zoo_times.verdict(result)[2] == (
        "In a graph, beside inductor-graph, 1 row: median 2.50 times as fast, least 2.50. Slower:"
        " none."
    )
    assert zoo_times.header(result)[1] == "in a graph, times inductor-graph's speed at 1, 4"
    assert zoo_times.cells(result, result["models"][0]) == ("2.00, 0.90", "-, 2.50")
    bare = {"models": [{"name": "one"}]}
    assert zoo_times.header(bare) == zoo_times.cells(bare, bare["models"][0]) == ()


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STROP_CACHE_DIR", str(tmp_path / "cache"))
    page, file = tmp_path / "zoo.md", tmp_path / "zoo.json"
    asked = ["bench", "models", "--times", "--only", "dlrm", "--shapes", "1", "--device", "cpu"]
    keep = ["--page", str(page), "-o", str(file)]
    done = CliRunner().invoke(app, [*asked, "--batches", "1,2", *keep])
    assert done.exit_code == 0, done.output
    assert "| strict | times eager's speed at 1, 2 | why not |" in page.read_text()
    assert "Beside eager, 2 rows" in page.read_text()
    assert "Beside eager, 2 rows" in done.output
    rows = json.loads(file.read_text())["models"]
    again = CliRunner().invoke(app, [*asked, "--batches", "1,2", "-o", str(file)])
    assert again.exit_code == 0, again.output
    assert json.loads(file.read_text())["models"] == rows, "it was there already"
    other = CliRunner().invoke(app, [*asked, "--batches", "1,4", "-o", str(file)])
    assert other.exit_code == 2
    assert "of another run (batches)" in " ".join(other.output.replace("│", "").split())
    file.write_text("{")
    damaged = CliRunner().invoke(app, [*asked, "--batches", "1,2", "-o", str(file)])
    assert damaged.exit_code == 2
    assert "is no result of --times" in " ".join(damaged.output.replace("│", "").split())
    assert file.read_text() == "{"
    wrong = CliRunner().invoke(app, [*asked, "--batches", "0"])
    assert wrong.exit_code == 2
    assert census.rows_of({"models": []})[0][-2:] == ("strict", "why not")
