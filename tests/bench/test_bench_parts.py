"""Cases, timer, judge, worker and files of the benchmarks."""

from __future__ import annotations

import errno
import itertools
import json
import math
import os
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from strop.bench import (
    accuracy,
    environment,
    infer_plots,
    infer_report,
    models,
    peers,
    report,
    timer,
    train_report,
    worker,
)
from strop.bench.cases import CASES, case_named
from strop.bench.infer_contenders import take_turns
from strop.errors import OptionError

CPU = torch.device("cpu")


def parameters(module: Any) -> int:
    return sum(p.numel() for p in module.parameters())


def test_full_size_models() -> None:
    meta = torch.device("meta")
    half = torch.float16
    assert parameters(models.make_unet(models.SD15_UNET, meta, half)) == 859_520_964
    assert parameters(models.make_unet(models.SDXL_UNET, meta, half)) == 2_567_463_684
    assert parameters(models.make_vae(models.SD_VAE, meta, half)) == 83_653_863
    clip = models.make_text_encoder(models.CLIP_L, meta, half)
    assert parameters(clip) == 123_060_480
    assert {p.dtype for p in clip.parameters()} == {half}


def test_sdxl_inputs_fit_its_embedding() -> None:
    build = models.unet_workload(models.SDXL_UNET)
    given = build(torch.device("meta"), torch.float16).inputs((1024, 768), 2)
    added = given["added_cond_kwargs"]
    assert added["text_embeds"].shape == (2, 1280)
    assert added["time_ids"].shape == (2, 6)
    assert given["sample"].shape == (2, 4, 128, 96)


def test_weights_are_the_same_each_time() -> None:
    case = case_named("tiny-unet")
    first, second = (case.build(CPU).target.state_dict() for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert torch.get_default_dtype() == torch.float32


def test_cases_have_names() -> None:
    assert len({c.name for c in CASES}) == len(CASES)
    assert len(case_named("sd15-pipe").shapes) == 12
    with pytest.raises(OptionError, match="sd15-unet-512"):
        case_named("sd15")
    with pytest.raises(OptionError, match="inductor-dynamic"):
        peers.peer_named("tensorrt")


def test_percentiles() -> None:
    timing = timer.timing_of([float(n) for n in range(100, -1, -1)])
    assert (timing.p20_ms, timing.p50_ms, timing.p80_ms, timing.samples) == (20, 50, 80, 101)
    assert timer.timing_of([3.0]).p80_ms == 3.0


def test_calls_take_turns() -> None:
    order: list[str] = []
    calls = {"a": lambda: order.append("a"), "b": lambda: order.append("b")}
    found = timer.time_calls(calls, CPU, samples=2, inner=2, warmup=1)
    assert "".join(order) == "ab" + "aabb" + "bbaa"
    assert found["a"].samples == 2
    order.clear()
    timer.time_calls(calls, CPU, samples=1, inner={"a": 1, "b": 3}, warmup=0)
    assert "".join(order) == "abbb"


def test_each_call_comes_behind_each_other() -> None:
    """What a call leaves behind, heat or a cache, meets all alike."""
    order: list[str] = []
    calls = {name: (lambda name=name: order.append(name)) for name in "abc"}
    timer.time_calls(calls, CPU, samples=12, inner=1, warmup=0)
    pairs = Counter(f"{one}{two}" for one, two in itertools.pairwise(order) if one != two)
    assert set(pairs) == {"ab", "ba", "bc", "cb", "ca", "ac"}
    assert max(pairs.values()) - min(pairs.values()) <= 2


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_a_graph_keeps_what_it_reads() -> None:
    """Nobody else holds the arguments of a call that a hand-made graph was captured from: other
    tensors came to lie where they had been."""

    def graph_of(x: torch.Tensor) -> timer.Call:
        return timer.captured(lambda: x * 2)

    replay = graph_of(torch.ones(1 << 20, device="cuda"))
    others = [torch.full((1 << 20,), 7.0, device="cuda") for _ in range(8)]
    assert replay().mean().item() == 2
    assert len(others) == 8


def test_a_call_that_captures_again_is_timed_like_others() -> None:
    """A graph whose working memory has grown since is captured again by the next call; what that
    takes does not say how many calls make a sample."""
    slow = [0.2]

    def step() -> None:
        time.sleep(slow.pop() if slow else 0.001)

    found = take_turns({"step": step}, "step", CPU, samples=3)
    assert found["step"]["calls"] > 5


def test_times_are_true() -> None:
    found = timer.time_calls({"nap": lambda: time.sleep(0.02)}, CPU, samples=3, inner=2, warmup=0)
    assert 20 <= found["nap"].p50_ms < 10_000  # not microseconds, on however busy a machine
    assert 20 <= timer.wall_ms(lambda: time.sleep(0.02), CPU, 2) < 10_000
    assert timer.with_peak(lambda: 3, CPU) == (3, None)


def test_what_overlaps_counts_once() -> None:
    """Kernels that begin early, in any order; one within another; a gap; copies beside them."""
    spans = [(10.0, 30.0), (0.0, 12.0), (15.0, 20.0), (40.0, 45.0), (45.0, 46.0)]
    assert timer.covered(spans) == 36
    assert timer.covered([]) == 0


def test_judge() -> None:
    torch.manual_seed(0)
    exact = torch.randn(1000, dtype=torch.float64)
    noise = torch.randn(1000, dtype=torch.float64)
    eager = (exact + 1e-5 * noise).float()
    assert accuracy.judge((exact - 1e-5 * noise).float(), eager, exact)["is_good"]
    assert not accuracy.judge((exact - 1.2e-5 * noise).float(), eager, exact)["is_good"]
    one_off = eager.clone()
    one_off[7] += 2e-4
    assert not accuracy.judge(one_off, eager, exact)["is_good"]
    assert not accuracy.judge(torch.full_like(eager, math.nan), eager, exact)["is_good"]
    found = accuracy.judge(eager, eager, exact)
    assert found["rms"] == found["rms_eager"] == pytest.approx(1e-5, rel=0.1)


def test_psnr() -> None:
    a = torch.zeros(3, 4, 4)
    assert accuracy.psnr_db(a, a) == math.inf
    assert accuracy.psnr_db(a, a + 0.1) == pytest.approx(20)


def test_precision_is_put_back() -> None:
    before = torch.backends.cudnn.allow_tf32
    with accuracy.full_precision():
        assert not torch.backends.cudnn.allow_tf32
    assert torch.backends.cudnn.allow_tf32 == before


def task(**more: Any) -> dict[str, Any]:
    plan = {"device": "cpu", "dtype": "fp32", "peers": (), "samples": 3}
    return {
        "do": "rows",
        "rows": ["P4-512"],
        "is_tiny": True,
        "plan": plan,
        "until": time.time() + 300,
        **more,
    }


def test_worker_is_cut() -> None:
    start = time.monotonic()
    assert worker.run_apart(task(), 0.3) == {"failed": "cut after 0 s"}
    assert time.monotonic() - start < 10


def test_worker_that_fails_leaves_what_it_saved(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    found = worker.run_apart(task(rows=["P4-512", "no such row"]), 120)
    assert found["failed"] == "exit 1"
    assert "no such row" in found["log"][-1]


def test_environment() -> None:
    found = environment.describe(CPU)
    assert found["torch"] == torch.__version__
    assert found["diffusers"] != "unknown"
    assert environment.device_label(CPU) == "cpu"
    assert environment.version_of("no-such-package") == "unknown"
    assert found["switches"] == {}
    json.dumps(found)


def test_a_gpu_is_looked_at_while_it_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\nsleep 0.2\necho '1590 MHz, 699.10 W, 61'\n")
    tool.chmod(0o755)
    calls = list[float]()

    def call() -> None:
        calls.append(time.monotonic())
        time.sleep(0.01)

    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    start = time.monotonic()
    found = environment.gpu_load(call, settle_s=0.05)
    assert found == {
        "clocks.sm": "1590 MHz",
        "power.draw.instant": "699.10 W",
        "temperature.gpu": "61",
    }
    assert calls[-1] - start > 0.2, "until the answer was there"
    monkeypatch.setenv("PATH", "")
    assert environment.gpu_load(call) == {}


def test_switches_of_the_environment_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STROP_HOIST", "0")
    monkeypatch.setenv("STROP_IN_PLACE", "1")  # as it is anyway
    monkeypatch.setenv("STROP_CACHE_DIR", "somewhere")
    assert environment.switches() == {"hoist": False}


@pytest.mark.parametrize(("kind", "row"), [("infer", "P1"), ("train", "P8")])
def test_tables_are_of_the_default_options(kind: str, row: str, tmp_path: Path) -> None:
    load = {"infer": infer_report.load, "train": train_report.load}[kind]
    usual = {
        "row": row,
        "kind": kind,
        "contenders": {},
        "environment": {"date": "2030-01-01", "switches": {}},
    }
    newer = {"date": "2030-01-02", "switches": {"in_place": False}}
    for number, result in enumerate((usual, usual | {"environment": newer})):
        (tmp_path / f"{number}.json").write_text(json.dumps(result))
    assert load(sorted(tmp_path.iterdir())) == [usual]


def test_tables_prefer_what_was_measured_beside_eager(tmp_path: Path) -> None:
    for day, others in enumerate((("eager",), ("eager",), ()), 1):
        contenders: dict[str, Any] = {name: {} for name in ("strop", *others)}
        result = {
            "row": "P1",
            "kind": "infer",
            "contenders": contenders,
            "environment": {"date": f"2030-01-0{day}"},
        }
        (tmp_path / f"{day}.json").write_text(json.dumps(result))
    (found,) = infer_report.load(sorted(tmp_path.iterdir()))
    assert found["environment"]["date"] == "2030-01-02"
    for day in (1, 2):
        (tmp_path / f"{day}.json").unlink()
    (found,) = infer_report.load(tmp_path.iterdir())
    assert found["environment"]["date"] == "2030-01-03"
    by_itself = {
        "row": "P1",
        "kind": "infer",
        "contenders": {"strop": {}, "eager": {}},
        "calls": 1,
        "environment": {"date": "2030-01-04"},
    }
    (tmp_path / "4.json").write_text(json.dumps(by_itself))
    (tmp_path / "5.json").write_text(
        json.dumps(by_itself | {"calls": 20, "environment": {"date": "2030-01-01"}})
    )
    (found,) = infer_report.load(tmp_path.iterdir())
    assert found["calls"] == 20


def test_random_shapes_come_from_the_newest_run_that_has_them(tmp_path: Path) -> None:
    summary = {
        "count": 12,
        "median": 1.9,
        "worst": 1.7,
        "worst_shape": [512, 256, 2],
        "rms_to_peer": 1e-3,
        "first_s": 0.3,
        "longest_s": 0.1,
    }
    for day, random in enumerate(
        ({"summary": {**summary, "worst": 1.5}}, {"summary": summary}, {"failed": "cut"}, None), 1
    ):
        result = {
            "row": "P1",
            "kind": "infer",
            "contenders": {"strop": {}, "eager": {}},
            "environment": {"date": f"2030-01-0{day}"},
            "title": "t",
            "must": None,
            "measures": "step",
            "unit": "ms",
        } | ({"random": random | {"peer": "eager-graph"}} if random else {})
        (tmp_path / f"{day}.json").write_text(json.dumps(result))
    (found,) = infer_report.load(tmp_path.iterdir())
    assert found["environment"]["date"] == "2030-01-04"
    assert found["random"]["summary"] == summary
    assert "1.70x (1.90x) of eager-graph, another run |" in infer_report.markdown([found])
    assert "measured 2030-01-02, in another run" in infer_report.random_text(found)
    other = json.loads((tmp_path / "2.json").read_text())
    other["environment"]["gpu"] = "NVIDIA H200"
    (tmp_path / "2.json").write_text(json.dumps(other))
    (found,) = infer_report.load(tmp_path.iterdir())
    assert "of eager-graph, another run on NVIDIA H200 |" in infer_report.markdown([found])
    assert "2030-01-02, in another run on NVIDIA H200" in infer_report.random_text(found)
    (tmp_path / "4.json").unlink()
    (tmp_path / "3.json").unlink()
    (found,) = infer_report.load(tmp_path.iterdir())
    assert "another run" not in infer_report.markdown([found])


def test_switches_come_from_the_newest_run_that_has_them(tmp_path: Path) -> None:
    timed = {"p20_ms": 1.0, "p50_ms": 2.0, "p80_ms": 3.0}
    ladder = {"switches": {"all on": timed, "no hoist": {**timed, "p50_ms": 2.5}}}
    for day, switches in enumerate((None, ladder, {"failed": "cut"}, None), 1):
        result = {
            "row": "P1",
            "kind": "infer",
            "contenders": {"strop": {}, "eager": {}},
            "environment": {"date": f"2030-01-0{day}"},
            "title": "t",
            "must": None,
            "measures": "step",
            "unit": "ms",
        }
        result |= {"switches": switches} if switches else {}
        (tmp_path / f"{day}.json").write_text(json.dumps(result))
    (found,) = infer_report.load(tmp_path.iterdir())
    assert found["environment"]["date"] == "2030-01-04"
    assert found["switches"] == {**ladder, "from": "2030-01-02"}
    figure = infer_plots._ladder(found)
    texts = [text.get_text() for text in figure.axes[0].texts]
    assert texts == ["2", "2.5 (+25.0%)"]


RESULT = {
    "case": "some-case",
    "kind": "infer",
    "environment": {"date": "2030-01-02T03:04:05+00:00"},
}


def test_result_file(tmp_path: Path) -> None:
    path = report.write(RESULT, tmp_path / "results", CPU)
    assert path.name == "some-case_cpu_2030-01-02.json"
    assert json.loads(path.read_text()) == RESULT
    report.write(RESULT | {"kind": "compile"}, tmp_path / "results", CPU)
    names = sorted(f.name for f in (tmp_path / "results").iterdir())
    assert names == ["some-case-compile_cpu_2030-01-02.json", "some-case_cpu_2030-01-02.json"]


def test_table(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [("row", "ms"), ("long name", "2.000")]
    assert report.plain_table(rows) == "row        ms\nlong name  2.000"
    report.print_table(rows, "times")
    assert "2.000" in capsys.readouterr().out


def test_a_result_that_cannot_be_written_leaves_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = report.write_json({"a": 1}, tmp_path / "result.json")
    assert file.stat().st_mode & 0o777 == 0o644

    def dump(value: Any, target: Any, **named: Any) -> None:
        target.write('{"a"')
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(report.json, "dump", dump)
    with pytest.raises(OSError, match="No space left"):
        report.write_json({"a": 2}, file)
    assert json.loads(file.read_text()) == {"a": 1}
    assert list(tmp_path.iterdir()) == [file]
