"""Load the models that the verbs run: the sprites models of the package, or a diffusers folder."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from strop.cli.mistakes import CommandError
from strop.drawing.request import PictureSize

if TYPE_CHECKING:
    import torch

SPRITES, SPRITES_DIT = "sprites", "sprites-dit"
_BUILT_IN = (SPRITES, SPRITES_DIT)
_FLUX_LATENTS = 128  # a side of Flux's own pictures
MULTIPLE = 8  # of pixels, which diffusers asks of every picture


@dataclass(frozen=True)
class ModelFolder:
    """Hold a diffusers folder and what its configuration says.

    ``factor`` is what both sides of a picture must be multiples of, ``grid`` what they had better
    be: the autoencoder's factor times that of the UNet, or of Flux's packing.
    """

    name: str
    folder: Path
    factor: int
    grid: int
    default_size: PictureSize
    guidance: float

    @property
    def is_sprites(self) -> bool:
        return self.name in _BUILT_IN

    @property
    def is_flux(self) -> bool:
        return (self.folder / "transformer").is_dir()


def find_model(name: str, others: Iterable[str] = ()) -> ModelFolder:
    """Read a model's configuration; fast. Raises CommandError if there is none. ``others``: names
    that a command knows besides."""
    if name in _BUILT_IN:
        from strop.models import sprites

        folder = sprites.folder_of(name)
        advice = "reinstall strop, or give a diffusers folder with --model"
    else:
        folder, known = Path(name).expanduser(), ", ".join(map(repr, (*_BUILT_IN, *others)))
        advice = f"give {known} or a folder that diffusers saved"
    if not (folder / "model_index.json").is_file():
        raise CommandError(f"there is no diffusers model in {folder}; {advice}")
    _check_parts(folder)
    latent = 2 ** (len(_sizes(folder, "vae")["block_out_channels"]) - 1)
    coarse, own, guidance = _network(folder)
    grid = latent * coarse
    if name in _BUILT_IN:  # has seen no other sizes
        return ModelFolder(name, folder, 4 * latent, grid, PictureSize(96, 64), 4.0)
    side = own * latent
    factor = math.lcm(latent, MULTIPLE)
    return ModelFolder(name, folder, factor, grid, PictureSize(side, side), guidance)


def _network(folder: Path) -> tuple[int, int, float]:
    """Return the factor of the network that takes noise away, its own side in latents, and the
    guidance that is usual."""
    if not (folder / "transformer").is_dir():
        unet = _sizes(folder, "unet")
        return 2 ** (len(unet["block_out_channels"]) - 1), unet.get("sample_size", 64), 7.5
    config = _read_json(folder / "transformer" / "config.json")
    if config.get("_class_name") != "FluxTransformer2DModel" or config.get("guidance_embeds"):
        raise CommandError(
            f"{folder} has a transformer that strop's commands do not run: they are built for Flux "
            "without embedded guidance; call strop.optimize(pipe) from Python"
        )
    return 2, _FLUX_LATENTS, 1.0


def _check_parts(folder: Path) -> None:
    """Raise CommandError unless every part is there and its weights open."""
    from safetensors import SafetensorError, safe_open

    index = _read_json(folder / "model_index.json")
    wanted = [name for name, kind in index.items() if isinstance(kind, list) and kind[0]]
    places = [_place(folder, name) for name in wanted]
    missing = [name for name, place in zip(wanted, places, strict=True) if not place.is_dir()]
    if missing:
        raise CommandError(f"{folder} lacks {', '.join(missing)}; save the model again")
    for file in sorted(file for place in places for file in place.glob("*.safetensors")):
        try:
            with safe_open(file, framework="pt") as opened:
                opened.keys()
        except SafetensorError as error:
            raise CommandError(f"{file} is damaged ({error}); save the model again") from error


def _place(folder: Path, part: str) -> Path:
    from strop.models import sprites

    return sprites.folder_of_part(folder, part)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CommandError(
            f"{path} is missing; strop runs folders of Stable Diffusion and Flux, with vae/"
        ) from error
    except ValueError as error:
        raise CommandError(f"{path} is no JSON ({error}); save the model again") from error
    return content


def _sizes(folder: Path, part: str) -> dict[str, Any]:
    """Return the configuration of a part, which must tell its levels."""
    path = _place(folder, part) / "config.json"
    config = _read_json(path)
    if "block_out_channels" not in config:
        raise CommandError(f"{path} has no block_out_channels; strop cannot tell its picture sizes")
    return config


def load(model: ModelFolder, dtype: torch.dtype, device: str) -> Any:
    """Return the pipeline, without its own progress bars. Raises CommandError if the files are
    damaged."""
    quieten()
    try:
        if model.is_sprites:
            from strop.models import sprites

            pipe: Any = sprites.load_from(model.folder, dtype, device)
        else:
            pipe = _load_folder(model.folder, dtype, device)
    except (ValueError, OSError) as error:
        raise CommandError(f"cannot load {model.folder}: {error}") from error
    pipe.set_progress_bar_config(disable=True)
    return pipe


def _load_folder(folder: Path, dtype: torch.dtype, device: str) -> Any:
    from diffusers import DiffusionPipeline

    pipe = DiffusionPipeline.from_pretrained(folder, dtype=dtype, local_files_only=True)
    return pipe.to(device)


def quieten() -> None:
    """Leave the screen to our own progress bars: no bars nor hints of other libraries."""
    logging.getLogger("transformers").setLevel(logging.ERROR)
    from diffusers.utils import logging as of_diffusers
    from transformers.utils import logging as of_transformers

    for library in (of_transformers, of_diffusers):
        library.set_verbosity_error()
        library.disable_progress_bar()
