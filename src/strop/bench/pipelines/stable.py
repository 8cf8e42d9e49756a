"""Pipelines around the UNets of Stable Diffusion 1.5, 2 and XL."""

from __future__ import annotations

from strop.bench.pipelines.parts import (
    REFINER,
    WIDTH,
    XL,
    Parts,
    clip,
    clip_tokenizer,
    controlnet,
    ddim,
    unet,
    vae,
)
from strop.bench.pipelines.tiny import TinyPipeline


def sd15(**changes: object) -> Parts:
    """``changes``: of the UNet's configuration."""
    return {"unet": unet(**changes), "vae": vae(), "text_encoder": clip(),
            "tokenizer": clip_tokenizer(), "scheduler": ddim()}  # fmt: skip


def sdxl() -> Parts:
    return {
        "unet": unet(**XL), "vae": vae(), "text_encoder": clip(), "tokenizer": clip_tokenizer(),
        "text_encoder_2": clip("CLIPTextModelWithProjection"),
        "tokenizer_2": clip_tokenizer(), "scheduler": ddim(),
    }  # fmt: skip


def refiner() -> Parts:
    return {
        "unet": unet(**REFINER), "vae": vae(), "scheduler": ddim(), "requires_aesthetics_score": True,
        "text_encoder_2": clip("CLIPTextModelWithProjection"), "tokenizer_2": clip_tokenizer(),
    }  # fmt: skip


def controlled() -> Parts:
    return sd15() | {"controlnet": controlnet()}


def controlled_xl() -> Parts:
    fixed = ("up_block_types", "cross_attention_dim")
    config = {name: value for name, value in XL.items() if name not in fixed}
    net = controlnet(**config, cross_attention_dim=2 * WIDTH)
    return sdxl() | {"controlnet": net}


STABLE: tuple[TinyPipeline, ...] = (
    TinyPipeline("sd15", "StableDiffusionPipeline", sd15),
    TinyPipeline("sd15-img2img", "StableDiffusionImg2ImgPipeline", sd15),
    TinyPipeline("sd15-inpaint", "StableDiffusionInpaintPipeline", sd15),
    TinyPipeline("sd15-controlnet", "StableDiffusionControlNetPipeline", controlled),
    TinyPipeline("sdxl", "StableDiffusionXLPipeline", sdxl),
    TinyPipeline("sdxl-refiner", "StableDiffusionXLImg2ImgPipeline", refiner),
    TinyPipeline("sdxl-controlnet", "StableDiffusionXLControlNetPipeline", controlled_xl),
)
