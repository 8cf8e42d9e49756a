"""``strop train`` from a shell: flags, YAML, and what it says when something is wrong."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from typer.testing import CliRunner, Result

from strop.cli import app
from strop.errors import OptionError, UnsupportedError
from strop.train import checkpoint, given_settings, setting, settings, unbuilt_flags
from tests.train import trainer

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation")  # of diffusers


@pytest.fixture
def invoke(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Result]]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    threads = torch.get_num_threads()
    yield lambda *words: CliRunner().invoke(app, ["train", *map(str, words)])
    torch.set_num_threads(threads)  # a command takes fewer on a busy machine


def said(result: Result) -> str:
    return " ".join(result.output.replace("│", " ").split())


def test_yaml_and_flags_in_both_spellings(
    invoke: Callable[..., Result], tiny_model: Path, pictures: Path, tmp_path: Path
) -> None:
    (tmp_path / "train.yaml").write_text(
        f"model: {tiny_model}\ntrain-data-dir: {pictures}\nlearning_rate: 1e-3\nrank: 2\n"
        "use_ema: true\nresolution: 32\nmax_train_steps: 9\nseed: 3\nvalidation_prompt: a ring\n"
        "num_validation_images: 1\nvalidation_inference_steps: 2\n"
    )
    done = invoke(
        "lora",
        "--config",
        "train.yaml",
        "--max-train-steps",
        2,
        "--train_batch_size",
        1,
        "--no-use-ema",
        "--output-dir",
        "out",
        "--checkpointing_steps",
        2,
    )
    assert done.exit_code == 0, done.output
    assert "2 steps; the model is in out" in said(done)
    assert "step 2/2" in said(done)
    assert "img/s eta 0:00:00" in said(done)
    _, state = checkpoint.load(tmp_path / "out" / "checkpoint-2")
    kept = state["settings"]
    assert (kept["rank"], kept["learning_rate"], kept["use_ema"], kept["seed"]) == (2, 1e-3, 0, 3)
    rows = [json.loads(line) for line in (tmp_path / "out/metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2]
    assert all(row["lr"] == 1e-3 and row["grad_norm"] > 0 for row in rows)
    assert len(list((tmp_path / "out" / "validation").iterdir())) == 2


LORA = ("lora", "--model", "sprites", "--train_data_dir", "pics")
DREAM = ("dreambooth", "--model", "sprites", "--instance_data_dir", "pics")
SUBJECT = (*DREAM, "--instance_prompt", "x")

# What is called -> exit code, and what must be said.
MISTAKES: dict[str, tuple[tuple[Any, ...], int, str]] = {
    "no model": (("lora", "--train_data_dir", "pics"), 2, "--model sprites, or a diffusers folder"),
    "no pictures": (("lora", "--model", "here"), 2, "--train_data_dir DIR, or --instance_data_dir"),
    "no subject": (("dreambooth", "--model", "sprites"), 2, "--instance_data_dir DIR"),
    "no prompt": (DREAM, 2, "--instance_prompt TEXT"),
    "two sources": (
        (*LORA, "--dataset_name", "sprites"),
        2,
        "train_data_dir and dataset_name are given",
    ),
    "hub": (
        ("lora", "--model", "sprites", "--dataset_name", "a/b"),
        2,
        "only 'sprites' is built in; download",
    ),
    "no class": ((*SUBJECT, "--with_prior_preservation"), 2, "needs --class_data_dir DIR"),
    "crop and cache": ((*LORA, "--cache_latents"), 2, "add --center_crop"),
    "text twice": (
        (*LORA, "--train_text_encoder", "--pre_compute_text_embeddings"),
        2,
        "choose one",
    ),
    "cached generator": (
        ("text-to-image", "--model", "sprites", "--cache_latents", "--center_crop"),
        2,
        "nothing to cache",
    ),
    "choice": ((*LORA, "--lr_scheduler", "cosin"), 2, "lr_scheduler is 'cosin': choose constant"),
    "range": ((*LORA, "--rank", 0), 2, "rank is 0: it must be at least 1"),
    "beta": ((*LORA, "--adam_beta2", 1), 2, "adam_beta2 is 1.0: it must be below 1"),
    "no clip": ((*LORA, "--max_grad_norm", 0), 2, "max_grad_norm is 0.0: it must be above 0"),
    "no alpha": ((*LORA, "--lora_alpha", 0), 2, "lora_alpha is 0.0: it must be above 0"),
    "no weight": ((*LORA, "--snr_gamma", 0), 2, "snr_gamma is 0.0: it must be above 0"),
    "all dropped": ((*LORA, "--lora_dropout", 1), 2, "lora_dropout is 1.0: it must be below 1"),
    "kind": ((*LORA, "--rank", "four"), 2, "integer"),
    "not built": ((*LORA, "--dream_training"), 2, "DREAM is not built"),
    "unknown": ((*LORA, "--rnak", 4), 2, "No such option"),
    "no folder": (LORA, 1, "the folder pics does not exist"),
    "no such model": (
        ("lora", "--model", "sd", "--train_data_dir", "pics"),
        1,
        "there is no diffusers model in sd",
    ),
    "no yaml": (("lora", "--config", "gone.yaml"), 2, "No such file"),
    "output among pictures": (
        (*LORA, "--output_dir", "pics/out"),
        1,
        "output_dir pics/out lies in the folder of the pictures, pics",
    ),
    "cache among pictures": ((*LORA, "--cache_dir", "pics/c"), 1, "cache_dir pics/c lies in"),
    "class among pictures": (
        (
            *SUBJECT,
            "--with_prior_preservation",
            "--class_prompt",
            "a",
            "--class_data_dir",
            "pics/c",
        ),
        1,
        "class_data_dir pics/c lies in",
    ),
    "gpu": ((*LORA, "--device", "cuda"), 1, "torch finds no GPU"),
    "fp16": ((*LORA, "--mixed_precision", "fp16", "--device", "cpu"), 1, "fp16 needs a GPU"),
    "board": ((*LORA, "--report_to", "tensorboard"), 1, "pip install 'strop[train]'"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes(
    name: str, invoke: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    words, code, message = MISTAKES[name]
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("importlib.util.find_spec", _without_tensorboard)
    result = invoke(*words)
    assert result.exit_code == code, result.output
    assert message in said(result)
    assert "Traceback" not in result.output


def _without_tensorboard(name: str, package: str | None = None) -> object:
    return None if name == "tensorboard" else object()


YAMLS = {
    "unknown": ("rnak: 4", "lora has no setting 'rnak'; did you mean 'rank'?"),
    "other task": ("rank: 4", "dreambooth has no setting 'rank'"),
    "kind": ("rank: four", "rank is 'four': it must be a whole number"),
    "fraction": ("rank: 2.5", "rank is 2.5: it must be a whole number"),
    "bool": ("use_ema: 1", "use_ema is 1: it must be true or false"),
    "text": ("instance_prompt: [a]", "instance_prompt is ['a']: it must be a text"),
    "no mapping": ("- rank", "write one 'name: value' a line"),
    "no yaml": ("rank: [", "is no YAML"),
    "not built": ("dream_training: true", "DREAM is not built"),
}


@pytest.mark.parametrize("name", YAMLS)
def test_mistakes_in_yaml(name: str, tmp_path: Path) -> None:
    text, message = YAMLS[name]
    path = tmp_path / "t.yaml"
    path.write_text(text)
    with pytest.raises((OptionError, UnsupportedError)) as raised:
        given_settings.make(
            "dreambooth" if name == "other task" else "lora", given_settings.read_yaml(path)
        )
    assert message in str(raised.value)


def test_no_in_yaml_is_a_precision() -> None:
    """YAML reads the word as false."""
    read = yaml.safe_load("{model: sprites, max_train_steps: 1, mixed_precision: no}")
    assert read["mixed_precision"] is False
    assert given_settings.make("text-to-image", read).mixed_precision == "no"
    with pytest.raises(OptionError, match=r"mixed_precision is True: it must be a text"):
        given_settings.make("text-to-image", read | {"mixed_precision": True})
    with pytest.raises(OptionError, match=r"report_to is False: it must be a text"):
        given_settings.make("text-to-image", read | {"report_to": False})


# Settings that change nothing, and the one that they need.
IDLE = {
    "class_data_dir": ("dogs", "with_prior_preservation"),
    "class_prompt": ("a dog", "with_prior_preservation"),
    "validation_steps": (5, "validation_prompt"),
}


@pytest.mark.parametrize("name", IDLE)
def test_settings_that_change_nothing_are_named(
    name: str, invoke: Callable[..., Result], tmp_path: Path
) -> None:
    value, needed = IDLE[name]
    result = invoke(*SUBJECT, f"--{name}", value)
    assert f"warning: --{name} changes nothing without --{needed}" in said(result)
    given = ("--with_prior_preservation", "--validation_prompt", "x")
    full = [word for key, (value, _) in IDLE.items() for word in (f"--{key}", value)]
    assert "changes nothing" not in said(invoke(*SUBJECT, *given, *full))


def test_home_in_a_file(
    invoke: Callable[..., Result],
    tiny_model: Path,
    pictures: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A shell puts it in the place of ~; in YAML nobody does."""
    home = tmp_path / "home"
    monkeypatch.setenv("HOME", str(home))
    (tmp_path / "train.yaml").write_text(
        f"model: {tiny_model}\ntrain_data_dir: {pictures}\nresolution: 32\ncenter_crop: true\n"
        "cache_latents: true\ncache_dir: ~/cache\noutput_dir: ~/out\nlogging_dir: ~/logs\n"
        "report_to: tensorboard\ntrain_batch_size: 1\ncheckpointing_steps: 1\n"
    )
    words = ("text-to-image", "--config", "train.yaml", "--max_train_steps")
    assert invoke(*words, 1).exit_code == 0
    resumed = invoke(*words, 2, "--resume_from_checkpoint", "~/out/checkpoint-1")
    assert resumed.exit_code == 0, resumed.output
    assert {path.name for path in home.iterdir()} == {"cache", "out", "logs"}
    assert not (tmp_path / "~").exists()


def test_model_of_another_architecture(
    invoke: Callable[..., Result], tiny_model: Path, tmp_path: Path
) -> None:
    index = json.loads((tiny_model / "model_index.json").read_text())
    index["unet"] = ["diffusers", "FluxTransformer2DModel"]
    (tmp_path / "flux").mkdir()
    (tmp_path / "flux" / "model_index.json").write_text(json.dumps(index))
    result = invoke("lora", "--model", "flux", "--train_data_dir", "pics")
    assert result.exit_code == 1
    assert "its unet is FluxTransformer2DModel, and Stable Diffusion 1 and 2" in said(result)


def test_pictures_below_the_resolution_and_bad_files(
    invoke: Callable[..., Result], tiny_model: Path, tmp_path: Path
) -> None:
    place = trainer.draw_pictures(tmp_path / "pics", 2, metadata=False)
    (place / "broken.png").write_bytes(b"\x89PNG")
    words = (
        "dreambooth",
        "--model",
        tiny_model,
        "--instance_data_dir",
        place,
        "--device",
        "cpu",
        "--instance_prompt",
        "x",
        "--max_train_steps",
        1,
        "--output_dir",
        "out",
    )
    result = invoke(*words)
    assert result.exit_code == 1
    assert "found 2 pictures smaller than 96 pixels: 0.png (48x40), 1.png (48x40)" in said(result)
    assert "skipped" in said(result)
    assert "broken.png: is damaged" in said(result)
    result = invoke(*words, "--bad_files", "refuse")
    assert result.exit_code == 1
    assert "found 1 file without a whole picture" in said(result)
    result = invoke(*words, "--resolution", 40)
    assert "resolution 40: this model takes multiples of 16; the nearest: 32 or 48" in said(result)
    assert invoke(*words, "--resolution", 48, "--allow_upscaling").exit_code == 0


def test_several_processes_are_started_with_the_same_words(
    invoke: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[object] = []

    def start(words: list[str], count: int, restarts: int, warn: object) -> int:
        started.extend([words[1:], count, restarts])
        return 143

    words = ["text-to-image", "--model", "sprites", "--num_processes", 3]
    monkeypatch.setattr("strop.train.launch.launch", start)
    for more, own in (([], []), (["--max_restarts", 2], ["--max_restarts", "0"])):
        monkeypatch.setattr("sys.argv", ["strop", "train", *words, *more])
        assert invoke(*words, *more).exit_code == 143
        assert started == [["-m", "strop", "train", *words, *more, *own], 3, 2 if more else 0]
        started.clear()
    monkeypatch.setenv("RANK", "0")  # in a process that was started
    monkeypatch.setenv("WORLD_SIZE", "2")
    result = invoke(*words)
    assert result.exit_code == 1
    assert "MASTER_ADDR is not set" in said(result)


def test_the_model_is_not_overwritten(tiny_model: Path, pictures: Path) -> None:
    with pytest.raises(OptionError, match="is the model to start from"):
        trainer.session(
            "text-to-image", model=tiny_model, train_data_dir=pictures, output_dir=tiny_model
        )


def test_the_recipe_of_the_shipped_weights() -> None:
    """It does what its header says, and keeps the autoencoder."""
    file = Path(__file__).parents[2] / "examples" / "sprites.yaml"
    command, *header = file.read_text().splitlines()[:3]
    assert command == "# strop train text-to-image --config examples/sprites.yaml"
    made = given_settings.make("text-to-image", given_settings.read_yaml(file))
    assert made.is_sprites
    assert made.draws_sprites
    assert made.from_scratch
    assert made.train_text_encoder
    assert (made.max_train_steps, made.train_batch_size, made.gradient_accumulation_steps) == (
        4000,
        1024,
        1,
    )
    assert f"{4000 * 1024 / 1e6:.1f} million drawings" in " ".join(header)
    assert made.use_ema
    assert made.proportion_empty_prompts > 0  # guidance needs an unconditional prediction
    assert made.save_precision == "fp16"


def test_captions_that_are_cut(tiny_model: Path, tmp_path: Path) -> None:
    place = trainer.draw_pictures(tmp_path / "pics", 2, metadata=False)
    (place / "0.txt").write_text("a red circle")
    (place / "1.txt").write_text("red " * 30)
    watch = trainer.Watch()
    trainer.session(
        "text-to-image", watch, model=tiny_model, train_data_dir=place, output_dir=tmp_path / "out"
    )
    assert [text.split(";")[0] for text in watch.warnings] == [
        "found 1 caption with more than the 22 tokens that this model reads"
    ]


def test_every_setting_is_explained() -> None:
    for knob in fields(settings.Settings):
        if knob.name != "task":
            assert knob.metadata["doc"].endswith("."), knob.name
            assert knob.name not in {*unbuilt_flags.UNBUILT, *unbuilt_flags.NEEDLESS}


@pytest.mark.parametrize("task", setting.TASKS)
def test_help(task: str, invoke: Callable[..., Result]) -> None:
    shown = said(invoke(task, "-h"))
    assert "--learning_rate" in shown
    assert ("--rank <" in shown) == (task == "lora")  # --rank_timeout is for all
    assert ("--class_data_dir" in shown) == (task in ("dreambooth", "lora"))
    assert "--use_8bit_adam" in shown
    assert ("--use_dora" in shown) == (task == "lora")
    assert "--dream_training" not in shown
