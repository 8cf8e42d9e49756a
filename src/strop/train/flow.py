"""Compute what flow matching draws, and what Flux's transformer reads.

A timestep is the share of noise in what the network sees: 0 is the picture, 1 is noise (Liu et al.
2022, Esser et al. 2024).
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from strop.train.model import FlowModel


def draw_times(scheme: str | None, count: int, source: torch.Generator) -> Tensor:
    """Draw timesteps: evenly for "none", else more from the middle, where most is to be learned."""
    if scheme == "none":
        return torch.rand(count, device=source.device, generator=source)
    return torch.randn(count, device=source.device, generator=source).sigmoid()


def tokens_of(latents: Tensor) -> Tensor:
    """Return latents [batch, channels, height, width] as tokens, two rows of two in each."""
    from diffusers import FluxPipeline

    tokens: Tensor = FluxPipeline._pack_latents(latents, *latents.shape)
    return tokens


@lru_cache(maxsize=16)
def _places(height: int, width: int, device: torch.device) -> Tensor:
    """Return index, row and column of each token; a copy from the host would make steps wait."""
    from diffusers import FluxPipeline

    found: Tensor = FluxPipeline._prepare_latent_image_ids(
        1, height // 2, width // 2, device, torch.float32
    )
    return found


@torch.no_grad()
def inputs_of(model: FlowModel, mixed: Tensor, times: Tensor, ids: Tensor) -> dict[str, Any]:
    """Return the arguments of the transformer for noisy latents and the tokens of their texts."""
    _, _, height, width = mixed.shape
    ids = ids.to(mixed.device, non_blocking=True)
    states = model.text_encoder_2(ids, return_dict=False)[0]
    places = _places(height, width, mixed.device)
    return {
        "hidden_states": tokens_of(mixed),
        "timestep": times,
        "encoder_hidden_states": states,
        "pooled_projections": model.text_encoder(ids).pooler_output,
        "txt_ids": places.new_zeros(states.shape[1], places.shape[1]),
        "img_ids": places,
    }
