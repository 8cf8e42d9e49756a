"""Turn latents into the tokens of Flux, of two rows of two latents each."""

from __future__ import annotations

from torch import Tensor

PATCH = 2  # latents on a side of a token


def tokens_of(latents: Tensor) -> Tensor:
    """Return latents [rows, channels, height, width] as tokens [rows, count, 4 * channels]."""
    from diffusers import FluxPipeline

    tokens: Tensor = FluxPipeline._pack_latents(latents, *latents.shape)
    return tokens
