"""Build the diffusion transformers that benchmarks time, with random weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from strop.bench.models import Build, Size, Workload, call_for_tensor, made_on, random_tensor

FLUX: dict[str, Any] = {"guidance_embeds": True}  # diffusers' defaults are Flux.1 dev
_TINY: dict[str, Any] = {
    "num_layers": 2,
    "num_attention_heads": 2,
    "attention_head_dim": 16,
    "joint_attention_dim": 32,
}
_TINY_ROTARY: dict[str, Any] = {**_TINY, "axes_dims_rope": (4, 4, 8)}
TINY_FLUX: dict[str, Any] = FLUX | {
    **_TINY_ROTARY,
    "num_single_layers": 2,
    "pooled_projection_dim": 16,
}
WAN: dict[str, Any] = {
    "num_attention_heads": 12,
    "attention_head_dim": 128,
    "ffn_dim": 8960,
    "num_layers": 30,
}  # 1.3B
TINY_WAN: dict[str, Any] = {
    "num_attention_heads": 2,
    "attention_head_dim": 12,
    "ffn_dim": 32,
    "num_layers": 2,
    "text_dim": 16,
    "freq_dim": 16,
}
WAN_14B: dict[str, Any] = {}  # diffusers' defaults: 40 blocks
QWEN: dict[str, Any] = {}  # diffusers' defaults are Qwen-Image
TINY_QWEN = _TINY_ROTARY
SD3: dict[str, Any] = {
    "num_layers": 24,
    "num_attention_heads": 24,
    "caption_projection_dim": 1536,
    "pos_embed_max_size": 192,
}
SD35: dict[str, Any] = SD3 | {
    "pos_embed_max_size": 384,
    "dual_attention_layers": tuple(range(13)),
    "qk_norm": "rms_norm",
}
TINY_SD3: dict[str, Any] = {
    **_TINY,
    "sample_size": 16,
    "caption_projection_dim": 32,
    "pooled_projection_dim": 16,
    "pos_embed_max_size": 16,
}
TINY_SD35: dict[str, Any] = TINY_SD3 | {"dual_attention_layers": (0,), "qk_norm": "rms_norm"}
_PIXELS_PER_TOKEN = 16  # a side
_FLUX_TEXT, _WAN_TEXT, _QWEN_TEXT, _SD3_TEXT = 512, 512, 128, 333  # tokens
_WAN_GUIDANCE = 5.0
WAN_FRAMES, WAN_FRAMES_81 = 9, 21  # frames of latents: 33 and 81 frames of video


def _flux_inputs(
    model: Any, size: Size, batch: int, device: torch.device, dtype: torch.dtype
) -> dict[str, Any]:
    height, width = (side // _PIXELS_PER_TOKEN for side in size)
    rows, columns = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    places = torch.stack([torch.zeros_like(rows), rows, columns], -1).reshape(-1, 3)
    config, tokens = model.config, height * width
    return {
        "hidden_states": random_tensor((batch, tokens, config.in_channels), device, dtype),
        "encoder_hidden_states": random_tensor(
            (batch, _FLUX_TEXT, config.joint_attention_dim), device, dtype, seed=2
        ),
        "pooled_projections": random_tensor(
            (batch, config.pooled_projection_dim), device, dtype, seed=3
        ),
        "timestep": torch.full((batch,), 0.5, device=device, dtype=dtype),
        "img_ids": places.to(device, dtype),
        "txt_ids": torch.zeros(_FLUX_TEXT, 3, device=device, dtype=dtype),
        "guidance": torch.full((batch,), 3.5, device=device),
    }


def _wan_inputs(
    model: Any,
    size: Size,
    batch: int,
    device: torch.device,
    dtype: torch.dtype,
    frames: int = WAN_FRAMES,
) -> dict[str, Any]:
    height, width = (side // 8 for side in size)
    channels = model.config.in_channels
    return {
        "hidden_states": random_tensor((batch, channels, frames, height, width), device, dtype),
        "timestep": torch.full((batch,), 500.0, device=device),
        "encoder_hidden_states": random_tensor(
            (batch, _WAN_TEXT, model.config.text_dim), device, dtype, seed=2
        ),
    }


def _qwen_inputs(
    model: Any, size: Size, batch: int, device: torch.device, dtype: torch.dtype
) -> dict[str, Any]:
    height, width = (side // _PIXELS_PER_TOKEN for side in size)
    config, tokens = model.config, height * width
    text = (batch, _QWEN_TEXT, config.joint_attention_dim)
    return {
        "hidden_states": random_tensor((batch, tokens, config.in_channels), device, dtype),
        "encoder_hidden_states": random_tensor(text, device, dtype, seed=2),
        "encoder_hidden_states_mask": None,  # what the pipeline gives where all prompts are as long
        "timestep": torch.full((batch,), 0.5, device=device, dtype=dtype),
        "img_shapes": [[(1, height, width)]] * batch,
    }


def _sd3_inputs(
    model: Any, size: Size, batch: int, device: torch.device, dtype: torch.dtype
) -> dict[str, Any]:
    height, width = (side // 8 for side in size)
    config = model.config
    text = (batch, _SD3_TEXT, config.joint_attention_dim)
    return {
        "hidden_states": random_tensor((batch, config.in_channels, height, width), device, dtype),
        "encoder_hidden_states": random_tensor(text, device, dtype, seed=2),
        "pooled_projections": random_tensor(
            (batch, config.pooled_projection_dim), device, dtype, seed=3
        ),
        "timestep": torch.full((batch,), 500.0, device=device),
    }


def _workload(name: str, config: Mapping[str, Any], inputs: Callable[..., dict[str, Any]]) -> Build:
    def build(device: torch.device, dtype: torch.dtype) -> Workload:
        import diffusers

        with made_on(device, dtype):
            model = getattr(diffusers, name)(**config).eval().requires_grad_(False)
        return Workload(
            model, lambda size, batch: inputs(model, size, batch, device, dtype), call_for_tensor
        )

    return build


def _guided_workload(config: Mapping[str, Any], frames: int) -> Build:
    """Return a workload of Wan's step with guidance: two calls, as its pipeline makes them."""
    plain = _workload("WanTransformer3DModel", config, partial(_wan_inputs, frames=frames))

    def build(device: torch.device, dtype: torch.dtype) -> Workload:
        step = plain(device, dtype)

        def inputs(size: Size, batch: int) -> dict[str, Any]:
            given = dict(step.inputs(size, batch))
            text = given["encoder_hidden_states"]
            other = random_tensor(tuple(text.shape), device, dtype, seed=3)
            return {**given, "negative": other}

        def call(model: Any, given: Mapping[str, Any]) -> Tensor:
            positive = {name: value for name, value in given.items() if name != "negative"}
            negative = {**positive, "encoder_hidden_states": given["negative"]}
            wanted, unwanted = (call_for_tensor(model, each) for each in (positive, negative))
            return unwanted + _WAN_GUIDANCE * (wanted - unwanted)

        return Workload(step.target, inputs, call)

    return build


def flux_workload(config: Mapping[str, Any]) -> Build:
    return _workload("FluxTransformer2DModel", config, _flux_inputs)


# A step of each, at full size and tiny; times are of bf16, in which both are published.
TRANSFORMERS: dict[str, tuple[Build, Build]] = {
    "flux": (
        flux_workload(FLUX),
        flux_workload(TINY_FLUX),
    ),
    "wan": (
        _workload("WanTransformer3DModel", WAN, _wan_inputs),
        _workload("WanTransformer3DModel", TINY_WAN, _wan_inputs),
    ),
    "wan-81": (
        _workload("WanTransformer3DModel", WAN, partial(_wan_inputs, frames=WAN_FRAMES_81)),
        _workload("WanTransformer3DModel", TINY_WAN, partial(_wan_inputs, frames=3)),
    ),
    "wan-14b-guided": (
        _guided_workload(WAN_14B, WAN_FRAMES_81),
        _guided_workload(TINY_WAN, 3),
    ),
    "qwen-image": (
        _workload("QwenImageTransformer2DModel", QWEN, _qwen_inputs),
        _workload("QwenImageTransformer2DModel", TINY_QWEN, _qwen_inputs),
    ),
    "sd3-medium": (
        _workload("SD3Transformer2DModel", SD3, _sd3_inputs),
        _workload("SD3Transformer2DModel", TINY_SD3, _sd3_inputs),
    ),
    "sd3.5-medium": (
        _workload("SD3Transformer2DModel", SD35, _sd3_inputs),
        _workload("SD3Transformer2DModel", TINY_SD35, _sd3_inputs),
    ),
}
