"""Build the networks beside diffusion that ``strop bench models --speed`` times: encoders of texts
and pictures, and GPT-2, with random weights.

Sizes are (height, width) in pixels, or (1, tokens) of a text.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from strop.bench.models import (
    CLIP_BIG_G,
    CLIP_L,
    TINY_CLIP,
    TINY_CLIP_G,
    Build,
    Size,
    Workload,
    call_for_tensor,
    made_on,
    random_tensor,
)
from strop.bench.zoo_bevformer import TINY as TINY_BEV
from strop.bench.zoo_bevformer import BevConfig, BevFormer, bev_inputs
from strop.bench.zoo_model import SIZES, Config
from strop.bench.zoo_modules import WithCache
from strop.bench.zoo_vision import RESNET, VIT

Maker = Callable[[Any, Size, int, torch.device, torch.dtype], dict[str, Any]]

T5_XXL: Config = {
    "d_model": 4096,
    "d_kv": 64,
    "d_ff": 10240,
    "num_layers": 24,
    "num_heads": 64,
    "feed_forward_proj": "gated-gelu",
}
T5_LARGE: Config = {
    "d_model": 1024,
    "d_kv": 64,
    "d_ff": 4096,
    "num_layers": 24,
    "num_heads": 16,
}
TINY_T5: Config = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
QWEN_7B: Config = {
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "rope_parameters": {"rope_type": "default", "mrope_section": [16, 24, 24]},
}
TINY_SIZES: Config = {**SIZES, "intermediate_size": 64}
TINY_QWEN: Config = {
    **TINY_SIZES,
    "num_key_value_heads": 2,
    "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2]},
}
LARGE: Config = {
    "hidden_size": 1024,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "intermediate_size": 4096,
}
SWIN_B: Config = {"embed_dim": 128, "depths": (2, 2, 18, 2), "num_heads": (4, 8, 16, 32)}
TINY_SWIN: Config = {"embed_dim": 16, "depths": (2, 2), "num_heads": (2, 4), "image_size": 56}
SIGLIP: Config = {
    "hidden_size": 1152,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "intermediate_size": 4304,
    "image_size": 384,
    "patch_size": 14,
}
CONVNEXT_B: Config = {"hidden_sizes": (128, 256, 512, 1024), "depths": (3, 3, 27, 3)}
TINY_CONVNEXT: Config = {"hidden_sizes": (8, 16, 16, 32), "depths": (1, 1, 2, 1)}
EFFICIENTNET_B3: Config = {
    "width_coefficient": 1.2,
    "depth_coefficient": 1.4,
    "image_size": 300,
    "hidden_dim": 1536,
}
TINY_EFFICIENTNET: Config = {
    "width_coefficient": 0.25,
    "depth_coefficient": 0.4,
    "hidden_dim": 320,
}
TINY_RESNET: Config = {**RESNET, "depths": (1, 1, 1, 1)}
TINY_GPT2: Config = {"n_embd": 32, "n_layer": 2, "n_head": 4}


def _tokens(
    model: Any, size: Size, batch: int, device: torch.device, dtype: torch.dtype
) -> dict[str, Any]:
    source = torch.Generator().manual_seed(batch)
    tokens = torch.randint(3, model.config.vocab_size, (batch, size[1]), generator=source)
    return {"input_ids": tokens.to(device)}


def _pixels(
    model: Any, size: Size, batch: int, device: torch.device, dtype: torch.dtype
) -> dict[str, Any]:
    return {"pixel_values": random_tensor((batch, 3, *size), device, dtype)}


def _next_token(
    model: Any, size: Size, batch: int, device: torch.device, dtype: torch.dtype
) -> dict[str, Any]:
    """Return one token, and keys and values of as many as ``size`` says."""
    config = model.model.config
    shape = (batch, config.n_head, size[1], config.n_embd // config.n_head)
    cache = [random_tensor(shape, device, dtype, seed=n) for n in range(2 * config.n_layer)]
    return {**_tokens(model.model, (1, 1), batch, device, dtype), "cache": cache}


def _call_with_cache(model: Any, given: Mapping[str, Any]) -> torch.Tensor:
    logits, _ = model(**given)
    result: torch.Tensor = logits
    return result


def _transformers(kind: str, config: Config, inputs: Maker, *, with_cache: bool = False) -> Build:
    """Return the workload of a class of transformers, from its own config class."""

    def build(device: torch.device, dtype: torch.dtype) -> Workload:
        import transformers

        made = getattr(transformers, kind)
        with made_on(device, dtype):
            model: nn.Module = made(made.config_class(**config))
            model = WithCache(model) if with_cache else model
        model = model.eval().requires_grad_(False)
        call = _call_with_cache if with_cache else call_for_tensor
        return Workload(model, lambda size, batch: inputs(model, size, batch, device, dtype), call)

    return build


def _bevformer(config: BevConfig) -> Build:
    """Return the workload of BEVFormer; its result is the ground that all cameras have seen."""

    def build(device: torch.device, dtype: torch.dtype) -> Workload:
        with made_on(device, dtype):
            model = BevFormer(config)
        model = model.eval().requires_grad_(False)

        def inputs(size: Size, batch: int) -> dict[str, Any]:
            torch.manual_seed(batch)
            given = bev_inputs(config, batch, *size)
            return {name: tensor.to(device, dtype) for name, tensor in given.items()}

        return Workload(model, inputs, lambda module, given: module(**given)[0])

    return build


@dataclass(frozen=True, slots=True)
class NetworkModel:
    """Describe a network, at full size and tiny, and the size of its inputs."""

    name: str
    full: Build
    tiny: Build
    size: Size
    tiny_size: Size
    dtype: str = "fp16"  # on a GPU: what its users run it in


def _network(
    name: str,
    kind: str,
    inputs: Maker,
    configs: tuple[Config, Config],
    sizes: tuple[Size, Size],
    dtype: str = "fp16",
    *,
    with_cache: bool = False,
) -> NetworkModel:
    """Return a network by its configs and sizes, full and tiny."""
    full, tiny = (_transformers(kind, c, inputs, with_cache=with_cache) for c in configs)
    return NetworkModel(name, full, tiny, *sizes, dtype)


_TEXT, _TINY_TEXT = (1, 512), (1, 24)
_PROMPT = ((1, 77), (1, 16))
_PICTURE, _SMALL = (224, 224), (32, 32)

NETWORKS: tuple[NetworkModel, ...] = (
    _network("t5-xxl", "T5EncoderModel", _tokens, (T5_XXL, TINY_T5), (_TEXT, _TINY_TEXT), "bf16"),
    _network(
        "umt5-xxl",
        "UMT5EncoderModel",
        _tokens,
        ({**T5_XXL, "vocab_size": 256384}, TINY_T5),
        (_TEXT, _TINY_TEXT),
        "bf16",
    ),
    _network("t5-large", "T5EncoderModel", _tokens, (T5_LARGE, TINY_T5), ((1, 256), _TINY_TEXT)),
    _network("clip-l", "CLIPTextModel", _tokens, (CLIP_L, TINY_CLIP), _PROMPT),
    _network(
        "clip-bigg", "CLIPTextModelWithProjection", _tokens, (CLIP_BIG_G, TINY_CLIP_G), _PROMPT
    ),
    _network(
        "qwen2.5-vl-7b",
        "Qwen2_5_VLTextModel",
        _tokens,
        (QWEN_7B, TINY_QWEN),
        ((1, 128), _TINY_TEXT),
        "bf16",
    ),
    _network("vit-l", "ViTModel", _pixels, (LARGE, VIT), (_PICTURE, _SMALL)),
    _network("swin-b", "SwinModel", _pixels, (SWIN_B, TINY_SWIN), (_PICTURE, (56, 56))),
    _network(
        "dinov2-b",
        "Dinov2Model",
        _pixels,
        ({"image_size": 518, "patch_size": 14}, VIT),
        (_PICTURE, _SMALL),
    ),
    _network(
        "siglip-so400m",
        "SiglipVisionModel",
        _pixels,
        (SIGLIP, VIT),
        ((384, 384), _SMALL),
    ),
    _network(
        "convnext-b", "ConvNextModel", _pixels, (CONVNEXT_B, TINY_CONVNEXT), (_PICTURE, _SMALL)
    ),
    _network(
        "efficientnet-b3",
        "EfficientNetModel",
        _pixels,
        (EFFICIENTNET_B3, TINY_EFFICIENTNET),
        ((300, 300), (64, 64)),
    ),
    _network(
        "resnet50", "ResNetForImageClassification", _pixels, ({}, TINY_RESNET), (_PICTURE, _SMALL)
    ),
    _network("bert-base", "BertModel", _tokens, ({}, TINY_SIZES), ((1, 128), _TINY_TEXT)),
    _network("bert-large", "BertModel", _tokens, (LARGE, TINY_SIZES), ((1, 384), _TINY_TEXT)),
    _network("gpt2", "GPT2LMHeadModel", _tokens, ({}, TINY_GPT2), (_TEXT, _TINY_TEXT)),
    _network(
        "gpt2-decode",
        "GPT2LMHeadModel",
        _next_token,
        ({}, TINY_GPT2),
        (_TEXT, _TINY_TEXT),
        with_cache=True,
    ),
    NetworkModel("bevformer", _bevformer(BevConfig()), _bevformer(TINY_BEV), (480, 800), (64, 64)),
)
