"""One function draws for all commands: noise by seed, batches, starts, previews, faults."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import EulerDiscreteScheduler, HeunDiscreteScheduler
from PIL import Image

from strop.drawing.draw import NotFiniteError, batch_key, draw, to_preview
from strop.drawing.request import PictureRequest, PictureSize, StepDone
from strop.drawing.samplers import UnknownSamplerError
from strop.models import sprites

pytestmark = pytest.mark.filterwarnings("ignore")

SIZE = PictureSize(64, 32)
RED = PictureRequest("a red circle", SIZE, 3, 4.0, seed=1)
BLUE = PictureRequest("a blue square", SIZE, 3, 4.0, seed=2)


@pytest.fixture(scope="module")
def pipe(tiny_model: Path) -> Any:
    loaded = sprites.load_from(tiny_model)
    loaded.set_progress_bar_config(disable=True)
    return loaded


def _direct(pipe: Any, request: PictureRequest, **more: Any) -> torch.Tensor:
    """What a user's own call of the pipeline gives."""
    generator = torch.Generator().manual_seed(request.seed)
    return pipe(  # type: ignore[no-any-return]
        request.prompt,
        num_inference_steps=request.steps,
        guidance_scale=request.guidance,
        negative_prompt=request.negative or None,
        generator=generator,
        output_type="pt",
        **more,
    ).images[0]


def test_one_picture_has_the_bits_of_a_plain_call(pipe: Any) -> None:
    for request in (RED, replace(RED, negative="a blue square")):
        own = _direct(pipe, request, width=64, height=32)
        assert torch.equal(draw(pipe, [request])[0], own)


def test_each_picture_of_a_batch_has_the_noise_of_its_seed(pipe: Any) -> None:
    together = draw(pipe, [RED, BLUE, replace(RED, seed=5)])
    for pixels, request in zip(together, (RED, BLUE, replace(RED, seed=5)), strict=True):
        torch.testing.assert_close(pixels, draw(pipe, [request])[0], atol=1e-5, rtol=0)
    assert not torch.allclose(together[0], together[2], atol=1e-2)


def test_negative_prompts_of_a_batch_are_their_own(pipe: Any) -> None:
    requests = [replace(RED, negative="a blue square"), replace(RED, negative="a green star")]
    first, second = draw(pipe, requests)
    torch.testing.assert_close(first, draw(pipe, requests[:1])[0], atol=1e-5, rtol=0)
    assert not torch.equal(first, second)


def test_a_start_is_followed(pipe: Any) -> None:
    start = Image.new("RGB", (64, 32), (200, 30, 30))
    request = replace(RED, start=start, strength=0.7, steps=4)
    seen: list[StepDone] = []
    pixels = draw(pipe, [request], seen.append)[0]
    assert pixels.shape == (3, 32, 64)
    assert [(done.number, done.total) for done in seen] == [(1, 2), (2, 2)]
    assert not torch.equal(pixels, draw(pipe, [replace(request, start=None)])[0])


def test_requests_that_differ_in_what_is_shared_are_not_drawn_together(pipe: Any) -> None:
    start = Image.new("RGB", (64, 32))
    others = [
        replace(RED, steps=4),
        replace(RED, guidance=3.0),
        replace(RED, size=PictureSize(32, 64)),
        replace(RED, negative="a blue square"),
        replace(RED, start=start),
        replace(RED, start=start, strength=0.5),
    ]
    assert len({batch_key(request) for request in (RED, *others)}) == 1 + len(others)
    for other in others:
        with pytest.raises(ValueError, match="one call"):
            draw(pipe, [RED, other])


def test_steps_are_told_and_their_latents_can_be_shown(pipe: Any) -> None:
    shown = []
    pixels = draw(pipe, [RED], lambda done: shown.append(to_preview(pipe, done.latents[:1], RED)))
    assert [preview.shape for preview in shown] == [(3, 32, 64)] * 3
    torch.testing.assert_close(shown[-1], pixels[0], atol=1e-5, rtol=0)


def test_a_preview_of_the_transformers_kind(tiny_dit: Path) -> None:
    pipe = sprites.load_from(tiny_dit)
    pipe.set_progress_bar_config(disable=True)
    request = replace(RED, guidance=1.0)
    shown: list[torch.Tensor] = []
    pixels = draw(pipe, [request], lambda d: shown.append(to_preview(pipe, d.latents[:1], request)))
    torch.testing.assert_close(shown[-1], pixels[0], atol=1e-5, rtol=0)


def test_what_a_step_raises_ends_the_drawing(pipe: Any) -> None:
    class Enough(Exception):
        pass

    def stop(done: StepDone) -> None:
        if done.number == 2:
            raise Enough

    with pytest.raises(Enough):
        draw(pipe, [RED], stop)
    assert torch.equal(draw(pipe, [RED])[0], _direct(pipe, RED, width=64, height=32))


def test_a_picture_that_is_not_finite_is_refused(tiny_model: Path) -> None:
    damaged = sprites.load_from(tiny_model)
    damaged.set_progress_bar_config(disable=True)
    with torch.no_grad():
        damaged.vae.decoder.conv_out.bias.fill_(float("nan"))
    with pytest.raises(NotFiniteError, match="NaN"):
        draw(damaged, [RED])


def test_a_sampler_draws_as_its_scheduler_does_and_leaves_nothing_behind(
    pipe: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Heun's calls the model twice in a step, and steps are told as often."""
    own = EulerDiscreteScheduler(beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear")
    monkeypatch.setattr(pipe, "scheduler", own)
    told: list[StepDone] = []
    heun = replace(RED, steps=4, sampler="Heun", schedule="karras")
    found = draw(pipe, [heun], told.append)[0]
    assert pipe.scheduler is own
    assert [(done.number, done.total) for done in told] == [(n, 7) for n in range(1, 8)]
    with pytest.raises(UnknownSamplerError, match="LMS"):
        draw(pipe, [replace(RED, sampler="LMS")])
    assert pipe.scheduler is own
    begun = replace(heun, start=Image.new("RGB", (64, 32), "red"), strength=0.5)
    assert batch_key(begun) != batch_key(replace(begun, mask=begun.start))
    assert batch_key(heun) != batch_key(replace(heun, schedule="simple"))
    told.clear()
    draw(pipe, [begun], told.append)
    assert [(done.number, done.total) for done in told] == [(n, 3) for n in range(1, 4)]
    pipe.scheduler = HeunDiscreteScheduler.from_config(own.config, use_karras_sigmas=True)
    assert torch.equal(found, _direct(pipe, replace(heun, sampler=""), width=64, height=32))
