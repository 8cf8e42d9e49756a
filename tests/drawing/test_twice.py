"""A second pass: the bits of two calls of diffusers, sizes, steps, every upscaler."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import AutoPipelineForImage2Image
from PIL import Image
from torch.nn import functional

from strop.drawing.draw import batch_key, draw
from strop.drawing.request import PictureRequest, PictureSize, SecondPass, StepDone
from strop.drawing.twice import UPSCALERS, enlarged_latents, enlarged_picture
from strop.models import sprites

pytestmark = pytest.mark.filterwarnings("ignore")

RED = PictureRequest("a red circle", PictureSize(64, 32), 3, 4.0, seed=1)
LARGE = PictureSize(96, 48)


def _second(upscaler: str = "Latent", size: PictureSize = LARGE, **more: Any) -> SecondPass:
    again = replace(RED, size=size, steps=4, strength=0.5, **more)
    return SecondPass(again, size, upscaler)


@pytest.fixture(scope="module")
def pipe(tiny_model: Path) -> Any:
    loaded = sprites.load_from(tiny_model)
    loaded.set_progress_bar_config(disable=True)
    return loaded


def _by_hand(pipe: Any, is_latent: bool) -> torch.Tensor:
    how = {"guidance_scale": 4.0, "generator": torch.Generator().manual_seed(1)}
    output = "latent" if is_latent else "pil"
    (first,) = pipe(
        "a red circle", width=64, height=32, num_inference_steps=3, output_type=output, **how
    ).images
    if is_latent:
        factor = pipe.vae_scale_factor
        begin = functional.interpolate(first[None], (48 // factor, 96 // factor), mode="bilinear")
    else:
        begin = first.resize((96, 48), Image.Resampling.LANCZOS)
    again = AutoPipelineForImage2Image.from_pipe(pipe)
    how["generator"] = torch.Generator().manual_seed(1)
    return again(  # type: ignore[no-any-return]
        "a red circle", begin, strength=0.5, num_inference_steps=4, output_type="pt", **how
    ).images[0]


@pytest.mark.parametrize("upscaler", ["Latent", "Lanczos"])
def test_it_has_the_bits_of_two_calls(pipe: Any, upscaler: str) -> None:
    (found,) = draw(pipe, [replace(RED, second=_second(upscaler))])
    assert torch.equal(found, _by_hand(pipe, upscaler == "Latent"))


def test_both_passes_count_as_steps(pipe: Any) -> None:
    told: list[StepDone] = []
    request = replace(RED, second=_second())
    draw(pipe, [request], told.append)
    assert [(done.number, done.total) for done in told] == [(n, 5) for n in range(1, 6)]
    assert request.num_steps == 5
    assert request.final_size == LARGE
    assert told[3].latents.shape[-1] == told[0].latents.shape[-1] * 3 // 2


def test_samplers_that_call_twice_are_counted_and_may_differ(
    pipe: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from diffusers import EulerDiscreteScheduler

    own = EulerDiscreteScheduler(beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear")
    monkeypatch.setattr(pipe, "scheduler", own)
    for first, second, total in (
        ("Heun", "Euler a", 5 + 2),
        ("", "Heun", 3 + 3),
        ("Heun",) * 2 + (8,),
    ):
        told: list[StepDone] = []
        asked = replace(RED, sampler=first, second=_second(sampler=second))
        draw(pipe, [asked], told.append)
        assert [(done.number, done.total) for done in told] == [
            (n, total) for n in range(1, total + 1)
        ]
    assert pipe.scheduler is own


def test_every_upscaler_draws_and_none_is_another(pipe: Any) -> None:
    made = {name: draw(pipe, [replace(RED, second=_second(name))]) for name in UPSCALERS}
    assert all(pixels.shape == (1, 3, 48, 96) for pixels in made.values())
    assert torch.equal(made.pop("None"), made["Lanczos"])
    bits = [pixels.numpy().tobytes() for pixels in made.values()]
    assert len({*bits}) >= len(bits) - 1, "the two nearest ones may agree"


def test_a_batch_draws_each_picture_as_if_alone(pipe: Any) -> None:
    requests = [
        replace(RED, seed=seed, second=_second(seed=seed, prompt=f"a {colour} circle"))
        for seed, colour in ((1, "red"), (2, "blue"))
    ]
    for pixels, request in zip(draw(pipe, requests), requests, strict=True):
        torch.testing.assert_close(pixels, draw(pipe, [request])[0], atol=1e-5, rtol=0)


def test_what_is_too_much_is_cut_off_on_both_sides() -> None:
    second = SecondPass(
        replace(RED, size=PictureSize(64, 64)), PictureSize(128, 64), "Latent (nearest)"
    )
    latents = torch.arange(8.0).view(1, 1, 1, 8).expand(1, 4, 4, 8)
    assert enlarged_latents(latents, second, 8)[0, 0, 0].tolist() == [2, 2, 3, 3, 4, 4, 5, 5]
    pixels = torch.arange(64.0).view(1, 1, 64).expand(3, 32, 64) / 255
    cut = enlarged_picture(pixels, replace(second, upscaler="Nearest"))
    assert cut.size == (64, 64)
    assert (cut.getpixel((0, 0)), cut.getpixel((63, 63))) == ((16,) * 3, (47,) * 3)


def test_requests_that_differ_in_the_second_pass_are_not_drawn_together(pipe: Any) -> None:
    second = _second()
    others = [
        None,
        replace(second, upscaler="Lanczos"),
        replace(second, cover=PictureSize(96, 64)),
        *(
            replace(second, request=replace(second.request, **change))
            for change in ({"strength": 0.9}, {"steps": 5}, {"sampler": "Euler a"}, {"chunks": 2})
        ),
    ]
    keys = {batch_key(replace(RED, second=one)) for one in (second, *others)}
    assert len(keys) == 1 + len(others)


def test_models_without_a_unet_are_refused(tiny_dit: Path) -> None:
    flux = sprites.load_from(tiny_dit)
    with pytest.raises(ValueError, match="built for UNets; FluxPipeline has none"):
        draw(flux, [replace(RED, second=_second())])
