"""Build the pipelines in which ``benchmarks/waits.py`` times changes, at full size or tiny.

Weights are random and nothing is downloaded. Prompts of Stable Diffusion go through its text
encoders; Flux.1 gets the embeddings of its prompt, as its text encoder of 9 GB takes no part.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from strop.bench import models
from strop.bench.models import Size, made_on
from strop.bench.transformer_models import FLUX, TINY_FLUX

_ATTENTION = ("to_q", "to_k", "to_v", "to_out.0")
UNET_LAYERS = (*_ATTENTION, "ff.net.0.proj", "ff.net.2", "proj_in", "proj_out")
FLUX_LAYERS = (
    *(*_ATTENTION, "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out", "proj_mlp", "proj_out"),
    *("ff.net.0.proj", "ff.net.2", "ff_context.net.0.proj", "ff_context.net.2"),
    *("norm.linear", "norm1.linear", "norm1_context.linear"),
)
FLUX_VAE = models.SD_VAE | {
    "latent_channels": 16,
    "sample_size": 1024,
    "scaling_factor": 0.3611,
    "shift_factor": 0.1159,
    "use_quant_conv": False,
    "use_post_quant_conv": False,
}


@dataclass(frozen=True, slots=True)
class WaitModel:
    """Describe a pipeline. ``build`` makes it, tiny or not; ``adapted`` are the ends of the names
    of layers that LoRAs have; ``control`` is the class of its pipeline with a ControlNet, and
    ``net`` makes that."""

    build: Callable[[bool, torch.device, torch.dtype], Any]
    dtype: torch.dtype
    size: Size
    other_size: Size
    denoiser: str
    adapted: tuple[str, ...]
    control: str
    net: Callable[[Any, bool], Any]
    has_blocks: bool = False  # whether diffusers' pages compile its repeated blocks alone
    tiny_size: Size = (64, 64)
    tiny_other_size: Size = (64, 96)

    def sizes(self, is_tiny: bool) -> tuple[Size, Size]:
        """Return the usual size and another one."""
        return (self.tiny_size, self.tiny_other_size) if is_tiny else (self.size, self.other_size)


def _sd15(is_tiny: bool, device: torch.device, dtype: torch.dtype) -> Any:
    parts = (
        (models.TINY_UNET, models.TINY_VAE, models.TINY_CLIP)
        if is_tiny
        else (models.SD15_UNET, models.SD_VAE, models.CLIP_L)
    )
    return models.make_pipeline(*parts, device, dtype)


def _sdxl(is_tiny: bool, device: torch.device, dtype: torch.dtype) -> Any:
    if is_tiny:
        unet, vae = models.TINY_SDXL_UNET, models.TINY_VAE
        clips = (models.TINY_CLIP, models.TINY_CLIP_G)
    else:
        unet, vae = models.SDXL_UNET, models.SD_VAE
        clips = (models.CLIP_L, models.CLIP_BIG_G)
    return models.make_sdxl_pipeline(unet, vae, clips, device, dtype)


def _flux(is_tiny: bool, device: torch.device, dtype: torch.dtype) -> Any:
    from diffusers import FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel

    with made_on(device, dtype):
        transformer = FluxTransformer2DModel(**(TINY_FLUX if is_tiny else FLUX))
    vae = FLUX_VAE | (models.TINY_VAE | {"latent_channels": 16} if is_tiny else {})
    pipe = FluxPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True),
        vae=models.make_vae(vae, device, dtype),
        text_encoder=None,
        tokenizer=None,
        text_encoder_2=None,
        tokenizer_2=None,
        transformer=transformer.eval().requires_grad_(False),
    )
    pipe.set_progress_bar_config(disable=True)
    return pipe


def _unets_net(unet: Any, is_tiny: bool) -> Any:
    from diffusers import ControlNetModel

    return ControlNetModel.from_unet(
        unet,
        load_weights_from_unet=False,
        conditioning_embedding_out_channels=(8, 16, 16, 32) if is_tiny else (16, 32, 96, 256),
    )


def _flux_net(transformer: Any, is_tiny: bool) -> Any:
    from diffusers import FluxControlNetModel

    config = TINY_FLUX if is_tiny else FLUX
    double, single = (1, 1) if is_tiny else (5, 10)
    return FluxControlNetModel(**(config | {"num_layers": double, "num_single_layers": single}))


MODELS: Mapping[str, WaitModel] = {
    "sd15": WaitModel(
        _sd15,
        torch.float16,
        (512, 512),
        (768, 768),
        "unet",
        UNET_LAYERS,
        "StableDiffusionControlNetPipeline",
        _unets_net,
    ),
    "sdxl": WaitModel(
        _sdxl,
        torch.float16,
        (1024, 1024),
        (1216, 832),
        "unet",
        UNET_LAYERS,
        "StableDiffusionXLControlNetPipeline",
        _unets_net,
    ),
    "flux": WaitModel(
        _flux,
        torch.bfloat16,
        (1024, 1024),
        (1216, 832),
        "transformer",
        FLUX_LAYERS,
        "FluxControlNetPipeline",
        _flux_net,
        has_blocks=True,
    ),
}
