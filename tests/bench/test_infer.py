"""``strop bench infer``: its table of rows, its runs on the CPU with tiny models, its pages."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from strop.bench import (
    infer,
    infer_measure,
    infer_plots,
    infer_report,
    infer_variants,
    report,
)
from strop.bench.infer_contenders import DTYPES, Deadline, Field, Plan, attempt, in_order
from strop.bench.infer_rows import NUMERICS_ROWS, ROWS, chosen_rows, groups_of
from strop.bench.infer_variants import CHOOSING, random_summary
from strop.cli import app
from strop.dispatch.variants import VariantStore
from strop.errors import OptionError
from strop.kernels.library import OURS

TINY = Plan("cpu", "fp32", ("eager", "eager-graph"), samples=3)


def names(rows: Any) -> list[str]:
    return [row.name for row in rows]


def test_rows_by_name() -> None:
    assert names(chosen_rows([])) == names(ROWS)
    assert names(chosen_rows(["p4", "P1"])) == ["P1", "P4-512", "P4-1024"]
    assert len(chosen_rows(["P5"])) == 6
    assert names(chosen_rows(["P5x", "P2b"])) == ["P2b", "P5x"]
    with pytest.raises(OptionError, match="no row P8; there are P1, P2"):
        chosen_rows(["P8"])


def test_rows_of_one_model_share_a_process() -> None:
    found = [names(group) for group in groups_of(chosen_rows(["P1", "P2", "P3", "P6", "P7"]))]
    assert found == [["P1", "P2"], ["P3"], ["P6"], ["P7"]]
    assert [names(group) for group in groups_of(chosen_rows(["F1", "F5", "P3"]))] == [
        ["P3"],
        ["F1"],
        ["F5"],
    ]


def test_rows_by_numerics_are_exact_ones_by_another_name() -> None:
    assert names(NUMERICS_ROWS) == ["F1", "F2", "F3", "F4", "F5", "F6", "F7"]
    exact_rows = [chosen_rows([name])[0] for name in ("P3", "P5x", "P2", "D1", "P3", "P5x", "P5x")]
    for row, exact in zip(NUMERICS_ROWS, exact_rows, strict=True):
        assert row.model == exact.model
        assert row.title == f"{exact.title}, {', '.join(row.numerics.split(','))}"
        assert {r.numerics for r in chosen_rows([row.name])} == {row.numerics}
        assert not exact.numerics
    found = Field.of(chosen_rows(["F5"], tiny=True)[0], TINY, "cache")
    assert found.options.numerics == ("int8",)
    found = Field.of(chosen_rows(["F7"], tiny=True)[0], TINY, "cache")
    assert found.options.numerics == ("fp8", "step_cache")


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
@pytest.mark.parametrize("is_tiny", [False, True])
def test_random_shapes_are_legal(row: Any, is_tiny: bool) -> None:
    row = row.tiny() if is_tiny else row
    draws = row.draws
    shapes = draws.some(12, 0)
    assert shapes == draws.some(12, 0) != draws.some(12, 1)
    assert len(set(shapes)) == min(12, draws.most)
    grid = {"sd-vae": 8, "wan": 16, "wan-81": 16}.get(row.model, 16 if is_tiny else 64)
    assert all(side % grid == 0 for size, _ in shapes for side in size)
    assert all(side % grid == 0 for side in row.size)


def test_a_later_run_measures_the_shapes_that_are_left(tmp_path: Path) -> None:
    (row,) = chosen_rows(["P4-512"], tiny=True)
    plan = replace(TINY, random=3, random_from=2, peers=("eager",))
    (result,) = infer.run([row], plan, out=tmp_path, is_apart=False)
    drawn = row.draws.some(3, plan.seed)
    found = [(tuple(shape["size"]), shape["batch"]) for shape in result["random"]["shapes"]]
    assert found == [(tuple(size), batch) for size, batch in drawn[2:]]
    assert result["random"]["number_of_first"] == 2
    assert "from" not in result["random"]  # which says when another run measured them
    assert infer_report.random_text(result).startswith("1: ")


def test_a_model_and_its_random_shapes(tmp_path: Path) -> None:
    rows = chosen_rows(["P4"], tiny=True)
    plan = replace(TINY, random=2, variants=True, peers=("eager", "eager-graph", "inductor"))
    said: list[str] = []
    results = infer.run(
        rows,
        plan,
        out=tmp_path,
        is_apart=False,
        budget_s=79,
        step=lambda text, _: said.append(text),
    )
    assert said == ["P4-512, P4-1024: rows", "P4-512, P4-1024: random"]
    for result in results:
        ours, eager = (result["contenders"][name] for name in ("strop", "eager"))
        assert result["error"]["is_good"], result["error"]
        for found in (ours, eager):
            assert 0 < found["p20_ms"] <= found["p50_ms"] <= found["p80_ms"]
        assert result["contenders"]["eager-graph"] == {"skipped": "CUDA graphs need a GPU"}
        assert "left of the budget, it takes 80" in result["contenders"]["inductor"]["skipped"]
        assert len(result["random"]["shapes"]) == result["random"]["summary"]["count"] == 2
    first, second = results
    assert first["contenders"]["strop"]["first_s"] > second["contenders"]["strop"]["first_s"]
    assert second["counts"]["num_recompiles"] == first["random"]["counts"]["num_recompiles"] == 0
    assert first["random"]["summary"]["rms_to_peer"] < 1e-5
    cold, warm = first["random"]["shapes"]
    names = {"strop", *(f"no {name}" for name in CHOOSING)}
    assert set(warm["p50_ms"]) == names | {"eager"}
    fastest = warm["p50_ms"][warm["best"]]
    assert warm["to_best"] == pytest.approx(warm["p50_ms"]["strop"] / fastest, abs=1e-3)
    assert first["random"]["summary"]["to_best"] == max(cold["to_best"], warm["to_best"]) >= 1
    assert cold["cold_s"] > warm["first_s"]
    written = json.loads(Path(first["file"]).read_text())
    assert written["contenders"] == first["contenders"]
    assert "file" not in written
    assert Path(first["file"]).name.startswith("P4-512-tiny_cpu_2")
    assert len(infer_report.rows_of(results)) == 1 + 2 * 5


@pytest.mark.slow
def test_a_picture() -> None:
    rows = chosen_rows(["P5-512-img2img"], tiny=True)
    (result,) = infer.run(rows, TINY, is_apart=False)
    assert result["error"]["psnr_to_eager_db"] >= 60
    counts = result["counts"]
    assert (counts["num_graphs"], counts["num_recompiles"], counts["fallbacks"]) == (4, 0, {})


def test_nothing_is_timed_beside_compilers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels for other sizes, which are built behind the first call, are there before."""
    order: list[str] = []
    wait, turns = VariantStore.wait, infer_measure.take_turns
    monkeypatch.setattr(VariantStore, "wait", lambda store: (order.append("wait"), wait(store)))
    monkeypatch.setattr(
        infer_measure,
        "take_turns",
        lambda *args, **how: (order.append("turns"), turns(*args, **how))[1],
    )
    (result,) = infer.run(chosen_rows(["P1"], tiny=True), TINY, is_apart=False)
    assert result["contenders"]["strop"]["p50_ms"] > 0
    assert order == ["wait", "turns"]


@pytest.mark.parametrize("factor", [2.0, float("nan")])
def test_a_contender_with_a_wrong_result_has_failed(
    factor: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = infer_measure.take_turns

    def turns(calls: dict[str, Any], *given: Any, **how: Any) -> Any:
        right = calls["eager"]
        calls["eager"] = lambda: right() * factor
        return usual(calls, *given, **how)

    monkeypatch.setattr(infer_measure, "take_turns", turns)
    rows = chosen_rows(["P1"], tiny=True)
    (result,) = infer.run(rows, replace(TINY, peers=("eager",)), is_apart=False)
    assert result["contenders"]["strop"]["rms"] < 1e-2
    assert "of its size off" in result["contenders"]["eager"]["failed"]
    assert "of its size off" in str(infer_report.rows_of([result]))


@pytest.mark.parametrize("wanted", [1, 3])
def test_a_sample_has_as_many_calls_as_were_asked_for(wanted: int) -> None:
    (row,) = chosen_rows(["P1"], tiny=True)
    (result,) = infer.run([row], replace(TINY, calls=wanted, peers=()), is_apart=False)
    assert result["calls"] == wanted
    assert 1 <= result["contenders"]["strop"]["calls"] <= wanted


def test_each_switch_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    class AllButOne:  # each pass takes seconds
        def __contains__(self, name: str) -> bool:
            return name != "dot_merge"

    monkeypatch.setattr(infer_variants, "NEEDED_PASSES", AllButOne())
    (row,) = chosen_rows(["P4-512"], tiny=True)
    found = infer_variants.measure_switches(row, TINY, Deadline.of(300), lambda saved: None)
    switches = found["switches"]
    assert list(switches) == [
        "all on",
        "no dot_merge",
        "no cuda_graphs",
        "no check_finite",
        "no early_launch",
        "no in_place",
        *(f"no {name}" for name in OURS),
        "all off",
    ]
    assert all(switch["p50_ms"] > 0 for switch in switches.values())
    assert switches["no dot_merge"]["num_launches"] > switches["all on"]["num_launches"]
    assert switches["no cuda_graphs"]["num_launches"] == switches["all on"]["num_launches"]
    assert "failed" not in found["judge"]
    assert all(switch["error"]["is_good"] for switch in switches.values())


@pytest.mark.slow
def test_a_start_in_a_process_of_its_own() -> None:
    (result,) = infer.run(chosen_rows(["P6"], tiny=True), TINY, budget_s=300)
    assert "failed" not in result, result
    split = result["split_s"]
    assert set(split) == {"capture", "passes + codegen", "kernels", "first run"}
    first_s = result["contenders"]["strop"]["first_s"]
    assert sum(split.values()) == pytest.approx(first_s, abs=0.01)
    assert min(split.values()) > 0
    assert result["counts"]["num_captures"] == 1


def test_what_the_budget_leaves_out_is_named() -> None:
    rows = chosen_rows(["P1", "P3"], tiny=True)
    results = infer.run(rows, replace(TINY, random=3), budget_s=1)
    for result in results:
        assert "left of the budget" in result["skipped"]
        assert "left of the budget" in result["random"]["skipped"]
    table = infer_report.rows_of(results)
    assert [line[0] for line in table[1:]] == ["P1 ms", "", "P3 ms", ""]
    assert all("left of the budget" in line[-1] for line in table[1:])


def test_a_contender_that_fails_or_hangs() -> None:
    def hang() -> dict[str, Any]:
        time.sleep(30)
        return {}

    start = time.monotonic()
    found = attempt(hang, 0.1)
    assert found["failed"] == "cut after 0 s"
    assert time.monotonic() - start < 10
    found = attempt(lambda: {"share": 1 // 0})
    assert found["failed"].startswith("ZeroDivisionError")
    assert "1 // 0" in " ".join(found["log"])


@pytest.mark.parametrize(("left", "limit"), [(1000.0, 600.0), (500.0, 455.0), (320.0, None)])
def test_a_slow_peer_leaves_time_to_measure(left: float, limit: float | None) -> None:
    """It is cut early enough for that, or does not begin where it would be cut for sure."""
    (row,) = chosen_rows(["P1"], tiny=True)
    case = row.case(DTYPES[TINY.dtype_of(row)])
    reason, limit_s = infer_measure._terms("inductor-tuned", case, TINY, Deadline.of(left))
    if limit is None:
        assert "left of the budget, it takes 300" in reason
    else:
        assert reason == ""
        assert limit_s == pytest.approx(limit, abs=1.0)
    assert infer_measure._terms("eager", case, TINY, Deadline.of(left)) == ("", 0.0)


def test_peers_of_one_setup_are_side_by_side() -> None:
    found = in_order(["inductor-graph", "eager-graph", "inductor", "eager", "eager"])
    assert found == ["inductor", "inductor-graph", "eager", "eager-graph"]


# pages, from results that nobody measured

TIMES = {"p20_ms": 1.0, "p50_ms": 2.0, "p80_ms": 3.0, "samples": 9}
PLACE = {"gpu": "H100", "torch": "2.11", "date": "2030-01-02T03:04:05+00:00"}
CONTENDERS: dict[str, Any] = {
    "strop": {
        **TIMES,
        "first_s": 9.0,
        "peak_bytes": 3 << 30,
        "profile": {"launches": 412.0, "generated": 190.0},
    },
    "eager": {**TIMES, "p50_ms": 6.0, "p80_ms": 7.0, "first_s": 1.0, "peak_bytes": 4 << 30},
    "inductor": {"failed": "cut after 300 s"},
}
SHAPES = [
    {
        "size": (512, 256),
        "batch": b,
        "ratio": r,
        "longest_s": 0.1,
        "first_s": f,
        "rms_to_peer": 1e-3,
    }
    for b, r, f in ((1, 2.0, 0.2), (2, 1.5, 0.4), (3, 3.0, 0.1))
]
SWITCHES = {"all on": {**TIMES, "num_launches": 9}, "no x": {**TIMES, "num_launches": 12}}


def result_of(name: str = "P1", **more: Any) -> dict[str, Any]:
    (row,) = chosen_rows([name])
    return {**infer._empty(row, Plan(), PLACE), "contenders": CONTENDERS, **more}


def with_everything() -> dict[str, Any]:
    random = {"peer": "eager-graph", "shapes": SHAPES, "left_out": []}
    random["summary"] = random_summary(random)
    error = {"rms": 1e-3, "rms_eager": 2e-3, "is_good": True}
    return result_of(random=random, switches={"switches": SWITCHES}, error=error)


def test_summary_of_random_shapes() -> None:
    found = with_everything()["random"]["summary"]
    assert found["to_best"] is None
    assert (found["worst"], found["worst_shape"], found["median"]) == (1.5, [512, 256, 2], 2.0)
    assert (found["first_s"], found["longest_s"]) == (0.4, 0.1)


def test_table() -> None:
    text = report.plain_table(infer_report.rows_of([with_everything()]))
    assert "3.00x" in text
    assert "412 (190 generated)" in text
    assert "stretch 4.0 reached, ok rms 1.00e-03 (eager 2.00e-03)" in text
    assert "cut after 300 s" in text
    assert "worst 1.50x at 256x512 b2" in text
    assert "no x" in text


def test_verdicts() -> None:
    slow = {"strop": {**TIMES, "p50_ms": 9.6}}
    assert infer_report.verdict(result_of(contenders=slow)) == "2.00 x the must of 4.8"
    assert infer_report.verdict(result_of("P5-512", contenders=slow)) == "stretch 0.23 reached"
    assert infer_report.verdict(result_of("P7")) == "stretch 0.8 reached"  # 3 GiB of 4
    assert infer_report.verdict(result_of(is_tiny=True)) == ""


def test_earlier_results_of_slow_peers(tmp_path: Path) -> None:
    fast = {"inductor": {**TIMES, "first_s": 60.0}, "eager": {**TIMES, "first_s": 1.0}}
    report.write_json(result_of(contenders=fast), tmp_path / "P1_h100_2030-01-02.json")
    found = infer.earlier_peers(result_of(), tmp_path)
    assert found == {"inductor": {"from": PLACE["date"], **fast["inductor"]}}
    other = result_of(environment={**PLACE, "torch": "2.13"})
    assert infer.earlier_peers(other, tmp_path) == {}
    assert infer.earlier_peers(result_of(dtype="bf16"), tmp_path) == {}
    assert infer.earlier_peers(result_of("P2"), tmp_path) == {}
    start = infer.earlier_peers(result_of("P6"), tmp_path)
    assert start == {"inductor": {"from": PLACE["date"], "first_s": 60.0}}
    later = result_of(contenders=found)
    assert "2.00 ms (2030-01-02)" in infer_report.markdown([later])


def test_page(tmp_path: Path) -> None:
    for date, p50 in (("2030-01-01", 5.0), ("2030-01-02", 2.0)):
        times = {"strop": {**TIMES, "p50_ms": p50}}
        place = {**PLACE, "date": date}
        report.write_json(
            result_of(contenders=times, environment=place), tmp_path / f"P1_{date}.json"
        )
    report.write_json(result_of("P4-512"), tmp_path / "P4-512_h100.json")
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- infer -->\nold\n<!-- /infer -->\nafter\n")
    words = ["bench", "table", "--results", str(tmp_path), "--page", str(page)]
    assert CliRunner().invoke(app, words).exit_code == 0
    text = page.read_text()
    assert text.startswith("before\n<!-- infer -->\n| ")
    assert text.endswith("<!-- /infer -->\nafter\n")
    assert "| P1 | SD1.5 UNet step 512², batch 2 | **2.00 ms** |" in text
    assert text.index("| P1 |") < text.index("| P4-512 |")
    assert "old" not in text


def test_plots(tmp_path: Path) -> None:
    files = infer_plots.draw(with_everything(), tmp_path / "plots")
    assert [file.name for file in files] == ["P1-times.svg", "P1-random.svg", "P1-ladder.svg"]
    assert all(file.read_text().startswith("<?xml") for file in files)
    assert [f.name for f in infer_plots.draw(result_of("P7"), tmp_path)] == [
        "P7-times.svg",
        "P7-peaks.svg",
    ]
    assert infer_plots.draw(result_of(contenders={}), tmp_path) == []


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["infer", "P1", "--device", "cpu"], 1, "--device cpu --tiny runs the same code"),
        (["infer", "P1", "--peers", "tvm", "--device", "cpu"], 2, "no tvm; there are eager"),
        (["infer", "P1", "--tiny", "--dtype", "fp8", "--device", "cpu"], 2, "there are fp16"),
        (["infer", "P1", "--tiny", "--dtype", "fp16", "--device", "cpu"], 2, "rows run in fp32"),
        (["infer", "P1", "--tiny", "--device", "cpu", "-o", __file__], 1, "is a file; give the"),
        (["table", "--results", "absent"], 1, "strop bench infer -o absent makes them"),
    ],
)
def test_mistakes(words: list[str], code: int, said: str) -> None:
    found = CliRunner().invoke(app, ["bench", *words])
    assert found.exit_code == code, found.output
    assert said in " ".join(found.output.replace("│", " ").split())
