"""Hold the parts of a Stable Diffusion or Flux model while it is trained."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from strop.errors import OptionError
from strop.train.settings import Settings


@dataclass(frozen=True)
class DiffusionModel:
    """Hold the parts that both kinds of models have. ``unet`` is what takes noise away: a UNet,
    or the transformer in its place. ``half`` is the type of mixed precision, and of all weights
    that are not trained; or None."""

    folder: Path
    unet: Any
    vae: Any
    text_encoder: Any
    tokenizer: Any
    scheduler: Any
    half: torch.dtype | None

    denoiser: ClassVar[str] = "unet"
    """Names the part that ``unet`` is, as diffusers does."""

    @property
    def modules(self) -> dict[str, nn.Module]:
        return {self.denoiser: self.unet, "vae": self.vae, "text_encoder": self.text_encoder}

    def parts(self, settings: Settings) -> tuple[str, ...]:
        """Return what is trained of the model: its weights, or adapters beside them."""
        return (self.denoiser, "text_encoder") if settings.train_text_encoder else (self.denoiser,)

    def trained(self, settings: Settings) -> tuple[str, ...]:
        """Return parts whose own weights change."""
        return () if settings.task == "lora" else self.parts(settings)

    @property
    def sampler(self) -> Any:
        """Return a scheduler that draws with what is trained."""
        return type(self.scheduler).from_config(self.scheduler.config)

    @property
    def pipeline(self) -> Any:
        """Return the parts as a pipeline of diffusers."""
        raise NotImplementedError

    @property
    def factor(self) -> int:
        """Return how many pixels a latent stands for."""
        return int(2 ** (len(self.vae.config.block_out_channels) - 1))

    @property
    def grid(self) -> int:
        """Return the number of pixels that both sides must be multiples of."""
        raise NotImplementedError

    @property
    def num_latents(self) -> int:
        """Return how many latents a side of the model's own pictures has."""
        raise NotImplementedError

    @property
    def device(self) -> torch.device:
        device: torch.device = self.unet.device
        return device

    def attention(self, is_compiled: bool) -> AbstractContextManager[Any]:
        """Return what steps of the optimizer run in, for libraries of attention that are wrong."""
        return nullcontext()

    def autocast(self) -> AbstractContextManager[Any]:
        """Return autocast for calls of what is trained, whose weights are fp32, and of the parts
        together."""
        return torch.autocast(
            self.device.type, self.half or torch.bfloat16, enabled=self.half is not None
        )


@dataclass(frozen=True)
class NoiseModel(DiffusionModel):
    """Hold Stable Diffusion. ``signal`` is the share of the picture that is left at each timestep
    (alphas_cumprod)."""

    signal: Tensor
    prediction: str

    @property
    def grid(self) -> int:
        return int(self.factor * 2 ** (len(self.unet.config.block_out_channels) - 1))

    @property
    def num_latents(self) -> int:
        own = self.unet.config.sample_size
        return int(own[0] if isinstance(own, list | tuple) else own)

    @property
    def sampler(self) -> Any:
        kind, config = type(self.scheduler), self.scheduler.config
        return kind.from_config(config, prediction_type=self.prediction)

    @property
    def pipeline(self) -> Any:
        from diffusers import StableDiffusionPipeline

        return StableDiffusionPipeline(
            vae=self.vae,
            text_encoder=self.text_encoder,
            tokenizer=self.tokenizer,
            unet=self.unet,
            scheduler=self.sampler,
            safety_checker=None,
            feature_extractor=None,
            requires_safety_checker=False,
        )


@contextmanager
def without_cudnn_attention() -> Iterator[None]:
    """Have torch choose another library than cuDNN for attention.

    torch keeps the plans of cuDNN's backward by query, key and value alone, and uses one for every
    gradient. In Flux's single blocks that gradient is a part of a wider tensor, as attention is
    joined with the MLP, and in double blocks it is dense: read by the other one's plan, which takes
    5 times as much memory, it is an illegal access, or a wrong gradient without a word. What Strop
    compiles lays out both alike.
    """
    is_on = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(is_on)


@dataclass(frozen=True)
class FlowModel(DiffusionModel):
    """Hold Flux, which is trained by flow matching. The first text encoder gives one vector for a
    prompt, the second one vector for each token."""

    text_encoder_2: Any
    tokenizer_2: Any

    denoiser: ClassVar[str] = "transformer"

    @property
    def modules(self) -> dict[str, nn.Module]:
        return {**super().modules, "text_encoder_2": self.text_encoder_2}

    @property
    def grid(self) -> int:
        return self.factor * 2  # a token holds two rows of two latents

    def attention(self, is_compiled: bool) -> AbstractContextManager[Any]:
        return nullcontext() if is_compiled else without_cudnn_attention()

    @property
    def num_latents(self) -> int:
        return int(self.pipeline.default_sample_size)

    @property
    def pipeline(self) -> Any:
        from diffusers import FluxPipeline

        return FluxPipeline(
            scheduler=self.sampler,
            vae=self.vae,
            text_encoder=self.text_encoder,
            tokenizer=self.tokenizer,
            text_encoder_2=self.text_encoder_2,
            tokenizer_2=self.tokenizer_2,
            transformer=self.unet,
        )


def resolution_of(settings: Settings, model: DiffusionModel) -> int:
    """Return the resolution that was given, or the model's own. Raises OptionError for one off the
    model's grid."""
    side = settings.resolution or model.num_latents * model.factor
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
