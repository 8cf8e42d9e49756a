"""A1111's hires fix: what is drawn, how far it is, what is refused before any work."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from strop.drawing.embeddings import NoWeightsError
from strop.drawing.request import PictureRequest, PictureSize, SecondPass
from strop.serve.limits import ServeLimits
from strop.serve.second_pass import SecondWish, begun, sizes_of

from .asking import asking, opened, run
from .painters import CARD, FakePainter

TXT2IMG = "/sdapi/v1/txt2img"
LIMITS = ServeLimits(most_pixels=1 << 20, most_batch=4)
FIRST = PictureSize(512, 256)


@pytest.mark.parametrize(
    ("given", "size", "cover"),
    [
        ({"scale": 2.0}, (1024, 512), (1024, 512)),
        ({"scale": 1.3}, (664, 328), (664, 328)),  # 665.6 x 332.8, cut to multiples of 8
        ({"width": 768}, (768, 384), (768, 384)),
        ({"height": 384}, (768, 384), (768, 384)),
        ({"width": 600}, (600, 296), (600, 296)),
        ({"width": 512, "height": 512}, (512, 512), (1024, 512)),  # too wide: left and right go
        ({"width": 1024, "height": 256}, (1024, 256), (1024, 512)),
        ({"width": 768, "height": 384}, (768, 384), (768, 384)),
    ],
    ids=str,
)
def test_sizes_are_those_of_a1111(
    given: dict[str, Any], size: tuple[int, int], cover: tuple[int, int]
) -> None:
    found = sizes_of(FIRST, SecondWish(**given), 8, LIMITS)
    assert found == (PictureSize(*size), PictureSize(*cover))


def _begun(steps: int, strength: float, given: int = 0) -> SecondPass:
    first = PictureRequest("x", FIRST, steps, 4.0)
    return begun(first, first, SecondWish(steps=given, strength=strength), 8, LIMITS)


def test_it_has_as_many_steps_as_were_asked_for() -> None:
    """They are the last ones of a schedule with steps / strength of them."""
    for steps in range(1, 151):
        for share in (20, 30, 33, 50, 61, 70, 75, 90, 99, 100):
            second = _begun(steps, share / 100)
            assert second.request.begun_steps == steps
            assert second.request.steps == int(steps / min(share / 100, 0.999))
    assert _begun(20, 0.5, 7).request.begun_steps == 7
    assert _begun(20, 1.0).request.strength == 1


async def _asked(painter: FakePainter, **more: Any) -> Any:
    async with asking(painter) as asked:
        body = {"prompt": "a cat", "enable_hr": True, "steps": 4, "seed": 5, **more}
        return await asked.client.post(TXT2IMG, json=body)


def test_it_is_drawn_in_its_size_and_told() -> None:
    async def scenario() -> None:
        painter = FakePainter()
        answer = await _asked(painter, denoising_strength=0.5, hr_second_pass_steps=2, batch_size=2)
        assert answer.status_code == 200, answer.text
        assert [opened(image).size for image in answer.json()["images"]] == [(64, 32)] * 2
        info = json.loads(answer.json()["info"])
        assert (info["width"], info["denoising_strength"]) == (32, 0.5)
        assert info["extra_generation_params"] == {
            "Hires resize": "64x32", "Hires steps": 2, "Hires upscaler": "Latent",
        }  # fmt: skip
        assert info["infotexts"][0].endswith(
            "Size: 32x16, Denoising strength: 0.5, Hires resize: 64x32, Hires steps: 2,"
            " Hires upscaler: Latent"
        )
        (batch,) = painter.batches
        for number, request in enumerate(batch.requests):
            assert request.second is not None
            again = request.second.request
            assert (request.seed, again.seed) == (5 + number, 5 + number)
            assert (again.prompt, again.is_weighted, again.second) == ("a cat", True, None)
            assert (request.strength, again.strength, again.steps) == (1.0, 0.625, 4)

    run(scenario)


def test_it_may_have_its_own_words_and_sampler() -> None:
    async def scenario() -> None:
        painter = FakePainter()
        given = {
            "sampler_name": "DPM++ 2M",
            "scheduler": "Simple",
            "hr_sampler_name": "k_euler_a",
            "hr_scheduler": "SGM Uniform",
            "hr_prompt": "a (cat:1.2) <lora:ink>",
            "prompt": "a cat <lora:ink>",
            "hr_negative_prompt": "a, dog",
            "hr_upscaler": "lanczos",
            "hr_checkpoint_name": "Use same checkpoint",
        }
        answer = await _asked(painter, **given)
        assert answer.status_code == 200, answer.text
        shown = json.loads(answer.json()["info"])["extra_generation_params"]
        assert shown["Hires sampler"] == "Euler a"
        assert shown["Hires prompt"] == '"a (cat:1.2)"'
        same = {"hr_sampler_name": "Use same sampler", "hr_scheduler": "Use same scheduler"}
        assert (await _asked(painter, **(given | same))).status_code == 200
        first, other = (batch.requests[0] for batch in painter.batches)
        assert first.second is not None
        assert other.second is not None
        again = first.second.request
        assert (first.sampler, first.schedule) == ("DPM++ 2M", "simple")
        assert (again.sampler, again.schedule) == ("Euler a", "sgm_uniform")
        assert (again.prompt, again.negative, first.negative) == ("a (cat:1.2)", "a, dog", "")
        assert (first.chunks, again.chunks) == (1, 2)
        assert first.second.upscaler == "Lanczos"
        assert other.second.request.sampler == "DPM++ 2M"
        assert other.second.request.schedule == "simple"

    run(scenario)


def test_progress_counts_both_passes() -> None:
    async def scenario() -> None:
        painter = FakePainter()
        painter.gate.clear()
        async with asking(painter) as asked:
            import asyncio

            body = {"prompt": "a cat", "enable_hr": True, "steps": 4, "hr_second_pass_steps": 3}
            drawing = asyncio.ensure_future(asked.client.post(TXT2IMG, json=body))
            while not painter.batches:
                await asyncio.sleep(0.005)
            state = (await asked.client.get("/sdapi/v1/progress")).json()["state"]
            assert state["sampling_steps"] == 7
            painter.gate.set()
            assert (await drawing).status_code == 200

    run(scenario)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "pixels": ({"hr_scale": 3}, "hr_scale: 96x48 has more than the 4096 pixels"),
    "pixels of a side": ({"hr_resize_x": 128}, "hr_resize_x: 128x64 has more"),
    "pixels before the cut": ({"hr_resize_x": 8, "hr_resize_y": 96}, "hr_resize_x: 192x96 has"),
    "scale": ({"hr_scale": 0.5}, "hr_scale: 0.5 is not within 1 and 8"),
    "large scale": ({"hr_scale": 1e300}, "hr_scale: 1e+300 is not"),
    "multiple": ({"hr_resize_y": 33}, "hr_resize_y: 33 is no multiple of 8; take 32 or 40"),
    "side": ({"hr_resize_y": -8}, "hr_resize_y: -8 is not within 8 and 8192"),
    "thin": ({"width": 256, "height": 8, "hr_resize_x": 128}, "hr_resize_x: 128x0 has a side"),
    "upscaler": ({"hr_upscaler": "R-ESRGAN 4x+"}, "hr_upscaler: there is none of that name; there"),
    "steps": ({"hr_second_pass_steps": 151}, "hr_second_pass_steps: 151 is not within 1 and 150"),
    "fewer": ({"hr_second_pass_steps": -1}, "hr_second_pass_steps: -1 is not"),
    "strength": ({"denoising_strength": 0}, "denoising_strength: 0 is not above 0"),
    "fine": ({"denoising_strength": 0.001}, "denoising_strength: 0.001 with 4 steps is finer"),
    "sampler": ({"hr_sampler_name": "LMS"}, "hr_sampler_name: this model is not drawn with it"),
    "schedule": ({"hr_scheduler": "Karras"}, "hr_scheduler: it belongs to a sampler"),
    "prompt": ({"hr_prompt": "[a|b]"}, "hr_prompt: [a|b]"),
    "negative": ({"hr_negative_prompt": "(a:99)"}, "hr_negative_prompt: a weight of 99"),
    "LoRA": ({"hr_prompt": "x <lora:ink>"}, "hr_prompt: it has other LoRAs than the prompt"),
    "no LoRA": ({"prompt": "<lora:ink>", "hr_prompt": "x"}, "prompt: it is empty"),
    "LoRA left out": ({"prompt": "x <lora:ink>", "hr_prompt": "x"}, "hr_prompt: it has other"),
    "checkpoint": ({"hr_checkpoint_name": "other"}, "hr_checkpoint_name: this server does not"),
    "first size": ({"firstphase_width": 64}, "firstphase_width: this server does not do that"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_wrong_is_named_before_anything_is_drawn(name: str) -> None:
    async def scenario() -> None:
        painter = FakePainter()
        given, part = REFUSED[name]
        answer = await _asked(painter, **given)
        assert answer.status_code in (400, 422), answer.text
        assert answer.json()["error"]["message"].startswith(part)
        assert not painter.batches

    run(scenario)


def test_models_that_cannot_refuse_it_and_weights() -> None:
    async def scenario() -> None:
        painter = FakePainter(replace(CARD, reads_weights=False, draws_twice=False))
        answer = await _asked(painter)
        assert "enable_hr: a second pass is built for models with a UNet" in answer.text
        async with asking(painter) as asked:
            for path in (TXT2IMG, "/v1/images/generations", "/api/pictures"):
                more = {} if path == TXT2IMG else {"prompt_weights": True}
                answer = await asked.client.post(path, json={"prompt": "a (cat)", **more})
                assert answer.status_code == 400
                assert "prompt: this model reads no weights of words" in answer.text
            assert not painter.batches
            answer = await asked.client.post(TXT2IMG, json={"prompt": r"a \(cat\)"})
            assert answer.status_code == 200
            assert not (await asked.client.get("/api/model")).json()["prompt_weights"]
        request = painter.batches[0].requests[0]
        assert (request.prompt, request.is_weighted) == ("a (cat)", False)

    run(scenario)


def test_weights_that_leave_nothing_are_the_clients_fault() -> None:
    async def scenario() -> None:
        painter = FakePainter(fault=lambda _: NoWeightsError("take other weights"))
        answer = await _asked(painter, prompt="(a:-1)")
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "no_weights")
        assert "take other weights" in answer.text

    run(scenario)


def test_it_is_not_of_img2img_and_does_nothing_unless_it_is_on() -> None:
    async def scenario() -> None:
        from .asking import encoded, png

        painter = FakePainter()
        async with asking(painter) as asked:
            body = {"prompt": "x", "init_images": [encoded(png())], "enable_hr": True}
            answer = await asked.client.post("/sdapi/v1/img2img", json=body)
            assert answer.status_code == 422
            assert answer.text.count("enable_hr: this server does not do that")
            off = {"prompt": "x", "hr_scale": 99, "hr_upscaler": "any", "firstphase_width": 8}
            assert (await asked.client.post(TXT2IMG, json=off)).status_code == 200
            names = (await asked.client.get("/sdapi/v1/latent-upscale-modes")).json()
            assert names[0] == {"name": "Latent"}
            others = (await asked.client.get("/sdapi/v1/upscalers")).json()
            assert [one["name"] for one in others] == ["None", "Lanczos", "Nearest"]
        assert painter.batches[0].requests[0].second is None

    run(scenario)
