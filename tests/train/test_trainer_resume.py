"""A training that was stopped gives the bits of one that was not, wherever it was stopped."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

from strop.cli import app
from strop.errors import CacheError, OptionError, TrainingError
from strop.train import checkpoint, files, given_settings
from strop.train.learner import Learner
from tests.e2e.tiny import DEVICES, cache_dir
from tests.train import trainer

STEPS = 30  # of the processes that are stopped
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation")  # of diffusers

# Three batches an epoch, two a step: the checkpoint of step 2 lies inside the second epoch.
RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    "text to image": (
        "text-to-image",
        {
            "use_ema": True,
            "gradient_accumulation_steps": 2,
            "random_flip": True,
            "proportion_empty_prompts": 0.3,
            "lr_scheduler": "cosine",
            "lr_warmup_steps": 1,
            "train_text_encoder": True,
            "noise_offset": 0.1,
            "dataloader_num_workers": 2,
            "gradient_checkpointing": True,
        },
    ),
    "8 bits": ("text-to-image", {"use_8bit_adam": True, "use_ema": True}),
    "lora": (
        "lora",
        {
            "use_ema": True,
            "gradient_accumulation_steps": 2,
            "lora_dropout": 0.2,
            "train_text_encoder": True,
            "lr_scheduler": "polynomial",
            "lr_warmup_steps": 1,
        },
    ),
    "lora of a subject": (
        "lora",
        {
            "with_prior_preservation": True,
            "num_class_images": 3,
            "class_prompt": "a ring",
            "instance_prompt": "a sks ring",
            "mixed_precision": "bf16",
            "prior_loss_weight": 0.5,
        },
    ),
    "lora of drawings": (
        "lora",
        {
            "dataset_name": "sprites",
            "proportion_empty_prompts": 0.5,
            "lr_scheduler": "linear",
            "lr_warmup_steps": 0,
        },
    ),
    "dreambooth": (
        "dreambooth",
        {
            "with_prior_preservation": True,
            "num_class_images": 4,
            "class_prompt": "a ring",
            "instance_prompt": "a sks ring",
            "cache_latents": True,
            "center_crop": True,
            "random_flip": True,
            "pre_compute_text_embeddings": True,
            "snr_gamma": 5.0,
            "gradient_accumulation_steps": 2,
            "mixed_precision": "bf16",
        },
    ),
}


# On a GPU also: scaled losses, whose scaler leaves out steps; compiled passes.
GPU_RUNS: dict[str, tuple[str, dict[str, Any]]] = RUNS | {
    "fp16": (
        "text-to-image",
        {
            "mixed_precision": "fp16",
            "use_ema": True,
            "train_text_encoder": True,
            "gradient_accumulation_steps": 2,
        },
    ),
    "lora in fp16": ("lora", {"mixed_precision": "fp16", "lora_dropout": 0.2}),
    "compiled": (
        "text-to-image",
        {"compile_unet": True, "use_ema": True, "mixed_precision": "bf16"},
    ),
}
EVERY = [
    *(("cpu", name) for name in RUNS),
    *(pytest.param("cuda", name, marks=DEVICES[1].marks) for name in GPU_RUNS),
]

# Of torch before 2.13, whose deterministic products ask for it when the first one runs.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


@pytest.fixture(autouse=True)
def as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("STROP_CACHE_DIR", cache_dir())
    yield
    torch.use_deterministic_algorithms(False)


def given(name: str, model: Path, pictures: Path, output: Path) -> tuple[str, dict[str, Any]]:
    task, values = GPU_RUNS[name]
    values = {**values, "model": model, "output_dir": output}
    if "dataset_name" not in values:
        place = "instance_data_dir" if "instance_prompt" in values else "train_data_dir"
        values[place] = pictures
    if values.get("with_prior_preservation"):
        values["class_data_dir"] = output.parent / "class"
    return task, {**values, "max_train_steps": 4, "checkpointing_steps": 2}


@pytest.mark.parametrize(("device", "name"), EVERY)
def test_resumed_equals_straight(
    device: str, name: str, tiny_model: Path, pictures: Path, tmp_path: Path
) -> None:
    straight, resumed = tmp_path / "straight", tmp_path / "resumed"
    exact = {"device": device, "deterministic": device == "cuda"}
    task, values = given(name, tiny_model, pictures, straight)
    trainer.train(task, **values, **exact)
    resumed.mkdir()
    shutil.copytree(straight / "checkpoint-2", resumed / "checkpoint-2")
    task, values = given(name, tiny_model, pictures, resumed)
    torch.rand(7)  # whatever the process has drawn before
    watch = trainer.Watch()
    outcome = trainer.train(task, watch, **values, **exact, resume_from_checkpoint="latest")
    assert outcome.step == 4
    assert not [text for text in watch.warnings if "generator speaks" not in text]
    ours, theirs = (trainer.checkpoint_sums(f / "checkpoint-4") for f in (resumed, straight))
    assert ours == theirs
    assert any(name.endswith("_codes") for name in ours) == ("use_8bit_adam" in values)
    moved = trainer.checkpoint_sums(straight / "checkpoint-2")
    assert moved["weights.safetensors"] != ours["weights.safetensors"]


def test_accumulated_batches_equal_a_large_one(
    tiny_model: Path, pictures: Path, tmp_path: Path
) -> None:
    """Same pictures, and losses that are means: gradients agree to rounding."""
    found = []
    for count in (1, 2):
        made = trainer.session(
            "text-to-image",
            model=tiny_model,
            train_data_dir=pictures,
            output_dir=tmp_path / str(count),
            max_train_steps=1,
            train_batch_size=1,
        )
        from strop.train.objective import Objective

        made.learner.train()
        objective = Objective(made.settings, made.model, made.unet)
        for number in range(count):
            made.learner.backward(objective(made.source.batch(number), number) / count)
        found.append([p.grad.clone() for p in made.learner.parameters])
        if count == 2:
            made.learner.forget_gradients()
            made.learner.backward(objective(made.source.batch(1), 1))
            second = [p.grad for p in made.learner.parameters]
    for one, both, other in zip(found[0], found[1], second, strict=True):
        torch.testing.assert_close(both, (one + other) / 2, rtol=1e-4, atol=1e-6)


def test_scaled_losses_resume(tmp_path: Path) -> None:
    """fp16 needs a GPU, its bookkeeping does not: the scale, its age, and steps left out."""
    made = given_settings.make(
        "lora", {"model": "sprites", "mixed_precision": "fp16", "use_ema": True}
    )

    def learner() -> Learner:
        torch.manual_seed(0)
        return Learner(made, {"m": nn.Linear(3, 2)})

    def run(learner: Learner, numbers: range) -> None:
        for number in numbers:
            torch.manual_seed(number)
            loss = learner.modules["m"](torch.randn(4, 3)).square().mean()
            learner.backward(loss * (torch.inf if number == 1 else 1.0))
            learner.step(1e-2)

    straight, first, second = learner(), learner(), learner()
    run(straight, range(6))
    run(first, range(3))
    checkpoint.save(tmp_path, 3, first.tensors(), first.numbers())
    second.load(*checkpoint.load(tmp_path / "checkpoint-3"))
    run(second, range(3, 6))
    assert second.numbers() == straight.numbers()
    assert second.numbers()["scaler"]["scale"] == 2.0**15  # one step was left out
    for group, tensors in straight.tensors().items():
        for name, tensor in tensors.items():
            assert torch.equal(second.tensors()[group][name], tensor), name


class Crash(BaseException):
    """Stands for the loss of the process."""


def test_crash_at_any_moment_of_saving(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every write, sync, rename and deletion in turn is the last thing that happens."""
    tensors = {"weights": {"a": torch.arange(5.0)}, "optimizer": {"a/step": torch.ones(())}}
    moment, crashes = 0, 0

    def crashing(function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal moment
            if moment == 0:
                raise Crash
            moment -= 1
            return function(*args, **kwargs)

        return call

    for last in range(200):
        output = tmp_path / str(last)
        checkpoint.save(output, 1, tensors, {"mark": "old"})
        with monkeypatch.context() as patch:
            moment = last
            for owner, name in (
                (os, "fsync"),
                (os, "rename"),
                (os, "rmdir"),
                (os, "unlink"),
                (os, "mkdir"),
                (Path, "write_text"),
                (Path, "rename"),
                (checkpoint, "save_file"),
            ):
                patch.setattr(owner, name, crashing(getattr(owner, name)))
            try:
                checkpoint.save(output, 2, tensors, {"mark": "new"})
                checkpoint.prune(output, 1)
                crashed = False
            except Crash:
                crashed = True
        found = checkpoint.find(output, "latest")
        assert found is not None, f"nothing is left after a crash at operation {last}"
        loaded, state = checkpoint.load(found)
        assert torch.equal(loaded["weights"]["a"], torch.arange(5.0))
        assert state["step"] == (1 if state["mark"] == "old" else 2)
        files.sweep(output)
        assert not list(output.glob(f"*{files.PART}"))
        if not crashed:
            assert state["step"] == 2
            assert [step for step, _ in checkpoint.numbered(output)] == [2]
            break
        crashes += 1
    assert 10 < crashes < 199


def test_damaged_checkpoints(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tensors = {"weights": {"a": torch.zeros(8)}}
    for step in (1, 2, 3):
        checkpoint.save(tmp_path, step, tensors, {})
    bad = tmp_path / "checkpoint-3" / "weights.safetensors"
    content = bytearray(bad.read_bytes())
    content[-1] ^= 1
    bad.write_bytes(content)
    (tmp_path / "checkpoint-2" / "manifest.json").unlink()
    assert checkpoint.find(tmp_path, "latest") == tmp_path / "checkpoint-1"
    assert "checkpoint-3 is damaged: weights.safetensors" in caplog.text
    with pytest.raises(CacheError, match="damaged"):
        checkpoint.find(tmp_path, "checkpoint-3")
    with pytest.raises(OptionError, match=r"no checkpoint checkpoint-9.*holds checkpoint-1"):
        checkpoint.find(tmp_path, "checkpoint-9")
    assert checkpoint.find(tmp_path / "none", "latest") is None
    (tmp_path / "checkpoint-1" / "state.json").write_text("{}")
    every = r"checkpoint-3 is damaged: .*checkpoint-2 is .*checkpoint-1 is damaged: state.json"
    with pytest.raises(CacheError, match=rf"holds no whole checkpoint: .*{every}.*--output_dir"):
        checkpoint.find(tmp_path, "latest")


@pytest.mark.parametrize("wanted", ["latest", "checkpoint-10"])
def test_checkpoints_of_other_programs(wanted: str, tmp_path: Path) -> None:
    """Those of diffusers' scripts have the same names. They are left alone, older ones or not."""
    checkpoint.save(tmp_path, 5, {"weights": {"a": torch.zeros(8)}}, {})
    theirs = tmp_path / "checkpoint-10"
    (theirs / "unet").mkdir(parents=True)
    for name in ("optimizer.bin", "scheduler.bin", "random_states_0.pkl"):
        (theirs / name).write_bytes(b"x")
    with pytest.raises(OptionError, match=r"checkpoint-10 is not a checkpoint of Strop.*another"):
        checkpoint.find(tmp_path, wanted)


def test_latest_does_not_write_over_damaged_checkpoints(
    tiny_model: Path, pictures: Path, tmp_path: Path
) -> None:
    values: dict[str, Any] = {
        "model": tiny_model,
        "train_data_dir": pictures,
        "max_train_steps": 1,
        "output_dir": tmp_path / "out",
        "checkpointing_steps": 1,
        "resume_from_checkpoint": "latest",
    }
    watch = trainer.Watch()
    trainer.train("lora", watch, **values)
    assert [text.rpartition(" ")[2] for text in watch.warnings] == ["anew"]
    (tmp_path / "out" / "checkpoint-1" / "weights.safetensors").write_bytes(b"")
    with pytest.raises(CacheError, match="holds no whole checkpoint"):
        trainer.train("lora", **values)


def test_resume_refuses_what_would_not_continue(
    tiny_model: Path, pictures: Path, tmp_path: Path
) -> None:
    values: dict[str, Any] = {
        "model": tiny_model,
        "train_data_dir": pictures,
        "rank": 2,
        "output_dir": tmp_path / "out",
        "checkpointing_steps": 1,
        "max_train_steps": 1,
    }
    trainer.train("lora", **values)
    with pytest.raises(TrainingError, match="resume_from_checkpoint latest"):
        trainer.train("lora", **values)
    values["resume_from_checkpoint"] = "latest"
    with pytest.raises(OptionError, match="rank was 2 and is 3"):
        trainer.train("lora", **values | {"rank": 3})
    checkpoint.save(tmp_path / "out", 5, *_as_saved(tmp_path / "out" / "checkpoint-1"))
    with pytest.raises(OptionError, match="past max_train_steps"):
        trainer.train("lora", **values)
    shutil.rmtree(tmp_path / "out" / "checkpoint-5")
    other = trainer.draw_pictures(tmp_path / "other", 4)
    with pytest.raises(OptionError, match="other pictures"):
        trainer.train("lora", **values | {"train_data_dir": other})
    tensors, state = _as_saved(tmp_path / "out" / "checkpoint-1")
    del state["settings"]["use_8bit_adam"]  # written before there was such a setting
    shutil.rmtree(tmp_path / "out" / "checkpoint-1")
    checkpoint.save(tmp_path / "out", 1, tensors, state)
    with pytest.raises(OptionError, match="use_8bit_adam was False and is True"):
        trainer.train("lora", **values | {"use_8bit_adam": True})
    assert trainer.train("lora", **values | {"max_train_steps": 2}).step == 2
    assert _reported(tmp_path / "out") == [1, 2]


def _reported(output: Path) -> list[int]:
    lines = (output / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["step"] for line in lines]


def _as_saved(folder: Path) -> tuple[dict[str, dict[str, Tensor]], dict[str, Any]]:
    tensors, state = checkpoint.load(folder)
    return tensors, {name: value for name, value in state.items() if name != "step"}


def _words(model: Path, pictures: Path, output: Path, device: str) -> list[str]:
    return [
        sys.executable,
        "-m",
        "strop",
        "train",
        "text-to-image",
        "--model",
        str(model),
        "--train_data_dir",
        str(pictures),
        "--resolution",
        "32",
        "--train_batch_size",
        "2",
        "--gradient_accumulation_steps",
        "2",
        "--use_ema",
        "--max_train_steps",
        str(STEPS),
        "--checkpointing_steps",
        "3",
        "--checkpoints_total_limit",
        "2",
        "--device",
        device,
        "--deterministic",
        "--output_dir",
        str(output),
    ]


def _start(words: list[str]) -> subprocess.Popen[str]:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        words, env=environment, stdout=subprocess.PIPE, text=True, stderr=subprocess.DEVNULL
    )


def _wait_past(output: Path, step: int, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 240
    while not any(found > step for found, _ in checkpoint.numbered(output)):
        assert process.poll() is None, "the training ended before it could be stopped"
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
def test_sigterm_and_kill(device: str, tiny_model: Path, pictures: Path, tmp_path: Path) -> None:
    """A process told to stop, one that is killed, and one that finishes: as a single one."""
    straight, broken = tmp_path / "straight", tmp_path / "broken"
    with_flags = _words(tiny_model, pictures, straight, device)[3:]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as in the processes
    assert CliRunner().invoke(app, with_flags).exit_code == 0
    torch.set_num_threads(threads)
    words = _words(tiny_model, pictures, broken, device)

    process = _start(words)
    _wait_past(broken, 0, process)
    process.send_signal(signal.SIGTERM)
    said, _ = process.communicate(timeout=240)
    assert process.returncode == 128 + signal.SIGTERM
    saved = checkpoint.numbered(broken)[-1][0]
    assert f"after step {saved} of {STEPS}, which is saved" in said
    assert saved < STEPS

    words += ["--resume_from_checkpoint", "latest"]
    process = _start(words)
    _wait_past(broken, saved, process)
    process.kill()
    process.communicate(timeout=240)
    killed = checkpoint.numbered(broken)[-1][0]
    assert saved < killed < STEPS
    assert not (broken / "model_index.json").exists()

    process = _start(words)
    process.communicate(timeout=240)
    assert process.returncode == 0
    for folder in (f"checkpoint-{STEPS - 3}", f"checkpoint-{STEPS}"):
        assert trainer.checkpoint_sums(broken / folder) == trainer.checkpoint_sums(
            straight / folder
        )
    ours, theirs = trainer.weights(broken), trainer.weights(straight)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert not list(broken.glob(f"*{files.PART}"))
    assert _reported(broken) == list(range(1, STEPS + 1))
