"""List actions that save memory or time: offloading, casting, slicing, and the caches of
diffusers."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

CPU = torch.device("cpu")


def attention_slicing(pipe: Any) -> None:
    pipe.enable_attention_slicing(1)


def vae_slicing(vae: Any) -> None:
    vae.enable_slicing()


def vae_tiling(vae: Any) -> None:
    vae.enable_tiling()


def model_offload(pipe: Any) -> None:
    pipe.enable_model_cpu_offload(device="cpu")


def sequential_offload(pipe: Any) -> None:
    """Do as ``enable_sequential_cpu_offload`` does. That takes weights to "cpu:0", for which
    accelerate puts tensors in the places of Parameters, and fails."""
    from accelerate import cpu_offload

    for model in pipe.components.values():
        if isinstance(model, nn.Module):
            cpu_offload(model, CPU, offload_buffers=bool(model._parameters))


def offload_hooks_removed(pipe: Any) -> None:
    model_offload(pipe)
    pipe.remove_all_hooks()


def group_offload(module: Any) -> None:
    module.enable_group_offload(
        onload_device=CPU, offload_device=CPU, num_blocks_per_group=1, offload_type="block_level"
    )


def group_offload_by_leaf(module: Any) -> None:
    module.enable_group_offload(onload_device=CPU, offload_device=CPU, offload_type="leaf_level")


def layerwise_casting(module: Any) -> None:
    module.enable_layerwise_casting(storage_dtype=torch.float8_e4m3fn, compute_dtype=torch.float32)


def half_precision(pipe: Any) -> None:
    pipe.to(torch.bfloat16)


def channels_last_everywhere(pipe: Any) -> None:
    pipe.unet.to(memory_format=torch.channels_last)
    pipe.vae.to(memory_format=torch.channels_last)


def pyramid_attention(transformer: Any) -> None:
    from diffusers import PyramidAttentionBroadcastConfig

    timesteps = iter(range(900, 0, -1))
    transformer.enable_cache(
        PyramidAttentionBroadcastConfig(
            spatial_attention_block_skip_range=2,
            spatial_attention_timestep_skip_range=(0, 1000),
            current_timestep_callback=lambda: next(timesteps),
        )
    )


def faster_cache(transformer: Any) -> None:
    from diffusers import FasterCacheConfig

    transformer.enable_cache(
        FasterCacheConfig(
            spatial_attention_block_skip_range=2,
            spatial_attention_timestep_skip_range=(0, 1000),
            is_guidance_distilled=True,
            tensor_format="BCHW",
            current_timestep_callback=lambda: 500,
            attention_weight_callback=lambda module: 0.3,
        )
    )


def first_block_cache(transformer: Any) -> None:
    from diffusers import FirstBlockCacheConfig

    transformer.enable_cache(FirstBlockCacheConfig(threshold=10.0))


def taylor_cache(transformer: Any) -> None:
    from diffusers import TaylorSeerCacheConfig

    transformer.enable_cache(
        TaylorSeerCacheConfig(cache_interval=2, disable_cache_before_step=1, max_order=1)
    )


def mag_cache(transformer: Any) -> None:
    from diffusers import MagCacheConfig

    transformer.enable_cache(
        MagCacheConfig(
            threshold=10.0,
            max_skip_steps=2,
            retention_ratio=0.1,
            num_inference_steps=3,
            mag_ratios=[1.0, 1.0, 1.0],
        )
    )


def cache_ended(transformer: Any) -> None:
    first_block_cache(transformer)
    transformer.disable_cache()
