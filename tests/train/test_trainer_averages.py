"""Averages in the host's memory, which a thread computes: they are those of the device."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from strop.errors import OptionError, TrainingError
from strop.train import averages, given_settings
from strop.train.averages import Averages, HostAverages
from strop.train.ema import EMASchedule
from tests.train import trainer

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation")  # of diffusers
_GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
DEVICES = ["cpu", pytest.param("cuda", marks=_GPU)]
SCHEDULE = EMASchedule(0.5)


def moved(parameters: list[Tensor], number: int) -> None:
    source = torch.Generator().manual_seed(number)
    with torch.no_grad():
        for parameter in parameters:
            parameter.add_(torch.randn(parameter.shape, generator=source).to(parameter.device))


@pytest.mark.parametrize("device", DEVICES)
def test_the_thread_averages_what_each_step_left(device: str) -> None:
    """Weights change right after ``settle``, while the averaging may still go on."""
    parameters = [torch.randn(300, 70, device=device), torch.randn(8, 3, 2, 2, device=device)]
    parameters[1] = parameters[1].to(memory_format=torch.channels_last)
    plain, hosted = Averages(parameters, SCHEDULE), HostAverages(parameters, SCHEDULE)
    assert hosted.of(parameters[0]) is None
    for number in range(7):
        plain.settle()
        hosted.settle()
        moved(parameters, number)
        plain.step()
        hosted.step()
    for parameter in parameters:
        found, expected = hosted.of(parameter), plain.of(parameter)
        assert found is not None
        assert expected is not None
        assert found.device.type == "cpu"
        torch.testing.assert_close(found, expected.cpu(), rtol=1e-6, atol=1e-7)
        if device == "cpu":
            assert torch.equal(found, expected)
    hosted.write()
    assert all(torch.equal(p.cpu(), hosted.of(p)) for p in parameters)  # type: ignore[arg-type]


def test_a_step_waits_for_the_copy_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The averaging is held back until the weights have changed."""
    parameters = [torch.zeros(4)]
    hosted, may_average = (
        HostAverages(parameters, EMASchedule(1.0, min_decay=0.5)),
        threading.Event(),
    )
    usual = HostAverages._average

    def held(self: HostAverages, *args: Any) -> None:
        assert may_average.wait(60)
        usual(self, *args)

    monkeypatch.setattr(HostAverages, "_average", held)
    parameters[0].fill_(1.0)
    hosted.step()
    hosted.settle()
    parameters[0].fill_(9.0)
    may_average.set()
    found = hosted.of(parameters[0])
    assert found is not None
    assert found.tolist() == [1.0] * 4


def test_an_error_of_the_thread_ends_the_training(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> Tensor:
        raise RuntimeError("no memory")

    parameters = [torch.zeros(4)]
    hosted = HostAverages(parameters, SCHEDULE)
    monkeypatch.setattr(torch, "zeros", refuse)
    hosted.step()
    with pytest.raises(
        TrainingError, match=r"to be averaged .*no memory.* leave out --offload_ema"
    ):
        hosted.settle()


@pytest.mark.parametrize("optimizer", ["adamw", "adafactor"])
def test_trainings_end_with_the_same_bytes(
    optimizer: str, tiny_model: Path, pictures: Path, tmp_path: Path
) -> None:
    """Pictures are drawn with averages meanwhile, and a resume may keep them elsewhere."""
    values = {
        "model": tiny_model,
        "train_data_dir": pictures,
        "optimizer": optimizer,
        "rank": 2,
        "use_ema": True,
        "lr_warmup_steps": 0,
        "threads": 1,
        "checkpointing_steps": 2,
        "validation_prompt": "a ring",
        "validation_steps": 1,
        "num_validation_images": 1,
        "validation_inference_steps": 1,
    }
    found = {}
    for name, first, second in (
        ("device", False, False),
        ("host", True, True),
        ("both", True, False),
    ):
        output = tmp_path / name
        trainer.train("lora", **values, output_dir=output, max_train_steps=2, offload_ema=first)
        resumed = {"resume_from_checkpoint": "latest", "max_train_steps": 4, "offload_ema": second}
        trainer.train("lora", **values, output_dir=output, **resumed)
        drawn = (output / "validation" / "step-000003.png").read_bytes()
        found[name] = trainer.checkpoint_sums(output / "checkpoint-4"), drawn
    assert found["device"] == found["host"] == found["both"]
    assert {"weights.safetensors", "optimizer.safetensors"} <= found["device"][0].keys()


def test_what_does_not_go_together() -> None:
    with pytest.raises(OptionError, match="add --use_ema"):
        given_settings.make("lora", {"model": "sprites", "offload_ema": True})


def test_the_place_is_chosen_once() -> None:
    made = [type(averages.make([torch.zeros(1)], SCHEDULE, place)) for place in (False, True)]
    assert made == [Averages, HostAverages]
