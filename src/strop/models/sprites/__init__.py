"""Sprites are two small text-to-image models that draw one or two coloured shapes.

>>> from strop.models import sprites
>>> pipe = sprites.load()
>>> pipe("a red circle above a blue square on a white background", width=96, height=64)

The folder that `load` reads is an ordinary diffusers `StableDiffusionPipeline`, and `load_dit`'s an
ordinary `FluxPipeline`, which is called with `strop.models.guidance.guided`'s arguments.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from strop.models.sprites.grammar import BUCKETS, Scene, Thing, caption, parse
from strop.models.sprites.score import Score, score
from strop.models.sprites.specs import held_out_prompts

if TYPE_CHECKING:
    from diffusers import FluxPipeline, StableDiffusionPipeline

__all__ = [
    "BUCKETS",
    "DIT_WEIGHTS",
    "WEIGHTS",
    "Scene",
    "Score",
    "Thing",
    "caption",
    "folder_of",
    "held_out_prompts",
    "load",
    "load_dit",
    "load_from",
    "parse",
    "score",
]

WEIGHTS = Path(__file__).parent / "weights"
"""The diffusers folder that ships with the package."""

DIT_WEIGHTS = Path(__file__).parent / "dit_weights"
"""The diffusers folder of sprites-dit. It is there once its weights are trained."""

_FILES = (
    "model_index.json",
    "vae/diffusion_pytorch_model.safetensors",
    "text_encoder/model.safetensors",
    "tokenizer/vocab.json",
    "tokenizer/merges.txt",
    "scheduler/scheduler_config.json",
)
_UNET = "unet/diffusion_pytorch_model.safetensors"
_DIT_FILES = (
    "transformer/diffusion_pytorch_model.safetensors",
    "text_encoder_2/model.safetensors",
    "tokenizer_2/vocab.json",
    "tokenizer_2/merges.txt",
)


def folder_of(name: str) -> Path:
    """Return the folder of "sprites" or "sprites-dit".

    Raises:
        FileNotFoundError: the weights of sprites-dit are not trained yet.
    """
    if name == "sprites":
        return WEIGHTS
    if not (DIT_WEIGHTS / "model_index.json").is_file():
        raise FileNotFoundError(
            "the weights of sprites-dit are not trained yet; train them: 'python -m "
            "strop.models.sprites.dit --out DIR', then 'strop train text-to-image --config "
            "examples/sprites-dit.yaml --model DIR', whose output folder --model takes"
        )
    return DIT_WEIGHTS


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


def load_dit(
    dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu"
) -> "FluxPipeline":
    """Load sprites-dit, a transformer of Flux's kind; otherwise like `load`.

    diffusers logs that it expected a T5 as the second text encoder, which is a CLIP here.

    Raises:
        FileNotFoundError: its weights are not trained yet, or a file of them is missing.
        ValueError: a weights file is damaged.
    """
    return load_from(folder_of("sprites-dit"), dtype, device)


def load_from(
    folder: Path, dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu"
) -> Any:
    """Load a model of either kind from any folder; otherwise like `load` and `load_dit`."""
    from diffusers import FluxPipeline, StableDiffusionPipeline

    is_dit = (folder / "transformer").is_dir()
    _check_files(folder, (*_FILES, *(_DIT_FILES if is_dit else (_UNET,))))
    common: dict[str, Any] = {"dtype": dtype, "use_safetensors": True, "local_files_only": True}
    if is_dit:
        return FluxPipeline.from_pretrained(folder, **common).to(device)
    pipe = StableDiffusionPipeline.from_pretrained(folder, safety_checker=None, **common)
    return pipe.to(device)


def _check_files(folder: Path, names: Sequence[str]) -> None:
    """Raise unless all these files are there and the weights among them open."""
    from safetensors import SafetensorError, safe_open

    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise FileNotFoundError(
            f"the sprites model in {folder} lacks {', '.join(missing)}; reinstall strop, or train "
            "a model: 'python -m strop.models.sprites.train --out DIR', then 'strop train "
            "text-to-image --config examples/sprites.yaml --model DIR/weights'"
        )
    for name in names:
        if not name.endswith(".safetensors"):
            continue
        try:
            with safe_open(folder / name, framework="pt") as file:
                file.keys()
        except SafetensorError as error:
            raise ValueError(
                f"{folder / name} is no readable safetensors file ({error}); reinstall strop"
            ) from error
