"""The three interfaces: what they give, and what they refuse."""

from __future__ import annotations

import json
from typing import Any

import pytest

from .asking import EDIT, GENERATE, asking, encoded, events, opened, png, run
from .painters import FakePainter


def test_openai_draws_from_a_text() -> None:
    async def scenario() -> None:
        painter = FakePainter()
        async with asking(painter) as asked:
            body = {"prompt": "a cat", "n": 2, "size": "48x24", "seed": 7, "model": "fake"}
            answer = await asked.client.post(GENERATE, json=body)
            assert answer.status_code == 200
            data = answer.json()["data"]
            assert [one["seed"] for one in data] == [7, 8]
            pictures = [opened(one["b64_json"]) for one in data]
            assert [p.getpixel((0, 0))[0] for p in pictures] == [7, 8]
            assert pictures[0].size == (48, 24)
        (batch,) = painter.batches
        assert [r.prompt for r in batch.requests] == ["a cat"] * 2

    run(scenario)


def test_openai_draws_from_a_picture() -> None:
    async def scenario() -> None:
        painter = FakePainter()
        async with asking(painter) as asked:
            data = {"prompt": "a cat", "strength": "0.5", "steps": "8", "size": "64x32"}
            files = {"image": ("../../etc/passwd", png(10, 10, "RGBA"), "image/png")}
            answer = await asked.client.post(EDIT, data=data, files=files)
            assert answer.status_code == 200, answer.text
        (batch,) = painter.batches
        request = batch.requests[0]
        assert request.start is not None
        assert request.start.size == (64, 32)
        assert request.start.getpixel((0, 0)) == (255, 255, 255), "it is white behind"
        assert (request.strength, request.num_steps) == (0.5, 4)

    run(scenario)


def test_a_large_picture_leaves_no_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """A form is held in memory: nothing of a request is written to disk."""
    import tempfile

    def refused(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("a file is made")

    monkeypatch.setattr(tempfile.SpooledTemporaryFile, "rollover", refused)
    image = png(900, 900)
    image += b"\0" * (3 << 20)  # behind its end

    async def scenario() -> None:
        async with asking() as asked:
            files = {"image": ("a.png", image, "image/png")}
            answer = await asked.client.post(EDIT, data={"prompt": "x"}, files=files)
            assert answer.status_code == 200, answer.text

    run(scenario)


def test_a1111_draws_from_a_text_with_a_lora_in_it() -> None:
    async def scenario() -> None:
        painter = FakePainter()
        async with asking(painter) as asked:
            body = {
                "prompt": "a cat <lora:ink:0.8> <lora:style>",
                "negative_prompt": "a dog",
                "cfg_scale": 3,
                "batch_size": 2,
                "n_iter": 2,
                "seed": 5,
                "sampler_name": "Automatic",
                "restore_faces": False,
                "enable_hr": False,
                "hr_scale": 2,
                "styles": [],
                "override_settings": {},
            }
            answer = await asked.client.post("/sdapi/v1/txt2img", json=body)
            assert answer.status_code == 200, answer.text
            found = answer.json()
            assert len(found["images"]) == 4
            info = json.loads(found["info"])
            assert info["all_seeds"] == [5, 6, 7, 8]
        (batch,) = painter.batches
        assert batch.adapters == (("ink", 0.8), ("style", 1.0))
        request = batch.requests[0]
        assert (request.prompt, request.negative, request.guidance) == ("a cat", "a dog", 3)

    run(scenario)


def test_a1111_clients_learn_of_the_model_and_of_progress() -> None:
    async def scenario() -> None:
        painter = FakePainter()
        painter.gate.clear()
        async with asking(painter) as asked:
            ask = asked.client
            chosen = {"sd_model_checkpoint": "fake"}
            assert (await ask.get("/sdapi/v1/options")).json() == chosen
            assert (await ask.post("/sdapi/v1/options", json=chosen)).status_code == 200
            assert (await ask.get("/sdapi/v1/schedulers")).json()[0]["name"] == "automatic"
            idle = (await ask.get("/sdapi/v1/progress")).json()
            assert (idle["progress"], idle["state"]["job_count"]) == (0, 0)
            job = await asked.job(steps=4)
            await asked.until("drawing", job["id"])
            busy = (await ask.get("/sdapi/v1/progress")).json()["state"]
            assert (busy["job_count"], busy["sampling_steps"]) == (1, 4)
            painter.gate.set()
            await asked.until("done", job["id"])
            body = {"prompt": "a cat", "override_settings": chosen}
            assert (await ask.post("/sdapi/v1/txt2img", json=body)).status_code == 200

    run(scenario)


def test_a_form_has_the_arguments_of_a_body() -> None:
    async def scenario() -> None:
        painter = FakePainter()
        async with asking(painter) as asked:
            files = {"image": ("a.png", png(), "image/png")}
            fields = {"prompt": "x", "n": "2", "stream": "false", "loras": '{"ink": 0.5}'}
            fields |= {"steps": "4", "guidance": "2.5", "output_compression": "100"}
            answer = await asked.client.post(EDIT, data=fields, files=files)
            assert answer.status_code == 200, answer.text
            (batch,) = painter.batches
            assert (len(batch.requests), batch.adapters) == (2, (("ink", 0.5),))
            assert batch.requests[0].guidance == 2.5
            for name, value in (("loras", "ink"), ("loras", "[" * 9999), ("stream", "true")):
                wrong = await asked.client.post(EDIT, data=fields | {name: value}, files=files)
                assert wrong.status_code == 422, wrong.text
                assert wrong.json()["error"]["message"].startswith(f"{name}: ")

    run(scenario)


def test_a1111_draws_from_a_picture() -> None:
    async def scenario() -> None:
        painter = FakePainter()
        async with asking(painter) as asked:
            image = "data:image/png;base64," + encoded(png())
            body = {"prompt": "a cat", "init_images": [image], "denoising_strength": 0.5}
            answer = await asked.client.post("/sdapi/v1/img2img", json=body)
            assert answer.status_code == 200, answer.text
        assert painter.batches[0].requests[0].strength == 0.5

    run(scenario)


def test_lists_that_clients_ask_for() -> None:
    async def scenario() -> None:
        async with asking() as asked:
            paths = ("/v1/models", "/sdapi/v1/sd-models", "/sdapi/v1/loras", "/sdapi/v1/samplers")
            found = [(await asked.client.get(path)).json() for path in paths]
            assert found[0]["data"][0]["id"] == found[1][0]["title"] == "fake"
            assert [lora["name"] for lora in found[2]] == ["ink", "style"]
            assert found[3][0]["name"] == "Automatic"
            model = (await asked.client.get("/api/model")).json()
            assert (model["multiple_of"], model["most_pixels"]) == (8, 4096)
            assert (await asked.client.get("/api/report")).text == "3 graphs"
            assert (await asked.client.get("/healthz")).json()["state"] == "ready"

    run(scenario)


def test_the_native_interface_tells_what_happens() -> None:
    async def scenario() -> None:
        async with asking() as asked:
            job = await asked.job(seed=3, count=2, steps=5, preview_every=2)
            text = (await asked.client.get(f"/api/pictures/{job['id']}/events")).text
            told = events(text)
            names = [name for name, _ in told]
            assert names[0] == "state"
            assert names[-1] == "end"
            assert names.count("picture") == 2
            last = told[-1][1]
            assert last["state"] == "done"
            assert [picture["seed"] for picture in last["pictures"]] == [3, 4]
            assert last["pictures"][0]["batch"] == 2
            url = last["pictures"][1]["url"]
            answer = await asked.client.get(url)
            assert answer.headers["content-type"] == "image/png"
            assert opened(encoded(answer.content)).getpixel((0, 0))[0] == 4

    run(scenario)


def test_previews_are_shown_while_it_is_drawn() -> None:
    async def scenario() -> None:
        painter = FakePainter()
        async with asking(painter) as asked:
            job = asked.service.accept(_wish(preview_every=2, steps=5))
            while 0 not in job.previews and not job.state.is_over:
                await job.after(job.version)
            assert job.previews[0] in ((2, b"jpeg"), (4, b"jpeg"))
            await job.over()
            assert not job.previews

    run(scenario)


def _wish(**given: Any) -> Any:
    from strop.serve.order import Wish

    return Wish("a cat", **given)


def test_what_is_left_out_is_the_models_own() -> None:
    async def scenario() -> None:
        async with asking() as asked:
            (picture,) = (await asked.job())["pictures"]
            chosen = {k: picture[k] for k in ("width", "height", "steps", "guidance", "eager")}
            assert chosen == {
                "width": 32,
                "height": 16,
                "steps": 4,
                "guidance": 4.0,
                "eager": False,
            }
            other = (await asked.job())["pictures"][0]
            assert other["seed"] != picture["seed"], "seeds are drawn"

    run(scenario)


REFUSED: tuple[tuple[str, dict[str, Any], int, str], ...] = (
    (GENERATE, {}, 422, "prompt"),
    (GENERATE, {"prompt": " "}, 400, "empty"),
    (GENERATE, {"prompt": "x" * 4001}, 400, "4000 characters"),
    (GENERATE, {"prompt": "x", "n": 0}, 400, "n: 0 is not within 1 and"),
    (GENERATE, {"prompt": "x", "n": 9}, 400, "n: 9 is not"),
    (GENERATE, {"prompt": "x", "size": "large"}, 400, "WIDTHxHEIGHT"),
    (GENERATE, {"prompt": "x", "size": "33x32"}, 400, "32 or 40"),
    (GENERATE, {"prompt": "x", "size": "0x32"}, 400, "size: 0 is not"),
    (GENERATE, {"prompt": "x", "negative_prompt": "x" * 4001}, 400, "negative_prompt: it has"),
    (GENERATE, {"prompt": "x", "size": "4096x4096"}, 400, "--max-pixels"),
    (GENERATE, {"prompt": "x", "steps": 0}, 400, "steps"),
    (GENERATE, {"prompt": "x", "steps": 151}, 400, "steps"),
    (GENERATE, {"prompt": "x", "guidance": 51}, 400, "guidance"),
    (GENERATE, {"prompt": "x", "seed": -1}, 400, "seed"),
    (GENERATE, {"prompt": "x", "seed": 2**53}, 400, "seed"),
    (GENERATE, {"prompt": "x", "model": "dall-e-3"}, 404, "fake"),
    (GENERATE, {"prompt": "x", "response_format": "url"}, 422, "response_format"),
    (GENERATE, {"prompt": "x", "style": "vivid"}, 422, "style: this server does not know it"),
    (GENERATE, {"prompt": "x", "output_compression": 50}, 422, "output_compression"),
    (GENERATE, {"prompt": "x", "loras": {"../../secret": 1}}, 400, "ink, style"),
    (GENERATE, {"prompt": "x", "loras": {"ink": 11}}, 400, "within -10 and 10"),
    (EDIT, {"prompt": "x"}, 415, "multipart"),
    ("/sdapi/v1/txt2img", {"prompt": "x", "sampler_name": "LMS"}, 400, "there are Euler a, DPM++"),
    ("/sdapi/v1/txt2img", {"prompt": "x", "sampler_index": "PLMS"}, 400, "sampler_name: "),
    ("/sdapi/v1/txt2img", {"prompt": "x", "scheduler": "karras"}, 400, "scheduler: it belongs to"),
    (
        "/sdapi/v1/txt2img",
        {"prompt": "x", "sampler_name": "Euler a", "scheduler": "Beta"},
        400,
        "scheduler: Euler a has none of that name; it has automatic, uniform, sgm_uniform",
    ),
    ("/api/pictures", {"prompt": "x", "sampler": "LMS"}, 400, "sampler: this model"),
    ("/api/pictures", {"prompt": "x", "mask": encoded(png())}, 400, "mask: it belongs to a start"),
    ("/sdapi/v1/txt2img", {"prompt": "x", "send_images": False}, 422, "send_images"),
    ("/sdapi/v1/txt2img", {"prompt": "x", "s_noise": 0}, 422, "s_noise"),
    ("/sdapi/v1/txt2img", {"prompt": "x", "cfg_scale": 51}, 400, "cfg_scale: 51 is not"),
    ("/sdapi/v1/txt2img", {"prompt": "x", "override_settings": {"a": 1}}, 422, "override_settings"),
    ("/sdapi/v1/txt2img", {"prompt": "[a:b:0.5]"}, 400, "prompt: [from:to:when]"),
    ("/sdapi/v1/txt2img", {"prompt": "x", "negative_prompt": "a|[b|c]"}, 400, "negative_prompt: ["),
    ("/sdapi/v1/txt2img", {"prompt": "x AND y"}, 400, "write 'and'"),
    ("/sdapi/v1/txt2img", {"prompt": "x <lyco:a:1>"}, 400, "<lora:NAME:0.8>"),
    ("/sdapi/v1/txt2img", {"prompt": "," * 8}, 400, "prompt: it has 9 chunks of tokens"),
    ("/sdapi/v1/img2img", {"prompt": "(x:11)", "init_images": [encoded(png())]}, 400, "within -10"),
    (GENERATE, {"prompt": "(x:11)", "prompt_weights": True}, 400, "prompt: a weight of 11"),
    ("/api/pictures", {"prompt": "[a|b]", "prompt_weights": True}, 400, "prompt: [a|b]"),
    ("/sdapi/v1/options", {"samples_format": "jpg"}, 422, "draws with fake, and has no settings"),
    ("/sdapi/v1/options", {"sd_model_checkpoint": "x"}, 422, "sd_model_checkpoint"),
    ("/sdapi/v1/interrupt", {}, 404, "/openapi.json"),
    ("/sdapi/v1/progress", {}, 405, "/openapi.json"),
    ("/sdapi/v1/txt2img", {"prompt": "x <lora:ink:much>"}, 422, "LoRA"),
    ("/sdapi/v1/txt2img", {"prompt": "x <lora:/etc/passwd>"}, 400, "no LoRA of that name"),
    ("/sdapi/v1/img2img", {"prompt": "x"}, 422, "exactly one picture"),
    (
        "/sdapi/v1/img2img",
        {"prompt": "x", "init_images": [encoded(png())], "denoising_strength": 2},
        400,
        "denoising_strength: 2 is not",
    ),
    ("/sdapi/v1/img2img", {"prompt": "x", "init_images": ["/etc/passwd"]}, 400, "not opened"),
    ("/sdapi/v1/img2img", {"prompt": "x", "init_images": ["http://a/b.png"]}, 400, "not opened"),
    ("/sdapi/v1/img2img", {"prompt": "x", "mask": "x", "init_images": ["x"]}, 400, "base64"),
    ("/api/pictures", {"prompt": "x", "start": encoded(b"GIF89a")}, 400, "PNG or JPEG"),
    (
        "/api/pictures",
        {"prompt": "x", "start": encoded(png()), "strength": 0.1},
        400,
        "less than one",
    ),
    ("/api/pictures", {"prompt": "x", "start": encoded(png()), "strength": 2}, 400, "strength"),
    ("/api/pictures", {"prompt": "x", "colour": "red"}, 422, "colour"),
)


@pytest.mark.parametrize(("path", "body", "status", "part"), REFUSED)
def test_what_is_wrong_is_named(path: str, body: dict[str, Any], status: int, part: str) -> None:
    async def scenario() -> None:
        painter = FakePainter()
        async with asking(painter) as asked:
            answer = await asked.client.post(path, json=body)
            assert answer.status_code == status, answer.text
            error = answer.json()["error"]
            assert part in error["message"]
            assert answer.json()["detail"] == error["message"]
            assert error["param"] in (None, "body") or error["param"] in {
                *body,
                "prompt",
                "init_images",
                "sampler_name",
            }
        assert not painter.batches

    run(scenario)


@pytest.mark.parametrize(
    ("files", "part"),
    [
        ({}, "exactly one"),
        ({"image": png(), "image[]": png()}, "exactly one"),
        ({"image": png(), "mask": png()}, "nothing of it is transparent"),
        ({"image": b"no picture"}, "PNG or JPEG"),
    ],
    ids=str,
)
def test_what_is_wrong_with_a_form_is_named(files: dict[str, bytes], part: str) -> None:
    async def scenario() -> None:
        async with asking() as asked:
            given = {name: ("a.png", data, "image/png") for name, data in files.items()}
            given = given or {"other": ("a.png", b"", "image/png")}
            answer = await asked.client.post(EDIT, data={"prompt": "x"}, files=given)
            assert answer.status_code == 400, answer.text
            assert part in answer.json()["error"]["message"]

    run(scenario)


def test_there_is_no_eager_model_unless_the_server_keeps_one() -> None:
    from dataclasses import replace

    from .painters import CARD

    async def scenario() -> None:
        async with asking(FakePainter(replace(CARD, has_eager=False, loras=()))) as asked:
            wrong = ({"eager": True}, "--eager"), ({"loras": {"ink": 1}}, "--lora DIR")
            for body, part in wrong:
                answer = await asked.client.post("/api/pictures", json={"prompt": "x", **body})
                assert answer.status_code == 400
                assert part in answer.text

    run(scenario)
