"""Hold the parts of a model while it is trained."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from strop.errors import OptionError
from strop.models import sprites
from strop.train import controlnet
from strop.train.families.family import Family, factor_of
from strop.train.levels import Process
from strop.train.prompts import Prompts
from strop.train.settings import Settings


@dataclass(frozen=True)
class DiffusionModel:
    """Hold a pipeline of diffusers, whose parts are trained.

    pipeline: draws with what is trained.
    half: the type of mixed precision, and of all weights that are not trained; or None.
    longest_text: tokens that are read by encoders which could read more.
    places: folders of parts that do not lie in ``folder``.
    """

    folder: Path
    family: Family
    pipeline: Any
    process: Process
    half: torch.dtype | None
    longest_text: int
    places: Mapping[str, Path] = field(default_factory=dict)

    @cached_property
    def modules(self) -> dict[str, nn.Module]:
        found = {name: getattr(self.pipeline, name) for name in self.family.kinds}
        found |= {controlnet.PART: getattr(self.pipeline, controlnet.PART, None)}
        return {name: part for name, part in found.items() if isinstance(part, nn.Module)}

    @property
    def unet(self) -> Any:
        """Return what takes noise away: a UNet, or the transformer in its place."""
        return self.modules[self.family.denoiser]

    @property
    def denoisers(self) -> tuple[Any, ...]:
        """Return the networks of a denoising step: the UNet, and a ControlNet if there is one."""
        more = self.modules.get(controlnet.PART)
        return (self.unet,) if more is None else (self.unet, more)

    @property
    def vae(self) -> Any:
        return self.modules["vae"]

    @property
    def encoders(self) -> tuple[str, ...]:
        """Name the text encoders that the model has."""
        return tuple(name for name in self.family.encoders if name in self.modules)

    def tokenizer(self, encoder: str) -> Any:
        """Return the tokenizer of a text encoder."""
        return getattr(self.pipeline, encoder.replace("text_encoder", "tokenizer"))

    def length(self, encoder: str) -> int:
        """Return how many tokens of a prompt a text encoder reads."""
        own = int(self.tokenizer(encoder).model_max_length)
        is_clip = "CLIP" in self.family.kinds[encoder]
        return own if is_clip else min(own, self.longest_text)

    def parts(self, settings: Settings) -> tuple[str, ...]:
        """Return what is trained of the model: its weights, or adapters or a ControlNet beside
        them."""
        if settings.task == "controlnet":
            return (controlnet.PART,)
        texts = self.family.trained_encoders if settings.train_text_encoder else ()
        return (self.family.denoiser, *texts)

    def trained(self, settings: Settings) -> tuple[str, ...]:
        """Return parts whose own weights change."""
        return () if settings.task == "lora" else self.parts(settings)

    def folder_of(self, part: str) -> Path:
        """Return where a part that is not trained lies."""
        return self.places.get(part) or sprites.folder_of_part(self.folder, part)

    @property
    def factor(self) -> int:
        """Return how many pixels a side of a latent stands for."""
        return factor_of(self.modules)

    @property
    def device(self) -> torch.device:
        device: torch.device = self.unet.device
        return device

    def attention(self, is_compiled: bool) -> AbstractContextManager[Any]:
        """Return what steps of the optimizer run in, for libraries of attention that are wrong."""
        is_safe = is_compiled or not self.family.splits_attention
        return nullcontext() if is_safe else without_cudnn_attention()

    def autocast(self) -> AbstractContextManager[Any]:
        """Return autocast for calls of what is trained, whose weights are fp32, and of the parts
        together."""
        return torch.autocast(
            self.device.type, self.half or torch.bfloat16, enabled=self.half is not None
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


def resolution_of(settings: Settings, model: DiffusionModel) -> int:
    """Return the resolution that was given, or the model's own. Raises OptionError for one off the
    model's grid."""
    family, parts = model.family, model.modules
    side = settings.resolution or family.num_latents(parts) * model.factor
    grid = family.grid(parts)
    if side % grid:
        below = side // grid * grid
        near = f"{below} or {below + grid}" if below else str(grid)
        raise OptionError(
            f"resolution {side}: this model takes multiples of {grid}; the nearest: {near}"
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


def token_ids(model: DiffusionModel, prompts: list[str]) -> Prompts:
    """Return ids [prompts, length] of each text encoder on the CPU, padded and cut to what it
    reads."""
    made = {
        name: model.tokenizer(name)(
            prompts,
            padding="max_length",
            truncation=True,
            max_length=model.length(name),
            return_tensors="pt",
        ).input_ids
        for name in model.encoders
    }
    return Prompts(made)


def longest_encoder(model: DiffusionModel) -> str:
    """Name the text encoder that reads most of a prompt."""
    return max(model.encoders, key=model.length)


def cut_prompts(model: DiffusionModel, prompts: list[str]) -> list[str]:
    """Return the prompts of which no text encoder reads the end."""
    name = longest_encoder(model)
    made = model.tokenizer(name)(prompts, truncation=False, verbose=False).input_ids
    limit = model.length(name)
    return [text for text, ids in zip(prompts, made, strict=True) if len(ids) > limit]


@torch.no_grad()
def embeddings_of(model: DiffusionModel, ids: Prompts) -> Prompts:
    """Return what text encoders that are not trained make of ids, in the type of their weights."""
    return Prompts(model.family.encode(model.modules, ids.to(model.device).tensors), True)


@torch.no_grad()
def moments_of(model: DiffusionModel, pixels: Tensor) -> Tensor:
    """Return mean and log-variance of the latents [batch, 2 * channels, ...] of pixels from -1 to
    1."""
    encoded = model.vae.encode(pixels.to(model.device, model.vae.dtype))
    moments: Tensor = encoded.latent_dist.parameters
    return moments.float()
