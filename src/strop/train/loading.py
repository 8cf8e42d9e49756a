"""Load a model from a diffusers folder for training."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from strop.errors import OptionError, UnsupportedError
from strop.models import sprites
from strop.train import block_swap, controlnet
from strop.train.ddpm import Ddpm
from strop.train.families import family_of
from strop.train.families.family import Family
from strop.train.flow import FlowMatching, Timesteps, shares_of
from strop.train.levels import Process
from strop.train.model import DiffusionModel
from strop.train.settings import Settings

HALVES = {"fp16": torch.float16, "bf16": torch.bfloat16}  # by --mixed_precision
# Settings that one kind of training has and the other has not.
_OF_FLOW = (
    "weighting_scheme",
    "logit_mean",
    "logit_std",
    "mode_scale",
    "timestep_shift",
    "precondition_outputs",
)
_CONTROL_SCHEME = "logit_normal"  # of diffusers' scripts for ControlNets
_OF_DDPM = ("prediction_type", "snr_gamma")
_OF_SCHEMES = {"logit_mean": "logit_normal", "logit_std": "logit_normal", "mode_scale": "mode"}


def folder_of(settings: Settings) -> Path:
    """Return where the model lies, after a check of its index, which is fast."""
    if settings.is_sprites:
        return sprites.folder_of(settings.pretrained_model_name_or_path)
    folder = Path(settings.pretrained_model_name_or_path).expanduser()
    index = folder / "model_index.json"
    if not index.is_file():
        raise OptionError(
            f"there is no diffusers model in {folder}; give 'sprites' or a folder that diffusers "
            "saved (models are not downloaded: 'hf download NAME --local-dir DIR' does)"
        )
    family_of(folder, index_of(folder))
    return folder


def index_of(folder: Path) -> Mapping[str, Any]:
    """Return what parts a folder has. Raises OptionError if that cannot be read."""
    index = folder / "model_index.json"
    try:
        parts = json.loads(index.read_text(encoding="utf-8"))
    except ValueError as error:
        raise OptionError(f"{index} is no JSON ({error}); save the model again") from error
    if not isinstance(parts, dict):
        raise OptionError(f"{index} holds no names of parts; save the model again")
    return parts


def load(settings: Settings, device: torch.device) -> DiffusionModel:
    """Load the model: in fp32 what is trained, the rest in the type of mixed precision.

    Raises OptionError if its files are damaged or missing.
    """
    folder = folder_of(settings)
    try:
        shipped = sprites.load_from(folder) if settings.is_sprites else None
        family = family_of(folder, index_of(folder))
        _check(settings, family, folder)
        pipe = shipped or _pipeline(settings, folder, family)
    except (OSError, ValueError, KeyError) as error:
        raise OptionError(f"cannot load {folder}: {error}") from error
    _check_networks(family, pipe, folder)
    if settings.from_scratch:
        _renew(settings, family, pipe)
    if settings.task == "controlnet":
        pipe = controlnet.begin(settings, family, pipe)
    process = (_flow if family.is_flow else _ddpm)(settings, folder, family, pipe, device)
    own = Path(settings.pretrained_vae_model_name_or_path).expanduser()
    model = DiffusionModel(
        folder,
        family,
        pipe,
        process,
        HALVES.get(settings.mixed_precision),
        settings.max_sequence_length or family.longest_text,
        {"vae": own} if settings.pretrained_vae_model_name_or_path else {},
    )
    for name, module in model.modules.items():
        is_whole = name in model.trained(settings) or (name == "vae" and _keeps(settings, model))
        dtype = None if is_whole else model.half
        away = name == family.denoiser and settings.blocks_to_swap
        block_swap.move(module, device, dtype, block_swap.chosen(module, away) if away else ())
        module.requires_grad_(False).eval()
    return model


def _keeps(settings: Settings, model: DiffusionModel) -> bool:
    """Tell whether the autoencoder stays in fp32: where its family asks for it, unless its own
    settings say that half types do."""
    if settings.vae_precision is not None:
        return settings.vae_precision == "fp32"
    return model.family.keeps_vae and bool(model.vae.config.force_upcast)


def _check(settings: Settings, family: Family, folder: Path) -> None:
    """Raise OptionError for settings that the family has nothing for."""
    kind, others = ("flow matching", _OF_DDPM) if family.is_flow else ("DDPM", _OF_FLOW)
    for name in others:
        if getattr(settings, name) is not None:
            raise OptionError(
                f"{name} is not for {kind}, by which {family.name} is trained ({folder}); leave it "
                "out"
            )
    scheme = _scheme(settings, family)
    for name, needed in _OF_SCHEMES.items():
        if getattr(settings, name) is not None and scheme != needed:
            raise OptionError(f"{name} changes nothing without --weighting_scheme {needed}")
    if settings.guidance_scale is not None and not family.reads_guidance:
        raise OptionError(
            f"guidance_scale is for models that read it, and {family.name} does not ({folder}); "
            "leave it out"
        )
    if settings.max_sequence_length and not family.reads_long:
        raise OptionError(
            f"max_sequence_length is for models with a T5, and {family.name} has none ({folder}); "
            "leave it out"
        )


def _scheme(settings: Settings, family: Family) -> str:
    """Name how timesteps are drawn: as one wishes, or as diffusers' script has it."""
    usual = _CONTROL_SCHEME if settings.task == "controlnet" else family.scheme
    return settings.weighting_scheme or usual


def _check_networks(family: Family, pipe: Any, folder: Path) -> None:
    """Raise UnsupportedError for networks that read more than noisy latents and texts."""
    parts = pipe.components
    if getattr(pipe.vae.config, "latents_mean", None) is not None:
        raise UnsupportedError(
            f"{folder}: its autoencoder has a mean for each channel (latents_mean), which is not "
            "built; take a model without"
        )
    has, reads = int(pipe.vae.config.latent_channels), family.channels(parts)
    if has != reads:
        raise UnsupportedError(
            f"{folder}: its {family.denoiser} reads {reads} channels and latents have {has}, as in "
            "models for inpainting or editing, which are not trained; take one that draws from text"
        )
    if getattr(parts[family.denoiser].config, "time_cond_proj_dim", None) is not None:
        raise UnsupportedError(
            f"{folder}: its {family.denoiser} reads the scale of guidance (a distilled model), "
            "which is built for Flux alone; take the model that it was made of"
        )


def _pipeline(settings: Settings, folder: Path, family: Family) -> Any:
    import diffusers

    common: dict[str, Any] = {"local_files_only": True, "use_safetensors": True}
    own = settings.pretrained_vae_model_name_or_path
    if own:
        place = Path(own).expanduser()
        if not (place / "config.json").is_file():
            raise OptionError(
                f"there is no autoencoder in {place}, given as pretrained_vae_model_name_or_path; "
                "give a folder that diffusers saved one in"
            )
        common["vae"] = diffusers.AutoencoderKL.from_pretrained(
            place, dtype=torch.float32, **common
        )
    index = index_of(folder)
    common |= {name: None for name in family.may_lack if not (index.get(name) or [None])[0]}
    kind = getattr(diffusers, family.pipeline)
    return kind.from_pretrained(folder, dtype=torch.float32, **family.left_out, **common)


def _ddpm(
    settings: Settings, folder: Path, family: Family, pipe: Any, device: torch.device
) -> Process:
    """Return DDPM; the pipeline then draws by what is trained to be predicted."""
    scheduler = pipe.scheduler
    if not isinstance(getattr(scheduler, "alphas_cumprod", None), Tensor):
        raise UnsupportedError(
            f"{folder}: its scheduler {type(scheduler).__name__} has no "
            "alphas_cumprod; training is built for DDPM noise"
        )
    prediction = settings.prediction_type or scheduler.config.prediction_type
    kind = type(scheduler)
    pipe.scheduler = kind.from_config(scheduler.config, prediction_type=prediction)
    return Ddpm(scheduler.alphas_cumprod.to(device, torch.float32), prediction, settings.snr_gamma)


def _flow(
    settings: Settings, folder: Path, family: Family, pipe: Any, device: torch.device
) -> Process:
    if "FlowMatch" not in type(pipe.scheduler).__name__:
        raise UnsupportedError(
            f"{folder}: its scheduler is {type(pipe.scheduler).__name__}; {family.name} is trained "
            "for FlowMatchEulerDiscreteScheduler"
        )
    given = {
        "mean": settings.logit_mean,
        "deviation": settings.logit_std,
        "mode_scale": settings.mode_scale,
    }
    chosen = {name: value for name, value in given.items() if value is not None}
    wish = settings.precondition_outputs
    return FlowMatching(
        shares_of(pipe.scheduler, settings.timestep_shift).to(device),
        Timesteps(_scheme(settings, family), **chosen),
        family.preconditions if wish is None else bool(wish),
    )


def _renew(settings: Settings, family: Family, pipe: Any) -> None:
    """Draw random weights from the seed; those of text encoders too, if they are trained."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        old = getattr(pipe, family.denoiser)
        setattr(pipe, family.denoiser, type(old).from_config(old.config))
        for name in family.trained_encoders if settings.train_text_encoder else ():
            text = getattr(pipe, name)
            setattr(pipe, name, type(text)(text.config))
