"""Models of the Stable Diffusion architecture with tiny widths and random weights."""

from __future__ import annotations

import tempfile
from functools import cache
from typing import Any

import pytest
import torch
from diffusers import AutoencoderKL, DDIMScheduler, StableDiffusionPipeline, UNet2DConditionModel
from torch import Tensor
from transformers import CLIPTextConfig, CLIPTextModel

from strop import Options

PROMPT_DIM = 16
VOCABULARY = 64
DEVICES = [
    pytest.param("cpu"),
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
        ],
    ),
]


@cache
def cache_dir() -> str:
    """One for the whole run: equal kernels are compiled once."""
    return tempfile.mkdtemp(prefix="strop-tests-")


def options(**changes: Any) -> Options:
    return Options(**({"cache_dir": cache_dir()} | changes))


def unet(seed: int = 0, **changes: Any) -> UNet2DConditionModel:
    torch.manual_seed(seed)
    config = {
        "sample_size": 8,
        "in_channels": 4,
        "out_channels": 4,
        "cross_attention_dim": PROMPT_DIM,
        "block_out_channels": (16, 32),
        "layers_per_block": 1,
        "attention_head_dim": 2,
        "norm_num_groups": 4,
        "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
        "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
    }
    return UNet2DConditionModel(**(config | changes)).eval()


def unet_args(
    batch: int,
    height: int,
    width: int,
    prompt: int,
    dtype: torch.dtype = torch.float32,
    seed: int = 1,
) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    return (
        torch.randn(batch, 4, height, width, generator=g).to(dtype),
        torch.rand(batch, generator=g) * 1000,
        torch.randn(batch, prompt, PROMPT_DIM, generator=g).to(dtype),
    )


def vae(seed: int = 0) -> AutoencoderKL:
    torch.manual_seed(seed)
    return AutoencoderKL(
        in_channels=3,
        out_channels=3,
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        block_out_channels=(8, 16),
        layers_per_block=1,
        latent_channels=4,
        norm_num_groups=4,
        sample_size=16,
    ).eval()


def clip(seed: int = 0) -> CLIPTextModel:
    torch.manual_seed(seed)
    config = CLIPTextConfig(
        vocab_size=VOCABULARY,
        hidden_size=PROMPT_DIM,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=24,
        hidden_act="quick_gelu",
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=1,
    )
    return CLIPTextModel(config).eval()


def pipeline(seed: int = 0) -> StableDiffusionPipeline:
    """Without a tokenizer: prompts are given as embeddings."""
    pipe = StableDiffusionPipeline(
        vae=vae(seed),
        text_encoder=None,
        tokenizer=None,
        unet=unet(seed),
        scheduler=DDIMScheduler(steps_offset=1, clip_sample=False),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )
    pipe.set_progress_bar_config(disable=True)
    return pipe
