"""Train a ControlNet beside a frozen UNet (https://arxiv.org/abs/2302.05543)."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from strop.errors import OptionError, UnsupportedError
from strop.train import files
from strop.train.draws import seed_of
from strop.train.families.family import Family, factor_of
from strop.train.settings import Settings

PART = "controlnet"  # its name among a model's parts
_KIND, _CONFIG = "ControlNetModel", "config.json"
_WIDTHS = (16, 32, 96, 256)  # of the layers that read the conditioning picture, by diffusers
_SHARED = (
    "in_channels",
    "block_out_channels",
    "down_block_types",
    "layers_per_block",
    "cross_attention_dim",
    "addition_embed_type",
    "projection_class_embeddings_input_dim",
)


class Controlled(nn.Module):
    """Let a ControlNet steer a UNet: what it makes of a conditioning picture is added to what the
    UNet's second half gets from the first."""

    def __init__(self, unet: nn.Module, controlnet: nn.Module) -> None:
        super().__init__()
        self.unet, self.controlnet = unet, controlnet

    def forward(
        self, sample: Tensor, timestep: Tensor, controlnet_cond: Tensor, **given: Any
    ) -> tuple[Tensor, ...]:
        """Return what the UNet gives for noisy latents [rows, channels, height, width].

        ``controlnet_cond`` is [rows, 3, height, width] of pixels from 0 to 1; ``given`` are the
        other arguments of both networks.
        """
        added, middle = self.controlnet(sample, timestep, controlnet_cond=controlnet_cond, **given)
        found: tuple[Tensor, ...] = self.unet(
            sample,
            timestep,
            down_block_additional_residuals=tuple(added),
            mid_block_additional_residual=middle,
            **given,
        )
        return found


def begin(settings: Settings, family: Family, pipe: Any) -> Any:
    """Return a pipeline with a ControlNet: the one that was given, or a copy of the first half of
    the UNet behind convolutions of zeros, and new layers that read the conditioning picture.

    Raises OptionError for a ControlNet that belongs to another model, and UnsupportedError for
    families without.
    """
    import diffusers

    if not family.controlled:
        raise UnsupportedError(
            f"{settings.pretrained_model_name_or_path}: ControlNets are trained for Stable "
            f"Diffusion 1, 2 and XL, and this is {family.name}; give one of these"
        )
    given = settings.controlnet_model_name_or_path
    made = _loaded(Path(given).expanduser(), pipe) if given else _from_unet(settings, pipe)
    return getattr(diffusers, family.controlled).from_pipe(pipe, controlnet=made)


def _from_unet(settings: Settings, pipe: Any) -> nn.Module:
    import diffusers

    halvings = factor_of(pipe.components).bit_length() - 1
    widths = (*_WIDTHS, *_WIDTHS[-1:] * halvings)[: halvings + 1]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed_of(settings.seed, PART, 0))
        made: nn.Module = diffusers.ControlNetModel.from_unet(
            pipe.unet, conditioning_embedding_out_channels=widths
        )
    return made


def _loaded(folder: Path, pipe: Any) -> nn.Module:
    import diffusers

    path = folder / _CONFIG
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        kind = config.get("_class_name")
    except (OSError, ValueError, AttributeError) as error:
        raise OptionError(
            f"there is no ControlNet in {folder}, given as controlnet_model_name_or_path "
            f"({error}); give a diffusers folder, with {_CONFIG}"
        ) from error
    if kind != _KIND:
        raise OptionError(f"{folder} holds a {kind}; training is built for a {_KIND}")
    try:
        made: nn.Module = diffusers.ControlNetModel.from_pretrained(
            folder, dtype=torch.float32, use_safetensors=True, local_files_only=True
        )
    except (OSError, ValueError, RuntimeError) as error:
        raise OptionError(f"cannot load the ControlNet in {folder}: {error}") from error
    _check_fits(folder, made.config, pipe)  # type: ignore[arg-type]
    return made


def _check_fits(folder: Path, config: Mapping[str, Any], pipe: Any) -> None:
    pixels = 2 ** (len(config["conditioning_embedding_out_channels"]) - 1)
    pairs = {name: (config.get(name), pipe.unet.config.get(name)) for name in _SHARED}
    pairs["pixels per latent"] = (pixels, factor_of(pipe.components))
    for name, values in pairs.items():
        theirs, ours = (list(one) if isinstance(one, tuple) else one for one in values)
        if theirs != ours:
            raise OptionError(
                f"the ControlNet in {folder} was made for another model: its {name} is {theirs}, "
                f"that of the UNet is {ours}; give one of this model's, or none"
            )


def save(net: Any, output: Path) -> None:
    """Write a ControlNet as a diffusers folder into ``output``, where other files may lie.
    ``config.json`` comes last: a folder that has it is complete."""
    fresh = output / f"{PART}{files.PART}"
    shutil.rmtree(fresh, ignore_errors=True)
    net.save_pretrained(fresh, safe_serialization=True)
    (output / _CONFIG).unlink(missing_ok=True)
    for file in sorted(fresh.iterdir(), key=lambda path: path.name == _CONFIG):
        file.chmod(0o644)  # safetensors lets nobody else read
        files.sync(file)
        file.replace(output / file.name)
    fresh.rmdir()
    files.sync(output)
