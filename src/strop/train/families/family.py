"""Define what a family of models is: the interface that the trainer asks.

Parts of a model are modules by their names in a diffusers folder.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor

from strop.train.families.kohya_layers import KohyaPlace

if TYPE_CHECKING:
    from strop.train.families.control import Control

Parts = Mapping[str, Any]
CLIP_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "out_proj")
"""Layers of a CLIP text encoder that get an adapter."""


@dataclass(frozen=True)
class Noisy:
    """Hold what a denoiser is asked about.

    latents: noisy, [rows, channels, height, width].
    times: [rows], from 0 to the number of the scheduler's timesteps.
    text: what the text encoders gave, by name, with a row for each of the latents.
    sizes: [rows, 6] pixels: height and width of the picture's file, top and left of what was cut
        out of it once resized, height and width of what the network is shown.
    guidance: the scale of guidance, for models that read it.
    """

    latents: Tensor
    times: Tensor
    text: dict[str, Tensor]
    sizes: Tensor
    guidance: float


class Family(ABC):
    """Describe models that are made of the same parts."""

    name: ClassVar[str]
    """Names the family in messages."""
    pipeline: ClassVar[str]
    """Names the class of diffusers."""
    control: ClassVar[Control]
    """Describes its ControlNets."""
    kinds: ClassVar[dict[str, str]]
    """Gives the class of each part; of tokenizers without the ending Fast."""
    may_lack: ClassVar[tuple[str, ...]] = ()
    """Names parts that a folder may leave out."""
    denoiser: ClassVar[str] = "unet"
    """Names the part that takes noise away."""
    is_flow: ClassVar[bool] = False
    """Tells whether it is trained by flow matching; else it is by DDPM."""
    trained_encoders: ClassVar[tuple[str, ...]] = ("text_encoder",)
    """Names the text encoders that are trained if one asks for it."""
    adapted: ClassVar[dict[str, tuple[str, ...]]]
    """Names the layers of each part that get an adapter."""
    kohya: ClassVar[dict[str, str]]
    """Gives the prefix of each part in files of kohya's form."""
    kohya_network: ClassVar[str] = "networks.lora"
    """Names the module of kohya's scripts that trains such LoRAs."""
    keeps_vae: ClassVar[bool] = False
    """Tells whether the autoencoder stays in fp32 under mixed precision."""
    guidance: ClassVar[float] = 7.5
    """Is the scale of guidance for validation pictures."""
    reads_guidance: ClassVar[bool] = False
    """Tells whether its networks may read the scale of guidance."""
    reads_long: ClassVar[bool] = False
    """Tells whether it has an encoder that reads as much as it is given, a T5."""
    longest_text: ClassVar[int] = 77
    """Counts the tokens that such an encoder is given."""
    scheme: ClassVar[str] = "none"
    """Names how timesteps of flow matching are drawn."""
    left_out: ClassVar[Mapping[str, Any]] = {}
    """Gives arguments of the pipeline, for parts that training does without."""
    preconditions: ClassVar[bool] = False
    """Tells whether errors of flow matching are multiplied by the share of noise, as scripts do."""
    splits_attention: ClassVar[bool] = False
    """Tells whether gradients of attention lie in memory in two ways, which cuDNN's plans in torch
    confuse."""

    @property
    def encoders(self) -> tuple[str, ...]:
        return tuple(name for name in self.kinds if name.startswith("text_encoder"))

    @abstractmethod
    def encode(self, parts: Parts, ids: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return what the text encoders give for token ids [rows, length] by encoder."""

    @abstractmethod
    def inputs(self, parts: Parts, noisy: Noisy) -> dict[str, Any]:
        """Return the arguments of the denoiser."""

    def guess(self, parts: Parts, found: Tensor, latents: Tensor) -> Tensor:
        """Return the denoiser's answer in the shape of these latents."""
        return found

    def channels(self, parts: Parts) -> int:
        """Return how many channels of latents the denoiser reads."""
        return int(parts[self.denoiser].config.in_channels)

    @abstractmethod
    def grid(self, parts: Parts) -> int:
        """Return the number of pixels that both sides must be multiples of."""

    @abstractmethod
    def num_latents(self, parts: Parts) -> int:
        """Return how many latents a side of the model's own pictures has."""

    def drawing(self, pipe: Any, prompts: list[str], guidance: float) -> dict[str, Any]:
        """Return the arguments for which the pipeline draws prompts with this guidance."""
        return {"guidance_scale": guidance}

    def kohya_notes(self, parts: Parts, prediction: str) -> dict[str, str]:
        """Return kohya's words for the model that adapters belong to."""
        return {}

    def kohya_place(self, parts: Parts, part: str, path: str) -> KohyaPlace:
        """Return where kohya's scripts have the adapter of a part's layer."""
        return KohyaPlace(path)


def factor_of(parts: Parts) -> int:
    """Return how many pixels a side of a latent stands for."""
    return int(2 ** (len(parts["vae"].config.block_out_channels) - 1))


def pooled_and_states(encoder: Any, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return a CLIP's projected vector for each prompt, and its last states but one, without the
    last norm, as SDXL and SD3 read them."""
    made = encoder(ids, output_hidden_states=True)
    return made[0], made.hidden_states[-2]
