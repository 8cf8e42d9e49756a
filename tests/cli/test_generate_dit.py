"""``strop generate`` and ``strop explain`` on a tiny transformer of Flux's kind."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from PIL import Image

from strop.cli import pictures
from strop.models import sprites

from .conftest import Invoke, said

pytestmark = pytest.mark.filterwarnings("ignore")

PROMPT = "a red circle above a blue square"
DIT = ("--model", "sprites-dit")
COMMON = ("--steps", "2", "--seed", "5", "--size", "64x32", "--device", "cpu")


def test_a_picture_is_the_same_with_and_without_strop(
    invoke: Invoke, shipped_dit: Path, tmp_path: Path
) -> None:
    ours = invoke("generate", PROMPT, *DIT, *COMMON, "-o", "ours.png")
    assert ours.exit_code == 0, ours.output
    assert "4 graphs" in said(ours)
    assert "in eager" not in said(ours)
    plain = invoke("generate", PROMPT, *DIT, *COMMON, "-o", "plain.png", "--no-optimize")
    assert plain.exit_code == 0, plain.output
    drawn = [Image.open(tmp_path / f"{name}.png") for name in ("ours", "plain")]
    assert drawn[0].size == (64, 32)
    pixels = [torch.tensor(list(picture.tobytes())) / 255 for picture in drawn]
    assert pictures.psnr_db(*pixels) > 50


def test_guidance_and_a_negative_prompt_change_the_picture(
    invoke: Invoke, shipped_dit: Path, tmp_path: Path
) -> None:
    plain = (*DIT, *COMMON, "--no-optimize")
    for name, more in {
        "usual": (),
        "none": ("--guidance", "1"),
        "negative": ("--negative", "a pink heart"),
    }.items():
        result = invoke("generate", PROMPT, *plain, *more, "-o", f"{name}.png")
        assert result.exit_code == 0, result.output
    drawn = {Image.open(path).tobytes() for path in tmp_path.glob("*.png")}
    assert len(drawn) == 3


def test_its_words_and_sizes_are_those_of_sprites(invoke: Invoke, shipped_dit: Path) -> None:
    unknown = invoke("generate", "an astronaut", *DIT)
    assert unknown.exit_code == 2
    assert "does not know" in said(unknown)
    odd = invoke("generate", PROMPT, *DIT, "--size", "72x64")
    assert odd.exit_code == 2
    assert "16" in said(odd)


def test_lost_weights_are_an_error(
    invoke: Invoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sprites, "DIT_WEIGHTS", tmp_path / "nothing")
    result = invoke("generate", PROMPT, *DIT)
    assert result.exit_code == 1
    assert "no diffusers model" in said(result)
    assert "reinstall strop" in said(result)


def test_damaged_weights_are_an_error(invoke: Invoke, shipped_dit: Path) -> None:
    damaged = shipped_dit / "transformer" / "diffusion_pytorch_model.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:1000])
    result = invoke("generate", PROMPT, *DIT)
    assert result.exit_code == 1
    assert f"{damaged} is damaged" in said(result)


def test_adapters_are_for_stable_diffusion(invoke: Invoke, shipped_dit: Path) -> None:
    result = invoke("generate", PROMPT, *DIT, "--lora", "style.safetensors")
    assert result.exit_code == 1
    assert "added to Stable Diffusion only" in said(result)


def test_a_folder_of_it_runs_by_its_path(invoke: Invoke, tiny_dit: Path, tmp_path: Path) -> None:
    given = ("--model", str(tiny_dit), *COMMON, "--no-optimize")
    result = invoke("generate", "an astronaut", *given)
    assert result.exit_code == 0, result.output
    assert Image.open(tmp_path / "out.png").size == (64, 32)


def test_embedded_guidance_is_refused(invoke: Invoke, tiny_dit: Path, tmp_path: Path) -> None:
    folder = tmp_path / "distilled"
    shutil.copytree(tiny_dit, folder)
    file = folder / "transformer" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"guidance_embeds": True}))
    result = invoke("generate", PROMPT, "--model", str(folder))
    assert result.exit_code == 1
    assert "Flux without embedded guidance" in said(result)


def test_explain_names_its_graphs(invoke: Invoke, shipped_dit: Path, tmp_path: Path) -> None:
    words = ("--size", "64x32", "--device", "cpu", "--json", "r.json")
    result = invoke("explain", *DIT, *words)
    assert result.exit_code == 0, result.output
    found = json.loads((tmp_path / "r.json").read_text())
    assert found["fallbacks"] == {}
    names = {part["name"] for part in found["components"] if part["graphs"]}
    assert names == {"text_encoder", "text_encoder_2", "transformer", "vae.decoder"}
