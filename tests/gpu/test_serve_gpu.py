"""What ``strop serve`` draws on a GPU: bits of generate, previews amid a denoise loop, stopping."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from diffusers import AutoPipelineForText2Image, ControlNetModel
from PIL import Image

import strop
from strop.api import dispatchers_of
from strop.bench.pipelines.parts import stir
from strop.cli import pictures, sampling
from strop.drawing.draw import draw
from strop.drawing.request import ControlPicture, PictureRequest, PictureSize, SecondPass
from strop.models import sprites
from strop.serve.order import ModelCard
from strop.serve.studio import PictureBatch, StepTold, Stopped, Studio

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    pytest.mark.filterwarnings("ignore"),
]

SIZE = PictureSize(96, 64)
RED = PictureRequest("a red circle above a blue square", SIZE, 8, 4.0, seed=1)


@pytest.fixture(scope="module")
def pipe(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    loaded = sprites.load(torch.float16, "cuda")
    loaded.set_progress_bar_config(disable=True)
    folder = tmp_path_factory.mktemp("cache")
    yield strop.optimize(loaded, options=strop.Options(cache_dir=str(folder)))
    strop.restore(loaded)


@pytest.fixture
def studio(pipe: Any) -> Studio:
    return Studio(ModelCard("sprites", SIZE, 16, 4.0, (), False, lambda text, _: (text, "")), pipe)


def _draw(studio: Studio, batch: PictureBatch) -> list[bytes]:
    return list(studio.draw(batch, lambda _: None, lambda: True).pictures)


def test_one_picture_has_the_bits_of_generate(studio: Studio, pipe: Any) -> None:
    sampling.warm_up(pipe, RED)
    expected = pictures.to_picture(sampling.draw(pipe, RED)).tobytes()
    assert _draw(studio, PictureBatch([RED])) == [expected]


def test_previews_do_not_change_pictures(studio: Studio) -> None:
    requests = [replace(RED, seed=seed) for seed in range(3)]
    plain = _draw(studio, PictureBatch(requests))
    for _ in range(3):  # the second call of a shape captures a graph, the third replays it
        told: list[StepTold] = []
        made = studio.draw(PictureBatch(requests, previews=[1, 0, 3]), told.append, lambda: True)
        assert list(made.pictures) == plain
        assert sum(len(each.previews) for each in told) == 7 + 2


def test_stopping_leaves_a_pipeline_that_draws(studio: Studio) -> None:
    before = _draw(studio, PictureBatch([RED]))
    for _ in range(3):
        told: list[StepTold] = []
        with pytest.raises(Stopped):
            studio.draw(PictureBatch([RED]), told.append, lambda told=told: len(told) < 2)
        assert _draw(studio, PictureBatch([RED])) == before


def test_weights_and_a_second_pass_are_those_of_eager(studio: Studio, pipe: Any) -> None:
    """Prompts of two chunks, then a larger picture, three times each: the third call replays
    graphs. No size and no length of prompt compiles the UNet anew."""
    long = ", ".join(["a (red:1.3) circle above a [blue] square"] * 4)
    weighted = replace(RED, prompt=long, is_weighted=True, chunks=2)
    large = PictureSize(144, 96)
    again = replace(RED, size=large, steps=10, strength=0.6)
    twice = [replace(RED, second=SecondPass(again, large, name)) for name in ("Latent", "Lanczos")]
    eager = sprites.load(torch.float16, "cuda")
    eager.set_progress_bar_config(disable=True)
    for request in (weighted, *twice):
        expected = sampling.draw(eager, request)
        first = sampling.draw(pipe, request)
        for _ in range(2):
            assert torch.equal(sampling.draw(pipe, request), first)
        assert pictures.psnr_db(first, expected) > 35, request
    assert len(dispatchers_of(pipe)["unet"].variants.all) == 1


def test_control_units_are_those_of_eager(pipe: Any) -> None:
    """One ControlNet, and one that is called twice in a step: the second call must not write over
    what the first one gave. The third drawing replays graphs."""
    eager = sprites.load(torch.float16, "cuda")
    slow = ControlNetModel.from_unet(eager.unet, conditioning_embedding_out_channels=(8, 16, 32))
    stir(slow)
    own = copy.deepcopy(slow.half().cuda().eval())
    made = AutoPipelineForText2Image.from_pipe(pipe, controlnet=own)
    strop.optimize(made, options=dispatchers_of(pipe)["unet"].options)
    one, other = (
        ControlPicture("edges", Image.effect_noise((96, 64), sigma).convert("RGB"), 0.6)
        for sigma in (60, 90)
    )
    for controls in ((one,), (one, replace(other, end=0.5))):
        request = replace(RED, controls=controls)
        first = draw(pipe, [request], nets={"edges": own})
        for _ in range(2):
            assert torch.equal(draw(pipe, [request], nets={"edges": own}), first)
        assert pictures.psnr_db(first, draw(eager, [request], nets={"edges": slow})) > 35
    (dispatcher,) = dispatchers_of(own).values()
    assert len(dispatcher.variants.all) == 1
