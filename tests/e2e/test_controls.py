"""Several ControlNets, T2I-Adapters and IP-Adapters: the same pictures, one graph for all sizes."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from diffusers import AltDiffusionPipeline
from diffusers.pipelines.deprecated.alt_diffusion.modeling_roberta_series import (
    RobertaSeriesConfig,
    RobertaSeriesModelWithTransformation,
)
from torch import Tensor

import strop
from strop.api import dispatchers_of
from strop.testing import psnr
from tests.e2e import controls, tiny

# AltDiffusion and T2I-Adapters use names that diffusers is about to drop
pytestmark = pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")
SIZES = ((16, 16, 1), (24, 16, 1), (16, 32, 2))


def images(count: int, height: int, width: int, batch: int) -> Any:
    g = torch.Generator().manual_seed(7)
    found = [torch.rand(batch, 3, height, width, generator=g) for _ in range(count)]
    return found[0] if count == 1 else found


def assert_same_pictures(eager: Any, fast: Any, sizes: Any, more: Any) -> None:
    for height, width, batch in sizes:
        given = more(height, width, batch)
        wanted = controls.picture(eager, height, width, batch, **given)
        # the bound of the project for fp32: below 60 dB differences could be seen in 8 bits
        assert psnr(controls.picture(fast, height, width, batch, **given), wanted) >= 60


def assert_graphs(pipe: Any, wanted: Mapping[str, int]) -> None:
    """So many graphs for each component, and none of their calls in eager."""
    found = dispatchers_of(pipe)
    assert {name: len(found[name].variants.all) for name in wanted} == wanted
    for dispatcher in found.values():
        assert not dispatcher.counters.fallbacks


def test_two_controlnets() -> None:
    count = 2
    eager, fast = controls.with_controlnets(count), controls.with_controlnets(count)
    strop.optimize(fast, options=tiny.options())
    assert_same_pictures(
        eager,
        fast,
        SIZES,
        lambda *size: {"image": images(count, *size), "controlnet_conditioning_scale": [0.7, 0.4]},
    )
    assert_graphs(fast, {"controlnet": 1, "unet": 1})


@pytest.mark.parametrize("count", [1, 2])
def test_t2i_adapters(count: int) -> None:
    """The UNet takes their residuals out of the list that it is given."""
    eager, fast = controls.with_t2i_adapters(count), controls.with_t2i_adapters(count)
    strop.optimize(fast, options=tiny.options())
    scales: Any = 0.7 if count == 1 else [0.7, 0.5]
    assert_same_pictures(
        eager,
        fast,
        SIZES,
        lambda *size: {"image": images(count, *size), "adapter_conditioning_scale": scales},
    )
    assert_graphs(fast, {"unet": 1})


@pytest.mark.parametrize("is_plus", [False, True])
def test_ip_adapter(is_plus: bool) -> None:
    """Those of the plus kind have embeddings of four dims, that are no latents."""
    eager, fast = (controls.with_ip_adapter(is_plus=is_plus) for _ in range(2))
    strop.optimize(fast, options=tiny.options())
    embeds = controls.image_embeds(is_plus=is_plus)
    sizes = (*SIZES, (8, 8, 1), (64, 48, 1))
    assert_same_pictures(eager, fast, sizes, lambda *size: {"ip_adapter_image_embeds": embeds})
    assert_graphs(fast, {"unet": 1})


class Words:
    """A tokenizer that gives the same words for every prompt."""

    model_max_length = 12

    def __call__(self, prompts: Any, **_: Any) -> SimpleNamespace:
        count = len(prompts) if isinstance(prompts, list) else 1
        ids = torch.randint(3, 60, (count, 12), generator=torch.Generator().manual_seed(1))
        return SimpleNamespace(input_ids=ids, attention_mask=torch.ones_like(ids))

    def tokenize(self, prompt: str) -> list[str]:
        return [prompt]

    added_tokens_encoder: Mapping[str, int] = {}


@pytest.mark.parametrize("looks_before_the_end", [False, True])
def test_alt_diffusion(looks_before_the_end: bool) -> None:
    def pipeline() -> Any:
        parts = tiny.pipeline().components
        parts.pop("image_encoder")
        torch.manual_seed(0)
        config = RobertaSeriesConfig(
            hidden_size=16,
            project_dim=tiny.PROMPT_DIM,
            intermediate_size=32,
            vocab_size=64,
            num_attention_heads=2,
            num_hidden_layers=2,
            max_position_embeddings=40,
            pad_token_id=1,
            has_pre_transformation=looks_before_the_end,
        )
        parts["text_encoder"] = RobertaSeriesModelWithTransformation(config).eval()
        pipe = AltDiffusionPipeline(**parts, requires_safety_checker=False)
        pipe.tokenizer = Words()
        pipe.set_progress_bar_config(disable=True)
        return pipe

    def picture(pipe: Any, height: int, width: int, batch: int) -> Tensor:
        g = torch.Generator().manual_seed(3)
        found = pipe(
            ["a cat"] * batch,
            height=height,
            width=width,
            num_inference_steps=2,
            generator=g,
            output_type="pt",
        )
        return found.images  # type: ignore[no-any-return]

    eager, fast = pipeline(), strop.optimize(pipeline(), options=tiny.options())
    for size in SIZES:
        assert psnr(picture(fast, *size), picture(eager, *size)) >= 60
    assert_graphs(fast, {"text_encoder": 1, "unet": 1})
