"""Loops of pipelines that share compiled components, and components put in others' places."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from diffusers import StableDiffusionImg2ImgPipeline, StableDiffusionPipeline
from diffusers.modular_pipelines import FluxAutoBlocks
from torch import Tensor

import strop
from strop.api import dispatchers_of
from strop.testing import psnr
from tests.e2e import controls, dits, tiny


def from_picture(pipe: Any) -> Tensor:
    """(1, 4, 8, 8), a latent, in two steps from a picture."""
    g = torch.Generator().manual_seed(3)
    prompt = torch.randn(1, 7, tiny.PROMPT_DIM, generator=g)
    pipe.set_progress_bar_config(disable=True)
    found = pipe(
        image=torch.rand(1, 3, 16, 16, generator=g),
        prompt_embeds=prompt,
        generator=g,
        negative_prompt_embeds=prompt / 2,
        num_inference_steps=4,
        strength=0.8,
        output_type="latent",
    )
    return torch.as_tensor(found.images)


@pytest.mark.parametrize("way", ["from_pipe", "components"])
def test_a_pipeline_made_of_an_optimised_one_hoists_too(way: str) -> None:
    def other(pipe: Any) -> Any:
        if way == "from_pipe":
            return StableDiffusionImg2ImgPipeline.from_pipe(pipe)
        return StableDiffusionImg2ImgPipeline(**pipe.components, requires_safety_checker=False)

    eager = other(tiny.pipeline())
    fast = other(strop.optimize(tiny.pipeline(), options=tiny.options(strict=True)))
    assert psnr(from_picture(fast), from_picture(eager)) >= 60
    hoisted = fast.unet.forward.counters.hoisted
    assert (hoisted.num_runs, hoisted.num_reuses) == (1, 2)
    assert not fast.unet.forward.loop.is_running
    strop.restore(fast)
    assert torch.equal(from_picture(fast), from_picture(eager))


def test_what_a_pipeline_shares_with_an_optimised_one_stays_compiled() -> None:
    options = tiny.options(strict=True)
    first = strop.optimize(tiny.pipeline(), options=options)
    controls.picture(first, 16, 16)
    unet, traced = first.unet.forward, first.unet.forward.variants.num_captures
    other = StableDiffusionImg2ImgPipeline.from_pipe(first)
    strop.optimize(other, options=options)
    wanted = from_picture(StableDiffusionImg2ImgPipeline.from_pipe(tiny.pipeline()))
    assert psnr(from_picture(other), wanted) >= 60
    assert other.unet.forward is unet
    assert unet.variants.num_captures == traced
    assert unet.counters.hoisted.num_reuses > 0
    strop.restore(first)
    assert other.unet.forward is unet, "the other pipeline is still optimised"
    strop.optimize(other, options=replace(options, hoist=False))
    assert other.unet.forward is not unet
    strop.restore(other)
    assert "forward" not in vars(other.unet)
    assert torch.equal(from_picture(other), wanted)


def test_a_component_in_the_place_of_a_compiled_one_is_compiled(caplog: Any) -> None:
    eager = tiny.pipeline()
    fast = strop.optimize(tiny.pipeline(), options=tiny.options(strict=True))
    controls.picture(fast, 16, 16)
    caplog.set_level("INFO", logger="strop")
    for pipe in (eager, fast):
        pipe.unet, pipe.vae = tiny.unet(seed=4), tiny.vae(seed=4)
    assert psnr(controls.picture(fast, 16, 16), controls.picture(eager, 16, 16)) >= 60
    found = dispatchers_of(fast)
    assert sorted(found) == ["unet", "vae.decoder", "vae.encoder"]
    assert found["unet"].counters.calls == 3
    assert found["unet"].counters.hoisted.num_reuses == 2
    assert found["unet"].options.strict
    assert "unet, which is put in the place of a compiled one" in caplog.text
    fast.unet.forward.eager  # noqa: B018
    strop.restore(fast)
    fast.unet = tiny.unet(seed=5)  # nobody has asked for it
    assert not dispatchers_of(fast)


def test_loops_of_modular_pipelines(monkeypatch: pytest.MonkeyPatch) -> None:
    def pipeline() -> Any:
        parts, blocks = dits.flux().components, FluxAutoBlocks()
        blocks.sub_blocks.pop("text_encoder")
        pipe = blocks.init_pipeline()
        pipe.update_components(**{n: parts[n] for n in ("transformer", "vae", "scheduler")})
        pipe.set_progress_bar_config(disable=True)
        return pipe

    def picture(pipe: Any) -> Tensor:
        g = torch.Generator().manual_seed(3)
        found = pipe(
            prompt_embeds=torch.randn(1, 9, dits.WIDTH, generator=g),
            height=32,
            width=32,
            pooled_prompt_embeds=torch.randn(1, dits.POOLED, generator=g),
            generator=g,
            num_inference_steps=3,
            output_type="latent",
            output="images",
        )
        return torch.as_tensor(found)

    eager, fast = pipeline(), strop.optimize(pipeline(), options=tiny.options())
    dispatcher, seen = fast.transformer.forward, []
    served = dispatcher._serve

    def serve(*call: Any, **how: Any) -> Any:
        seen.append(dispatcher.loop.number if dispatcher.loop.is_running else None)
        return served(*call, **how)

    monkeypatch.setattr(dispatcher, "_serve", serve)
    assert psnr(picture(fast), picture(eager)) >= 60
    assert len(seen) == 3
    assert len({*seen}) == 1
    assert None not in seen
    assert not dispatcher.loop.is_running
    fast.update_components(transformer=dits.flux(seed=3).transformer)
    eager.update_components(transformer=dits.flux(seed=3).transformer)
    assert psnr(picture(fast), picture(eager)) >= 60
    assert fast.transformer.forward.counters.calls == 3


def test_a_bar_takes_the_arguments_that_its_class_adds() -> None:
    """Marigold's bars have a description."""
    seen: list[tuple[str, bool]] = []

    class Own(StableDiffusionPipeline):
        def progress_bar(
            self, iterable: Any = None, total: Any = None, desc: str = "", leave: bool = True
        ) -> Any:
            seen.append((desc, leave))
            return iterable if total is None else nullcontext(total)

    pipe: Any = tiny.pipeline()
    pipe.__class__ = Own
    strop.optimize(pipe, options=tiny.options())
    assert list(pipe.progress_bar(range(2), desc="steps", leave=False)) == [0, 1]
    with pipe.progress_bar(total=3, desc="steps") as bar:
        assert bar == 3
        assert pipe.unet.forward.loop.is_running
    assert seen == [("steps", False), ("steps", True)]
