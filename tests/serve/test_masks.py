"""Masks of A1111's interface and the others: what is drawn on, and what comes back over it."""

from __future__ import annotations

import io
from typing import Any

import pytest
from PIL import Image, ImageChops

from strop.drawing.request import PictureSize
from strop.serve.masks import MaskWish, canvas

from .asking import EDIT, asking, encoded, opened, png, run
from .painters import FakePainter

IMG2IMG = "/sdapi/v1/img2img"
LEFT = (0, 0, 16, 16)


def as_png(picture: Image.Image) -> bytes:
    target = io.BytesIO()
    picture.save(target, format="PNG")
    return target.getvalue()


def start(width: int = 32, height: int = 16) -> Image.Image:
    """A picture in which each pixel has a colour of its own."""
    picture = Image.new("RGB", (width, height))
    picture.putdata([(7 * x % 256, 9 * y % 256, 90) for y in range(height) for x in range(width)])
    return picture


def mask(box: tuple[int, int, int, int] = LEFT, size: tuple[int, int] = (32, 16)) -> Image.Image:
    """White within a box."""
    made = Image.new("L", size)
    made.paste(255, box)
    return made


def body(**more: Any) -> dict[str, Any]:
    known = {"init_images": [encoded(as_png(start()))], "mask": encoded(as_png(mask()))}
    return {"prompt": "x", "mask_blur": 0, "seed": 200, "steps": 4, **known, **more}


def asked_once(path: str, given: Any, painter: FakePainter | None = None) -> Any:
    """What the server answers to a body, or to a form of fields and files."""
    found: list[Any] = []

    async def scenario() -> None:
        async with asking(painter or FakePainter()) as asked:
            how = {"json": given} if isinstance(given, dict) else dict(given)
            found.append(await asked.client.post(path, **how))

    run(scenario)
    return found[0]


def drawn(**more: Any) -> Image.Image:
    """The picture that comes back for a mask. What was drawn has red 200."""
    answer = asked_once(IMG2IMG, body(**more))
    assert answer.status_code == 200, answer.text
    return opened(answer.json()["images"][0])


def test_what_is_not_white_keeps_its_bytes() -> None:
    noise = {"inpainting_fill": 2, "denoising_strength": 1}
    for more in ({"inpaint_full_res": False}, {"inpainting_fill": 1}, noise):
        found = drawn(**more)
        assert found.getpixel((3, 3)) == (200, 0, 4)
        right = (16, 0, 32, 16)
        assert ImageChops.difference(found.crop(right), start().crop(right)).getbbox() is None


def test_a_mask_is_inverted_and_read_from_what_is_opaque() -> None:
    assert drawn(inpainting_mask_invert=1).getpixel((3, 3)) == start().getpixel((3, 3))
    holes = Image.new("RGBA", (32, 16))
    holes.paste((0, 0, 0, 255), LEFT)
    found = drawn(mask=encoded(as_png(holes)))
    assert found.getpixel((3, 3)) == (200, 0, 4)
    assert found.getpixel((30, 3)) == start().getpixel((30, 3))


def test_the_surroundings_of_a_mask_are_drawn_and_put_back() -> None:
    """The request is 64x32; the picture has 60x40, and keeps them."""
    painter, picture, box = FakePainter(), start(60, 40), (20, 10, 28, 14)
    given = body(
        init_images=[encoded(as_png(picture))],
        mask=encoded(as_png(mask(box, picture.size))),
        width=64,
        height=32,
        inpainting_fill=1,
        inpaint_full_res_padding=2,
    )
    answer = asked_once(IMG2IMG, given, painter)
    assert answer.status_code == 200, answer.text
    (request,) = painter.batches[0].requests
    assert request.start.size == request.mask.size == (64, 32)
    assert request.mask.getpixel((32, 16)) > 200
    assert request.mask.getpixel((1, 1)) == 0
    shown = request.start.getpixel((32, 16))
    assert abs(shown[0] - picture.getpixel((24, 12))[0]) < 16, "the surroundings are enlarged"
    found = opened(answer.json()["images"][0])
    assert found.size == picture.size
    changed = ImageChops.difference(found, picture).getbbox()
    assert changed == box


def test_an_edge_fades() -> None:
    found = drawn(mask_blur=2, inpaint_full_res=False)
    reds = [found.getpixel((x, 8))[0] for x in range(10, 32)]
    own = [start().getpixel((x, 8))[0] for x in range(10, 32)]
    assert reds[0] == 200
    assert reds[-1] == own[-1]
    assert 2 < sum(red not in (200, one) for red, one in zip(reds, own, strict=True)) < 12


def test_colours_come_from_around() -> None:
    picture = Image.new("RGB", (32, 16), (10, 120, 240))
    picture.paste((255, 0, 0), LEFT)
    size = PictureSize(32, 16)
    kept = canvas(picture, MaskWish(mask()), size)
    filled = canvas(picture, MaskWish(mask(), is_filled=True), size)
    assert kept is not None
    assert filled is not None
    assert kept.start.getpixel((3, 3)) == (255, 0, 0)
    assert filled.start.getpixel((3, 3)) == (10, 120, 240)
    everything = canvas(picture, MaskWish(mask((0, 0, 32, 16)), is_filled=True), size)
    assert everything is not None
    assert everything.start.getcolors() == [(512, (128, 128, 128))]


def test_a_picture_is_cut_or_has_longer_edges() -> None:
    wide = Image.new("RGB", (64, 16), (0, 0, 255))
    wide.paste((255, 0, 0), (0, 0, 8, 16))
    for mode, corner in ((0, (255, 0, 0)), (1, (0, 0, 255)), (2, (255, 0, 0))):
        painter = FakePainter()
        given = {"prompt": "x", "init_images": [encoded(as_png(wide))], "resize_mode": mode}
        assert asked_once(IMG2IMG, given, painter).status_code == 200
        begun = painter.batches[0].requests[0].start
        assert begun is not None
        assert begun.size == (32, 16)
        assert begun.getpixel((0, 8)) == corner, mode


def test_openai_draws_where_a_mask_is_transparent() -> None:
    hidden = Image.new("RGBA", (32, 16), (0, 0, 0, 255))
    hidden.paste((0, 0, 0, 0), LEFT)
    files = {
        "image": ("a.png", as_png(start()), "image/png"),
        "mask": ("m.png", as_png(hidden), "image/png"),
    }
    fields = {"prompt": "x", "seed": "200", "steps": "4"}
    answer = asked_once(EDIT, [("data", fields), ("files", files)])
    assert answer.status_code == 200, answer.text
    found = opened(answer.json()["data"][0]["b64_json"])
    assert found.getpixel((3, 3)) == (200, 0, 4)
    assert found.getpixel((30, 3)) == start().getpixel((30, 3))


def test_the_native_interface_takes_a_mask_and_a_sampler() -> None:
    async def scenario() -> None:
        painter = FakePainter()
        async with asking(painter) as asked:
            given = {"start": encoded(as_png(start())), "mask": encoded(as_png(mask()))}
            job = await asked.job(**given, sampler="euler A", schedule="sgm_uniform", seed=200)
            done = await asked.until("done", job["id"])
            picture = done["pictures"][0]
            assert (picture["sampler"], picture["schedule"]) == ("Euler a", "sgm_uniform")
            answer = await asked.client.get(picture["url"])
            assert opened(encoded(answer.content)).getpixel((3, 3))[0] == 200
            assert (await asked.client.get("/api/model")).json()["samplers"]["Euler a"]
        assert painter.batches[0].requests[0].sampler == "Euler a"

    run(scenario)


@pytest.mark.parametrize(
    ("more", "status", "part"),
    [
        ({"mask": encoded(png())}, 400, "nothing of it is white"),
        ({"mask": "x"}, 400, "mask: it is no base64"),
        ({"mask_blur": 65}, 422, "mask_blur: it is not within 0 and 64"),
        ({"inpaint_full_res_padding": -1}, 422, "inpaint_full_res_padding"),
        ({"inpainting_fill": 2, "denoising_strength": 0.5}, 422, "denoising_strength 1 alone"),
        ({"inpainting_fill": 4}, 422, "inpainting_fill: take 0"),
        ({"mask_round": False}, 422, "mask_round"),
        ({"resize_mode": 3}, 422, "resize_mode: take 0"),
        ({"latent_mask": "x"}, 422, "latent_mask: this server does not do that"),
        ({"init_images": [encoded(png(65, 64))]}, 400, "init_images: a part of it"),
        ({"width": 4096, "height": 4096}, 400, "--max-pixels"),
        (
            {"init_images": [encoded(png(300, 2))], "resize_mode": 2, "inpaint_full_res": 0},
            400,
            "init_images: a part of 300x2 is too narrow to be drawn as 32x16",
        ),
    ],
)
def test_what_is_wrong_with_a_mask_is_named(more: dict[str, Any], status: int, part: str) -> None:
    answer = asked_once(IMG2IMG, body(**more))
    assert answer.status_code == status, answer.text
    assert part in answer.json()["detail"]


def test_names_of_samplers_are_those_of_a1111() -> None:
    given = (
        ({"sampler_index": "k_euler_a", "sampler_name": None}, ("Euler a", "automatic")),
        ({"sampler_name": "DPM++ 2M Karras"}, ("DPM++ 2M", "karras")),
        ({"sampler_name": "euler A", "scheduler": "SGM Uniform"}, ("Euler a", "sgm_uniform")),
        ({"sampler_name": "Automatic", "scheduler": "Automatic"}, ("", "automatic")),
    )
    for more, expected in given:
        painter = FakePainter()
        answer = asked_once("/sdapi/v1/txt2img", {"prompt": "x", **more}, painter)
        assert answer.status_code == 200, answer.text
        request = painter.batches[0].requests[0]
        assert (request.sampler, request.schedule) == expected


def test_lists_of_samplers_and_of_what_there_is_not() -> None:
    async def scenario() -> None:
        async with asking() as asked:

            async def listed(name: str) -> Any:
                return (await asked.client.get(f"/sdapi/v1/{name}")).json()

            assert [one["name"] for one in await listed("samplers")][1:] == ["Euler a", "DPM++ 2M"]
            assert (await listed("schedulers"))[2]["label"] == "SGM Uniform"
            assert await listed("sd-vae") == await listed("prompt-styles") == []
            assert (await listed("upscalers"))[0]["name"] == "None"
            assert not (await listed("embeddings"))["loaded"]

    run(scenario)


def test_what_clients_read_of_an_answer() -> None:
    import json

    given = {"prompt": "a cat", "negative_prompt": "a dog", "seed": 3, "sampler_name": "Euler a"}
    answer = asked_once("/sdapi/v1/txt2img", {**given, "batch_size": 2})
    info = json.loads(answer.json()["info"])
    assert info["all_prompts"] == ["a cat", "a cat"]
    assert info["notes"] == []
    assert info["infotexts"][1] == (
        "a cat\nNegative prompt: a dog\nSteps: 4, Sampler: Euler a, Schedule type: Automatic,"
        " CFG scale: 4.0, Seed: 4, Size: 32x16"
    )
