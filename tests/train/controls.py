"""Drawings with conditioning pictures, ControlNets, and trainings of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import diffusers
import torch
from PIL import Image
from torch import Tensor

from strop.train.session import Session
from tests.train import trainer

NUMBER = 1  # of the batch
NAMES = ("sd3", "flux")
KINDS = {"sd3": "SD3ControlNetModel", "flux": "FluxControlNetModel"}
# Blocks of a ControlNet that has fewer than its transformer.
FEWER = {
    "sd3": {"num_double_layers": 1},
    "flux": {"num_double_layers": 1, "num_single_layers": 2},
}


def by_diffusers(name: str, model: Path) -> Any:
    """A ControlNet that diffusers makes of the transformer, as its scripts have it."""
    kind = "SD3Transformer2DModel" if name == "sd3" else "FluxTransformer2DModel"
    loaded = getattr(diffusers, kind).from_pretrained(model / "transformer")
    if name == "sd3":
        return diffusers.SD3ControlNetModel.from_transformer(
            loaded, num_layers=1, num_extra_conditioning_channels=0
        )
    return diffusers.FluxControlNetModel.from_transformer(
        loaded,
        num_layers=1,
        num_single_layers=2,
        attention_head_dim=loaded.config.attention_head_dim,
        num_attention_heads=loaded.config.num_attention_heads,
    )


def session(model: Path, data: Path, out: Path, **more: Any) -> Session:
    return trainer.session("controlnet", model=model, train_data_dir=data, output_dir=out, **more)


def given_for(model: Path, data: Path, out: Path, **more: Any) -> dict[str, Any]:
    return {
        "model": model,
        "train_data_dir": data,
        "output_dir": out,
        "max_train_steps": 4,
        "checkpointing_steps": 2,
        "lr_warmup_steps": 0,
        "use_ema": True,
        "max_grad_norm": 0.05,
        "random_flip": True,
        "threads": 1,
        **more,
    }


def draw_controlled(place: Path) -> Path:
    trainer.draw_pictures(place / "pictures")
    rows = (place / "pictures" / "metadata.jsonl").read_text().splitlines()
    (place / "pictures" / "metadata.jsonl").unlink()
    (place / "greys").mkdir()
    named = []
    for row in map(json.loads, rows):
        name = row["file_name"]
        grey = Image.open(place / "pictures" / name).convert("L").resize((24, 20))
        grey.save(place / "greys" / name)
        named.append(row | {"file_name": f"pictures/{name}", "conditioning_image": f"greys/{name}"})
    (place / "metadata.jsonl").write_text("\n".join(map(json.dumps, named)))
    return place


def awake(net: Any) -> None:
    """Give a new ControlNet what it has after some training: at first its last layers are zeros,
    which hand no gradient to those before them."""
    source = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in net.parameters():
            if not parameter.any():
                parameter.copy_(torch.randn(parameter.shape, generator=source) * 0.05)


def gradients(made: Session, loss: Tensor) -> dict[str, Tensor]:
    made.learner.forget_gradients()
    loss.backward()
    return {n: p.grad.double() for n, p in made.learner.named.items() if p.grad is not None}
