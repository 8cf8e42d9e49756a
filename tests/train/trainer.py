"""A tiny training to run in a test, and what it leaves behind."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor

from strop.models.sprites import draw, specs
from strop.models.sprites.grammar import caption
from strop.train import given_settings
from strop.train.loop import Outcome, TrainingLoop
from strop.train.metrics import Metrics
from strop.train.session import Session, prepare_session

SIDE = 32
# Of the folder with captions: half of the prompts dropped, crops and mirrors drawn.
COMMON: dict[str, Any] = {
    "resolution": SIDE,
    "train_batch_size": 2,
    "learning_rate": 1e-3,
    "device": "cpu",
}


class Watch:
    """Remembers what a user would have seen."""

    def __init__(self) -> None:
        self.warnings: list[str] = []
        self.stages: list[str] = []
        self.steps: list[Metrics] = []

    def stage(self, text: str, done: int, total: int) -> None:
        self.stages.append(text)

    def step(self, last: Metrics, total: int, eta_s: float) -> None:
        self.steps.append(last)

    def warn(self, text: str) -> None:
        self.warnings.append(text)


def holding(task: str, watch: Watch | None = None, **given: Any) -> Session:
    """With the lock of its output folder."""
    watch = watch or Watch()
    made = given_settings.make(task, {**COMMON, **given})
    return prepare_session(made, watch.stage, watch.warn)


def session(task: str, watch: Watch | None = None, **given: Any) -> Session:
    """Without: the next one of a test may share its folder."""
    found = holding(task, watch, **given)
    found.hold.release()
    return found


def train(task: str, watch: Watch | None = None, **given: Any) -> Outcome:
    watch = watch or Watch()
    return TrainingLoop(holding(task, watch, **given), watch).run()


def draw_pictures(folder: Path, count: int = 5, metadata: bool = True) -> Path:
    """Drawings that are wider than high, with canonical captions; every second one has two."""
    source = torch.Generator().manual_seed(3)
    scenes = specs.draw_training_specs(count, source)
    made = draw.pictures(scenes, 48, 40, source)
    folder.mkdir(exist_ok=True)
    rows = []
    for number, (pixels, scene) in enumerate(zip(made, specs.scenes(scenes), strict=True)):
        rounded = (pixels * 255).round().byte().permute(1, 2, 0).contiguous().numpy()
        Image.fromarray(rounded).save(folder / f"{number}.png")
        text = [caption(scene), "a ring"] if number % 2 else caption(scene)
        rows.append({"file_name": f"{number}.png", "text": text})
    if metadata:
        (folder / "metadata.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder


def checkpoint_sums(folder: Path) -> dict[str, str]:
    """Sums over the files that hold the state, but for the settings, and over each of their
    tensors: equal if these are, and short where a test shows what differs."""
    files = sorted(folder.glob("*.safetensors"))
    found = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
    for path in files:
        for name, tensor in load_file(path).items():
            numbers = tensor.contiguous().view(-1).view(torch.uint8).numpy()
            found[f"{path.name}/{name}"] = hashlib.sha256(numbers).hexdigest()
    return found


def checkpoint_tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of a checkpoint, by the name of their file and their own."""
    files = sorted(folder.glob("*.safetensors"))
    groups = [(path.stem.partition("-")[0], load_file(path)) for path in files]
    return {f"{group}/{name}": t for group, tensors in groups for name, t in tensors.items()}


def weights(output: Path) -> dict[str, Tensor]:
    return load_file(output / "unet" / "diffusion_pytorch_model.safetensors")


def picture(pipe: Any, prompt: str = "a red circle") -> Tensor:
    pipe.set_progress_bar_config(disable=True)
    noise = torch.Generator().manual_seed(0)
    drawn: Tensor = pipe(
        prompt, width=SIDE, height=SIDE, num_inference_steps=2, generator=noise, output_type="pt"
    ).images
    return drawn
