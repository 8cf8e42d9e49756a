"""A whole StableDiffusionPipeline: the same picture, restored exactly."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import strop
from strop.testing import psnr
from tests.e2e import tiny


def picture(pipe: Any, height: int = 16, width: int = 16, batch: int = 1, **more: Any) -> Tensor:
    g = torch.Generator().manual_seed(3)
    prompt = torch.randn(batch, 7, tiny.PROMPT_DIM, generator=g)
    return pipe(
        prompt_embeds=prompt,
        negative_prompt_embeds=prompt * 0.5,
        num_inference_steps=3,
        height=height,
        width=width,
        generator=g,
        output_type="pt",
        **more,
    ).images


@pytest.fixture(scope="module", params=tiny.DEVICES)
def pair(request: pytest.FixtureRequest):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.backends.cudnn, "allow_tf32", False)
        eager, fast = (tiny.pipeline().to(request.param) for _ in range(2))
        yield eager, strop.optimize(fast, options=tiny.options(strict=True))


@pytest.mark.parametrize(("height", "width", "batch"), [(16, 16, 1), (24, 16, 1), (16, 8, 2)])
def test_pictures_are_equal(pair, height: int, width: int, batch: int):
    eager, fast = pair
    expected = picture(eager, height, width, batch)
    # the bound of the project for fp32: below 60 dB differences could be seen in 8 bits
    assert psnr(picture(fast, height, width, batch), expected) >= 60
    assert len(fast.unet.forward.variants.all) == 1
    assert fast.unet.forward.counters.eager_calls == 0


def test_new_weights_make_new_pictures(pair):
    eager, fast = pair
    weights = tiny.unet(seed=5).state_dict()
    before = picture(fast)
    for pipe in (eager, fast):
        pipe.unet.load_state_dict(weights)  # copies into the old places
    after = picture(fast)
    assert not torch.equal(before, after)
    assert psnr(after, picture(eager)) >= 60
    assert len(fast.unet.forward.variants.all) == 1


def test_a_callback_may_change_the_latents(pair):
    eager, fast = pair

    def halve(pipe: Any, step: int, timestep: Tensor, kwargs: dict[str, Any]) -> dict[str, Any]:
        return {"latents": kwargs["latents"] * 0.5}

    more = {"callback_on_step_end": halve}
    assert psnr(picture(fast, **more), picture(eager, **more)) >= 60


def test_restore():
    pipe = tiny.pipeline()
    expected = picture(pipe)
    picture(strop.optimize(pipe, options=tiny.options()))
    strop.restore(pipe)
    assert "progress_bar" not in vars(pipe)
    assert not any("forward" in vars(m) for c in (pipe.unet, pipe.vae) for m in c.modules())
    assert torch.equal(picture(pipe), expected)
