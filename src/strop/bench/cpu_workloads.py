"""Make the models of ``strop bench cpu`` that are not recommendation: a UNet and a small BERT."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from strop.models import sprites

BATCH, VOCABULARY = 2, 30522


class SpritesStep(nn.Module):
    """Runs one step of the sprites UNet: latents (B, 4, H, W), a time (), text (B, 77, C)."""

    def __init__(self, unet: nn.Module) -> None:
        super().__init__()
        self.unet = unet

    def forward(self, latents: Tensor, time: Tensor, text: Tensor) -> Tensor:
        noise: Tensor = self.unet(latents, time, text, return_dict=False)[0]
        return noise


def sprites_step() -> SpritesStep:
    """Return the UNet that comes with Strop, in fp32."""
    return SpritesStep(sprites.load().unet.float().eval().requires_grad_(False)).eval()


def sprites_inputs(
    model: nn.Module, shape: tuple[int, ...], generator: torch.Generator
) -> tuple[Tensor, ...]:
    """Return latents of two pictures of ``shape``, height and width, and what goes with them."""
    unet: Any = model.unet
    text = torch.randn(BATCH, 77, int(unet.config.cross_attention_dim), generator=generator)
    return torch.randn(BATCH, 4, *shape, generator=generator), torch.tensor(500), text


class Bert(nn.Module):
    """Gives the hidden states (B, S, 256) and the logits (B, 4) of a classifier."""

    def __init__(self) -> None:
        from transformers import BertConfig, BertForSequenceClassification

        super().__init__()
        config = BertConfig(
            hidden_size=256,
            num_hidden_layers=4,
            num_attention_heads=4,
            intermediate_size=1024,
            num_labels=4,
        )
        config._attn_implementation = "sdpa"
        self.whole = BertForSequenceClassification(config)

    def forward(self, ids: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        found = self.whole.bert(input_ids=ids, attention_mask=mask)
        return found.last_hidden_state, self.whole.classifier(found.pooler_output)


def bert() -> Bert:
    """Return BERT-mini's architecture with random weights, a little larger than those of a new
    model, as trained weights are."""
    torch.manual_seed(0)
    model = Bert().eval().requires_grad_(False)
    for name, weight in model.named_parameters():
        if weight.dim() == 2 and "embeddings" not in name:
            weight.mul_(2.5)
        elif name.endswith("bias"):
            weight.add_(0.05 * torch.randn(weight.shape))
    return model


def bert_inputs(
    model: nn.Module, shape: tuple[int, ...], generator: torch.Generator
) -> tuple[Tensor, ...]:
    """Return token numbers (B, S) and a mask of ones (B, S)."""
    ids = torch.randint(0, VOCABULARY, shape, generator=generator)
    return ids, torch.ones_like(ids)


def in_int8(model: nn.Module, *, has_zero_points: bool = False) -> Any:
    """Return a copy in bf16 whose linears torchao has quantised: int8 weights, and rows quantised
    in each call, by a scale each, or by a scale and a zero point."""
    from torchao.quantization import (
        Int8DynamicActivationInt8WeightConfig,
        MappingType,
        quantize_,
    )

    found = copy.deepcopy(model).bfloat16()
    kind = MappingType.ASYMMETRIC if has_zero_points else MappingType.SYMMETRIC
    how: dict[str, Any] = {"version": 2, "set_inductor_config": False, "act_mapping_type": kind}
    quantize_(found, Int8DynamicActivationInt8WeightConfig(**how))
    return found
