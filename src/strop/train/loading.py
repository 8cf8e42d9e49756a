"""Load the parts of a Stable Diffusion or Flux model from a diffusers folder for training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from strop.errors import OptionError, UnsupportedError
from strop.models import sprites
from strop.train.model import DiffusionModel, FlowModel, NoiseModel
from strop.train.settings import Settings

# Part of a pipeline -> its class. Other pipelines have other parts, and other losses.
PARTS = {
    "unet": "UNet2DConditionModel",
    "vae": "AutoencoderKL",
    "text_encoder": "CLIPTextModel",
    "tokenizer": "CLIPTokenizer",
}
FLOW_PARTS = {
    "transformer": "FluxTransformer2DModel",
    **{name: kind for name, kind in PARTS.items() if name != "unet"},
    "text_encoder_2": "CLIPTextModel",
    "tokenizer_2": "CLIPTokenizer",
}
HALVES = {"fp16": torch.float16, "bf16": torch.bfloat16}  # by --mixed_precision
_NOT_FOR_FLOW = (
    "from_scratch",
    "train_text_encoder",
    "pre_compute_text_embeddings",
    "prediction_type",
    "snr_gamma",
)


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
    try:
        parts = json.loads(index.read_text(encoding="utf-8"))
    except ValueError as error:
        raise OptionError(f"{index} is no JSON ({error}); save the model again") from error
    is_flow = "transformer" in parts
    for name, kind in (FLOW_PARTS if is_flow else PARTS).items():
        found = parts.get(name)
        found = found[1] if isinstance(found, list) and len(found) == 2 else None
        if str(found).removesuffix("Fast") != kind:
            raise UnsupportedError(
                f"{folder}: its {name} is {found}, and training is built for {kind} ("
                f"{'Flux with CLIP alone' if is_flow else 'Stable Diffusion 1 and 2'}) only"
            )
    return folder


def load(settings: Settings, device: torch.device) -> DiffusionModel:
    """Load the model: in fp32 what is trained, the rest in the type of mixed precision.

    Raises OptionError if its files are damaged or missing.
    """
    folder = folder_of(settings)
    is_flow = (folder / FlowModel.denoiser).is_dir()
    try:
        pipe = _pipeline(settings, folder, is_flow)
    except (OSError, ValueError, KeyError) as error:
        raise OptionError(f"cannot load {folder}: {error}") from error
    make = _flow_model if is_flow else _noise_model
    model = make(settings, folder, pipe, device)
    for name, module in model.modules.items():
        dtype = None if name in model.trained(settings) else model.half
        nn.Module.to(module, device, dtype).requires_grad_(False).eval()
    return model


def _pipeline(settings: Settings, folder: Path, is_flow: bool) -> Any:
    from diffusers import FluxPipeline, StableDiffusionPipeline

    if settings.is_sprites:
        return sprites.load_from(folder)
    common: dict[str, Any] = {"local_files_only": True, "use_safetensors": True}
    if is_flow:
        return FluxPipeline.from_pretrained(folder, dtype=torch.float32, **common)
    return StableDiffusionPipeline.from_pretrained(
        folder,
        dtype=torch.float32,
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
        **common,
    )


def _noise_model(settings: Settings, folder: Path, pipe: Any, device: torch.device) -> NoiseModel:
    scheduler = pipe.scheduler
    if not isinstance(getattr(scheduler, "alphas_cumprod", None), Tensor):
        raise UnsupportedError(
            f"{folder}: its scheduler {type(scheduler).__name__} has no "
            "alphas_cumprod; training is built for DDPM noise"
        )
    unet, text = pipe.unet, pipe.text_encoder
    if settings.from_scratch:
        unet, text = _anew(unet, text, settings)
    if settings.weighting_scheme is not None:
        raise OptionError(f"weighting_scheme is for flow matching, and {folder} is no Flux model")
    return NoiseModel(
        folder,
        unet,
        pipe.vae,
        text,
        pipe.tokenizer,
        scheduler,
        HALVES.get(settings.mixed_precision),
        scheduler.alphas_cumprod.to(device, torch.float32),
        settings.prediction_type or scheduler.config.prediction_type,
    )


def _flow_model(settings: Settings, folder: Path, pipe: Any, _: torch.device) -> FlowModel:
    if pipe.transformer.config.guidance_embeds:
        raise UnsupportedError(
            f"{folder}: its guidance is an input of the network, which is not built"
        )
    for name in _NOT_FOR_FLOW:
        if getattr(settings, name):
            raise UnsupportedError(f"{name} is not built for Flux; leave it out")
    if settings.task == "lora":
        raise UnsupportedError(f"{folder}: adapters are trained for Stable Diffusion 1 and 2 only")
    return FlowModel(
        folder,
        pipe.transformer,
        pipe.vae,
        pipe.text_encoder,
        pipe.tokenizer,
        pipe.scheduler,
        HALVES.get(settings.mixed_precision),
        pipe.text_encoder_2,
        pipe.tokenizer_2,
    )


def _anew(unet: Any, text: Any, settings: Settings) -> tuple[Any, Any]:
    """Draw random weights from the seed; the text encoder's too, if it is trained."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        fresh = type(unet).from_config(unet.config)
        return fresh, type(text)(text.config) if settings.train_text_encoder else text
