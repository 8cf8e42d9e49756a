"""``strop bench models --speed``: a table of networks that is measured in parts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from strop.bench import accuracy, batch_norms, infer, infer_report, peers, speed
from strop.bench.cases import BenchCase
from strop.bench.infer_contenders import Field, Plan
from strop.bench.infer_rows import SPEED_ROWS, chosen_rows
from strop.bench.models import Workload
from strop.bench.report import write_json
from strop.cli import app
from strop.errors import OptionError
from strop.options import Options

PLAN = Plan("cpu", "fp32", ("eager",), samples=3)
BERT = speed.chosen(["bert-base"], [1], tiny=True)


def test_rows_are_chosen_by_network_and_batch() -> None:
    assert len(speed.chosen([], [], tiny=False)) == len(SPEED_ROWS) == 3 * len(speed.NAMES)
    assert [row.name for row in speed.chosen(["gpt2", "clip-l"], [8], tiny=False)] == [
        "D7-clip-l-b8",
        "D7-gpt2-b8",
    ]
    with pytest.raises(OptionError, match="no network bert; there are t5-xxl"):
        speed.chosen(["bert"], [], tiny=False)
    with pytest.raises(OptionError, match="no row of batch 3; batches are 1, 8, 32"):
        speed.chosen([], [3], tiny=False)


@pytest.mark.parametrize("network", speed.NAMES)
def test_networks_run_at_tiny_sizes(network: str) -> None:
    (row,) = speed.chosen([network], [1], tiny=True)
    workload = row.case(torch.float32).build(torch.device("cpu"))
    result = accuracy.run(workload, workload.inputs(row.size, 2))
    assert result.shape[0] == 2
    assert bool(result.isfinite().all())


@pytest.mark.parametrize("network", speed.NAMES)
def test_results_of_networks_follow_their_inputs(network: str) -> None:
    (row,) = speed.chosen([network], [1], tiny=True)
    (known,) = accuracy.references(row.case(torch.float32), torch.device("cpu"))
    assert known.signal > 2 * accuracy.MIN_SIGNAL
    assert float(known.exact.std()) > 0.01


@pytest.mark.parametrize("bias", [0.0, 3.0])
def test_a_result_that_follows_nothing_judges_nothing(bias: float) -> None:
    """As of a network in which signals die out: all would be equal, and good."""

    def build(device: torch.device, dtype: torch.dtype) -> Workload:
        model = torch.nn.Linear(4, 4, device=device, dtype=dtype)
        torch.nn.init.zeros_(model.weight)
        torch.nn.init.constant_(model.bias, bias)
        return Workload(
            model,
            lambda size, batch: {"input": torch.arange(4.0, dtype=dtype)},
            lambda model, given: model(**given),
        )

    case = BenchCase("still", build, ((1, 1),), (1,), torch.float32)
    (known,) = accuracy.references(case, torch.device("cpu"))
    error = accuracy.worst([known.eager], *known)
    assert error is not None
    assert (error["rms"], error["signal"], error["is_good"]) == (0.0, 0.0, False)
    assert accuracy.judge(known.eager, known.eager, known.exact)["is_good"]
    said = "no judge: other inputs change the result by 0.0e+00 of its size"
    assert said in speed.markdown({"rows": [made_up("a", 1, 2) | {"error": error}], "summary": {}})
    assert infer_report._error_text({"error": error}) == said


@pytest.mark.parametrize("network", ["efficientnet-b3", "resnet50", "bevformer"])
def test_batch_norms_divide_by_what_they_get(network: str) -> None:
    """And alike for each contender. EfficientNet's add 1e-3 to variances that are less."""
    (row,) = speed.chosen([network], [1], tiny=True)
    case = row.case(torch.float32)
    ours, eager = (case.build(torch.device("cpu")) for _ in range(2))
    weights, others = (each.target.state_dict() for each in (ours, eager))
    assert all(torch.equal(weights[name], others[name]) for name in weights)
    seen = list[float]()
    for norm in batch_norms.norms_of(ours.target):
        norm.register_forward_hook(
            lambda part, given, result: seen.append(
                float((result / part.weight.view(-1, 1, 1)).std((0, 2, 3)).median())
            )
        )
    accuracy.run(ours, ours.inputs(row.size, 4))
    assert all(0.1 < each < 1.5 for each in seen), seen


def test_a_table_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "speed.json"
    first = speed.run(BERT, PLAN, out=file, is_apart=False)
    assert json.loads(file.read_text())["rows"] == first["rows"]
    (row,) = first["rows"]
    assert row["error"]["is_good"]
    assert not row["fallbacks"]
    assert row["contenders"]["strop"]["p50_ms"] > 0 < row["contenders"]["eager"]["p50_ms"]

    asked: list[str] = []
    run = infer.run

    def watched(rows: Sequence[Any], plan: Plan, **how: Any) -> Any:
        asked.extend(row.name for row in rows)
        return run(rows, plan, **how)

    monkeypatch.setattr(infer, "run", watched)
    assert speed.run(BERT, PLAN, out=file, is_apart=False)["rows"] == first["rows"]
    assert not asked
    plan = Plan("cpu", "fp32", (), samples=3)
    again = speed.run(BERT, plan, out=file, is_apart=False, again=True)
    assert asked == ["D7-bert-base-b1"]
    eager = again["rows"][0]["contenders"]["eager"]
    assert eager == {"from": row["date"], **row["contenders"]["eager"]}
    file.write_text('{"kind": "speed"}')
    with pytest.raises(OptionError, match="is no file of strop bench models --speed"):
        speed.run(BERT, PLAN, out=file, is_apart=False)
    first["environment"]["torch"] = "1.0"
    file.write_text(json.dumps(first))
    with pytest.raises(OptionError, match="on another device or with other versions"):
        speed.run(BERT, PLAN, out=file, is_apart=False)


def made_up(name: str, ours: float, theirs: float) -> dict[str, Any]:
    contenders = {"strop": {"p50_ms": ours}, "inductor-graph": {"p50_ms": theirs}}
    return {"row": name, "model": name, "batch": 1, "dtype": "fp16", "contenders": contenders}


def test_the_verdict_counts_what_is_slower() -> None:
    rows = [made_up("a", 1.0, 2.0), made_up("b", 2.0, 1.0), made_up("c", 1.02, 1.0)]
    found = speed.summary(rows)
    assert (found["worst_row"], found["over_must"]) == ("b", ["b"])
    assert found["mean"] == pytest.approx(1.02 ** (1 / 3), abs=1e-4)
    text = speed.markdown({"rows": rows, "summary": found})
    for said in ("| b | 1 | fp16 | 2.000 |", "more than 1.02", "1 over 1.02"):
        assert said in text
    assert "no row has" in speed.verdict({"rows": [], "summary": {}})


def test_a_row_says_where_the_gpu_waits_for_the_host() -> None:
    row = made_up("a", 1.0, 2.0)
    for busy_ms, is_said in ((0.5, True), (0.9, False)):
        found = speed.rows_of({"rows": [row | {"busy_ms": busy_ms}]})[1][-1]
        assert ("the GPU is busy for 0.500 ms of it and waits for the host" in found) == is_said


def test_the_newest_result_becomes_a_table_of_a_page(tmp_path: Path) -> None:
    for date, ours in (("2030-01-01", 1.0), ("2030-01-02", 3.0)):
        rows = [made_up("a", ours, 2.0)]
        found = {"kind": "speed", "rows": rows, "summary": speed.summary(rows)}
        write_json(found, tmp_path / f"speed_h100_{date}.json")
    page = tmp_path / "page.md"
    page.write_text("<!-- networks -->\n<!-- /networks -->\n")
    words = ["bench", "table", "--results", str(tmp_path), "--page", str(page)]
    assert CliRunner().invoke(app, words).exit_code == 0
    assert "| a | 1 | fp16 | 3.000 |" in page.read_text()
    (tmp_path / "speed_h100_2030-01-03.json").write_text("[]")
    with pytest.raises(OptionError, match="is no file of strop bench models"):
        speed.load(tmp_path)
    assert speed.load(tmp_path / "empty") == {}


def test_contenders_of_a_large_model_have_the_same_weights(tmp_path: Path) -> None:
    (row,) = chosen_rows(["D1"], tiny=True)
    field = Field(row.case(torch.float32), torch.device("cpu"), Options(cache_dir=str(tmp_path)))
    ours, eager = (field.contender(name).workload.target for name in ("strop", "eager"))
    assert ours is not eager
    pointers = [[w.data_ptr() for w in each.parameters()] for each in (ours, eager)]
    assert pointers[0] == pointers[1]


@pytest.mark.parametrize(("row", "count"), [("D1s35", 2), ("D1", 4)])
def test_blocks_that_repeat_are_compiled_one_by_one(row: str, count: int) -> None:
    """SD3's transformer does not name them, Flux's names two classes."""
    model = chosen_rows([row], tiny=True)[0].case(torch.float32).build(torch.device("cpu")).target
    peers.peer_named("inductor-blocks-graph").prepare(model)
    compiled = [part for part in model.modules() if part._compiled_call_impl is not None]
    assert compiled == peers.repeated_blocks(model)
    assert len(compiled) == count
    with pytest.raises(OptionError, match="LayerNorm has no blocks that repeat"):
        peers.repeated_blocks(torch.nn.LayerNorm(4))


def test_a_large_model_is_judged_without_a_wider_copy() -> None:
    (row,) = chosen_rows(["D1s"], tiny=True)
    case = row.case(torch.bfloat16)
    large = BenchCase(case.name, case.builder, case.sizes, case.batches, case.dtype, is_large=True)
    ((_, exact, _),) = accuracy.references(case, torch.device("cpu"))
    ((_, found, _),) = accuracy.references(large, torch.device("cpu"))
    assert found.dtype == torch.float32
    scale = float(exact.square().mean().sqrt())
    assert float((found - exact).square().mean().sqrt()) < 1e-5 * scale


def narrow(model: Any, given: dict[str, Tensor]) -> Tensor:
    return torch.empty_like(given["x"], dtype=torch.bfloat16).copy_(model(given["x"]))


def test_a_wider_run_knows_no_narrow_type() -> None:
    model = torch.nn.Linear(4, 4, dtype=torch.bfloat16)
    given = {"x": torch.ones(2, 4, dtype=torch.bfloat16)}
    with accuracy.Widened(torch.float32):
        result = accuracy.run(Workload(model, lambda size, batch: given, narrow), given)
    wide = torch.nn.functional.linear(given["x"].float(), model.weight.float(), model.bias.float())
    torch.testing.assert_close(result, wide.detach())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--only", "bert"], "no network bert"),
        (["--batches", "x"], "are no numbers"),
        (["--peers", "tensorrt"], "no tensorrt"),
    ],
)
def test_mistakes(words: list[str], said: str) -> None:
    found = CliRunner().invoke(
        app, ["bench", "models", "--speed", "--tiny", "--device", "cpu", *words]
    )
    assert found.exit_code == 2
    assert said in " ".join(found.output.replace("│", " ").split())
