"""The verbs on a tiny model, from the command line to the files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from strop.api import dispatchers_of
from strop.bench import models
from strop.cli import arguments, pictures, sampling
from strop.debug import step_times
from strop.drawing.request import PictureRequest, PictureSize

from .conftest import Invoke, said

pytestmark = pytest.mark.filterwarnings("ignore")

PROMPT = "a red circle above a blue square"


def test_a_picture_and_its_comparison(invoke: Invoke, as_sprites: Path, tmp_path: Path) -> None:
    result = invoke(
        "generate", PROMPT, "--steps", "2", "--compare", "--size", "64x32", "--device", "cpu"
    )
    assert result.exit_code == 0, result.output
    assert Image.open(tmp_path / "out.png").size == (64, 32)
    assert Image.open(tmp_path / "out_compare.png").width > 128
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out.png", "out_compare.png"]
    text = said(result)
    for part in ("load", "compile", "sampling", "3 graphs", "PSNR", "64x32 picture in out.png"):
        assert part in text
    assert "in eager" not in text


def test_a_picture_with_a_step_cache(invoke: Invoke, as_sprites: Path, tmp_path: Path) -> None:
    common = ("generate", PROMPT, "--size", "64x32", "--device", "cpu")
    result = invoke(*common, "--steps", "6", "--numerics", "step_cache")
    assert result.exit_code == 0, result.output
    assert "unet: step cache (balanced): 2 of 8 calls from the cache, 6 in full" in said(result)
    for name in ("step_cache:quick", "int9"):
        wrong = invoke(*common, "--numerics", name)
        assert wrong.exit_code == 2
        assert f"no {name}; there are int8, fp8, step_cache, step_cache:cautious" in said(wrong)
    plain = invoke(*common, "--numerics", "step_cache", "--no-optimize")
    assert plain.exit_code == 2
    assert "--numerics needs Strop" in said(plain)


def test_the_same_seed_gives_the_same_picture_with_and_without_strop(
    invoke: Invoke, as_sprites: Path, tmp_path: Path
) -> None:
    common = ("--steps", "2", "--seed", "5", "--size", "64x32", "--device", "cpu")
    assert invoke("generate", PROMPT, "-o", "ours.png", *common).exit_code == 0
    plain = invoke("generate", PROMPT, "-o", "plain.png", "--no-optimize", *common)
    assert plain.exit_code == 0
    assert "graphs" not in said(plain)
    ours, eager = (
        torch.tensor(list(Image.open(tmp_path / f"{name}.png").tobytes())) / 255
        for name in ("ours", "plain")
    )
    assert pictures.psnr_db(ours, eager) > 50


def test_bf16_is_said_where_the_processor_lacks_it(
    invoke: Invoke, as_sprites: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = ("--steps", "1", "--size", "64x32", "--device", "cpu", "--dtype", "bf16")
    for has_bf16 in (False, True):
        monkeypatch.setattr(arguments, "has_bf16", lambda found=has_bf16: found)
        result = invoke("generate", PROMPT, *given)
        assert result.exit_code == 0, result.output
        assert ("multiplies no bf16" in said(result)) is not has_bf16
        assert "in eager" not in said(result)
    assert Image.open(tmp_path / "out.png").size == (64, 32)


def test_samplers_have_the_names_of_the_server(
    invoke: Invoke, as_sprites: Path, tmp_path: Path
) -> None:
    """The picture of a name is the one that the server draws under it, and steps are timed."""
    from strop.cli import models

    common = ("generate", PROMPT, "--size", "64x32", "--steps", "4", "--device", "cpu")
    for words in (
        ("--sampler", "k_euler_a", "--schedule", "SGM Uniform"),
        ("--sampler", "euler a", "--schedule", "sgm_uniform", "--no-optimize"),
    ):
        result = invoke(*common, *words)
        assert result.exit_code == 0, result.output
        found = Image.open(tmp_path / "out.png").tobytes()
        pipe = models.load(models.find_model("sprites"), torch.float32, "cpu")
        size, how = PictureSize(64, 32), {"sampler": "Euler a", "schedule": "sgm_uniform"}
        own = sampling.draw(pipe, PictureRequest(PROMPT, size, 4, 4.0, **how))
        pairs = zip(found, pictures.to_picture(own).tobytes(), strict=True)
        assert max(abs(a - b) for a, b in pairs) <= 1
    for words, part in (
        (("--sampler", "LMS"), "there are DPM++ 2M, DPM++ 2M SDE, Euler a, Euler, DDIM"),
        (("--sampler", "Euler a", "--schedule", "karras"), "Euler a has none of that name"),
        (("--schedule", "karras"), "it belongs to a sampler"),
        (("--model", "sprites-dit", "--sampler", "Euler"), "there are none but its own"),
    ):
        result = invoke(*common, *words)
        assert result.exit_code == 2, result.output
        assert part in said(result)
        assert "--s" in said(result)


def test_samplers_are_listed_without_drawing(
    invoke: Invoke, as_sprites: Path, tmp_path: Path
) -> None:
    text = said(invoke("generate", "--list-samplers"))
    assert "Euler a uniform, simple, sgm_uniform k_euler_a, k_euler_ancestral" in text
    assert "Heun" not in text
    assert "karras" not in text, "this model's last noise has no signal"
    own = invoke("generate", "--list-samplers", "--model", "sprites-dit")
    assert "sprites-dit is drawn by its own sampler alone" in said(own)
    assert not list(tmp_path.iterdir())
    missing = invoke("generate")
    assert missing.exit_code == 2
    assert "'PROMPT': describe the picture to draw" in said(missing)
    (as_sprites / "scheduler" / "scheduler_config.json").rename(tmp_path / "kept.json")
    try:
        broken = invoke("generate", "--list-samplers")
    finally:
        (tmp_path / "kept.json").rename(as_sprites / "scheduler" / "scheduler_config.json")
    assert broken.exit_code == 1
    assert "cannot read the scheduler in" in said(broken)


def test_weights_of_words_are_read_by_name_alone(
    invoke: Invoke, weighing_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from strop.models import sprites

    monkeypatch.setattr(sprites, "WEIGHTS", weighing_model)
    common = ("--size", "64x32", "--steps", "2", "--device", "cpu", "--no-optimize")
    made = {}
    for prompt in ("a red circle", "a (red:1.00) circle", "A (Red:1.4) circle"):
        result = invoke("generate", prompt, *common, "--prompt-weights", "--negative", "[star]")
        assert result.exit_code == 0, result.output
        made[prompt] = Image.open(tmp_path / "out.png").tobytes()
    plain, one, red = made.values()
    assert plain == one != red
    long = ("generate", " ".join(["a red circle"] * 12), *common)
    for more, part in (((), "ignores the end"), (("--prompt-weights",), "64x32 picture")):
        result = invoke(*long, *more)
        assert part in said(result)
        assert ("ignores the end" in said(result)) is not bool(more)
    for words, part in (
        (("a (red:1.4) circle",), "does not know '(red'"),
        (("a [red:blue:0.5] circle", "--prompt-weights"), "[from:to:when]"),
        (("a (rad:1.4) circle", "--prompt-weights"), "did you mean 'red'?"),
        (("red", "--negative", "[a|b]", "--prompt-weights"), "'--negative': [a|b]"),
        (("x", "--model", "sprites-dit", "--prompt-weights"), "built for models with a UNet"),
    ):
        result = invoke("generate", *words, *common)
        assert result.exit_code == 2, result.output
        assert part in said(result), said(result)


def test_a_prompt_outside_the_grammar_is_drawn_with_a_warning(
    invoke: Invoke, as_sprites: Path, tmp_path: Path
) -> None:
    result = invoke(
        "generate",
        "Grey background, red circle!",
        "--steps",
        "1",
        "--no-optimize",
        "--device",
        "cpu",
        "-o",
        "x.jpg",
    )
    assert result.exit_code == 0, result.output
    assert "outside the sprites grammar" in said(result)
    assert Image.open(tmp_path / "x.jpg").format == "JPEG"


def test_a_picture_that_is_not_finite_is_never_saved(
    invoke: Invoke, as_sprites: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from strop.cli import models

    load = models.load

    def damaged(*args: object) -> object:
        pipe = load(*args)  # type: ignore[arg-type]
        with torch.no_grad():
            pipe.vae.decoder.conv_out.bias.fill_(float("nan"))
        return pipe

    monkeypatch.setattr(models, "load", damaged)
    result = invoke("generate", PROMPT, "--steps", "1", "--no-optimize", "--device", "cpu")
    assert result.exit_code == 1
    assert "NaN" in said(result)
    assert not list(tmp_path.iterdir())


def test_explain_writes_a_page_and_numbers(
    invoke: Invoke, as_sprites: Path, tmp_path: Path
) -> None:
    result = invoke(
        "explain", "--size", "64x32", "--device", "cpu", "--html", "r.html", "--json", "r.json"
    )
    assert result.exit_code == 0, result.output
    assert "3 graphs, 0 recompiles" in said(result)
    assert "<html" in (tmp_path / "r.html").read_text()
    numbers = json.loads((tmp_path / "r.json").read_text())
    assert numbers["num_graphs"] == 3
    assert numbers["fallbacks"] == {}


def test_explain_times_the_steps_of_each_part(
    invoke: Invoke, as_sprites: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_times, "CPU_S", 0.2)
    result = invoke(
        "explain",
        "--size",
        "64x32",
        "--device",
        "cpu",
        "--profile",
        "--html",
        "r.html",
        "--json",
        "r.json",
    )
    assert result.exit_code == 0, result.output
    found = json.loads((tmp_path / "r.json").read_text())
    parts = {c["name"]: c for c in found["components"]}
    assert parts.pop("vae.encoder")["profile"] is None
    assert any(note.startswith("vae.encoder has no times") for note in found["notes"])
    assert parts.keys() == {"text_encoder", "unet", "vae.decoder"}
    for part in parts.values():
        timed, (graph,) = part["profile"], part["graphs"]
        assert len(timed["steps"]) + timed["num_not_run"] == len(graph["steps"])
        assert all(step["us"] > 0 for step in timed["steps"])
        assert 0 < timed["steps_us"] < 1.2 * timed["call_us"]
    assert (tmp_path / "r.html").read_text().count('<svg class="roof"') == 3
    assert said(result).count("most time lost") == 3


@pytest.mark.parametrize("name", ["sd15-unet", "sdxl-unet", "sd-vae"])
def test_explain_of_a_single_call(
    invoke: Invoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Of models that the benchmarks have, by their names; tiny here."""
    for config in ("SD15_UNET", "SDXL_UNET", "SD_VAE"):
        tiny = "TINY_" + config.removeprefix("SD_").replace("SD15_", "")
        monkeypatch.setattr(models, config, getattr(models, tiny))
    monkeypatch.setattr(step_times, "CPU_S", 0.2)
    result = invoke(
        "explain",
        "--model",
        name,
        "--size",
        "64x64",
        "--device",
        "cpu",
        "--profile",
        "--json",
        "r.json",
    )
    assert result.exit_code == 0, result.output
    (found,) = json.loads((tmp_path / "r.json").read_text())["components"]
    assert all(step["us"] > 0 for step in found["profile"]["steps"])
    assert "most time lost" in said(result)


def test_a_size_of_the_other_orientation_needs_no_new_graph(
    invoke: Invoke, as_sprites: Path
) -> None:
    import strop
    from strop.cli import models

    pipe = strop.optimize(models.load(models.find_model("sprites"), torch.float32, "cpu"))
    for size in (PictureSize(64, 32), PictureSize(32, 64)):
        request = PictureRequest(PROMPT, size, 1, 4.0)
        assert sampling.draw(pipe, request).shape == (3, size.height, size.width)
    assert sampling.compiled_text(pipe).startswith("3 graphs")
    assert sampling.fallbacks(pipe) == []


def test_numerics_reach_the_denoiser(
    invoke: Invoke, as_sprites: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[tuple[str, ...]] = []
    optimize = sampling.optimize

    def noted(pipe: Any, **how: Any) -> Any:
        given.append(how["options"].numerics)
        optimize(pipe, **how)
        served = {name: d.options.numerics for name, d in dispatchers_of(pipe).items()}
        assert served.pop("unet") == how["options"].numerics
        assert set(served.values()) == {()}  # text encoder and VAE stay exact

    monkeypatch.setattr(sampling, "optimize", noted)
    common = ("--steps", "1", "--size", "64x32", "--device", "cpu", "--numerics", "int8")
    result = invoke("generate", PROMPT, *common)
    assert result.exit_code == 0, result.output
    refused = invoke("generate", PROMPT, *common, "--no-optimize")
    assert refused.exit_code == 2
    assert "--numerics needs Strop" in said(refused)
    wrong = invoke("generate", PROMPT, "--numerics", "fp8", *common[:-2])
    assert wrong.exit_code == 1
    assert "numerics=('int8',) is for other GPUs, and for CPUs" in said(wrong)
    assert given == [("int8",), ("fp8",)]
