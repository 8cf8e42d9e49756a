"""Build diffusion models from their configuration, with random weights: nothing is downloaded."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

Size = tuple[int, int]  # height and width in pixels
LATENT_FACTOR = 8  # pixels a side of one latent

SD15_UNET: dict[str, Any] = {
    "sample_size": 64,
    "cross_attention_dim": 768,
    "block_out_channels": (320, 640, 1280, 1280),
    "layers_per_block": 2,
    "attention_head_dim": 8,
    "down_block_types": ("CrossAttnDownBlock2D",) * 3 + ("DownBlock2D",),
    "up_block_types": ("UpBlock2D",) + ("CrossAttnUpBlock2D",) * 3,
}
SD2_UNET = SD15_UNET | {
    "cross_attention_dim": 1024,
    "attention_head_dim": [5, 10, 20, 20],
    "use_linear_projection": True,
}
SDXL_UNET: dict[str, Any] = {
    "sample_size": 128,
    "cross_attention_dim": 2048,
    "block_out_channels": (320, 640, 1280),
    "layers_per_block": 2,
    "attention_head_dim": [5, 10, 20],
    "transformer_layers_per_block": [1, 2, 10],
    "use_linear_projection": True,
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 256,
    "projection_class_embeddings_input_dim": 2816,
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
}
SD_VAE: dict[str, Any] = {
    "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4,
    "block_out_channels": (128, 256, 512, 512),
    "layers_per_block": 2,
    "latent_channels": 4,
    "norm_num_groups": 32,
    "sample_size": 512,
}
CLIP_L: dict[str, Any] = {
    "vocab_size": 49408,
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "max_position_embeddings": 77,
    "hidden_act": "quick_gelu",
}
CLIP_BIG_G = CLIP_L | {
    "hidden_size": 1280,
    "intermediate_size": 5120,
    "num_hidden_layers": 32,
    "num_attention_heads": 20,
    "hidden_act": "gelu",
    "projection_dim": 1280,
}
TINY_UNET = SD15_UNET | {
    "sample_size": 8,
    "cross_attention_dim": 32,
    "block_out_channels": (32, 64),
    "layers_per_block": 1,
    "attention_head_dim": 2,
    "norm_num_groups": 8,
    "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
    "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
}
TINY_SD2_UNET = TINY_UNET | {"attention_head_dim": [2, 4], "use_linear_projection": True}
TINY_SDXL_UNET = SDXL_UNET | {
    "sample_size": 8,
    "cross_attention_dim": 64,
    "block_out_channels": (32, 64),
    "layers_per_block": 1,
    "attention_head_dim": [2, 4],
    "transformer_layers_per_block": [1, 2],
    "addition_time_embed_dim": 8,
    "projection_class_embeddings_input_dim": 6 * 8 + 32,
    "norm_num_groups": 8,
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
}
TINY_VAE = SD_VAE | {
    "block_out_channels": (16, 16, 32, 32),
    "layers_per_block": 1,
    "norm_num_groups": 8,
}
TINY_CLIP = CLIP_L | {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
TINY_CLIP_G = TINY_CLIP | {"projection_dim": 32}


@dataclass(frozen=True, slots=True)
class Workload:
    """Hold a model and how one call of it looks. ``target`` is what ``strop.optimize`` gets."""

    target: Any
    inputs: Callable[[Size, int], Mapping[str, Any]]
    call: Callable[[Any, Mapping[str, Any]], Tensor]


Build = Callable[[torch.device, torch.dtype], Workload]


@contextmanager
def made_on(device: torch.device, dtype: torch.dtype) -> Iterator[None]:
    """Make weights in place and reproducibly, with neither a copy in fp32 nor one on the host."""
    before = torch.get_default_dtype()
    torch.manual_seed(0)
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            yield
    finally:
        torch.set_default_dtype(before)


def random_tensor(
    shape: tuple[int, ...], device: torch.device, dtype: torch.dtype, seed: int = 1
) -> Tensor:
    """Return normal values that are the same on every device."""
    source = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=source).to(device, dtype)


def load_libraries() -> None:
    """Import the classes that all benchmarks need: seconds, in a new process."""
    from diffusers import AutoencoderKL, UNet2DConditionModel  # noqa: F401


def make_unet(config: Mapping[str, Any], device: torch.device, dtype: torch.dtype) -> Any:
    from diffusers import UNet2DConditionModel

    with made_on(device, dtype):
        return UNet2DConditionModel(**config).eval().requires_grad_(False)


def make_vae(config: Mapping[str, Any], device: torch.device, dtype: torch.dtype) -> Any:
    from diffusers import AutoencoderKL

    with made_on(device, dtype):
        return AutoencoderKL(**config).eval().requires_grad_(False)


def make_text_encoder(config: Mapping[str, Any], device: torch.device, dtype: torch.dtype) -> Any:
    from transformers import CLIPTextConfig, CLIPTextModel

    with made_on(device, dtype):
        return CLIPTextModel(CLIPTextConfig(**config)).eval().requires_grad_(False)


def unet_workload(config: Mapping[str, Any], tokens: int = 77) -> Build:
    """Return a workload of one denoising step: latents, one timestep for all, prompt states."""

    def build(device: torch.device, dtype: torch.dtype) -> Workload:
        def inputs(size: Size, batch: int) -> dict[str, Any]:
            height, width = (side // LATENT_FACTOR for side in size)
            width_of_text = config["cross_attention_dim"]
            given: dict[str, Any] = {
                "sample": random_tensor((batch, 4, height, width), device, dtype),
                "timestep": torch.tensor(500, device=device),
                "encoder_hidden_states": random_tensor(
                    (batch, tokens, width_of_text), device, dtype, seed=2
                ),
            }
            if "addition_embed_type" in config:
                ids = torch.tensor([[*size, 0, 0, *size]], device=device, dtype=dtype)
                time = 6 * config["addition_time_embed_dim"]
                pooled = config["projection_class_embeddings_input_dim"] - time
                given["added_cond_kwargs"] = {
                    "text_embeds": random_tensor((batch, pooled), device, dtype, seed=3),
                    "time_ids": ids.repeat(batch, 1),
                }
            return given

        return Workload(make_unet(config, device, dtype), inputs, call_for_tensor)

    return build


def call_for_tensor(model: Any, given: Mapping[str, Any]) -> Tensor:
    result: Tensor = model(**given, return_dict=False)[0]
    return result


def vae_workload(config: Mapping[str, Any]) -> Build:
    """Return a workload that decodes latents to a picture."""

    def build(device: torch.device, dtype: torch.dtype) -> Workload:
        def inputs(size: Size, batch: int) -> dict[str, Any]:
            height, width = (side // LATENT_FACTOR for side in size)
            return {"sample": random_tensor((batch, 4, height, width), device, dtype)}

        def call(model: Any, given: Mapping[str, Any]) -> Tensor:
            result: Tensor = model(**given)
            return result

        return Workload(make_vae(config, device, dtype).decoder, inputs, call)

    return build


def pipeline_workload(
    unet: Mapping[str, Any],
    vae: Mapping[str, Any],
    clip: Mapping[str, Any],
    steps: int,
    *,
    from_picture: bool = False,
) -> Build:
    """Return a workload that draws from text, or from text and a picture, through a plain
    ``pipe(...)`` with guidance."""

    def build(device: torch.device, dtype: torch.dtype) -> Workload:
        pipe = make_pipeline(unet, vae, clip, device, dtype)
        if not from_picture:
            return Workload(pipe, partial(_text_inputs, steps), _draw)
        from diffusers import StableDiffusionImg2ImgPipeline

        pipe = StableDiffusionImg2ImgPipeline(**pipe.components, requires_safety_checker=False)
        pipe.set_progress_bar_config(disable=True)
        return Workload(pipe, partial(_picture_inputs, steps, device, dtype), _draw)

    return build


def sdxl_pipeline_workload(
    unet: Mapping[str, Any],
    vae: Mapping[str, Any],
    clips: tuple[Mapping[str, Any], Mapping[str, Any]],
    steps: int,
) -> Build:
    """Return a workload that draws from text through a plain SDXL ``pipe(...)`` with guidance."""

    def build(device: torch.device, dtype: torch.dtype) -> Workload:
        pipe = make_sdxl_pipeline(unet, vae, clips, device, dtype)
        return Workload(pipe, partial(_text_inputs, steps), _draw)

    return build


def _text_inputs(steps: int, size: Size, batch: int) -> dict[str, Any]:
    prompts = ["a red circle above a blue square", "a green triangle"]
    return {
        "prompt": [prompts[i % 2] for i in range(batch)],
        "height": size[0],
        "width": size[1],
        "num_inference_steps": steps,
        "generator": [torch.Generator().manual_seed(i) for i in range(batch)],
        "output_type": "pt",
    }


def _picture_inputs(
    steps: int, device: torch.device, dtype: torch.dtype, size: Size, batch: int
) -> dict[str, Any]:
    """Return the inputs for a picture, whose last 80 % of the steps run: diffusers' own default
    strength."""
    given = _text_inputs(steps, size, batch)
    picture = random_tensor((batch, 3, given.pop("height"), given.pop("width")), device, dtype)
    return {**given, "image": picture.sigmoid(), "strength": 0.8}


def _draw(pipe: Any, given: Mapping[str, Any]) -> Tensor:
    for number, generator in enumerate(given["generator"]):
        generator.manual_seed(number)
    result: Tensor = pipe(**given).images
    return result


def make_pipeline(
    unet: Mapping[str, Any],
    vae: Mapping[str, Any],
    clip: Mapping[str, Any],
    device: torch.device,
    dtype: torch.dtype,
) -> Any:
    """Return a StableDiffusionPipeline; its words come from the sprites model's small
    vocabulary."""
    from diffusers import DDIMScheduler, StableDiffusionPipeline

    from strop.models.sprites import vocabulary

    with tempfile.TemporaryDirectory() as folder:
        tokenizer = vocabulary.build(Path(folder), clip["max_position_embeddings"])
    pipe = StableDiffusionPipeline(
        vae=make_vae(vae, device, dtype),
        text_encoder=make_text_encoder(clip, device, dtype),
        tokenizer=tokenizer,
        unet=make_unet(unet, device, dtype),
        scheduler=DDIMScheduler(clip_sample=False, set_alpha_to_one=False, steps_offset=1),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )
    pipe.set_progress_bar_config(disable=True)
    return pipe


def make_sdxl_pipeline(
    unet: Mapping[str, Any],
    vae: Mapping[str, Any],
    clips: tuple[Mapping[str, Any], Mapping[str, Any]],
    device: torch.device,
    dtype: torch.dtype,
) -> Any:
    """Return a StableDiffusionXLPipeline; its VAE stays in ``dtype``, as the fp16 editions of it
    do."""
    from diffusers import EulerDiscreteScheduler, StableDiffusionXLPipeline
    from transformers import CLIPTextConfig, CLIPTextModelWithProjection

    from strop.models.sprites import vocabulary

    with tempfile.TemporaryDirectory() as folder:
        tokenizer = vocabulary.build(Path(folder), clips[0]["max_position_embeddings"])
    with made_on(device, dtype):
        second = CLIPTextModelWithProjection(CLIPTextConfig(**clips[1])).eval()
    pipe = StableDiffusionXLPipeline(
        vae=make_vae({**vae, "force_upcast": False}, device, dtype),
        text_encoder=make_text_encoder(clips[0], device, dtype),
        text_encoder_2=second.requires_grad_(False),
        tokenizer=tokenizer,
        tokenizer_2=tokenizer,
        unet=make_unet(unet, device, dtype),
        scheduler=EulerDiscreteScheduler(),
        add_watermarker=False,
    )
    pipe.set_progress_bar_config(disable=True)
    return pipe
