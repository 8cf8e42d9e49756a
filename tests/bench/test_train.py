"""``strop bench train``: its rows and rungs, its runs on the CPU with tiny models, its pages."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

import strop.train
from strop.bench import mock_set, train, train_loader, train_measure, train_plots, train_report
from strop.bench.infer_contenders import Deadline
from strop.bench.report import plain_table
from strop.bench.train_loader import Pictures
from strop.bench.train_loop import PARTS, Loop
from strop.bench.train_measure import Plan
from strop.bench.train_rows import LADDER, ROWS, chosen_rows
from strop.bench.train_work import Contender, Loader, Setup, Work
from strop.cli import app
from strop.errors import OptionError
from strop.options import Options
from strop.train.ranks import ALONE

pytestmark = [
    pytest.mark.filterwarnings("ignore:Dynamo detected a call"),  # in diffusers
    pytest.mark.filterwarnings("ignore:.*lr_scheduler.step"),
]
TINY = Plan("cpu", samples=3, warm_up=1)


@pytest.fixture(autouse=True)
def fresh_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STROP_CACHE_DIR", str(tmp_path / "cache"))


@pytest.fixture
def no_compile_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Strop before it had graphs of whole steps."""
    names = [name for name in strop.train.__all__ if name != "compile_step"]
    monkeypatch.setattr(strop.train, "__all__", names)
    monkeypatch.delattr(strop.train, "compile_step", raising=False)


def names(things: Any) -> list[str]:
    return [thing.name for thing in things]


def rung(name: str) -> Contender:
    return next(c for c in LADDER.tiny().contenders if c.name == name)


# rows


def test_rows_by_name() -> None:
    assert names(chosen_rows([])) == names(ROWS) == ["P8", "P9", "P11", "P11-lora", "P11x"]
    assert names(chosen_rows(["p11"])) == ["P11", "P11-lora"]
    assert names(chosen_rows([], ladder=True)) == ["ladder"]
    assert names(chosen_rows(["P9"], ladder=True)) == ["P9", "ladder"]
    (row,) = chosen_rows(["P8"], only=["torch", "strop"])
    assert names(row.contenders) == ["strop", "torch"]
    with pytest.raises(OptionError, match="no row P1; there are P8, P9"):
        chosen_rows(["P1"])
    with pytest.raises(OptionError, match="no contender apex; there are strop, strop-graph"):
        chosen_rows(["P8"], only=["apex"])


def test_the_ladder_is_the_published_one_and_ours() -> None:
    published = [c.published for c in LADDER.contenders if c.published]
    assert published == [8.11, 9.55, 11.46, 12.66, 18.07, 23.57, 23.75, 24.03]
    assert sum(LADDER.published_split.values()) == 436
    assert set(LADDER.published_split) <= set(PARTS)
    rungs = {c.name: c for c in LADDER.contenders}
    assert [n for n, c in rungs.items() if c.setup.compiler == "strop"] == [
        "compiled",
        "one-pass",
        "caches",
        "graph",
        "shadow",
    ]
    assert [n for n, c in rungs.items() if c.setup.attention == "naive"] == [
        "tf32",
        "fp16",
        "loader",
        "fused",
    ]
    assert {n: c.work.batch for n, c in rungs.items() if c.work.batch != 8}.keys() == {
        "batch48",
        "ema",
        "zero2",
        "compiled",
        "one-pass",
        "caches",
        "graph",
        "shadow",
    }
    workers = {(loader.workers, loader.is_pinned) for loader in rungs["loader"].setup.loaders}
    assert workers == {(w, p) for w in (1, 2, 4, 8, 16) for p in (True, False)}


@pytest.mark.parametrize("row", [*ROWS, LADDER], ids=lambda row: row.name)
def test_names_are_unique_and_notes_tell_of_less_work(row: Any) -> None:
    assert len(set(names(row.contenders))) == len(row.contenders)
    first = row.contenders[0]
    for contender in row.contenders:
        if contender.work.is_cached and not first.work.is_cached and not contender.setup.graph:
            assert contender.note.startswith("less work")


# one contender


def test_pictures_are_what_a_script_reads(tmp_path: Path) -> None:
    mock_set.write(tmp_path, 32, 3)
    assert len(list(tmp_path.glob("*.jpg"))) == 3
    pictures = Pictures(tmp_path, 3, 32, 100, 8)
    pixels, tokens = pictures[4]
    assert pixels.shape == (3, 32, 32)
    assert pixels.dtype == torch.float32
    assert -1.0 <= pixels.min() < -0.3 < 0.3 < pixels.max() <= 1.0
    assert tokens.shape == (77,)
    assert torch.equal(pixels, pictures[4][0])
    assert not torch.equal(pixels, pictures[1][0])  # the same file, cropped elsewhere
    batches = list(train_loader.batches(pictures, 2, Loader()))
    assert [batch[0].shape for batch in batches] == [(2, 3, 32, 32)] * 4
    assert "are free" in train_loader.refusal(Loader(16, True), 1 << 50)
    assert not train_loader.refusal(Loader(0), 1 << 50)


SETUPS = {
    "script": Setup("fp16", reads_loss=True),
    "naive": Setup("tf32", "naive", ema="foreach", optimizer="fused"),
    "checkpoints": Setup(recompute="checkpoints"),
    "one-pass": Setup("tf32", optimizer="strop"),
    "shadow": Setup(optimizer="strop", is_shadow=True),
}
WORKS = {
    "full": Work(),
    "sdxl": Work("sdxl", 4, is_cached=True, has_ema=False),
    "lora": Work(batch=1, trained="lora", is_cached=True, has_ema=False),
}


@pytest.mark.parametrize("setup", SETUPS)
@pytest.mark.parametrize("work", WORKS)
def test_a_step_is_that_of_eager(work: str, setup: str) -> None:
    if work == "lora" and setup == "shadow":
        pytest.skip("adapters stay fp32")
    loop = Loop(WORKS[work].tiny(), SETUPS[setup], torch.device("cpu"))
    reference = loop.reference_loss()
    loop.prepare(Options())
    before = [p.detach().clone() for p in loop.network.trained]
    found = train_measure._first_step(loop, reference)
    assert found["loss_ok"], found
    assert found["grad_norm"] == pytest.approx(gradient_norm(work), rel=0.02)
    moved = [
        float((p - b).detach().abs().max())
        for p, b in zip(loop.network.trained, before, strict=True)
    ]
    assert max(moved) == pytest.approx(1e-5, rel=0.03)  # the learning rate: Adam's first step
    first_draws = loop.draws
    loop.step()
    assert not torch.equal(loop.draws.noise, first_draws.noise)
    assert all(p.grad is None for p in loop.network.unet.parameters())


def gradient_norm(work: str) -> float:
    """By autograd alone."""
    loop = Loop(WORKS[work].tiny(), Setup("tf32"), torch.device("cpu"))
    loop.reference_loss()  # encodes
    loop.prepare(Options())
    loop.objective(*loop._tensors()).backward()
    return float(torch.stack([p.grad.norm() for p in loop.network.trained]).norm())


def test_a_wrong_loss_is_told() -> None:
    loop = Loop(WORKS["sdxl"].tiny(), SETUPS["one-pass"], torch.device("cpu"))
    loop.prepare(Options())
    found = train_measure._first_step(loop, 1.5)
    assert not found["loss_ok"]


def test_a_sweep_of_loaders_and_the_split(tmp_path: Path) -> None:
    (row,) = chosen_rows([], ladder=True, tiny=True, only=["tf32", "loader"])
    said: list[str] = []
    (result,) = train.run(
        [row], TINY, out=tmp_path, is_apart=False, step=lambda text, _: said.append(text)
    )
    assert said == ["ladder: tf32", "ladder: loader"]
    first, second = (result["contenders"][n] for n in ("tf32", "loader"))
    for found in (first, second):
        assert found["loss_ok"]
        assert 0 < found["p20_ms"] <= found["p50_ms"] <= found["p80_ms"]
        assert found["img_s"] == pytest.approx(2e3 / found["mean_ms"], rel=1e-3)
        assert set(found["split_ms"]) == {*PARTS} - {"whole step", "data", "sync", "gather"}
        assert found["decode_ms"] > 0
        assert found["wait_ms"] > 0
    assert [t["loader"]["workers"] for t in second["loaders"]] == [0, 1]
    assert second["mean_ms"] == min(t["mean_ms"] for t in second["loaders"])
    written = json.loads(Path(result["file"]).read_text())
    assert written["contenders"] == json.loads(json.dumps(result["contenders"]))
    assert Path(result["file"]).name.startswith("ladder-tiny_cpu_2")
    assert len(train_report.loader_rows_of([result])) == 3


def test_a_rung_that_waits_for_data_takes_more_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    (compiled,) = (rung for rung in LADDER.contenders if rung.name == "compiled")
    loop: Any = SimpleNamespace(
        setup=compiled.setup,
        batch=SimpleNamespace(pictures=torch.zeros(1)),
        feed=None,
        ranks=ALONE,
    )
    monkeypatch.setattr(train_measure, "_decode_ms", lambda loop, plan: 5.0)
    monkeypatch.setattr(train_measure, "_feed", lambda loop, loader, plan: loader)

    def series(loop: Any, plan: Plan, clock: Deadline) -> dict[str, Any]:
        work, read = 400.0, 1400.0 / loop.feed.workers
        return {"mean_ms": max(work, read), "wait_ms": max(0.0, read - work)}

    monkeypatch.setattr(train_measure, "_series", series)
    plan = replace(TINY, best_loader=(1, True))
    found = train_measure._timed(loop, compiled, plan, Deadline.of(60.0), {}, lambda saved: None)
    assert [tried["loader"]["workers"] for tried in found["loaders"]] == [1, 2, 4]
    assert found["loader"] == {"workers": 4, "is_pinned": True}
    assert found["mean_ms"] == 400.0
    found = train_measure._timed(
        loop,
        compiled,
        replace(plan, best_loader=(8, True)),
        Deadline.of(60.0),
        {},
        lambda saved: None,
    )
    assert found["loader"]["workers"] == 8
    assert "loaders" not in found


class Event:
    """Of a GPU that does everything at once."""

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.at = time.perf_counter()

    def elapsed_time(self, end: Event) -> float:
        return 1e3 * (end.at - self.at)


def test_times_by_events(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    loop = Loop(WORKS["sdxl"].tiny(), SETUPS["one-pass"], torch.device("cpu"))
    loop.prepare(Options())
    loop.device = torch.device("cuda")  # of what is timed; the step knows nothing of it
    times, host_ms = train_measure._step_times(loop, 3)
    assert len(times) == 3
    assert 0.3 * host_ms < sum(times) / 3 < 1.01 * host_ms  # a busy machine stops anywhere
    split = train_measure.split_ms(loop, 3)
    assert list(split) == ["forward", "backward", "update", "other"]
    assert split["backward"] > split["other"]


@pytest.mark.slow
def test_compiled_by_strop() -> None:
    (row,) = chosen_rows(["P9"], tiny=True, only=["strop"])
    (result,) = train.run([row], TINY, is_apart=False)
    found = result["contenders"]["strop"]
    assert found["loss_ok"], found
    assert found["graphs"]["roles"] == ["forward", "backward"]
    assert found["graphs"]["fallbacks"] == {}
    assert found["first_split_s"]["forward"] > 3 * found["split_ms"]["forward"] / 1e3


@pytest.mark.usefixtures("no_compile_step")
def test_graphs_of_whole_steps_before_they_are_built() -> None:
    graph, shadow = rung("graph"), rung("shadow")
    assert train_measure.refusal(graph, TINY).startswith("not built: strop.train.compile_step")
    assert not train_measure.refusal(shadow, TINY)
    assert not train_measure.setup_here(shadow.setup).graph


def test_graphs_of_whole_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Through the signature alone: what the graph does is tested elsewhere."""

    def compile_step(
        loss_fn: Callable[..., Tensor],
        optimizer: Any,
        accumulate: int = 1,
        scaler: Any = None,
        graph: bool = True,
        process_group: Any = None,
    ) -> Callable[..., Tensor]:
        assert (accumulate, scaler, graph, process_group) == (1, None, True, None)

        def step(*tensors: Tensor) -> Tensor:
            loss = loss_fn(*tensors)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        return step

    monkeypatch.setattr(strop.train, "compile_step", compile_step, raising=False)
    graph = rung("graph")
    assert not train_measure.refusal(graph, TINY)
    setup = replace(train_measure.setup_here(graph.setup), compiler="")
    assert setup.graph
    found = train_measure.measure(
        replace(graph, setup=setup), TINY, train.Deadline.of(100), lambda saved: None
    )
    assert found["loss_ok"]
    assert found["grad_norm"] > 0
    assert set(found["split_ms"]) == {"whole step", "other"}


def test_a_contender_that_fails_costs_no_other(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (row,) = chosen_rows(["P9"], tiny=True, only=["diffusers", "torch"])
    timed = train_measure._timed

    def fail(loop: Loop, contender: Contender, *rest: Any) -> Any:
        if contender.name == "diffusers":
            raise torch.OutOfMemoryError("CUDA out of memory.\nMore.")
        return timed(loop, contender, *rest)

    monkeypatch.setattr(train_measure, "_timed", fail)
    monkeypatch.setattr("strop.bench.train_models.compile_modules", lambda *rest: None)
    (result,) = train.run([row], TINY, is_apart=False, out=tmp_path)
    first, second = result["contenders"].values()
    assert first["failed"] == "OutOfMemoryError: CUDA out of memory."
    assert first["loss_ok"]  # what it had until then
    assert second["img_s"] > 0
    table = plain_table(train_report.rows_of([result]))
    assert "OutOfMemoryError: CUDA out of memory." in table


def test_what_the_budget_leaves_out_is_named() -> None:
    results = train.run(chosen_rows(["P8", "P11x"], tiny=True), TINY, budget_s=1)
    for result in results:
        assert all(
            "left of the budget" in c["skipped"] or "not built" in c["skipped"]
            for c in result["contenders"].values()
        )
    table = train_report.rows_of(results)
    assert len(table) == 1 + sum(len(result["contenders"]) for result in results)


def test_what_was_cut_is_measured_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second run has the rest of the rungs, and the loader that the first has found best."""
    monkeypatch.setattr("strop.bench.train_models.compile_modules", lambda *rest: None)
    (first,) = chosen_rows([], ladder=True, tiny=True, only=["loader", "ema"])
    (cut,) = train.run(
        [replace(first, contenders=first.contenders[:1])], TINY, is_apart=False, out=tmp_path
    )
    best = cut["contenders"]["loader"]["loader"]
    cut["contenders"]["loader"]["loader"] = {**best, "workers": 1 - best["workers"]}
    path = Path(cut["file"])
    path.write_text(json.dumps(cut))
    steps: list[str] = []
    (result,) = train.run(
        chosen_rows([], ladder=True, tiny=True, only=["flash", "ema", "loader"]),
        TINY,
        is_apart=False,
        out=tmp_path,
        earlier=[path],
        step=lambda text, done: steps.append(text),
    )
    assert steps == ["ladder: flash", "ladder: ema"]
    assert list(result["contenders"]) == ["loader", "flash", "ema"]
    assert result["contenders"]["ema"]["loader"]["workers"] == 1 - best["workers"]
    assert "date" in result["contenders"]["ema"]
    assert json.loads(path.read_text())["contenders"].keys() == result["contenders"].keys()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"kind": "infer"}, "not written by 'strop bench train'"),
        ({"row": "P8"}, "is of P8, which is not asked for; there are P9"),
        ({"is_tiny": False}, "is of full models"),
        ({"environment": {"torch": "1.0"}}, "torch 1.0 then"),
    ],
)
def test_what_cannot_be_gone_on_with(change: dict[str, Any], said: str, tmp_path: Path) -> None:
    (row,) = chosen_rows(["P9"], tiny=True)
    path = tmp_path / "cut.json"
    path.write_text(json.dumps({**train._empty(row, {}), **change}))
    with pytest.raises(OptionError, match=said):
        train.run([row], TINY, is_apart=False, earlier=[path])


@pytest.mark.slow
def test_in_processes_of_their_own(tmp_path: Path) -> None:
    (row,) = chosen_rows(["P9"], tiny=True, only=["diffusers"])
    (result,) = train.run([row], TINY, out=tmp_path)
    found = result["contenders"]["diffusers"]
    assert found["loss_ok"], found
    assert found["process_s"] > 0


# pages, from results that nobody measured

PLACE = {"gpu": "H100", "torch": "2.11", "date": "2030-01-02T03:04:05+00:00"}
SPLIT = {"VAE": 5.0, "forward": 20.0, "backward": 40.0, "update": 12.0, "other": 1.0}


def found_of(contender: Contender, img_s: float, **more: Any) -> dict[str, Any]:
    ms = 1e3 * contender.work.batch / img_s
    return {
        **train._described(contender),
        "setup": {"compiler": contender.setup.compiler},
        "p20_ms": ms,
        "p50_ms": ms,
        "p80_ms": ms,
        "mean_ms": ms,
        "img_s": img_s,
        "peak_bytes": 30 << 30,
        "first_split_s": {"forward": 30.0, "backward": 12.0},
        "loss": 1.2,
        "loss_reference": 1.2,
        "loss_ok": True,
        "grad_norm": 3.0,
        "split_ms": SPLIT,
        "tflops": 200.0,
        **more,
    }


def result_of(name: str, speeds: dict[str, float], **more: Any) -> dict[str, Any]:
    (row,) = (r for r in (*ROWS, LADDER) if r.name == name)
    contenders = {
        c.name: found_of(c, speeds[c.name], **more)
        if c.name in speeds
        else {**train._described(c), "skipped": "not built: x"}
        for c in row.contenders
    }
    return {**train._empty(row, PLACE), "contenders": contenders}


@pytest.mark.parametrize(
    ("name", "speeds", "said"),
    [
        ("P8", {"strop": 80, "diffusers": 20}, "strop: 80.00 img/s, must 72 img/s reached"),
        ("P8", {"strop": 80, "strop-graph": 95}, "strop-graph: 95.00 img/s, stretch 90"),
        ("P9", {"strop": 100}, "strop: 100.00 img/s, must 115 img/s missed"),
        ("P11", {"strop": 20, "diffusers": 5, "strop-cached": 90}, "strop: 4.00 x, must 3 x"),
        ("P11", {"strop": 20}, ""),
        ("P11-lora", {"strop": 50}, "strop: 20.00 ms, must 25 ms reached"),
        ("P8", {"diffusers": 20}, ""),
    ],
)
def test_verdicts(name: str, speeds: dict[str, float], said: str) -> None:
    verdict = train_report.verdict(result_of(name, speeds))
    assert verdict.startswith(said)
    assert bool(verdict) == bool(said)


def test_table() -> None:
    result = result_of("P8", {"strop": 80, "diffusers": 20, "torch": 60})
    result["contenders"]["torch"] |= {"grad_norm": 2.5, "loss_ok": False, "loss": 2.0}
    text = plain_table(train_report.rows_of([result]))
    assert "4.00x" in text
    assert "not built: x" in text
    assert "BAD loss 2.0, eager fp32 1.2; norm of gradients 2.5, of the script's 3" in text
    assert "cold compile of forward and backward 42.0 s, must reached" in text
    assert not train_report.verdict({**result, "is_tiny": True})
    split = plain_table(train_report.split_rows_of([result_of("ladder", {"tf32": 20})]))
    assert split.splitlines()[1].split()[-8:] == [
        "33.0",
        "14.0",
        "82.0",
        "125.0",
        "32.0",
        "96.0",
        "38.0",
        "16.0",
    ]


def test_picture(tmp_path: Path) -> None:
    result = result_of("ladder", {c.name: 9.0 + n for n, c in enumerate(LADDER.contenders[:9])})
    path = train_plots.draw(result, tmp_path / "plots")
    assert path is not None
    assert path.name == "ladder.png"
    assert path.read_bytes().startswith(b"\x89PNG")
    assert train_plots.draw(result_of("P8", {}), tmp_path) is None


def test_newest_results(tmp_path: Path) -> None:
    for date, speed in (("2030-01-01", 30.0), ("2030-01-02", 40.0)):
        result = result_of("P9", {"strop": speed})
        result["environment"] = {**PLACE, "date": date}
        (tmp_path / f"P9_{date}.json").write_text(json.dumps(result))
    (tmp_path / "P1.json").write_text(json.dumps({"kind": "infer", "row": "P1"}))
    (tmp_path / "ladder.json").write_text(json.dumps(result_of("ladder", {})))
    first, second = train_report.load(sorted(tmp_path.glob("*.json")))
    assert first["contenders"]["strop"]["img_s"] == 40.0
    assert second["row"] == "ladder"


def test_page(tmp_path: Path) -> None:
    for name, speeds in (("P9", {"strop": 125, "diffusers": 31}), ("ladder", {"tf32": 20.0})):
        (tmp_path / f"{name}.json").write_text(json.dumps(result_of(name, speeds)))
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- train -->\nold\n<!-- /train -->\nafter\n")
    words = [
        "bench",
        "table",
        "--results",
        str(tmp_path),
        "--page",
        str(page),
        "--plots",
        str(tmp_path),
    ]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    text = page.read_text()
    assert "**125.0 img/s, 256.0 ms, 30.00 GiB** (strop) | 31.0 img/s" in text
    assert "| tf32 | 20.0 img/s, 400.0 ms, 30.00 GiB | 8.11 |" in text
    assert "| zero2 | not built: x | 24.03 |" in text
    assert "old" not in text
    assert (tmp_path / "ladder.png").is_file()


# the command


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The command without measurements; what it would have measured."""
    seen: list[Any] = []

    def run(rows: Any, plan: Any, **how: Any) -> list[dict[str, Any]]:
        seen.append((names(rows), plan, how))
        return [result_of(row.name, {"strop": 80, "tf32": 9.0}) for row in rows]

    monkeypatch.setattr(train, "run", run)
    return seen


def test_command(fast: list[Any], tmp_path: Path) -> None:
    words = [
        "bench",
        "train",
        "--rows",
        "P8",
        "P9",
        "--ladder",
        "--tiny",
        "--device",
        "cpu",
        "--samples",
        "7",
        "--warm-up",
        "2",
        "--budget",
        "99",
        "-o",
        str(tmp_path),
    ]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    ((rows, plan, how),) = fast
    assert sorted(rows) == ["P8", "P9", "ladder"]
    assert (plan.device, plan.samples, plan.warm_up) == ("cpu", 7, 2)
    assert (how["budget_s"], how["out"], how["is_apart"]) == (99, tmp_path, False)
    assert (tmp_path / "ladder.png").is_file()
    assert "24.03" in done.output


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["P8", "--device", "cpu"], 1, "--device cpu --tiny runs the same code"),
        (["P1", "--tiny"], 2, "no row P1; there are P8"),
        (["--tiny", "--only", "apex"], 2, "no contender apex"),
        (["--tiny", "--device", "cpu", "-o", __file__], 1, "is a file; give the name of a folder"),
        (["--tiny", "--samples", "1"], 2, "samples"),
    ],
)
def test_mistakes(words: list[str], code: int, said: str) -> None:
    found = CliRunner().invoke(app, ["bench", "train", *words])
    assert found.exit_code == code, found.output
    assert said in " ".join(found.output.replace("│", " ").split())
