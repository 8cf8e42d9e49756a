"""Optimizers by name: the library's own steps from the same gradients, resumed to the bit."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from strop.errors import OptionError
from strop.train import given_settings, library_optimizers
from strop.train.objective import Objective
from strop.train.training_settings import OPTIMIZERS
from tests.train import trainer

pytest.importorskip("diffusers")
pytestmark = pytest.mark.filterwarnings("ignore")  # of diffusers and of pytorch-optimizer

NAMES = OPTIMIZERS[1:]
BETAS: dict[str, Any] = {"betas": (0.9, 0.999), "weight_decay": 1e-2}
ADAM: dict[str, Any] = {**BETAS, "eps": 1e-8}
# Class and arguments, as a user of the library would write them.
PLAIN: dict[str, tuple[str, dict[str, Any]]] = {
    "lion": ("Lion", BETAS),
    "lamb": ("Lamb", {**ADAM, "max_grad_norm": 0.0}),
    "novograd": ("NovoGrad", ADAM),
    "prodigy": ("Prodigy", {**ADAM, "bias_correction": True, "safeguard_warmup": True}),
    "schedule-free": ("ScheduleFreeAdamW", ADAM),
}


def library_of(name: str, parameters: Any, rate: float) -> torch.optim.Optimizer:
    if name == "adafactor":
        return torch.optim.Adafactor(parameters, lr=rate, weight_decay=1e-2)
    kind, arguments = PLAIN[name]
    library = pytest.importorskip("pytorch_optimizer")
    made: torch.optim.Optimizer = getattr(library, kind)(parameters, lr=rate, **arguments)
    return made


def values_of(name: str, folder: Path, pictures: Path) -> dict[str, Any]:
    return {
        "model": folder,
        "train_data_dir": pictures,
        "optimizer": name,
        "rank": 2,
        "lr_warmup_steps": 0,
        "learning_rate": 1.0 if name == "prodigy" else 1e-3,
        "max_grad_norm": 0.05,
        "checkpointing_steps": 2,
        "threads": 1,
    }


def test_every_name_has_a_maker() -> None:
    assert set(library_optimizers.MAKERS) == set(NAMES)
    given = {"model": "sprites", "optimizer": "AdamW"}
    assert given_settings.make("lora", given).optimizer == "adamw"


@pytest.mark.parametrize("name", NAMES)
def test_steps_are_the_librarys_and_resume_to_the_bit(
    name: str, tiny_model: Path, pictures: Path, tmp_path: Path
) -> None:
    if name != "adafactor":
        pytest.importorskip("pytorch_optimizer")
    values = values_of(name, tiny_model, pictures)
    made = trainer.session("lora", **values, output_dir=tmp_path / "plain")
    plain = library_of(name, made.learner.parameters, values["learning_rate"])
    if hasattr(plain, "train"):
        plain.train()
    made.learner.train()
    objective = Objective(made.settings, made.model, made.unet)
    for number in range(4):
        objective(made.source.batch(number), number).backward()
        torch.nn.utils.clip_grad_norm_(made.learner.parameters, 0.05)
        plain.step()
        plain.zero_grad()
    wanted = {name: p.detach().clone() for name, p in made.learner.named.items()}

    drawn = {"validation_prompt": "a ring", "validation_steps": 1, "num_validation_images": 1}
    drawn |= {"validation_inference_steps": 1}
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    trainer.train("lora", **values, **drawn, output_dir=whole, max_train_steps=4)
    trainer.train("lora", **values, output_dir=cut, max_train_steps=2)
    latest = {"max_train_steps": 4, "resume_from_checkpoint": "latest"}
    trainer.train("lora", **values, output_dir=cut, **latest)
    expected, actual = (trainer.checkpoint_sums(f / "checkpoint-4") for f in (whole, cut))
    assert expected
    assert expected == actual
    found = trainer.checkpoint_tensors(whole / "checkpoint-4")
    for key, weight in wanted.items():
        torch.testing.assert_close(found[f"weights/{key}"], weight, rtol=1e-5, atol=1e-7)
    one, other = (load_file(f / "pytorch_lora_weights.safetensors") for f in (whole, cut))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[key], other[key]) for key in one)


def test_averages_beside_another_optimizer(
    tiny_model: Path, pictures: Path, tmp_path: Path
) -> None:
    """They are EMAModel's, and resume to the bit."""
    from diffusers.training_utils import EMAModel

    values = values_of("adafactor", tiny_model, pictures) | {"use_ema": True}
    made = trainer.session("lora", **values, output_dir=tmp_path / "one")
    objective, ema = Objective(made.settings, made.model, made.unet), None
    made.learner.train()
    for number in range(4):
        ema = ema or EMAModel(made.learner.parameters, decay=0.9999)
        objective(made.source.batch(number), number).backward()
        made.learner.step(1e-3)
        ema.step(made.learner.parameters)
    states = made.learner.states()
    for (name, _), average in zip(made.learner.named.items(), ema.shadow_params, strict=True):
        torch.testing.assert_close(states[f"{name}/ema"], average)
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    trainer.train("lora", **values, output_dir=whole, max_train_steps=4)
    trainer.train("lora", **values, output_dir=cut, max_train_steps=2)
    latest = {"max_train_steps": 4, "resume_from_checkpoint": "latest"}
    trainer.train("lora", **values, output_dir=cut, **latest)
    expected, actual = (trainer.checkpoint_sums(f / "checkpoint-4") for f in (whole, cut))
    assert expected == actual


def test_schedule_free_saves_its_averages(tiny_model: Path, pictures: Path, tmp_path: Path) -> None:
    """Adapters on disk are those to draw with; a checkpoint has those to train with."""
    pytest.importorskip("pytorch_optimizer")
    values = values_of("schedule-free", tiny_model, pictures)
    trainer.train("lora", **values, output_dir=tmp_path, max_train_steps=4)
    trained = trainer.checkpoint_tensors(tmp_path / "checkpoint-4")
    saved = load_file(tmp_path / "pytorch_lora_weights.safetensors")
    ups = [
        key
        for key in trained
        if key.startswith("weights/") and key.endswith("lora_B.default.weight")
    ]
    sums = {float(tensor.double().sum()) for key, tensor in saved.items() if ".lora.up" in key}
    assert len(sums) == len(ups)
    assert not sums & {float(trained[key].double().sum()) for key in ups}


def test_without_its_library_an_optimizer_names_the_extra(
    tiny_model: Path, pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pytorch_optimizer", None)
    values = values_of("lion", tiny_model, pictures)
    with pytest.raises(OptionError, match=r"lion needs pytorch-optimizer: pip .*strop\[optimizers"):
        trainer.session("lora", **values, output_dir=tmp_path)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"use_8bit_adam": True}, "use_8bit_adam is built for Strop's AdamW"),
        ({"shard_optimizer": True}, "shard_optimizer is built for"),
        ({"mixed_precision": "fp16"}, "or --mixed_precision bf16"),
        ({"use_ema": True, "optimizer": "schedule-free"}, "are averages already"),
        ({"optimizer": "adagrad"}, "optimizer is 'adagrad': choose adamw, adafactor"),
    ],
)
def test_what_does_not_go_together(given: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        given_settings.make("lora", {"model": "sprites", "optimizer": "lion", **given})
