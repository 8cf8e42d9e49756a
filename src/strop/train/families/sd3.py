"""Describe Stable Diffusion 3 and 3.5, a transformer trained by flow matching."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from strop.train.families.control_sd3 import ControlOfSD3
from strop.train.families.family import (
    CLIP_PROJECTIONS,
    Family,
    Noisy,
    Parts,
    factor_of,
    pooled_and_states,
)
from strop.train.families.kohya_layers import SD3, KohyaPlace


class StableDiffusion3(Family):
    """Read the states of two CLIPs side by side, and a T5's behind them; and the CLIPs' vectors for
    the whole prompt. A folder without the T5 gives zeros in its place."""

    name = "Stable Diffusion 3"
    pipeline = "StableDiffusion3Pipeline"
    kinds = {
        "transformer": "SD3Transformer2DModel",
        "vae": "AutoencoderKL",
        "text_encoder": "CLIPTextModelWithProjection",
        "tokenizer": "CLIPTokenizer",
        "text_encoder_2": "CLIPTextModelWithProjection",
        "tokenizer_2": "CLIPTokenizer",
        "text_encoder_3": "T5EncoderModel",
        "tokenizer_3": "T5Tokenizer",
    }
    may_lack = ("text_encoder_3", "tokenizer_3")
    denoiser = "transformer"
    control = ControlOfSD3()
    is_flow = True
    trained_encoders = ("text_encoder", "text_encoder_2")
    adapted = {
        "transformer": (
            *(f"attn.{name}" for name in ("add_k_proj", "add_q_proj", "add_v_proj", "to_add_out")),
            *(f"attn.{name}" for name in ("to_k", "to_out.0", "to_q", "to_v")),
        ),
        "text_encoder": CLIP_PROJECTIONS,
        "text_encoder_2": CLIP_PROJECTIONS,
    }
    kohya = {
        "transformer": "lora_unet_",
        "text_encoder": "lora_te1_",
        "text_encoder_2": "lora_te2_",
    }
    kohya_network = "networks.lora_sd3"
    keeps_vae = True
    reads_long = True
    scheme = "logit_normal"
    guidance = 7.0
    preconditions = True

    def encode(self, parts: Parts, ids: dict[str, Tensor]) -> dict[str, Tensor]:
        clips = ("text_encoder", "text_encoder_2")
        found = [pooled_and_states(parts[name], ids[name]) for name in clips]
        states = torch.cat([states for _, states in found], dim=-1)
        width = parts["transformer"].config.joint_attention_dim
        if "text_encoder_3" in ids:
            long = parts["text_encoder_3"](ids["text_encoder_3"], return_dict=False)[0]
        else:
            long = states.new_zeros(len(states), self.longest_text, width)
        states = functional.pad(states, (0, width - states.shape[-1]))
        return {
            "states": torch.cat([states, long.to(states.dtype)], dim=1),
            "pooled": torch.cat([pooled for pooled, _ in found], dim=-1),
        }

    def inputs(self, parts: Parts, noisy: Noisy) -> dict[str, Any]:
        return {
            "hidden_states": noisy.latents,
            "timestep": noisy.times,
            "encoder_hidden_states": noisy.text["states"],
            "pooled_projections": noisy.text["pooled"],
        }

    def grid(self, parts: Parts) -> int:
        return factor_of(parts) * int(parts["transformer"].config.patch_size)

    def num_latents(self, parts: Parts) -> int:
        return int(parts["transformer"].config.sample_size)

    def kohya_notes(self, parts: Parts, prediction: str) -> dict[str, str]:
        """Return the version as kohya's scripts tell it from the layers of 3, 3.5 large and 3.5
        medium."""
        config = parts["transformer"].config
        size = "5-medium" if config.dual_attention_layers else "5-large"
        version = size if config.qk_norm else "medium"
        return {"ss_base_model_version": version, "ss_v2": "False"}

    def kohya_place(self, parts: Parts, part: str, path: str) -> KohyaPlace:
        """Return the place in the transformer of the first release, which has the shift before the
        scale in norms that have these two alone."""
        if part != "transformer":
            return KohyaPlace(path)
        last = int(parts["transformer"].config.num_layers) - 1
        swapped = ("norm_out.linear", f"transformer_blocks.{last}.norm1_context.linear")
        return SD3.place(path, swaps=path in swapped)
