"""Describe one row of the zoo, and build its models."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from strop.bench import zoo_modules as own
from strop.bench.zoo_inputs import VOCABULARY, Inputs, Shape, ZooSizes

Config = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ZooModel:
    """Describe one architecture. ``build`` needs no argument, ``inputs`` a shape; both draw from
    torch's generator."""

    name: str
    family: str
    build: Callable[[], nn.Module]
    inputs: Callable[..., Inputs]
    sizes: ZooSizes

    def made(self, seed: int = 0) -> nn.Module:
        torch.manual_seed(seed)
        return self.build().eval().requires_grad_(False)

    def given(self, shape: Shape, seed: int = 1) -> Inputs:
        torch.manual_seed(seed)
        return self.inputs(*shape)


# builders


def hf(kind: str, **config: Any) -> Callable[[], nn.Module]:
    """Return a builder of a class of transformers from its own config class."""

    def build() -> nn.Module:
        model = getattr(importlib.import_module("transformers"), kind)
        made: nn.Module = model(model.config_class(**config))
        return made

    return build


def cached(kind: str, **config: Any) -> Callable[[], nn.Module]:
    """Return a builder of a model that takes and gives keys and values of the past as plain
    tensors."""
    build = hf(kind, **config)
    return lambda: own.WithCache(build())


def diffusers(kind: str, method: str = "forward", **config: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        made: nn.Module = getattr(importlib.import_module("diffusers"), kind)(**config)
        return made if method == "forward" else own.Method(made, method)

    return build


# tiny widths in the words of config classes that several models share

SIZES: Config = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
BERT: Config = {
    **SIZES,
    "vocab_size": VOCABULARY,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
}
BART: Config = {
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "max_position_embeddings": 64,
    "pad_token_id": 1,
    "decoder_start_token_id": 2,
}
