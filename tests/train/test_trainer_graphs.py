"""A training whose steps are replayed as graphs gives the bits of one whose steps are not."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from strop.train import recording
from strop.train.closure_walk import reached
from strop.train.loop import TrainingLoop
from strop.train.objective import Objective
from strop.train.step_runs import GraphRuns, PlainRuns
from strop.train.whole_step import StepReport
from tests.train import taped, trainer

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation")  # of diffusers
STEPS = 5

# What the last step of an epoch, accumulation and dropout make of a step.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "lora": ("lora", {"use_ema": True, "lora_dropout": 0.2, "lr_scheduler": "cosine"}),
    "accumulated": ("lora", {"gradient_accumulation_steps": 2, "lr_warmup_steps": 2}),
    "text encoder": ("lora", {"train_text_encoder": True, "snr_gamma": 5.0}),
    "averages on the host": ("lora", {"use_ema": True, "offload_ema": True}),
}


def _trained(
    name: str, model: Path, pictures: Path, output: Path, **more: Any
) -> tuple[TrainingLoop, trainer.Watch, dict[str, Tensor]]:
    task, given = CASES[name]
    how = {
        "pretrained_model_name_or_path": str(model),
        "train_data_dir": str(pictures),
        "output_dir": str(output),
        "max_train_steps": STEPS,
        **given,
        **more,
    }
    watch = trainer.Watch()
    loop = TrainingLoop(trainer.holding(task, watch, **how), watch)
    loop.run()
    files = sorted(output.rglob("*.safetensors"))
    tensors = {f"{f.relative_to(output)}/{k}": t for f in files for k, t in load_file(f).items()}
    return loop, watch, tensors


def _begun(model: Path, pictures: Path, output: Path, **more: Any) -> TrainingLoop:
    made = trainer.session(
        "lora",
        pretrained_model_name_or_path=str(model),
        train_data_dir=str(pictures),
        output_dir=str(output),
        max_train_steps=1,
        **more,
    )
    return TrainingLoop(made, trainer.Watch())


def _report(loop: TrainingLoop) -> StepReport:
    assert isinstance(loop.runs, GraphRuns)
    return loop.runs.report


def _metrics(output: Path) -> list[dict[str, float]]:
    lines = (output / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    assert len(rows) == STEPS
    return [{key: row[key] for key in ("step", "loss", "lr", "grad_norm")} for row in rows]


@pytest.mark.parametrize("name", CASES)
def test_replayed_steps_have_the_bits_of_plain_ones(
    name: str, tiny_model: Path, pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    taped.use(monkeypatch)
    how = {"max_grad_norm": 0.01}
    plain, _, expected = _trained(
        name, tiny_model, pictures, tmp_path / "plain", step_graph=False, **how
    )
    assert isinstance(plain.runs, PlainRuns)
    loop, watch, found = _trained(name, tiny_model, pictures, tmp_path / "graphs", **how)
    report = _report(loop)
    assert report.replays > 0
    micro_batches = STEPS * CASES[name][1].get("gradient_accumulation_steps", 1)
    assert report.plain_runs + report.replays == micro_batches
    assert not watch.warnings
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], right) for key, right in expected.items())
    assert _metrics(tmp_path / "graphs") == _metrics(tmp_path / "plain")


def test_a_resumed_training_has_the_bits_of_a_straight_one(
    tiny_model: Path, pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    taped.use(monkeypatch)
    _, _, expected = _trained("lora", tiny_model, pictures, tmp_path / "straight")
    output = tmp_path / "resumed"
    _trained("lora", tiny_model, pictures, output, max_train_steps=4, checkpointing_steps=4)
    more = {"resume_from_checkpoint": "latest", "checkpointing_steps": 100}
    _, _, found = _trained("lora", tiny_model, pictures, output, **more)
    weights = {key for key in expected if "checkpoint" not in key}
    assert weights
    assert all(torch.equal(found[key], expected[key]) for key in weights)


def test_a_step_that_cannot_be_captured_is_run_as_before(
    tiny_model: Path, pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    taped.use(monkeypatch)
    original: Callable[..., Tensor] = Objective.loss

    def waits(self: Objective, drawn: Any) -> Tensor:
        loss = original(self, drawn)
        assert loss.item() >= 0
        return loss

    monkeypatch.setattr(Objective, "loss", waits)
    how = {"max_train_steps": 4}
    _, _, expected = _trained(
        "lora", tiny_model, pictures, tmp_path / "plain", step_graph=False, **how
    )
    loop, watch, found = _trained("lora", tiny_model, pictures, tmp_path / "graphs", **how)
    (warning,) = watch.warnings
    assert "steps are run without a CUDA graph" in warning
    assert "no CUDA graph of this step" in warning
    assert "--no_step_graph" in warning
    assert _report(loop).plain_runs == 4
    assert all(torch.equal(found[key], right) for key, right in expected.items())


def test_what_a_loss_reaches_is_watched(
    tiny_model: Path, pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A graph is stale where a weight moves, also one of a text encoder."""
    monkeypatch.setattr(recording, "can_record", lambda device: True)
    loop = _begun(tiny_model, pictures, tmp_path, train_text_encoder=True)
    assert isinstance(loop.runs, GraphRuns)
    modules = set(reached(loop.runs._step._loss_fn).modules)
    assert loop.session.unet in modules
    assert set(loop.learner.modules.values()) <= modules


@pytest.mark.parametrize("more", [{"optimizer": "lion"}, {"step_graph": False}])
def test_what_reads_numbers_on_the_host_has_no_graph(
    more: dict[str, Any],
    tiny_model: Path,
    pictures: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if "optimizer" in more:
        pytest.importorskip("pytorch_optimizer")
    monkeypatch.setattr(recording, "can_record", lambda device: True)
    assert isinstance(_begun(tiny_model, pictures, tmp_path, **more).runs, PlainRuns)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("compiles", [False, True], ids=["eager", "compiled"])
def test_on_a_gpu(compiles: bool, tiny_model: Path, pictures: Path, tmp_path: Path) -> None:
    how = {"device": "cuda", "compile_unet": compiles}
    _, _, expected = _trained(
        "lora", tiny_model, pictures, tmp_path / "plain", step_graph=False, **how
    )
    loop, watch, found = _trained("lora", tiny_model, pictures, tmp_path / "graphs", **how)
    assert not watch.warnings
    assert _report(loop).replays > 0
    for key, right in expected.items():
        torch.testing.assert_close(found[key], right, rtol=1e-3, atol=1e-5)
