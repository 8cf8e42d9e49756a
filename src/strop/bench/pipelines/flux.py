"""Pipelines that make pictures with Flux and transformers of its kind."""

from __future__ import annotations

from typing import Any

from strop.bench.pipelines.parts import (
    HEADS,
    LENGTH,
    WIDTH,
    Parts,
    causal,
    clip,
    clip_tokenizer,
    diffusers,
    flow,
    flow_vae,
    qwen_tokenizer,
    t5,
    t5_tokenizer,
    vae,
)
from strop.bench.pipelines.tiny import LEFT_OUT, TinyPipeline

FLUX: dict[str, Any] = HEADS | {
    "in_channels": 16,
    "num_layers": 1,
    "num_single_layers": 1,
    "joint_attention_dim": WIDTH,
    "axes_dims_rope": [4, 4, 8],
}


def flux(kind: str = "FluxTransformer2DModel", **changes: Any) -> Parts:
    config = FLUX | {"pooled_projection_dim": WIDTH, "guidance_embeds": True} | changes
    return {
        "transformer": diffusers(kind, **config),
        "vae": flow_vae(),
        "scheduler": flow(),
        "text_encoder": clip(),
        "tokenizer": clip_tokenizer(),
        "text_encoder_2": t5(),
        "tokenizer_2": t5_tokenizer(),
    }


def flux_controlled() -> Parts:
    net = diffusers(
        "FluxControlNetModel", **FLUX, pooled_projection_dim=WIDTH, guidance_embeds=True
    )
    return flux() | {"controlnet": net}


def chroma() -> Parts:
    net = diffusers(
        "ChromaTransformer2DModel",
        **FLUX,
        approximator_num_channels=16,
        approximator_hidden_dim=WIDTH,
        approximator_layers=1,
    )
    return {
        "transformer": net,
        "vae": flow_vae(),
        "scheduler": flow(),
        "text_encoder": t5(),
        "tokenizer": t5_tokenizer(),
    }


def bria() -> Parts:
    net = diffusers("BriaTransformer2DModel", **FLUX)
    return {
        "transformer": net,
        "vae": vae(),
        "scheduler": flow(),
        "text_encoder": t5(),
        "tokenizer": t5_tokenizer(),
    }


def flux2() -> Parts:
    net = diffusers(
        "Flux2Transformer2DModel",
        **HEADS,
        in_channels=16,
        num_layers=1,
        num_single_layers=1,
        joint_attention_dim=3 * WIDTH,
        timestep_guidance_channels=16,
        axes_dims_rope=(4, 4, 4, 4),
        guidance_embeds=False,
    )
    frames = diffusers(
        "AutoencoderKLFlux2",
        block_out_channels=(8, 16),
        layers_per_block=1,
        down_block_types=("DownEncoderBlock2D",) * 2,
        norm_num_groups=4,
        up_block_types=("UpDecoderBlock2D",) * 2,
        latent_channels=4,
        sample_size=32,
    )
    return {
        "transformer": net,
        "vae": frames,
        "scheduler": flow(),
        "text_encoder": causal("Qwen3ForCausalLM"),
        "tokenizer": qwen_tokenizer(),
    }


def ovis() -> Parts:
    net = diffusers("OvisImageTransformer2DModel", **FLUX, out_channels=16)
    return {
        "transformer": net,
        "vae": flow_vae(),
        "scheduler": flow(),
        "text_encoder": causal("Qwen3Model"),
        "tokenizer": qwen_tokenizer(),
    }


FLUXES: tuple[TinyPipeline, ...] = (
    TinyPipeline("flux", "FluxPipeline", flux, LENGTH),
    TinyPipeline("flux-schnell", "FluxPipeline", lambda: flux(guidance_embeds=False), LENGTH),
    TinyPipeline("flux-true-cfg", "FluxPipeline", flux, LENGTH | {"true_cfg_scale": 2.0}),
    TinyPipeline("flux-img2img", "FluxImg2ImgPipeline", flux, LENGTH),
    TinyPipeline("flux-inpaint", "FluxInpaintPipeline", flux, LENGTH),
    TinyPipeline(
        "flux-kontext",
        "FluxKontextPipeline",
        flux,
        LENGTH | {"max_area": 256, "_auto_resize": False},
    ),
    TinyPipeline(
        "flux-kontext-inpaint",
        "FluxKontextInpaintPipeline",
        flux,
        LENGTH | {"max_area": 256, "_auto_resize": False},
    ),
    TinyPipeline(
        "flux-fill", "FluxFillPipeline", lambda: flux(in_channels=48, out_channels=16), LENGTH
    ),
    TinyPipeline(
        "flux-control", "FluxControlPipeline", lambda: flux(in_channels=32, out_channels=16), LENGTH
    ),
    TinyPipeline(
        "flux-control-img2img",
        "FluxControlImg2ImgPipeline",
        lambda: flux(in_channels=32, out_channels=16),
        LENGTH,
    ),
    TinyPipeline(
        "flux-control-inpaint",
        "FluxControlInpaintPipeline",
        lambda: flux(in_channels=32, out_channels=16),
        LENGTH,
    ),
    TinyPipeline("flux-controlnet", "FluxControlNetPipeline", flux_controlled, LENGTH),
    TinyPipeline(
        "flux-controlnet-img2img", "FluxControlNetImg2ImgPipeline", flux_controlled, LENGTH
    ),
    TinyPipeline(
        "flux-controlnet-inpaint", "FluxControlNetInpaintPipeline", flux_controlled, LENGTH
    ),
    TinyPipeline(
        "flux2-klein",
        "Flux2KleinPipeline",
        flux2,
        {"image": LEFT_OUT, "text_encoder_out_layers": (0, 1, 2), "max_sequence_length": 64},
    ),
    TinyPipeline("chroma", "ChromaPipeline", chroma, LENGTH),
    TinyPipeline("chroma-img2img", "ChromaImg2ImgPipeline", chroma, LENGTH),
    TinyPipeline("chroma-inpaint", "ChromaInpaintPipeline", chroma, LENGTH),
    TinyPipeline("bria", "BriaPipeline", bria, LENGTH),
    TinyPipeline("ovis", "OvisImagePipeline", ovis),
)
