"""ControlNets: the pixels of diffusers' own pipelines, whatever else a request asks for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import diffusers
import pytest
import torch
from PIL import Image

from strop.bench.pipelines.parts import controlnet, stir
from strop.bench.pipelines.stable import XL_CONTROL, sd15, sdxl
from strop.bench.pipelines.tiny import TinyPipeline
from strop.drawing.draw import batch_key, draw
from strop.drawing.request import ControlPicture, PictureRequest, PictureSize, SecondPass

pytestmark = pytest.mark.filterwarnings("ignore")

SIZE = PictureSize(32, 16)
RED = PictureRequest("a red circle", SIZE, 4, 4.0, seed=1, negative="a dog")
EDGES, DEPTH, START = (Image.effect_noise((32, 16), n).convert("RGB") for n in (60, 90, 120))
HOLE = Image.new("L", (32, 16))
HOLE.paste(255, (0, 0, 16, 16))
EDGE = ControlPicture("edges", EDGES, 0.8)
PART = replace(EDGE, begin=0.2, end=0.75)
TWO = (ControlPicture("depth", DEPTH, 0.5, 0.0, 0.5), replace(EDGE, begin=0.25))
SAME = (EDGE, replace(EDGE, picture=DEPTH))
STARTED = replace(RED, start=START, strength=0.75)


@pytest.fixture(scope="module", params=["StableDiffusion", "StableDiffusionXL"])
def model(request: pytest.FixtureRequest) -> Any:
    """A pipeline and two ControlNets for it."""
    is_large = request.param.endswith("XL")
    pipe = TinyPipeline("", f"{request.param}Pipeline", sdxl if is_large else sd15).made()
    nets = dict[str, Any]()
    for name in ("edges", "depth"):
        nets[name] = controlnet(**(XL_CONTROL if is_large else {})).eval()
        stir(nets[name])
    return pipe, nets


@pytest.mark.parametrize("controls", [(EDGE,), (PART,), TWO, SAME])
@pytest.mark.parametrize("asked", [RED, STARTED, replace(STARTED, mask=HOLE)])
def test_pixels_are_those_of_diffusers(
    model: Any, asked: PictureRequest, controls: tuple[ControlPicture, ...]
) -> None:
    pipe, nets = model
    kind = "" if asked.start is None else "Img2Img" if asked.mask is None else "Inpaint"
    name = type(pipe).__name__.replace("Pipeline", f"ControlNet{kind}Pipeline")
    found: Any = [nets[one.net] for one in controls]
    seen: Any = [one.picture for one in controls]
    weights: Any = [one.weight for one in controls]
    if len(controls) == 1:
        found, seen, weights = found[0], seen[0], weights[0]
    safe = {} if "XL" in name else {"requires_safety_checker": False}
    more: dict[str, Any] = {"image": seen}
    if kind:
        more = {"image": START, "control_image": seen, "strength": asked.strength}
    own = getattr(diffusers, name)(**pipe.components, controlnet=found, **safe)
    wanted = own(
        asked.prompt,
        negative_prompt=asked.negative,
        guidance_scale=asked.guidance,
        num_inference_steps=asked.steps,
        width=SIZE.width,
        height=SIZE.height,
        generator=torch.Generator().manual_seed(asked.seed),
        controlnet_conditioning_scale=weights,
        control_guidance_start=[one.begin for one in controls],
        control_guidance_end=[one.end for one in controls],
        output_type="pt",
        **more,
        **({} if asked.mask is None else {"mask_image": HOLE}),
    ).images
    drawn = draw(pipe, [replace(asked, controls=controls)], nets=nets)
    assert torch.equal(drawn, wanted)
    assert not torch.equal(drawn, draw(pipe, [asked], nets=nets))


def test_each_pass_and_each_picture_of_a_batch_has_its_own(model: Any) -> None:
    pipe, nets = model
    larger, found = replace(EDGE, picture=EDGES.resize((48, 32))), list[torch.Tensor]()
    for first, second in (((), ()), (SAME, ()), ((), (larger,)), (SAME[::-1], (larger,))):
        again = replace(RED, size=PictureSize(48, 32), strength=0.75, controls=second)
        asked = replace(RED, controls=first, second=SecondPass(again, again.size, "Latent"))
        found.append(draw(pipe, [asked], nets=nets))
        assert not any(torch.equal(found[-1], other) for other in found[:-1])
    batch = [replace(RED, controls=one, seed=n) for n, one in enumerate((SAME, SAME[::-1]))]
    alone = torch.cat([draw(pipe, [request], nets=nets) for request in batch])
    torch.testing.assert_close(draw(pipe, batch, nets=nets), alone, rtol=0, atol=1e-4)


def test_other_units_are_another_batch(model: Any) -> None:
    changed = ({"net": "depth"}, {"weight": 0.7}, {"begin": 0.1}, {"end": 0.9})
    groups: list[Any] = [(), (EDGE,), (EDGE, EDGE), *((replace(EDGE, **c),) for c in changed)]
    assert len({batch_key(replace(RED, controls=controls)) for controls in groups}) == len(groups)
    assert len({batch_key(replace(RED, controls=(one,))) for one in SAME}) == 1
    with pytest.raises(ValueError, match="there is no ControlNet 'edges'"):
        draw(model[0], [replace(RED, controls=(EDGE,))])
