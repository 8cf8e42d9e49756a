"""The model behind the server: bits, batches, adapters, previews, stopping."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image, ImageChops

import strop
from strop.api import dispatchers_of
from strop.cli import adapters, models, pictures, sampling
from strop.cli import serve as command
from strop.drawing.request import PictureRequest, PictureSize, SecondPass
from strop.drawing.samplers import SAMPLERS
from strop.serve.limits import ServeLimits
from strop.serve.order import Adapters
from strop.serve.studio import PictureBatch, StepTold, Stopped, Studio

from .asking import GENERATE, asking, opened, run

pytestmark = pytest.mark.filterwarnings("ignore")

SIZE = PictureSize(64, 32)
RED = PictureRequest("a red circle", SIZE, 3, 4.0, seed=1)
LIMITS = ServeLimits(most_pixels=4 * 64 * 96, most_batch=4)


def _save_lora(model: Path, file: Path, seed: int) -> None:
    from diffusers import StableDiffusionPipeline
    from peft import LoraConfig, get_peft_model_state_dict

    pipe = StableDiffusionPipeline.from_pretrained(model, safety_checker=None)
    torch.manual_seed(seed)
    pipe.unet.add_adapter(
        LoraConfig(r=2, init_lora_weights=False, target_modules=["to_q", "to_v", "to_out.0"])
    )
    StableDiffusionPipeline.save_lora_weights(
        file.parent,
        unet_lora_layers=get_peft_model_state_dict(pipe.unet),
        weight_name=file.name,
    )


@pytest.fixture(scope="module")
def folder(weighing_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of two LoRAs."""
    made = tmp_path_factory.mktemp("loras")
    for seed, name in enumerate(("ink", "style")):
        _save_lora(weighing_model, made / f"{name}.safetensors", seed)
    return made


@pytest.fixture(scope="module")
def served(weighing_model: Path, cache_folder: Path, folder: Path) -> Iterator[Studio]:
    """What ``strop serve`` loads: the tiny model with two LoRAs, and the same one in eager."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STROP_CACHE_DIR", str(cache_folder))
        found = replace(models.find_model(str(weighing_model)), default_size=SIZE)
        files = command.lora_files(folder)
        yield command.load_studio(found, torch.float32, "cpu", files, True, threads=1)


def _draw(studio: Studio, *requests: PictureRequest, **how: Any) -> list[bytes]:
    return list(studio.draw(PictureBatch(requests, **how), lambda _: None, lambda: True).pictures)


def _as_generated(
    model: Path, folder: Path, request: PictureRequest, loras: Adapters = ()
) -> bytes:
    """What ``strop generate --lora FILE:SCALE`` draws, with a model that it has just loaded."""
    files = [adapters.ScaledFile(folder / f"{name}.safetensors", scale) for name, scale in loras]
    loaded = models.load(models.find_model(str(model)), torch.float32, "cpu")
    pipe = adapters.add_to(loaded, adapters.Additions(files), torch.float32)
    return pictures.to_picture(sampling.draw(strop.optimize(pipe), request)).tobytes()


def test_one_picture_has_the_bits_of_generate(
    served: Studio, weighing_model: Path, folder: Path
) -> None:
    for loras in ((), (("ink", 0.8),), (("style", 0.5), ("ink", -1.0)), ()):
        expected = _as_generated(weighing_model, folder, RED, loras)
        assert _draw(served, RED, adapters=loras) == [expected]


def test_adapters_of_one_batch_leave_nothing_behind(served: Studio) -> None:
    plain = _draw(served, RED)
    ink = _draw(served, RED, adapters=(("ink", 1.0),))
    style = _draw(served, RED, adapters=(("style", 1.0),))
    assert len({*plain, *ink, *style}) == 3
    assert _draw(served, RED) == plain
    assert _draw(served, RED, adapters=(("ink", 1.0),)) == ink
    assert not any(strop.explain(served._pipes[False]).fallbacks)


def test_a_batch_differs_in_last_bits_at_most(served: Studio) -> None:
    requests = [replace(RED, seed=seed) for seed in range(4)]
    for request, together in zip(requests, _draw(served, *requests), strict=True):
        (alone,) = _draw(served, request)
        pairs = zip(together, alone, strict=True)
        assert max(abs(a - b) for a, b in pairs) <= 1, "of 255"


def test_eager_draws_the_same_picture(served: Studio) -> None:
    for loras in ((), (("ink", 1.0),)):
        (ours,) = _draw(served, RED, adapters=loras)
        (eager,) = _draw(served, RED, adapters=loras, is_eager=True)
        assert max(abs(a - b) for a, b in zip(ours, eager, strict=True)) <= 1
    unet = dispatchers_of(served._pipes[False])["unet"]
    before = unet.counters.calls
    _draw(served, RED, is_eager=True)
    assert unet.counters.calls == before


def _sent(picture: Image.Image) -> str:
    target = io.BytesIO()
    picture.save(target, format="PNG")
    return base64.b64encode(target.getvalue()).decode()


def _graphs(served: Studio) -> dict[str, int]:
    return {name: len(d.variants.all) for name, d in dispatchers_of(served._pipes[False]).items()}


def test_samplers_and_masks_at_many_sizes_compile_nothing_anew(served: Studio) -> None:
    """Over A1111's interface: every sampler, beside eager; then parts of pictures drawn anew, whose
    rest keeps its bytes."""
    start = Image.effect_noise((96, 64), 80).convert("RGB")
    hole = Image.new("L", start.size)
    hole.paste(255, (8, 8, 40, 40))
    text = {"prompt": RED.prompt, "seed": 1, "steps": 4, "cfg_scale": 4.0}
    part = {"init_images": [_sent(start)], "mask": _sent(hole), "mask_blur": 0, "steps": 6}

    async def scenario() -> None:
        async with asking(served, LIMITS) as asked:
            await asked.client.post("/sdapi/v1/img2img", json={**text, **part})  # which encodes
            before = _graphs(served)
            assert {*served.card.samplers} == SAMPLERS.keys() - {"Heun"}  # see its own test
            for number, name in enumerate(served.card.samplers):
                size = {"width": 32 + 16 * number, "height": 64}
                body = {**text, **size, "sampler_name": name}
                answer = await asked.client.post("/sdapi/v1/txt2img", json=body)
                assert answer.status_code == 200, answer.text
                own = opened(answer.json()["images"][0]).tobytes()
                wish = PictureSize(size["width"], size["height"])
                request = replace(RED, size=wish, steps=4, sampler=name)
                (eager,) = _draw(served, request, is_eager=True)
                assert max(abs(a - b) for a, b in zip(own, eager, strict=True)) <= 1, name
                (other,) = _draw(served, replace(request, sampler=""))
                assert (other == own) is (name == "DPM++ 2M"), "which is this model's own"
            for width, close, name in ((64, 0, "Euler a"), (96, 1, ""), (32, 1, "DDIM")):
                body = {**text, **part, "inpaint_full_res": close, "sampler_name": name}
                answer = await asked.client.post(
                    "/sdapi/v1/img2img", json={**body, "width": width, "height": 64}
                )
                assert answer.status_code == 200, answer.text
                found = opened(answer.json()["images"][0])
                assert found.size == (start.size if close else (width, 64))
                base = start if close else start.resize((width, 64))
                rest = (48 if close else 32, 0, *found.size)
                apart = ImageChops.difference(found, base)
                assert apart.crop(rest).getbbox() is None
                assert apart.getbbox() is not None
            assert _graphs(served) == before

    run(scenario)
    assert not any(strop.explain(served._pipes[False]).fallbacks)


def test_a_part_of_a_picture_is_that_of_eager(served: Studio) -> None:
    start, hole = Image.effect_noise((64, 32), 80).convert("RGB"), Image.new("L", (64, 32))
    hole.paste(255, (0, 0, 32, 32))
    request = replace(RED, start=start, mask=hole, strength=0.9, steps=5)
    (ours,) = _draw(served, request)
    other = replace(request, seed=2, mask=Image.new("L", start.size, 255))
    for same in (*_draw(served, request, is_eager=True), _draw(served, request, other)[0]):
        assert max(abs(a - b) for a, b in zip(ours, same, strict=True)) <= 1
    assert _draw(served, replace(request, mask=None)) != [ours]


def test_weights_and_a_second_pass_compile_nothing_anew(served: Studio) -> None:
    """Over A1111's interface, beside eager: prompts of one chunk and of two, larger pictures."""
    long = ", ".join(["a (red:1.2) circle above a [blue] square"] * 4)
    text = {"seed": 1, "steps": 3, "cfg_scale": 4.0, "width": 64, "height": 32}
    twice = {"enable_hr": True, "hr_resize_x": 96, "hr_second_pass_steps": 2}
    plain = replace(RED, is_weighted=True)

    def second(request: PictureRequest, upscaler: str, **more: Any) -> PictureRequest:
        size = PictureSize(96, 48)  # 2 steps of 2 / 0.75 of them
        again = replace(request, size=size, steps=2, strength=1.0, **more)
        return replace(request, second=SecondPass(again, size, upscaler))

    wanted = (
        ({"prompt": "a red circle"}, plain),
        ({"prompt": "a (red:1.5) circle"}, replace(plain, prompt="a (red:1.5) circle")),
        ({"prompt": long, "negative_prompt": "[star]"}, replace(
            plain, prompt=long, negative="[star]", chunks=2)),
        ({"prompt": "a red circle", **twice}, second(plain, "Latent")),
        ({"prompt": "a red circle", **twice, "hr_upscaler": "Nearest"}, second(plain, "Nearest")),
        ({"prompt": "a red circle", **twice, "hr_prompt": "(blue)", "hr_sampler_name": "Euler a"},
         second(plain, "Latent", prompt="(blue)", sampler="Euler a")),
    )  # fmt: skip

    async def scenario() -> None:
        async with asking(served, LIMITS) as asked:
            body = {**text, "prompt": "x", **twice, "hr_upscaler": "None"}
            await asked.client.post("/sdapi/v1/txt2img", json=body)  # which encodes
            before, seen = _graphs(served), set()
            for more, request in wanted:
                answer = await asked.client.post("/sdapi/v1/txt2img", json={**text, **more})
                assert answer.status_code == 200, answer.text
                found = opened(answer.json()["images"][0])
                assert found.size == (request.final_size.width, request.final_size.height)
                own = found.tobytes()
                seen.add(own)
                assert own == _draw(served, request)[0]
                (eager,) = _draw(served, request, is_eager=True)
                assert max(abs(a - b) for a, b in zip(own, eager, strict=True)) <= 1, more
            assert len(seen) == len(wanted)
            assert _graphs(served) == before
            assert _draw(served, RED) == _draw(served, plain)

    run(scenario)
    assert not any(strop.explain(served._pipes[False]).fallbacks)


def test_weights_are_those_of_a_text_encoder_that_changed(
    weighing_model: Path, cache_folder: Path
) -> None:
    loaded = models.load(models.find_model(str(weighing_model)), torch.float32, "cpu")
    pipe = strop.optimize(loaded, options=strop.Options(cache_dir=str(cache_folder)))
    request = replace(RED, prompt="a (red:1.5) circle", is_weighted=True)
    before = sampling.draw(pipe, request)
    assert torch.equal(sampling.draw(pipe, request), before)
    with torch.no_grad():
        pipe.text_encoder.get_input_embeddings().weight.mul_(-1)
    after = sampling.draw(pipe, request)
    assert not torch.equal(after, before)
    torch.testing.assert_close(
        after, sampling.draw(strop.restore(pipe), request), atol=1e-5, rtol=0
    )


def test_previews_have_the_size_of_their_pass(served: Studio) -> None:
    told: list[StepTold] = []
    again = replace(RED, size=PictureSize(96, 48), steps=2)
    request = replace(RED, second=SecondPass(again, again.size, "Latent"))
    served.draw(PictureBatch([request], previews=[1]), told.append, lambda: True)
    sizes = [Image.open(io.BytesIO(one.previews[0])).size for one in told[:-1]]
    assert sizes == [(64, 32)] * 3 + [(96, 48)]
    assert [(one.number, one.total) for one in told] == [(n, 5) for n in range(1, 6)]


def test_previews_do_not_change_a_picture(served: Studio) -> None:
    told: list[StepTold] = []
    batch = PictureBatch([RED, replace(RED, seed=2)], previews=[1, 2])
    made = served.draw(batch, told.append, lambda: True)
    assert [sorted(each.previews) for each in told] == [[0], [0, 1], []]
    assert told[0].previews[0].startswith(b"\xff\xd8")
    assert list(made.pictures) == _draw(served, RED, replace(RED, seed=2))


def test_a_batch_that_nobody_wants_stops_and_the_next_is_right(served: Studio) -> None:
    (before,) = _draw(served, RED)
    told: list[StepTold] = []
    with pytest.raises(Stopped):
        served.draw(PictureBatch([RED]), told.append, lambda: not told)
    assert len(told) == 1
    assert _draw(served, RED) == [before]


def test_what_the_model_does_not_read_is_noted(served: Studio) -> None:
    (note,) = served.notes(replace(RED, prompt="red " * 100))
    assert "ignores the end" in note
    assert not served.notes(RED)
    assert not served.notes(replace(RED, prompt="red " * 100, is_weighted=True))
    assert served.chunks(replace(RED, prompt="a (red)", negative="red " * 100)) == 5


def test_over_http_with_the_seed_of_generate(served: Studio) -> None:
    async def scenario() -> None:
        async with asking(served, LIMITS) as asked:
            body = {"prompt": RED.prompt, "seed": 1, "steps": 3, "guidance": 4.0, "size": "64x32"}
            answer = await asked.client.post(GENERATE, json=body)
            got = opened(answer.json()["data"][0]["b64_json"]).tobytes()
            (own,) = _draw(served, RED)
            assert got == own
            more = body | {"loras": {"ink": 1.0}}
            answer = await asked.client.post(GENERATE, json=more)
            assert opened(answer.json()["data"][0]["b64_json"]).tobytes() != own
            report = (await asked.client.get("/api/report")).text
            assert "0 recompiles" in report

    run(scenario)


@pytest.mark.nightly
def test_memory_is_flat_over_thousands_of_pictures(served: Studio) -> None:
    import psutil

    process = psutil.Process()
    sizes = ("64x32", "32x64", "64x64", "96x64")

    async def scenario() -> None:
        async with asking(served, replace(LIMITS, keep_bytes=1 << 20)) as asked:
            seen = []
            for number in range(5000):
                body = {"prompt": "a red circle", "steps": 1, "size": sizes[number % 4]}
                loras = {"ink": (number % 7) / 7} if number % 3 == 0 else {}
                answer = await asked.client.post(GENERATE, json={**body, "loras": loras})
                assert answer.status_code == 200
                if number % 500 == 499:
                    seen.append(process.memory_info().rss)
            assert seen[-1] - seen[1] < 24 << 20, seen

    import asyncio

    asyncio.run(scenario())
