"""Pipelines around a transformer or a ControlNet, with tiny widths and random weights.

Each is made by a function without arguments; ``picture(pipe, height, width, batch)`` runs it from
random embeddings of a prompt.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from diffusers import (
    AutoencoderKL,
    AutoencoderKLWan,
    ControlNetModel,
    DDIMScheduler,
    FlowMatchEulerDiscreteScheduler,
    FluxPipeline,
    FluxTransformer2DModel,
    PixArtSigmaPipeline,
    PixArtTransformer2DModel,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
    StableDiffusionControlNetPipeline,
    WanPipeline,
    WanTransformer3DModel,
)
from torch import Tensor

from tests.e2e import tiny

WIDTH, POOLED = 32, 64  # of a prompt's embeddings


def vae() -> AutoencoderKL:
    torch.manual_seed(0)
    return AutoencoderKL(
        block_out_channels=(8, 16),
        layers_per_block=1,
        norm_num_groups=4,
        sample_size=32,
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        shift_factor=0.06,
        scaling_factor=1.5,
        use_quant_conv=False,
        use_post_quant_conv=False,
    ).eval()


def sd3(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    transformer = SD3Transformer2DModel(
        sample_size=32,
        in_channels=4,
        out_channels=4,
        num_layers=2,
        attention_head_dim=8,
        num_attention_heads=4,
        joint_attention_dim=WIDTH,
        caption_projection_dim=32,
        pooled_projection_dim=POOLED,
        pos_embed_max_size=32,
    ).eval()
    texts = {f"{kind}{n}": None for kind in ("text_encoder", "tokenizer") for n in ("", "_2", "_3")}
    return StableDiffusion3Pipeline(transformer, FlowMatchEulerDiscreteScheduler(), vae(), **texts)


def flux(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    transformer = FluxTransformer2DModel(
        in_channels=16,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=WIDTH,
        pooled_projection_dim=POOLED,
        axes_dims_rope=[4, 4, 8],
        guidance_embeds=True,
    ).eval()
    texts = {f"{kind}{n}": None for kind in ("text_encoder", "tokenizer") for n in ("", "_2")}
    return FluxPipeline(FlowMatchEulerDiscreteScheduler(), vae(), transformer=transformer, **texts)


def pixart(seed: int = 0) -> Any:
    """Its positions are divided by a ratio of sizes."""
    torch.manual_seed(seed)
    transformer = PixArtTransformer2DModel(
        sample_size=8,
        num_layers=2,
        attention_head_dim=8,
        num_attention_heads=3,
        out_channels=8,
        caption_channels=WIDTH,
        cross_attention_dim=24,
        use_additional_conditions=False,
    ).eval()
    return PixArtSigmaPipeline(None, None, vae(), transformer, DDIMScheduler())


def wan(seed: int = 0) -> Any:
    """Two transformers, for the noisy half of the loop and for the other one."""

    def transformer(seed: int) -> WanTransformer3DModel:
        torch.manual_seed(seed)
        return WanTransformer3DModel(
            num_attention_heads=2,
            attention_head_dim=12,
            in_channels=16,
            out_channels=16,
            text_dim=WIDTH,
            freq_dim=32,
            ffn_dim=32,
            num_layers=2,
            rope_max_seq_len=32,
        ).eval()

    torch.manual_seed(0)
    frames = AutoencoderKLWan(
        base_dim=3, dim_mult=[1] * 4, num_res_blocks=1, temperal_downsample=[False, True, True]
    ).eval()
    return WanPipeline(
        None,
        None,
        frames,
        FlowMatchEulerDiscreteScheduler(),
        transformer(seed),
        transformer(seed + 1),
        boundary_ratio=0.5,
    )


def controlled(seed: int = 0) -> Any:
    pipe = tiny.pipeline()
    torch.manual_seed(seed)
    controlnet = ControlNetModel.from_unet(pipe.unet, conditioning_embedding_out_channels=(8, 16))
    for weight in controlnet.controlnet_down_blocks.parameters():
        torch.nn.init.normal_(weight, std=0.05)  # they begin as zeros
    return StableDiffusionControlNetPipeline(
        **pipe.components, controlnet=controlnet.eval(), requires_safety_checker=False
    )


def picture(pipe: Any, height: int, width: int, batch: int = 1, **more: Any) -> Tensor:
    """(B, 3, H, W), or frames (B, F, 3, H, W), in 4 steps."""
    g = torch.Generator().manual_seed(3)
    known = inspect.signature(pipe.__call__).parameters
    width_of = tiny.PROMPT_DIM if hasattr(pipe, "controlnet") else WIDTH
    prompt = torch.randn(batch, 9, width_of, generator=g)
    pooled = torch.randn(batch, POOLED, generator=g)
    given = {
        "prompt_embeds": prompt,
        "pooled_prompt_embeds": pooled,
        "num_frames": 5,
        "use_resolution_binning": False,
        "prompt_attention_mask": torch.ones(batch, 9),
        "negative_prompt_attention_mask": torch.ones(batch, 9),
        "image": torch.rand(batch, 3, height, width, generator=g),
    }
    if not isinstance(pipe, FluxPipeline):  # it is distilled: guidance is an argument
        given |= {
            "negative_prompt_embeds": prompt / 2,
            "negative_pooled_prompt_embeds": pooled / 2,
            "negative_prompt": None,
        }
    pipe.set_progress_bar_config(disable=True)
    device = pipe.vae.device
    taken = {
        name: value.to(device) if isinstance(value, Tensor) else value
        for name, value in given.items()
        if name in known
    }
    found = pipe(
        height=height,
        width=width,
        num_inference_steps=4,
        generator=g,
        output_type="pt",
        **taken,
        **more,
    )
    return torch.as_tensor(found[0])
