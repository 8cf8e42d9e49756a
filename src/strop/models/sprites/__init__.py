"""Sprites are two small text-to-image models that draw one or two coloured shapes.

>>> from strop.models import sprites
>>> pipe = sprites.load()
>>> pipe("a red circle above a blue square on a white background", width=96, height=64)

The folder that `load` reads is an ordinary diffusers `StableDiffusionPipeline`. `load_dit` gives an
ordinary `FluxPipeline`, which is called with `strop.models.guidance.guided`'s arguments. Both have
the same autoencoder, text encoder and tokenizer, which ship once, in the folder of the first.
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
    "NAMES",
    "WEIGHTS",
    "Scene",
    "Score",
    "Thing",
    "caption",
    "folder_of",
    "folder_of_part",
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
"""The folder of what sprites-dit has for itself: its transformer and its scheduler."""

NAMES = ("sprites", "sprites-dit")
"""The models that ship with the package."""

_SHARED = {
    "vae": "vae",
    "text_encoder": "text_encoder",
    "tokenizer": "tokenizer",
    "text_encoder_2": "text_encoder",
    "tokenizer_2": "tokenizer",
}
"""Parts of the sprites-dit that ships -> the parts of the sprites model that they are."""

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
_TRAINING = (
    "'python -m strop.models.sprites.train --out DIR', then 'strop train text-to-image --config "
    "examples/sprites.yaml --model DIR/weights'"
)
_DIT_TRAINING = (
    "'python -m strop.models.sprites.dit --out DIR', then 'strop train text-to-image --config "
    "examples/sprites-dit.yaml --model DIR'"
)


def folder_of(name: str) -> Path:
    """Return the folder of a model by its name, which is one of `NAMES`."""
    return dict(zip(NAMES, (WEIGHTS, DIT_WEIGHTS), strict=True))[name]


def folder_of_part(folder: Path, part: str) -> Path:
    """Return where a part of the model in `folder` lies.

    It is the folder of that name, unless it is one that sprites-dit shares with the sprites model.
    """
    is_shared = part in _SHARED and folder.resolve() == DIT_WEIGHTS.resolve()
    return WEIGHTS / _SHARED[part] if is_shared else folder / part


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
    """
    return load_from(DIT_WEIGHTS, dtype, device)


def load_from(
    folder: Path, dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu"
) -> Any:
    """Load a model of either kind from any folder; otherwise like `load` and `load_dit`."""
    from diffusers import FluxPipeline, StableDiffusionPipeline

    is_dit = folder == DIT_WEIGHTS or (folder / "transformer").is_dir()
    _check_files(folder, (*_FILES, *(_DIT_FILES if is_dit else (_UNET,))))
    common: dict[str, Any] = {"dtype": dtype, "use_safetensors": True, "local_files_only": True}
    if is_dit:
        shared = _load_shared(folder, common)
        return FluxPipeline.from_pretrained(folder, **common, **shared).to(device)
    pipe = StableDiffusionPipeline.from_pretrained(folder, safety_checker=None, **common)
    return pipe.to(device)


def _load_shared(folder: Path, common: dict[str, Any]) -> dict[str, Any]:
    """Load the parts that do not lie in the model's own folder."""
    from diffusers import AutoencoderKL
    from transformers import CLIPTextModel, CLIPTokenizer

    found = {}
    for part, source in _SHARED.items():
        place = folder_of_part(folder, part)
        if place == folder / part:
            continue
        if source == "tokenizer":
            found[part] = CLIPTokenizer.from_pretrained(str(place), local_files_only=True)
        else:
            kind = AutoencoderKL if source == "vae" else CLIPTextModel
            found[part] = kind.from_pretrained(str(place), **common)
    return found


def _check_files(folder: Path, names: Sequence[str]) -> None:
    """Raise unless all these files are there and the weights among them open."""
    from safetensors import SafetensorError, safe_open

    files = [folder_of_part(folder, Path(name).parent.name) / Path(name).name for name in names]
    missing = [
        str(file.relative_to(folder) if file.is_relative_to(folder) else file)
        for file in files
        if not file.is_file()
    ]
    if missing:
        raise FileNotFoundError(
            f"the sprites model in {folder} lacks {', '.join(missing)}; reinstall strop, or train "
            f"a model: {_DIT_TRAINING if _DIT_FILES[0] in names else _TRAINING}"
        )
    for file in files:
        if file.suffix != ".safetensors":
            continue
        try:
            with safe_open(file, framework="pt") as opened:
                opened.keys()
        except SafetensorError as error:
            raise ValueError(
                f"{file} is no readable safetensors file ({error}); reinstall strop"
            ) from error
