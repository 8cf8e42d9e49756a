"""Pipelines whose models came with the last releases of diffusers, and others of families that the
other files have one pipeline of."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from strop.bench.pipelines.flux import flux2
from strop.bench.pipelines.images import SD3, qwen, sd3, z_image
from strop.bench.pipelines.parts import (
    HEADS,
    LENGTH,
    WIDTH,
    Parts,
    diffusers,
    embeds,
    flow,
)
from strop.bench.pipelines.stable import picture
from strop.bench.pipelines.tiny import LEFT_OUT, TinyPipeline
from strop.bench.pipelines.videos import ltx, wan


def _ones(words: int = 16) -> Tensor:
    return torch.ones(1, words, dtype=torch.long)


def photograph(size: int = 16) -> Any:
    """Return a picture as PIL has it, which some pipelines insist on."""
    from PIL import Image

    pixels = (picture(size=size)[0].permute(1, 2, 0) * 255).to(torch.uint8)
    return Image.fromarray(pixels.numpy())


def hunyuan_image() -> Parts:
    net = diffusers(
        "HunyuanImageTransformer2DModel",
        **HEADS,
        in_channels=4,
        out_channels=4,
        num_layers=1,
        num_single_layers=1,
        num_refiner_layers=1,
        text_embed_dim=WIDTH,
        text_embed_2_dim=WIDTH,
        rope_axes_dim=(8, 8),
    )
    frames = diffusers(
        "AutoencoderKLHunyuanImage",
        in_channels=3,
        out_channels=3,
        latent_channels=4,
        block_out_channels=(32, 64),
        layers_per_block=1,
        spatial_compression_ratio=2,
        sample_size=32,
        scaling_factor=0.75,
    )
    return {"transformer": net, "vae": frames, "scheduler": flow(shift=5.0)}


def krea2() -> Parts:
    net = diffusers(
        "Krea2Transformer2DModel",
        in_channels=16,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        num_key_value_heads=1,
        intermediate_size=48,
        timestep_embed_dim=16,
        text_hidden_dim=WIDTH,
        num_text_layers=2,
        text_num_attention_heads=2,
        text_num_key_value_heads=2,
        text_intermediate_size=48,
        num_layerwise_text_blocks=1,
        num_refiner_text_blocks=1,
        axes_dims_rope=(4, 4, 8),
    )
    return {"transformer": net, "vae": qwen()["vae"], "scheduler": flow(use_dynamic_shifting=True)}


def stacked_embeds(seed: int = 5) -> Tensor:
    """Return what two layers of a language model would make of a prompt."""
    source = torch.Generator().manual_seed(seed)
    return torch.randn(1, 16, 2, WIDTH, generator=source)


def sd35() -> Parts:
    config = SD3 | {"dual_attention_layers": (0,), "qk_norm": "rms_norm"}
    return sd3() | {"transformer": diffusers("SD3Transformer2DModel", **config)}


def flux2_dev() -> Parts:
    """Return Flux.2 with guidance as a number; prompts come as what a language model makes of
    them."""
    made = flux2()
    config = {**made["transformer"].config, "guidance_embeds": True}
    left_out = ("_use_default_values", "_class_name", "_diffusers_version")
    given = {name: value for name, value in config.items() if name not in left_out}
    net = diffusers("Flux2Transformer2DModel", **given)
    return {"transformer": net, "vae": made["vae"], "scheduler": made["scheduler"]}


def wide_embeds(seed: int = 5) -> Tensor:
    return torch.cat([embeds(seed), embeds(seed + 1), embeds(seed + 2)], -1)


def wan_ti2v() -> Parts:
    """Return Wan 2.2's small one, which gives each token a timestep of its own."""
    return wan() | {"expand_timesteps": True}


MASKED: dict[str, Any] = {
    "prompt": None,
    "negative_prompt": None,
    "prompt_embeds": embeds,
    "prompt_embeds_mask": _ones,
    "negative_prompt_embeds": lambda: embeds(6),
    "negative_prompt_embeds_mask": _ones,
}
TWICE_MASKED: dict[str, Any] = MASKED | {
    "prompt_embeds_2": lambda: embeds(7),
    "prompt_embeds_mask_2": _ones,
    "negative_prompt_embeds_2": lambda: embeds(8),
    "negative_prompt_embeds_mask_2": _ones,
}

TODAY: tuple[TinyPipeline, ...] = (
    TinyPipeline("sd3.5", "StableDiffusion3Pipeline", sd35, LENGTH),
    TinyPipeline(
        "flux2",
        "Flux2Pipeline",
        flux2_dev,
        {"prompt": None, "prompt_embeds": wide_embeds, "image": LEFT_OUT},
    ),
    TinyPipeline(
        "flux2-image",
        "Flux2Pipeline",
        flux2_dev,
        {"prompt": None, "prompt_embeds": wide_embeds, "image": lambda: photograph(64)},
    ),
    TinyPipeline("z-image-inpaint", "ZImageInpaintPipeline", z_image),
    TinyPipeline(
        "krea2",
        "Krea2Pipeline",
        krea2,
        MASKED
        | {
            "prompt_embeds": stacked_embeds,
            "negative_prompt_embeds": lambda: stacked_embeds(6),
            "prompt_embeds_mask": lambda: _ones().bool(),
            "negative_prompt_embeds_mask": lambda: _ones().bool(),
        },
    ),
    TinyPipeline("hunyuan-image", "HunyuanImagePipeline", hunyuan_image, TWICE_MASKED),
    TinyPipeline("wan-2.2-small", "WanPipeline", wan_ti2v, {"num_frames": 5} | LENGTH),
    TinyPipeline(
        "ltx-condition",
        "LTXConditionPipeline",
        ltx,
        {"num_frames": 9, "height": 32, "width": 32, "image": lambda: picture(size=32)} | LENGTH,
    ),
)
