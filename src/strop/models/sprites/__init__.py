"""Sprites is a small text-to-image model that draws one or two coloured shapes.

>>> from strop.models import sprites
>>> pipe = sprites.load()
>>> pipe("a red circle above a blue square on a white background", width=96, height=64)

The folder that `load` reads is an ordinary diffusers `StableDiffusionPipeline`.
"""

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from strop.models.sprites.grammar import BUCKETS, Scene, Thing, caption, parse
from strop.models.sprites.score import Score, score
from strop.models.sprites.specs import held_out_prompts

if TYPE_CHECKING:
    from diffusers import StableDiffusionPipeline

__all__ = [
    "BUCKETS",
    "WEIGHTS",
    "Scene",
    "Score",
    "Thing",
    "caption",
    "held_out_prompts",
    "load",
    "load_from",
    "parse",
    "score",
]

WEIGHTS = Path(__file__).parent / "weights"
"""The diffusers folder that ships with the package."""

_FILES = (
    "model_index.json",
    "unet/diffusion_pytorch_model.safetensors",
    "vae/diffusion_pytorch_model.safetensors",
    "text_encoder/model.safetensors",
    "tokenizer/vocab.json",
    "tokenizer/merges.txt",
    "scheduler/scheduler_config.json",
)


def load(
    dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu"
) -> "StableDiffusionPipeline":
    """Load the model that ships with the package.

    Args:
        dtype: Type of the weights and of the computation.
        device: Where the pipeline is to run.

    Raises:
        FileNotFoundError: a file of the model is missing from the installed package.
        ValueError: a weights file is damaged.
    """
    return load_from(WEIGHTS, dtype, device)


def load_from(
    folder: Path, dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu"
) -> "StableDiffusionPipeline":
    """Load a sprites model from any folder; otherwise like `load`."""
    from diffusers import StableDiffusionPipeline
    from safetensors import SafetensorError, safe_open

    missing = [name for name in _FILES if not (folder / name).is_file()]
    if missing:
        raise FileNotFoundError(
            f"the sprites model in {folder} lacks {', '.join(missing)}; reinstall strop, or train "
            "a model: 'python -m strop.models.sprites.train --out DIR', then 'strop train "
            "text-to-image --config examples/sprites.yaml --model DIR/weights'"
        )
    for name in _FILES:
        if not name.endswith(".safetensors"):
            continue
        try:
            with safe_open(folder / name, framework="pt") as file:
                file.keys()
        except SafetensorError as error:
            raise ValueError(
                f"{folder / name} is no readable safetensors file ({error}); reinstall strop"
            ) from error
    pipe = StableDiffusionPipeline.from_pretrained(
        folder, dtype=dtype, safety_checker=None, use_safetensors=True, local_files_only=True
    )
    return pipe.to(device)
