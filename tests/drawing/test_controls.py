"""ControlNets: the pixels of diffusers' own pipelines, whatever else a request asks for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import diffusers
import pytest
import torch
from PIL import Image
from torch import Tensor

from strop.bench.pipelines.parts import controlnet, stir
from strop.bench.pipelines.stable import XL_CONTROL, sd15, sdxl
from strop.bench.pipelines.tiny import TinyPipeline
from strop.drawing.draw import batch_key, draw
from strop.drawing.request import ControlPicture, PictureRequest, PictureSize, SecondPass

pytestmark = pytest.mark.filterwarnings("ignore")

SIZE = PictureSize(32, 16)
RED = PictureRequest("a red circle", SIZE, 4, 4.0, seed=1, negative="a dog")


def noise(sigma: float, size: PictureSize = SIZE) -> Image.Image:
    return Image.effect_noise((size.width, size.height), sigma).convert("RGB")


EDGES, DEPTH, START = (noise(sigma) for sigma in (60, 90, 120))
HOLE = Image.new("L", (SIZE.width, SIZE.height))
HOLE.paste(255, (0, 0, 16, 16))


@pytest.fixture(scope="module", params=["StableDiffusion", "StableDiffusionXL"])
def model(request: pytest.FixtureRequest) -> Any:
    """A pipeline and two ControlNets for it."""
    is_large = request.param.endswith("XL")
    parts = sdxl if is_large else sd15
    pipe = TinyPipeline("tiny", f"{request.param}Pipeline", parts).made()
    nets = dict[str, Any]()
    for number, name in enumerate(("edges", "depth")):
        torch.manual_seed(number)
        nets[name] = controlnet(**(XL_CONTROL if is_large else {})).eval()
        stir(nets[name])
    return pipe, nets


ONE = (ControlPicture("edges", EDGES, 0.8),)
PART = (ControlPicture("edges", EDGES, 0.8, 0.2, 0.75),)
TWO = (
    ControlPicture("depth", DEPTH, 0.5, 0.0, 0.5),
    ControlPicture("edges", EDGES, 1.2, 0.25, 1.0),
)
SAME = (ControlPicture("edges", EDGES, 0.5), ControlPicture("edges", DEPTH, 0.5))
STARTED = replace(RED, start=START, strength=0.75)


def by_diffusers(model: Any, request: PictureRequest, controls: Sequence[ControlPicture]) -> Tensor:
    """What a script of a user draws: pictures as Pillow has them, pipelines by their class."""
    pipe, nets = model
    kind = "" if request.start is None else "Img2Img" if request.mask is None else "Inpaint"
    name = type(pipe).__name__.replace("Pipeline", f"ControlNet{kind}Pipeline")
    found = [nets[one.net] for one in controls]
    is_one = len(controls) == 1
    own = getattr(diffusers, name)(
        **pipe.components,
        controlnet=found[0] if is_one else found,
        **({} if "XL" in name else {"requires_safety_checker": False}),
    )
    own.set_progress_bar_config(disable=True)
    pictures: Any = controls[0].picture if is_one else [one.picture for one in controls]
    more: dict[str, Any] = {"image": pictures}
    if request.start is not None:
        more = {"image": request.start, "control_image": pictures, "strength": request.strength}
    if request.mask is not None:
        more |= {"mask_image": request.mask}
    weights = [one.weight for one in controls]
    drawn: Tensor = own(
        request.prompt,
        negative_prompt=request.negative,
        guidance_scale=request.guidance,
        num_inference_steps=request.steps,
        width=SIZE.width,
        height=SIZE.height,
        generator=torch.Generator().manual_seed(request.seed),
        controlnet_conditioning_scale=weights[0] if is_one else weights,
        control_guidance_start=[one.begin for one in controls],
        control_guidance_end=[one.end for one in controls],
        output_type="pt",
        **more,
    ).images
    return drawn


@pytest.mark.parametrize("controls", [ONE, PART, TWO, SAME], ids=["one", "part", "two", "same"])
@pytest.mark.parametrize(
    "asked", [RED, STARTED, replace(STARTED, mask=HOLE)], ids=["text", "start", "mask"]
)
def test_pixels_are_those_of_diffusers(
    model: Any, asked: PictureRequest, controls: tuple[ControlPicture, ...]
) -> None:
    pipe, nets = model
    (found,) = draw(pipe, [replace(asked, controls=controls)], nets=nets)
    (wanted,) = by_diffusers(model, asked, controls)
    assert torch.equal(found, wanted)
    (without,) = draw(pipe, [asked], nets=nets)
    assert not torch.equal(found, without)


def test_each_picture_of_a_batch_sees_its_own(model: Any) -> None:
    pipe, nets = model
    for controls in (ONE, TWO):
        other = tuple(replace(one, picture=noise(20)) for one in controls)
        asked = [replace(RED, controls=controls), replace(RED, seed=2, controls=other)]
        together = draw(pipe, asked, nets=nets)
        for request, found in zip(asked, together, strict=True):
            (alone,) = draw(pipe, [request], nets=nets)
            torch.testing.assert_close(found, alone, rtol=0, atol=1e-4)


@pytest.mark.parametrize("upscaler", ["Latent", "Lanczos"])
def test_each_pass_has_its_own(model: Any, upscaler: str) -> None:
    pipe, nets = model
    size = PictureSize(48, 32)
    larger = tuple(replace(one, picture=noise(60, size)) for one in ONE)

    def drawn(in_first: bool, in_second: bool) -> Tensor:
        again = replace(RED, size=size, strength=0.75, controls=larger if in_second else ())
        second = SecondPass(again, size, upscaler)
        asked = replace(RED, second=second, controls=ONE if in_first else ())
        (pixels,) = draw(pipe, [asked], nets=nets)
        assert pixels.shape == (3, 32, 48)
        return pixels

    found = [drawn(one, other) for one in (False, True) for other in (False, True)]
    for number, one in enumerate(found):
        assert not any(torch.equal(one, other) for other in found[:number])


def test_other_units_are_another_batch(model: Any) -> None:
    pipe, nets = model
    (edges,) = ONE
    others = [replace(edges, net="depth"), replace(edges, weight=0.7), replace(edges, begin=0.1)]
    groups = [(), ONE, (*ONE, *ONE), *((one,) for one in (*others, replace(edges, end=0.9)))]
    keys = {batch_key(replace(RED, controls=controls)) for controls in groups}
    assert len(keys) == len(groups)
    seen = replace(edges, picture=DEPTH)
    assert batch_key(replace(RED, controls=(seen,))) == batch_key(replace(RED, controls=ONE))
    with pytest.raises(ValueError, match="cannot be drawn by one call"):
        draw(pipe, [RED, replace(RED, controls=ONE)], nets=nets)
    with pytest.raises(ValueError, match="there is no ControlNet 'edges'"):
        draw(pipe, [replace(RED, controls=ONE)])
