"""``strop bench cpu``: which rows there are, what its musts say, and that it runs."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

from strop.bench import cpu, cpu_peers, cpu_plots, cpu_report, recommendation
from strop.bench.cpu_rows import (
    EAGER,
    MODELS,
    ROWS,
    Contender,
    CpuModel,
    CpuRow,
    Must,
    chosen_rows,
    contenders_of,
)
from strop.bench.cpu_turns import on_one_core, over_inputs
from strop.cli import app
from strop.errors import OptionError, StropError


def _inputs(model: nn.Module, shape: tuple[int, ...], generator: torch.Generator) -> Any:
    return (torch.randn(*shape, 8, generator=generator),)


def _double(model: nn.Module, example: Any) -> Any:
    """A peer that is exact, as eager in fp64 is."""
    exact = nn.Sequential(nn.Linear(8, 8)).double()
    exact.load_state_dict(model.state_dict())
    return lambda x: exact(x.double())


def _failing(model: nn.Module, example: Any) -> Any:
    raise RuntimeError("no rule\nfor this")


def _wrong(model: nn.Module, example: Any) -> Any:
    return lambda x: model(x) + 1


def _tiny(*contenders: Contender) -> dict[str, CpuModel]:
    eager = next(each for each in MODELS["unet"].contenders if each.name == EAGER)
    model = CpuModel(
        "tiny",
        "a linear",
        lambda: nn.Sequential(nn.Linear(8, 8)).requires_grad_(False),
        _inputs,
        (eager, *contenders),
    )
    return {"tiny": model}


PEER = Contender("openvino fp32", "exact", _double)
ROW = CpuRow("tiny", (3,), (Must("openvino fp32", EAGER, 1e-6), Must("openvino fp32", EAGER)))


def test_rows_are_chosen_by_name_and_model() -> None:
    assert chosen_rows([]) == ROWS
    assert len({row.name for row in ROWS}) == len(ROWS) == 17
    names = [row.name for row in chosen_rows(["bert-1x32", "unet"])]
    assert names == ["unet-16x24", "unet-64x64", "bert-1x32"]
    with pytest.raises(OptionError, match="no row dlrm-3; there are unet-16x24"):
        chosen_rows(["dlrm-3"])


def test_musts_are_of_contenders_that_there_are() -> None:
    for row in ROWS:
        names = {each.name for each in MODELS[row.model].contenders}
        assert {must.contender for must in row.musts} | {must.other for must in row.musts} <= names


def test_peers_are_chosen() -> None:
    names = {each.name for each in contenders_of(MODELS["bert"], ("openvino",))}
    assert {"openvino int8", "strop int8", "eager int8"} <= names
    assert not {name for name in names if name.startswith(("inductor", "onnxruntime"))}


def test_a_run_is_written_and_shown(tmp_path: Path) -> None:
    models, before = _tiny(PEER), torch.get_num_threads()
    (result,) = cpu.run([ROW], cpu.CpuPlan(samples=3), out=tmp_path, models=models)
    assert torch.get_num_threads() == before
    written = json.loads(Path(result.pop("file")).read_text())
    assert written == json.loads(json.dumps(result))
    assert written["environment"]["core"] in os.sched_getaffinity(0)
    has_bf16 = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    types = {"fp32", "int8"} | ({"bf16"} if has_bf16 else set())
    assert written["environment"]["product_gops"].keys() == types
    peer, eager = (written["contenders"][name] for name in ("openvino fp32", EAGER))
    assert peer["error"] < eager["error"] < 1e-6
    assert peer["how"] == "exact"
    assert peer["samples"] == eager["samples"] == 3
    assert eager["over_eager"] == 1.0
    assert [must["holds"] for must in written["musts"]] == [True, True]
    (path,) = tmp_path.glob("*.json")
    assert path.name == f"cpu-tiny-3_cpu_{written['environment']['date'][:10]}.json"
    assert [file.suffix for file in cpu_plots.draw([result], tmp_path)] == [".png"]
    assert [line[0] for line in cpu_report.rows_of([result])] == ["row", "tiny-3", "tiny-3"]
    assert cpu_report.verdicts([result])[-1] == "2 musts: 2 hold, 0 missed, 0 not judged"


@pytest.mark.parametrize(
    ("contender", "why"),
    [
        (replace(PEER, needs=("no_such_package",)), "no_such_package not installed: pip install"),
        (replace(PEER, make=_failing), "RuntimeError: no rule for this"),
        (replace(PEER, make=_wrong), "StropError: the result is wrong"),
    ],
)
def test_a_peer_that_gives_nothing_says_why(contender: Contender, why: str) -> None:
    models = _tiny(contender)
    (result,) = cpu.run([ROW], cpu.CpuPlan(samples=3), models=models)
    (line,) = (line for line in cpu_report.rows_of([result]) if line[1] == contender.name)
    assert line[-1].startswith(why)
    assert [must["holds"] for must in result["musts"]] == [None, None]
    assert f"not judged, openvino fp32: {why}" in cpu_report.verdicts([result])[0]


def test_what_is_no_peer_may_not_fail() -> None:
    ours = Contender("strop fp32", "wrong", _wrong)
    with pytest.raises(StropError, match="the result is wrong"):
        cpu.run([ROW], cpu.CpuPlan(samples=3), models=_tiny(ours))


def test_a_must_that_is_missed() -> None:
    times = {EAGER: [2.0, 2.0, 2.0], "strop": [1.0, 1.0, 4.0]}
    contenders = {EAGER: {"error": 1e-3}, "strop": {"error": 2e-3}}
    faster = cpu.judged(Must("strop", EAGER, 2.5), contenders, times)
    assert (faster["found"], faster["holds"]) == (2.0, False)
    nearer = cpu.judged(Must("strop", EAGER), contenders, times)
    assert (nearer["found"], nearer["holds"]) == (2.0, False)


def test_all_ways_get_the_same_calls_in_turns() -> None:
    asked: list[tuple[str, int]] = []
    ways = {name: lambda n, name=name: asked.append((name, n)) for name in "ab"}
    times = over_inputs(ways, [[(0,)], [(1,), (2,)]])
    assert asked == [("a", 0), ("b", 0), ("b", 1), ("b", 2), ("a", 1), ("a", 2)]
    assert {name: len(found) for name, found in times.items()} == {"a": 1, "b": 1}


def test_one_core_and_back() -> None:
    allowed = os.sched_getaffinity(0)
    with on_one_core(min(allowed)) as core:
        assert os.sched_getaffinity(0) == {core} == {min(allowed)}
    assert os.sched_getaffinity(0) == allowed
    with pytest.raises(OptionError, match="core 4096 is not one"), on_one_core(4096):
        pass


@pytest.mark.parametrize(
    ("name", "batch"), [("lookups", 3), ("dlrm", 1), ("wide", 2), ("deepfm", 2)]
)
def test_recommendation_models(name: str, batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bags have lengths of their own in each call, and the first is not empty."""
    monkeypatch.setattr(recommendation, "ROWS", 50)
    model, generator = recommendation.MODELS[name]().eval(), torch.Generator().manual_seed(0)
    calls = [recommendation.call_of(batch, generator) for _ in range(2)]
    for given in calls:
        assert model(*given).shape[0] == batch
    assert [len(x) for x in calls[0]] != [len(x) for x in calls[1]]


def test_sizes_that_an_exporter_is_to_find() -> None:
    """In the structure of the arguments: the last of DLRM's is a list."""

    class Ragged(nn.Module):
        def forward(self, numbers: Tensor, *given: Tensor) -> Tensor:
            return numbers

    given = (torch.zeros(2, 3), torch.zeros(4), torch.zeros(5))
    peer = cpu_peers.OnnxRuntime(Ragged(), is_ragged=True, quantises=False)
    numbers, rest = peer._any_sizes(given)
    assert set(numbers) == {0, 1}
    assert [set(each) for each in rest] == [{0}, {0}]


def test_mistakes_of_the_command(tmp_path: Path) -> None:
    run = CliRunner().invoke
    assert "no row unet-1x1" in run(app, ["bench", "cpu", "unet-1x1"]).output
    assert "no tvm" in run(app, ["bench", "cpu", "unet", "--peers", "tvm"]).output
    assert "goes with --out" in run(app, ["bench", "cpu", "--page", "x.md"]).output


def test_the_table_of_the_page() -> None:
    """docs/benchmarks.md has the table of the files in the folder of results."""
    root = Path(__file__).parents[2]
    text = cpu_report.markdown(cpu_report.load(root / "benchmarks" / "results"))
    page = (root / "docs" / "benchmarks.md").read_text()
    assert f"<!-- cpu -->\n{text}\n<!-- /cpu -->" in page
