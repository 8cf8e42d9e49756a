"""Load the parts of a Stable Diffusion model from a diffusers folder for training."""

from __future__ import annotations

import hashlib
import json
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from strop.errors import OptionError, UnsupportedError
from strop.train.settings import Settings

# Part of a pipeline -> its class. Other pipelines have other parts, and other losses.
PARTS = {
    "unet": "UNet2DConditionModel",
    "vae": "AutoencoderKL",
    "text_encoder": "CLIPTextModel",
    "tokenizer": "CLIPTokenizer",
}
HALVES = {"fp16": torch.float16, "bf16": torch.bfloat16}  # by --mixed_precision


@dataclass(frozen=True)
class DiffusionModel:
    """Hold the parts. ``signal`` is the share of the picture that is left at each timestep
    (alphas_cumprod). ``half`` is the type of mixed precision, and of all weights that are not
    trained; or None."""

    folder: Path
    unet: Any
    vae: Any
    text_encoder: Any
    tokenizer: Any
    scheduler: Any
    signal: Tensor
    prediction: str
    half: torch.dtype | None = None

    @property
    def modules(self) -> dict[str, nn.Module]:
        return {"unet": self.unet, "vae": self.vae, "text_encoder": self.text_encoder}

    @property
    def factor(self) -> int:
        """Return how many pixels a latent stands for."""
        return int(2 ** (len(self.vae.config.block_out_channels) - 1))

    @property
    def grid(self) -> int:
        """Return the number of pixels that both sides must be multiples of."""
        return int(self.factor * 2 ** (len(self.unet.config.block_out_channels) - 1))

    @property
    def device(self) -> torch.device:
        device: torch.device = self.unet.device
        return device

    def autocast(self) -> AbstractContextManager[Any]:
        """Return autocast for calls of what is trained, whose weights are fp32, and of the parts
        together."""
        return torch.autocast(
            self.device.type, self.half or torch.bfloat16, enabled=self.half is not None
        )


def folder_of(settings: Settings) -> Path:
    """Return where the model lies, after a check of its index, which is fast."""
    if settings.is_sprites:
        from strop.models import sprites

        return sprites.WEIGHTS
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
    for name, kind in PARTS.items():
        found = parts.get(name)
        found = found[1] if isinstance(found, list) and len(found) == 2 else None
        if str(found).removesuffix("Fast") != kind:
            raise UnsupportedError(
                f"{folder}: its {name} is {found}, and training is built for {kind} (Stable "
                "Diffusion 1 and 2) only"
            )
    return folder


def load(settings: Settings, device: torch.device) -> DiffusionModel:
    """Load the model: in fp32 what is trained, the rest in the type of mixed precision.

    Raises OptionError if its files are damaged or missing.
    """
    from diffusers import StableDiffusionPipeline

    folder = folder_of(settings)
    try:
        pipe = StableDiffusionPipeline.from_pretrained(
            folder,
            dtype=torch.float32,
            safety_checker=None,
            feature_extractor=None,
            requires_safety_checker=False,
            local_files_only=True,
            use_safetensors=True,
        )
    except (OSError, ValueError, KeyError) as error:
        raise OptionError(f"cannot load {folder}: {error}") from error
    scheduler = pipe.scheduler
    if not isinstance(getattr(scheduler, "alphas_cumprod", None), Tensor):
        raise UnsupportedError(
            f"{folder}: its scheduler {type(scheduler).__name__} has no "
            "alphas_cumprod; training is built for DDPM noise"
        )
    unet, text = pipe.unet, pipe.text_encoder
    if settings.from_scratch:
        unet, text = _anew(unet, text, settings)
    prediction = settings.prediction_type or scheduler.config.prediction_type
    model = DiffusionModel(
        folder,
        unet,
        pipe.vae,
        text,
        pipe.tokenizer,
        scheduler,
        scheduler.alphas_cumprod.to(device, torch.float32),
        prediction,
        HALVES.get(settings.mixed_precision),
    )
    for name, module in model.modules.items():
        dtype = None if name in settings.trained else model.half
        nn.Module.to(module, device, dtype).requires_grad_(False).eval()
    return model


def _anew(unet: Any, text: Any, settings: Settings) -> tuple[Any, Any]:
    """Draw random weights from the seed; the text encoder's too, if it is trained."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        fresh = type(unet).from_config(unet.config)
        return fresh, type(text)(text.config) if settings.train_text_encoder else text


def resolution_of(settings: Settings, model: DiffusionModel) -> int:
    """Return the resolution that was given, or the model's own. Raises OptionError for one off the
    model's grid."""
    own = model.unet.config.sample_size
    if isinstance(own, list | tuple):
        own = own[0]
    side = settings.resolution or int(own) * model.factor
    if side % model.grid:
        below = side // model.grid * model.grid
        near = f"{below} or {below + model.grid}" if below else str(model.grid)
        raise OptionError(
            f"resolution {side}: this model takes multiples of {model.grid}; the nearest: {near}"
        )
    return side


def digest_of(module: nn.Module) -> str:
    """Hash all weights."""
    total = hashlib.sha256()
    for name, tensor in sorted(module.state_dict().items()):
        total.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        flat = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
        total.update(flat.numpy().tobytes())
    return total.hexdigest()


def token_ids(model: DiffusionModel, prompts: list[str]) -> Tensor:
    """Return ids [prompts, length] on the CPU, padded and cut to what the text encoder reads."""
    made = model.tokenizer(
        prompts,
        padding="max_length",
        truncation=True,
        max_length=model.tokenizer.model_max_length,
        return_tensors="pt",
    )
    ids: Tensor = made.input_ids
    return ids


def cut_prompts(model: DiffusionModel, prompts: list[str]) -> list[str]:
    """Return the prompts of which the text encoder does not read the end."""
    limit = model.tokenizer.model_max_length
    made = model.tokenizer(prompts, truncation=False, verbose=False).input_ids
    return [text for text, ids in zip(prompts, made, strict=True) if len(ids) > limit]


@torch.no_grad()
def embeddings_of(model: DiffusionModel, ids: Tensor) -> Tensor:
    """Return what a text encoder that is not trained makes of ids, in the type of its weights."""
    states: Tensor = model.text_encoder(ids.to(model.device), return_dict=False)[0]
    return states


@torch.no_grad()
def moments_of(model: DiffusionModel, pixels: Tensor) -> Tensor:
    """Return mean and log-variance of the latents [batch, 2 * channels, ...] of pixels from -1 to
    1."""
    encoded = model.vae.encode(pixels.to(model.device, model.vae.dtype))
    moments: Tensor = encoded.latent_dist.parameters
    return moments.float()
