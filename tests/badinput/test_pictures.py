"""Pipelines and prompts: what diffusers refuses, cuts or allows stays so."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

import strop
from strop.cli import app, arguments, models
from strop.errors import OptionError
from tests.e2e import tiny

pytestmark = pytest.mark.filterwarnings("ignore")


def draw(pipe: Any, width: int, height: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    embeds = torch.randn(1, 7, tiny.PROMPT_DIM, generator=generator)
    with torch.no_grad():
        return pipe(
            prompt_embeds=embeds,
            negative_prompt_embeds=-embeds,
            width=width,
            height=height,
            num_inference_steps=2,
            generator=generator,
            output_type="pt",
        ).images


def test_sizes_that_diffusers_refuses_and_sizes_off_the_grid() -> None:
    pipe, plain = tiny.pipeline(), tiny.pipeline()
    strop.optimize(pipe, options=tiny.options(strict=True))
    for width, height in ((100, 64), (64, 30)):
        with pytest.raises(ValueError, match="divisible by 8") as wanted:
            draw(plain, width, height)
        with pytest.raises(ValueError, match="divisible by 8") as found:
            draw(pipe, width, height)
        assert str(found.value) == str(wanted.value)
    for width, height in ((32, 32), (40, 24)):
        torch.testing.assert_close(
            draw(pipe, width, height), draw(plain, width, height), rtol=1e-3, atol=1e-3
        )
    assert pipe.unet.forward.counters.eager_calls == 0


LATENT, PROMPT = torch.randn(2, 4, 8, 8), torch.randn(2, 7, tiny.PROMPT_DIM)
WRONG_CALLS: dict[str, Callable[[Any], Any]] = {
    "no argument": lambda unet: unet(),
    "a text": lambda unet: unet("a cat", 1, PROMPT),
    "a timestep of another kind": lambda unet: unet(LATENT, "now", PROMPT),
    "three dims": lambda unet: unet(LATENT[0], 1, PROMPT),
    "channels": lambda unet: unet(LATENT[:, :3], 1, PROMPT),
    "prompt width": lambda unet: unet(LATENT, 1, PROMPT[..., :5]),
    "prompt batch": lambda unet: unet(LATENT, 1, torch.cat([PROMPT, PROMPT[:1]])),
    "timesteps": lambda unet: unet(LATENT, torch.ones(3), PROMPT),
    "sample twice": lambda unet: unet(LATENT, 1, PROMPT, sample=LATENT),
    "too many": lambda unet: unet(LATENT, 1, PROMPT, *[None] * 20),
    "keyword": lambda unet: unet(LATENT, 1, PROMPT, speed=11),
    "dtype": lambda unet: unet(LATENT.double(), 1, PROMPT),
}


def test_wrong_calls_of_a_unet_get_eagers_error() -> None:
    unet, plain = tiny.unet(), tiny.unet()
    strop.optimize(unet, options=tiny.options())
    with torch.no_grad():
        torch.testing.assert_close(
            unet(LATENT, 1, PROMPT).sample, plain(LATENT, 1, PROMPT).sample, rtol=1e-4, atol=1e-4
        )
        for name, call in WRONG_CALLS.items():
            with pytest.raises(Exception) as wanted:  # noqa: PT011  (whatever eager raises)
                call(plain)
            with pytest.raises(type(wanted.value)) as found:
                call(unet)
            assert str(found.value) == str(wanted.value), name
        unet(LATENT, torch.ones(1), PROMPT)
    assert unet.forward.counters.eager_calls == 0, unet.forward.counters.fallbacks
    assert len(unet.forward.variants.all) == 1


def test_a_pipeline_without_known_components_says_what_it_has() -> None:
    other = SimpleNamespace(components={"prior": torch.nn.Linear(2, 2), "scheduler": object()})
    with pytest.raises(OptionError, match=r"it has prior \(Linear\).*strop.optimize\(pipe.prior\)"):
        strop.optimize(other)
    with pytest.raises(OptionError, match="no module at all"):
        strop.optimize(SimpleNamespace(components={"scheduler": object()}))


def test_what_stays_as_it_is_is_told(caplog: Any) -> None:
    pipe = tiny.pipeline()
    strop.optimize(pipe, options=tiny.options())
    assert not caplog.messages
    pipe.register_modules(feature_extractor=None, safety_checker=torch.nn.Linear(2, 2))
    strop.optimize(pipe, options=tiny.options())
    (line,) = caplog.messages
    assert line == (
        "StableDiffusionPipeline: not compiled: safety_checker (Linear);"
        " a module by itself is: strop.optimize(pipe.safety_checker)"
    )


class Tokenizer:
    """A word is a token; begin and end are two more."""

    model_max_length = 7

    def __call__(self, text: str, **_: Any) -> Any:
        self.words = text.split()
        return SimpleNamespace(input_ids=list(range(-1, len(self.words) + 1)))

    def decode(self, ids: list[int], **_: Any) -> str:
        return " ".join(self.words[i] for i in ids if i < len(self.words))


def test_a_long_prompt_is_said_to_be_cut(capsys: Any) -> None:
    pipe = SimpleNamespace(tokenizer=Tokenizer())
    arguments.check_length(pipe, "one two three four five")
    arguments.check_length(SimpleNamespace(tokenizer=None), "one " * 100)
    assert capsys.readouterr().err == ""
    arguments.check_length(pipe, "one two three four five six seven")
    said = " ".join(capsys.readouterr().err.split())
    assert said == (
        "warning: the prompt has 7 tokens, of which this model reads 5;"
        " it ignores the end: 'six seven'"
    )


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A diffusers folder, which is the current one's."""
    from strop.models.sprites import network, settings, vocabulary

    made = tmp_path / "model"
    network.pipeline(network.parts(settings.TINY), settings.TINY.noise).save_pretrained(made)
    vocabulary.write(made / "tokenizer")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("STROP_CACHE_DIR", tiny.cache_dir())
    monkeypatch.setenv("COLUMNS", "400")
    return made


def generate(*words: str) -> str:
    threads = torch.get_num_threads()
    result = CliRunner().invoke(app, ["generate", *words, "--steps", "1", "--device", "cpu"])
    torch.set_num_threads(threads)  # a command takes fewer on a busy machine
    assert result.exit_code == 0, result.output
    return result.output


def test_generate_draws_a_long_prompt_as_diffusers_does(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tokenizer of the shipped model cuts as CLIP's does."""
    from strop.models import sprites

    monkeypatch.setattr(sprites, "WEIGHTS", folder)
    output = generate("a red circle " * 40, "--no-optimize")
    assert "the prompt has 120 tokens, of which this model reads" in output
    assert (tmp_path / "out.png").is_file()


def test_a_folder_takes_every_size_that_diffusers_takes(folder: Path, tmp_path: Path) -> None:
    found = models.find_model(str(folder))
    assert (found.factor, found.grid) == (8, 16)
    output = generate("a red circle", "--model", str(folder), "--size", "40x24")
    assert "40x24 is off this model's grid of 16 pixels" in output
    assert "in eager" not in output
    with Image.open(tmp_path / "out.png") as picture:
        assert picture.size == (40, 24)
