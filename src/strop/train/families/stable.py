"""Describe Stable Diffusion 1, 2 and XL, whose UNets are trained by DDPM."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor

from strop.models.guidance import guided
from strop.train.families.control_unet import ControlOfLargeUNets, ControlOfUNets
from strop.train.families.family import (
    CLIP_PROJECTIONS,
    Family,
    Noisy,
    Parts,
    factor_of,
    pooled_and_states,
)
from strop.train.families.kohya_layers import KohyaPlace

_ATTENTION = ("to_k", "to_q", "to_v", "to_out.0")
_SECOND_WIDTH = 1024  # of the text embeddings that Stable Diffusion 2 reads


class StableDiffusion(Family):
    """Read the last states of one CLIP."""

    name = "Stable Diffusion 1 and 2"
    pipeline = "StableDiffusionPipeline"
    control = ControlOfUNets()
    kinds = {
        "unet": "UNet2DConditionModel",
        "vae": "AutoencoderKL",
        "text_encoder": "CLIPTextModel",
        "tokenizer": "CLIPTokenizer",
    }
    left_out = {
        "safety_checker": None,
        "feature_extractor": None,
        "requires_safety_checker": False,
    }
    adapted = {"unet": _ATTENTION, "text_encoder": CLIP_PROJECTIONS}
    kohya = {"unet": "lora_unet_", "text_encoder": "lora_te_"}

    def encode(self, parts: Parts, ids: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"states": parts["text_encoder"](ids["text_encoder"], return_dict=False)[0]}

    def inputs(self, parts: Parts, noisy: Noisy) -> dict[str, Any]:
        return {
            "sample": noisy.latents,
            "timestep": noisy.times,
            "encoder_hidden_states": noisy.text["states"],
        }

    def grid(self, parts: Parts) -> int:
        levels = len(parts["unet"].config.block_out_channels)
        return int(factor_of(parts) * 2 ** (levels - 1))

    def num_latents(self, parts: Parts) -> int:
        own = parts["unet"].config.sample_size
        return int(own[0] if isinstance(own, list | tuple) else own)

    def drawing(self, pipe: Any, prompts: list[str], guidance: float) -> dict[str, Any]:
        return guided(pipe, prompts, guidance)

    def kohya_notes(self, parts: Parts, prediction: str) -> dict[str, str]:
        """Return the version: 2 reads OpenCLIP, which is wider."""
        is_second = parts["unet"].config.cross_attention_dim == _SECOND_WIDTH
        version = f"sd_v{1 + is_second}{'_v' if prediction == 'v_prediction' else ''}"
        return {"ss_base_model_version": version, "ss_v2": str(is_second)}


class StableDiffusionXL(StableDiffusion):
    """Read the last states but one of two CLIPs, the second one's vector for the whole prompt, and
    the sizes of the picture."""

    name = "SDXL"
    pipeline = "StableDiffusionXLPipeline"
    control = ControlOfLargeUNets()
    kinds = {
        **StableDiffusion.kinds,
        "text_encoder_2": "CLIPTextModelWithProjection",
        "tokenizer_2": "CLIPTokenizer",
    }
    left_out = {"feature_extractor": None, "image_encoder": None, "add_watermarker": False}
    trained_encoders = ("text_encoder", "text_encoder_2")
    adapted = {**StableDiffusion.adapted, "text_encoder_2": CLIP_PROJECTIONS}
    kohya = {"unet": "lora_unet_", "text_encoder": "lora_te1_", "text_encoder_2": "lora_te2_"}
    keeps_vae = True
    guidance = 5.0

    def encode(self, parts: Parts, ids: dict[str, Tensor]) -> dict[str, Tensor]:
        found = [pooled_and_states(parts[name], ids[name]) for name in self.encoders]
        states = torch.cat([states for _, states in found], dim=-1)
        return {"states": states, "pooled": found[-1][0]}

    def inputs(self, parts: Parts, noisy: Noisy) -> dict[str, Any]:
        more = {"text_embeds": noisy.text["pooled"], "time_ids": noisy.sizes}
        return {**super().inputs(parts, noisy), "added_cond_kwargs": more}

    def drawing(self, pipe: Any, prompts: list[str], guidance: float) -> dict[str, Any]:
        return {"guidance_scale": guidance}

    def kohya_notes(self, parts: Parts, prediction: str) -> dict[str, str]:
        version = f"sdxl_base_v{'0-9_v' if prediction == 'v_prediction' else '1-0'}"
        return {"ss_base_model_version": version, "ss_v2": "False"}

    def kohya_place(self, parts: Parts, part: str, path: str) -> KohyaPlace:
        """Return the place in the UNet of the first release, whose blocks kohya numbers.

        ``input_blocks`` starts with the first convolution; each level then has ``layers`` blocks
        and one that halves the picture. ``output_blocks`` has ``layers + 1`` blocks a level.
        """
        if part != "unet":
            return KohyaPlace(path)
        path = re.sub(r"^mid_block\.attentions\.0\.", "middle_block.1.", path)
        found = re.match(r"^(down|up)_blocks\.(\d+)\.attentions\.(\d+)\.(.*)$", path)
        if found is None:
            return KohyaPlace(path)
        side, level, layer, rest = found[1], int(found[2]), int(found[3]), found[4]
        size = int(parts["unet"].config.layers_per_block) + 1
        if side == "down":
            return KohyaPlace(f"input_blocks.{1 + size * level + layer}.1.{rest}")
        return KohyaPlace(f"output_blocks.{size * level + layer}.1.{rest}")
