"""``strop train --compile_unet``: whole trainings whose UNet is compiled, forward and backward."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

import strop
from strop.cli import app
from strop.models.sprites import network, settings, vocabulary
from strop.train.loop import TrainingLoop
from strop.train.session import Session
from tests.e2e import tiny
from tests.train import trainer
from tests.train.compiled import roles

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("fresh"),
    pytest.mark.filterwarnings("ignore:__array__ implementation"),  # of diffusers
    pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`"),
]
PAIR = ["backward", "forward"]


@pytest.fixture(scope="module")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sprites model with the least of a UNet, as every training traces it anew."""
    folder = tmp_path_factory.mktemp("small")
    unet = tiny.unet(
        block_out_channels=(16,),
        down_block_types=("CrossAttnDownBlock2D",),
        mid_block_type=None,
        up_block_types=("UpBlock2D",),
        cross_attention_dim=settings.TINY.network.text_width,
    )
    parts = replace(network.parts(settings.TINY), unet=unet)
    network.pipeline(parts, settings.TINY.noise).save_pretrained(folder)
    vocabulary.write(folder / "tokenizer")
    return folder


@pytest.fixture
def same_threads() -> Iterator[None]:
    """A command takes fewer on a busy machine."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@dataclass(frozen=True)
class Run:
    """A training, which is stopped half way. Five pictures give batches of two, two and one."""

    task: str
    values: dict[str, Any]
    steps: int = 4
    draws: bool = False  # compiled dropout draws other numbers than eager's


RUNS = {
    "averaged": Run("text-to-image", {"use_ema": True, "random_flip": True}),
    "checkpointed": Run("text-to-image", {"gradient_checkpointing": True}, steps=2),
    "adapters": Run("lora", {"rank": 2, "gradient_accumulation_steps": 2}),
    "dropout": Run("lora", {"rank": 2, "lora_dropout": 0.2, "mixed_precision": "bf16"}, draws=True),
}
NIGHTLY = ("checkpointed", "adapters")


def trained(run: Run, values: dict[str, Any]) -> Session:
    made = trainer.session(run.task, **values)
    TrainingLoop(made, trainer.Watch()).run()
    return made


def parameters(made: Session) -> Tensor:
    return torch.cat([p.detach().flatten() for p in made.learner.parameters])


def check_compiled(made: Session) -> None:
    forward: Any = made.unet.forward
    assert roles(forward.log) == PAIR
    assert not strop.explain(made.unet).fallbacks
    assert not forward.traced_by_torch


def resume(run: Run, values: dict[str, Any]) -> None:
    """From the shell."""
    words = ["train", run.task]
    for name, value in (trainer.COMMON | values | {"resume_from_checkpoint": "latest"}).items():
        words += [f"--{name}"] if value is True else [f"--{name}", str(value)]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output


@pytest.mark.usefixtures("same_threads")
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.nightly if name in NIGHTLY else ()) for name in RUNS],
)
def test_weights_and_resume(name: str, small_model: Path, pictures: Path, tmp_path: Path) -> None:
    run, half = RUNS[name], f"checkpoint-{RUNS[name].steps // 2}"
    values = run.values | {
        "model": small_model,
        "train_data_dir": pictures,
        "max_train_steps": run.steps,
        "checkpointing_steps": run.steps // 2,
    }
    straight, resumed = tmp_path / "straight", tmp_path / "resumed"
    made = trained(run, values | {"compile_unet": True, "output_dir": straight})
    check_compiled(made)
    if not run.draws:
        start = parameters(trainer.session(run.task, **values, output_dir=tmp_path / "none"))
        plain = parameters(trained(run, values | {"output_dir": tmp_path / "plain"}))
        assert (parameters(made) - plain).norm() < 0.01 * (plain - start).norm()
    resumed.mkdir()
    shutil.copytree(straight / half, resumed / half)
    resume(run, values | {"compile_unet": True, "output_dir": resumed})
    last = f"checkpoint-{run.steps}"
    ours, theirs = (trainer.checkpoint_sums(f / last) for f in (resumed, straight))
    assert ours == theirs
    assert ours["weights.safetensors"] != (straight / half / "weights.safetensors").read_bytes()
