"""Describe Flux.1, a transformer over tokens of two rows of two latents, trained by flow
matching."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from strop.models.guidance import guided
from strop.train.families.control_flux import ControlOfFlux
from strop.train.families.family import CLIP_PROJECTIONS, Family, Noisy, Parts, factor_of
from strop.train.families.kohya_layers import FLUX, KohyaPlace
from strop.train.families.tokens import PATCH, tokens_of


class Flux(Family):
    """Read a CLIP's vector for the whole prompt and a T5's states. A small Flux may have a CLIP in
    the place of the T5."""

    name = "Flux.1"
    pipeline = "FluxPipeline"
    kinds = {
        "transformer": "FluxTransformer2DModel",
        "vae": "AutoencoderKL",
        "text_encoder": "CLIPTextModel",
        "tokenizer": "CLIPTokenizer",
        "text_encoder_2": "T5EncoderModel",
        "tokenizer_2": "T5Tokenizer",
    }
    denoiser = "transformer"
    control = ControlOfFlux()
    is_flow = True
    adapted = {
        "transformer": (
            *(f"attn.{name}" for name in ("to_k", "to_q", "to_v", "to_out.0")),
            *(f"attn.{name}" for name in ("add_k_proj", "add_q_proj", "add_v_proj", "to_add_out")),
            *(f"{name}.net.{layer}" for name in ("ff", "ff_context") for layer in ("0.proj", "2")),
        ),
        "text_encoder": CLIP_PROJECTIONS,
    }
    kohya = {"transformer": "lora_unet_", "text_encoder": "lora_te1_"}
    kohya_network = "networks.lora_flux"
    guidance = 3.5
    reads_guidance = True
    reads_long = True
    longest_text = 512
    splits_attention = True

    def encode(self, parts: Parts, ids: dict[str, Tensor]) -> dict[str, Tensor]:
        return {
            "states": parts["text_encoder_2"](ids["text_encoder_2"], return_dict=False)[0],
            "pooled": parts["text_encoder"](ids["text_encoder"]).pooler_output,
        }

    def inputs(self, parts: Parts, noisy: Noisy) -> dict[str, Any]:
        """Return tokens and their places. Timesteps go from 0 to 1 here."""
        _, _, height, width = noisy.latents.shape
        states = noisy.text["states"]
        places = _places(height, width, noisy.latents.device)
        given = {
            "hidden_states": tokens_of(noisy.latents),
            "timestep": noisy.times / 1000,
            "encoder_hidden_states": states,
            "pooled_projections": noisy.text["pooled"],
            "txt_ids": places.new_zeros(states.shape[1], places.shape[1]),
            "img_ids": places,
        }
        if parts["transformer"].config.guidance_embeds:
            given["guidance"] = torch.full_like(noisy.times, noisy.guidance)
        return given

    def guess(self, parts: Parts, found: Tensor, latents: Tensor) -> Tensor:
        from diffusers import FluxPipeline

        _, _, height, width = latents.shape
        unpacked: Tensor = FluxPipeline._unpack_latents(found, height, width, 1)
        return unpacked

    def channels(self, parts: Parts) -> int:
        return int(parts["transformer"].config.in_channels) // PATCH**2

    def grid(self, parts: Parts) -> int:
        return factor_of(parts) * PATCH

    def num_latents(self, parts: Parts) -> int:
        return 128  # diffusers' default_sample_size; the transformer's settings name none

    def drawing(self, pipe: Any, prompts: list[str], guidance: float) -> dict[str, Any]:
        given = guided(pipe, prompts, guidance)
        if not pipe.transformer.config.guidance_embeds:
            return given
        return {
            "guidance_scale": guidance,
            "max_sequence_length": given["max_sequence_length"],
        }

    def kohya_notes(self, parts: Parts, prediction: str) -> dict[str, str]:
        return {"ss_base_model_version": "flux1", "ss_v2": "False"}

    def kohya_place(self, parts: Parts, part: str, path: str) -> KohyaPlace:
        """Return the place in the transformer of the first release."""
        if part != "transformer":
            return KohyaPlace(path)
        return FLUX.place(path, swaps=path == "norm_out.linear")


class FluxOfClips(Flux):
    """Read the states of a CLIP in the place of a T5, as sprites-dit does."""

    name = "Flux with CLIP alone"
    kinds = {**Flux.kinds, "text_encoder_2": "CLIPTextModel", "tokenizer_2": "CLIPTokenizer"}
    reads_long = False
    scheme = "logit_normal"
    guidance = 7.5


@cache  # graphs of steps point to what is kept here
def _places(height: int, width: int, device: torch.device) -> Tensor:
    """Return index, row and column of each token; a copy from the host would make steps wait."""
    from diffusers import FluxPipeline

    found: Tensor = FluxPipeline._prepare_latent_image_ids(
        1, height // PATCH, width // PATCH, device, torch.float32
    )
    return found
