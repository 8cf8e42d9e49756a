"""Diffusion transformers whose rotations torch would run: strided writes, complex numbers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from torch import nn

import strop
from strop.bench.transformer_models import TINY_WAN
from strop.options import Options


def _wan() -> tuple[nn.Module, Callable[[int], dict[str, Any]]]:
    def inputs(side: int) -> dict[str, Any]:
        return {
            "hidden_states": torch.randn(1, 16, 2, side, 4),
            "timestep": torch.tensor([500.0]),
            "encoder_hidden_states": torch.randn(1, 6, 16),
        }

    return diffusers.WanTransformer3DModel(**TINY_WAN), inputs


def _qwen_image() -> tuple[nn.Module, Callable[[int], dict[str, Any]]]:
    def inputs(side: int) -> dict[str, Any]:
        return {
            "hidden_states": torch.randn(1, side * 4, 16),
            "encoder_hidden_states": torch.randn(1, 7, 16),
            "encoder_hidden_states_mask": torch.ones(1, 7, dtype=torch.long),
            "timestep": torch.tensor([0.5]),
            "img_shapes": [(1, side, 4)],
        }

    model = diffusers.QwenImageTransformer2DModel(
        in_channels=16,
        out_channels=4,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=16,
        axes_dims_rope=(8, 4, 4),
    )
    return model, inputs


# Wan cuts its video into patches by a 3-d convolution
MODELS = {"Wan": (_wan, {"aten.convolution.default"}), "Qwen-Image": (_qwen_image, set())}


@pytest.mark.parametrize("name", MODELS)
def test_no_rotation_is_a_call(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    build, others = MODELS[name]
    model, inputs = build()
    model.eval()
    calls = [inputs(4), inputs(6)]
    with torch.no_grad():
        wanted = [model(**call, return_dict=False)[0] for call in calls]
        strop.optimize(model, options=Options(cache_dir=str(tmp_path)))
        found = [model(**call, return_dict=False)[0] for call in calls]
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    assert not model.forward.counters.fallbacks
    for variant in model.forward.variants.all:
        steps = variant.program.call_steps
        assert {dict(step.attrs)["target"] for step in steps if step.op == "aten"} == others
