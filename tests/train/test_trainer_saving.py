"""Checkpoints are written while a training goes on, and are what a training that waits writes."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from strop.errors import TrainingError
from strop.train import attempts, checkpoint, host_copies
from strop.train.ranks import ALONE
from strop.train.saving import Saver
from tests.train import trainer

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation")  # of diffusers
GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
DEVICES = ["cpu", pytest.param("cuda", marks=GPU)]


@dataclass
class Given:
    """The settings that a saver reads."""

    output: Path
    background_checkpoints: bool = True
    checkpoints_total_limit: int | None = None


def _saver(folder: Path) -> Saver:
    return Saver(Given(folder), ALONE)  # type: ignore[arg-type]


def _weights(device: str) -> dict[str, dict[str, Tensor]]:
    """Tensors of several types, one of which is channels-last."""
    found = {
        "a": torch.arange(300_000.0, device=device),
        "b": torch.arange(24.0, device=device).reshape(1, 2, 3, 4),
        "c": torch.ones(7, dtype=torch.uint8, device=device),
        "d": torch.tensor(3.0, device=device),
        "e": torch.ones(5, dtype=torch.bfloat16, device=device),
    }
    found["b"] = found["b"].contiguous(memory_format=torch.channels_last)
    return {"weights": found, "optimizer": {"a/step": torch.ones(())}}


@pytest.mark.parametrize("device", DEVICES)
def test_a_change_waits_for_the_copy(
    device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copy begins late; what comes after ``settle`` is not in it."""
    usual, begins = host_copies.HostCopies.take, threading.Event()

    def late(self: Any, *given: Any) -> host_copies.HostCopy:
        begins.wait()
        return usual(self, *given)

    monkeypatch.setattr(host_copies.HostCopies, "take", late)
    saver, tensors = _saver(tmp_path), _weights(device)
    before = {name: tensor.clone().cpu() for name, tensor in tensors["weights"].items()}
    saver.save(1, tensors, {"mark": 7}, all_write=False)
    timer = threading.Timer(0.05, begins.set)
    timer.start()
    saver.settle()
    for tensor in tensors["weights"].values():
        tensor.zero_()
    saver.wait()
    timer.join()
    saver.close(print)
    groups, state = checkpoint.load(tmp_path / "checkpoint-1")
    assert state["mark"] == 7
    for name, tensor in before.items():
        assert torch.equal(groups["weights"][name], tensor), name


@pytest.mark.parametrize("device", DEVICES)
def test_saves_follow_each_other_in_one_memory(
    device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, at_once, open_saves = set(), [], []
    begin, publish, take = checkpoint.begin, checkpoint.publish, host_copies.HostCopies.take

    def noted_begin(final: Path) -> None:
        open_saves.append(final)
        at_once.append(len(open_saves))
        begin(final)

    def noted_publish(final: Path, *given: Any) -> None:
        publish(final, *given)
        open_saves.remove(final)

    def noted_take(self: Any, *given: Any) -> host_copies.HostCopy:
        found = take(self, *given)
        seen.add(tuple(t.data_ptr() for group in found.tensors.values() for t in group.values()))
        return found

    monkeypatch.setattr(checkpoint, "begin", noted_begin)
    monkeypatch.setattr(checkpoint, "publish", noted_publish)
    monkeypatch.setattr(host_copies.HostCopies, "take", noted_take)
    saver, tensors = _saver(tmp_path), _weights(device)
    saver.reserve(tensors)
    for step in range(1, 4):
        tensors["weights"]["a"].fill_(step)
        saver.save(step, tensors, {}, all_write=False)
        saver.settle()
    saver.wait()
    saver.close(print)
    assert at_once == [1, 1, 1]
    assert len(seen) == 1
    for step in range(1, 4):
        groups, _ = checkpoint.load(tmp_path / f"checkpoint-{step}")
        assert groups["weights"]["a"].unique().tolist() == [step]


def _given(model: Path, pictures: Path, output: Path, **more: Any) -> dict[str, Any]:
    return {
        "model": model,
        "train_data_dir": pictures,
        "output_dir": output,
        "max_train_steps": 4,
        "checkpointing_steps": 1,
        "use_ema": True,
        "validation_prompt": ["a ring"],
        "validation_steps": 1,
        "num_validation_images": 1,
        "validation_inference_steps": 1,
        **more,
    }


def test_the_bits_are_those_of_a_training_that_waits(
    tiny_model: Path, pictures: Path, tmp_path: Path
) -> None:
    """Also where averages take the place of the weights right after a save has begun."""
    given = partial(_given, tiny_model, pictures)
    for name, background in (("goes on", True), ("waits", False)):
        made = given(tmp_path / name, background_checkpoints=background)
        trainer.train("text-to-image", **made)
    for step in range(1, 5):
        folders = [tmp_path / name / f"checkpoint-{step}" for name in ("goes on", "waits")]
        first, second = map(trainer.checkpoint_sums, folders)
        assert first == second, step


@pytest.mark.parametrize("failing", [1, 4], ids=["next step", "end"])
def test_what_the_thread_raises_is_not_lost(
    failing: int, tiny_model: Path, pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = checkpoint.save_file

    def full(tensors: Any, path: Path) -> None:
        if path.parent.name.startswith(f"checkpoint-{failing}."):
            raise OSError(28, "No space left on device")
        usual(tensors, path)

    monkeypatch.setattr(checkpoint, "save_file", full)
    given = _given(tiny_model, pictures, tmp_path, validation_prompt=[])
    with pytest.raises(
        TrainingError, match=rf"cannot write .*checkpoint-{failing}: .*No space left.*; make room"
    ):
        trainer.train("text-to-image", **given)
    kept = [step for step, _ in checkpoint.numbered(tmp_path)]
    assert failing not in kept
    assert kept == list(range(1, failing))


def test_an_error_of_the_training_lets_the_save_end(tmp_path: Path) -> None:
    saver, warned = _saver(tmp_path), []
    saver.save(1, _weights("cpu"), {}, all_write=False)
    saver.close(warned.append)
    checkpoint.verify(tmp_path / "checkpoint-1")
    assert not warned


def test_attempts_go_on_from_their_own_checkpoints(tmp_path: Path) -> None:
    """Not from those that another training has left, whatever their number."""
    tensors = {"weights": {"a": torch.zeros(2)}}
    checkpoint.save(tmp_path, 9, tensors, {"run": "another"})
    old = checkpoint.save(tmp_path, 3, tensors, {"run": "another"})
    first = attempts.start(tmp_path, 0, lambda: old)
    assert first.folder == old

    def never() -> None:
        raise AssertionError("a further attempt does not ask where to begin")

    assert attempts.start(tmp_path, 1, never) == first
    own = checkpoint.save(tmp_path, 4, tensors, {"run": first.run})
    assert attempts.start(tmp_path, 1, never) == attempts.Start(first.run, own)
    (checkpoint.save(tmp_path, 5, tensors, {"run": first.run}) / "state.json").write_text("{}")
    assert attempts.start(tmp_path, 2, never).folder == own


def test_an_attempt_after_a_refusal_is_refused(tmp_path: Path) -> None:
    attempts.start(tmp_path, 0, lambda: None)

    def refuse() -> None:
        raise TrainingError("another training")

    for attempt in (0, 1):
        with pytest.raises(TrainingError, match="another training"):
            attempts.start(tmp_path, attempt, refuse)
