"""``strop bench train`` in several processes: ranks share the work, one that fails ends all."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from strop.bench import mock_set, train, train_group, train_measure
from strop.bench.train_log import TrainLog
from strop.bench.train_loop import Loop
from strop.bench.train_measure import Plan
from strop.bench.train_rows import LADDER, chosen_rows
from strop.bench.train_work import Setup, Work
from strop.options import Options
from strop.train.ranks import Ranks

TINY = Plan("cpu", samples=3, warm_up=1, processes=2, series=2, log_freq=2)
LIMIT_S = 400.0  # of a loaded machine


@pytest.fixture(autouse=True)
def fresh_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STROP_CACHE_DIR", str(tmp_path / "cache"))


# rows


def test_rows_of_several_gpus() -> None:
    found = {row.name: row for row in chosen_rows(["P12", "p12s", "P12b", "P12c", "P12d"])}
    assert {name: row.processes for name, row in found.items()} == {
        "P12": (1, 2),
        "P12s": (1, 2),
        "P12b": (1, 2),
        "P12c": (1, 2),
        "P12d": (2,),
    }
    assert found["P12s"].contenders[0].work.batch == 4
    assert found["P12d"].against == "torch"
    assert {c.name for c in found["P12d"].contenders} >= {"strop", "torch"}


def test_compilers_and_a_batch_that_was_asked_for() -> None:
    (row,) = chosen_rows(["P12"], compilers=["eager", "inductor"], batch=6)
    assert [(c.name, c.compiler, c.work.batch) for c in row.contenders] == [
        ("eager", "eager", 6),
        ("torch", "inductor", 6),
    ]
    (tiny,) = chosen_rows(["P12"], batch=6, tiny=True)
    assert {c.work.batch for c in tiny.contenders} == {6}
    (largest,) = chosen_rows(["SD2"], batch=16)
    assert [c.name for c in largest.contenders if c.compiler == "strop"] == [
        "strop",
        "strop-budget",
    ]


def test_a_graph_of_cut_gradients_is_refused_by_name() -> None:
    (row,) = chosen_rows(["P9"], only=["strop-graph"])
    (graph,) = row.contenders
    assert not train_measure.refusal(graph, TINY), "gradients are averaged in it"
    cut = replace(graph, setup=replace(graph.setup, parallel="zero1"))
    assert "gradients are cut over several GPUs" in train_measure.refusal(cut, TINY)
    assert not train_measure.refusal(cut, replace(TINY, processes=1))
    assert not train_measure.setup_here(cut.setup, 2).graph


def test_the_rung_of_two_gpus_says_what_it_is() -> None:
    zero2 = next(c for c in LADDER.contenders if c.name == "zero2")
    assert train_measure.count_of(zero2, replace(TINY, processes=1)) == 2
    assert "ZeRO-2" in zero2.note
    assert zero2.setup.parallel == "zero2"
    after = LADDER.contenders[LADDER.contenders.index(zero2) + 1].setup
    assert (after.gpus, after.optimizer) == (1, "fused")
    named = train._too_few(zero2, Plan("cuda"))
    assert named == f"needs 2 GPUs, and this machine has {torch.cuda.device_count()}" or not named


# what ranks share


@pytest.mark.parametrize("model", ["sd15", "sdxl", "flux"])
def test_ranks_together_have_the_batch_of_one(model: str) -> None:
    """Their rows behind each other are those of one rank with as many pictures."""
    cached = Work(model, 2, is_cached=True, has_ema=False, trained="lora").tiny()
    for work in {cached, replace(cached, is_cached=model != "sd15")}:
        whole = Loop(replace(work, batch=4), Setup(), torch.device("cpu"))
        parts = [Loop(work, Setup(), torch.device("cpu"), Ranks(r, 2)) for r in range(2)]
        for take in (
            lambda loop: loop.batch.pictures,
            lambda loop: loop.batch.text,
            lambda loop: loop.draws.noise,
            lambda loop: loop.draws.times,
        ):
            assert torch.equal(torch.cat([take(part) for part in parts]), take(whole))
        losses = [part.reference_loss() for part in parts]
        assert sum(losses) / 2 == pytest.approx(whole.reference_loss(), rel=1e-2)


def test_ranks_draw_other_noise_later() -> None:
    work = Work(batch=1, is_cached=True, has_ema=False).tiny()
    seen = []
    for rank in range(2):
        loop = Loop(work, Setup("tf32"), torch.device("cpu"), Ranks(rank, 2))
        loop.ranks = Ranks(rank)  # nobody to speak to
        loop.prepare(Options())
        loop.num_steps = 1
        loop._draw()
        seen.append(loop.draws.noise)
    assert not torch.equal(*seen)


def test_two_processes_compute_what_one_does(tmp_path: Path) -> None:
    """Losses and norms are those of one process with as many pictures; the log has its lines."""
    (row,) = chosen_rows(["P12"], tiny=True, only=["eager"], batch=1)
    (result,) = train.run([row], TINY, out=tmp_path, is_apart=False)
    found = result["contenders"]["eager"]
    assert "failed" not in found, found
    assert found["loss_ok"]
    assert found["weights_agree"]
    assert (found["processes"], len(found["ranks"]), len(found["img_s_series"])) == (2, 2, 2)
    assert found["img_s"] == pytest.approx(2 * found["img_s_a_gpu"], rel=1e-3)
    (alone,) = train.run(
        chosen_rows(["P12"], tiny=True, only=["eager"], batch=2),
        replace(TINY, processes=1),
        is_apart=False,
    )
    one = alone["contenders"]["eager"]
    assert found["loss"] == pytest.approx(one["loss"], rel=1e-2)
    assert found["grad_norm"] == pytest.approx(one["grad_norm"], rel=2e-2)
    assert Path(result["file"]).name.startswith("P12-tiny-2gpu-b1_cpu_")
    (log,) = tmp_path.glob("*.jsonl")
    head, *lines = map(json.loads, log.read_text().splitlines())
    assert head["kind"] == "train-log"
    assert (head["row"], head["contender"], head["processes"], head["batch"]) == (
        "P12",
        "eager",
        2,
        1,
    )
    assert lines
    for line in lines:
        assert list(line) == ["step", "loss", "images_per_s", "ms", "peak_bytes", "rank"]
        assert line["step"] % 2 == 0
        assert line["images_per_s"] == pytest.approx(2e3 / line["ms"], rel=1e-2)


class Rank:
    """A process that has ended with an answer, or never ends."""

    def __init__(self, answer: dict[str, Any] | None) -> None:
        self.answered, self.is_over = answer, answer is not None

    def answer(self) -> dict[str, Any]:
        assert self.answered is not None
        return dict(self.answered)

    def cut(self, limit_s: float) -> dict[str, Any]:
        return {"failed": "cut", "partial": {"first_s": 1.0}}


def test_a_rank_that_fails_ends_all_and_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train_group, "_GRACE_S", 0.0)
    failed = {"failed": "exit 1", "log": ["Traceback", "KeyError: 'x'"]}
    ranks: Any = [Rank(None), Rank(failed)]
    found = train_group._attended(ranks, LIMIT_S)
    assert found["failed"] == "rank 1: exit 1 KeyError: 'x'"
    assert found["partial"] == {"first_s": 1.0}
    whole: Any = [Rank({"img_s": 2.0}), Rank({"img_s": 3.0})]
    assert train_group._attended(whole, LIMIT_S)["img_s"] == 2.0


def test_a_log_is_of_its_own_clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("strop.bench.train_log.time.perf_counter", lambda: now[0])
    path = tmp_path / "deep" / "a.jsonl"
    log = TrainLog(path, 2, 8, torch.device("cpu"), {"row": "P12"})
    log.begin(0)
    for step in range(1, 6):
        now[0] += 0.5
        log.step(step, torch.tensor(float(step)))
    log.end()
    head, *lines = map(json.loads, path.read_text().splitlines())
    assert head == {"kind": "train-log", "version": 1, "row": "P12"}
    assert [(line["step"], line["loss"], line["ms"]) for line in lines] == [
        (2, 2.0, 500.0),
        (4, 4.0, 500.0),
    ]
    assert lines[0]["images_per_s"] == 16.0


# the mock set


def test_the_mock_set_is_the_same_each_time_and_read_by_the_trainer(tmp_path: Path) -> None:
    from strop.train.folders import read_captioned

    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        mock_set.write(tmp_path / name, 32, 3)
    first, second = (
        [file.read_bytes() for file in sorted((tmp_path / name).iterdir())] for name in ("a", "b")
    )
    assert first == second
    folder = read_captioned(tmp_path / "a", "text")
    assert [p.captions[0] for p in folder.pictures] == [mock_set.caption_of(n) for n in range(3)]
    assert not folder.bad
    tokens = mock_set.tokens_of(mock_set.caption_of(1), 100)
    assert tokens.shape == (77,)
    assert 0 <= int(tokens.min()) <= int(tokens.max()) == 99
    assert not torch.equal(tokens, mock_set.tokens_of(mock_set.caption_of(2), 100))


# the command, every night


def command(*words: str, start: tuple[str, ...] = ("-m",)) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *start, "strop", "bench", "train", *words, "--device", "cpu", "--tiny"],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=550,
    )


def test_torchrun(tmp_path: Path) -> None:
    start = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m")
    words = ("P12", "--only", "eager,diffusers", "--samples", "3", "-o", str(tmp_path))
    done = command(*words, start=start)
    assert done.returncode == 0, done.stderr
    (path,) = tmp_path.glob("*.json")
    result = json.loads(path.read_text())
    assert result["processes"] == 2
    for found in result["contenders"].values():
        assert found["loss_ok"], found
        assert found["weights_agree"], found


@pytest.mark.parametrize(
    "words",
    [
        ("--ladder", "--only", "zero2,compiled"),
        ("P12", "--only", "strop,diffusers"),
        ("P12b", "--only", "strop-zero1,strop-zero2"),
        ("P12c", "--only", "strop-shadow,diffusers"),
        ("P12e", "--only", "strop"),
        ("SD2", "--only", "strop-64-budget,diffusers-32"),
    ],
    ids=lambda words: words[0].strip("-"),
)
def test_every_row_runs_in_two_processes(words: tuple[str, ...], tmp_path: Path) -> None:
    done = command(*words, "--nproc-per-node", "2", "--samples", "3", "-o", str(tmp_path))
    assert done.returncode == 0, done.stderr
    (path,) = tmp_path.glob("*.json")
    for name, found in json.loads(path.read_text())["contenders"].items():
        assert found.get("img_s"), (name, found)
        assert found["loss_ok"], (name, found)
        assert found["weights_agree"], (name, found)


@pytest.mark.gpu
def test_two_gpus(tmp_path: Path) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs 2 GPUs")
    (row,) = chosen_rows(["P12"], tiny=True, only=["strop", "eager"])
    plan = replace(TINY, device="cuda")
    (result,) = train.run([row], plan, out=tmp_path, is_apart=False)
    for found in result["contenders"].values():
        assert found["loss_ok"], found
        assert found["weights_agree"], found
        assert all(rank["peak_bytes"] for rank in found["ranks"])
