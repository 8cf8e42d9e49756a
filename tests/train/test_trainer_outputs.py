"""What a training leaves behind loads elsewhere, and draws the same pictures."""

from __future__ import annotations

import io
import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn
from typer.testing import CliRunner

from strop.cli import app
from strop.errors import OptionError, TrainingError
from strop.models import sprites
from strop.models.sprites import network, vocabulary
from strop.train import attempts, files, lock, lora, outputs
from strop.train.folders import open_rgb
from strop.train.loop import TrainingLoop
from tests.e2e.tiny import DEVICES
from tests.train import trainer

diffusers = pytest.importorskip("diffusers")
pytestmark = [
    pytest.mark.filterwarnings("ignore:__array__ implementation"),  # of diffusers
    pytest.mark.filterwarnings("ignore:Already found a `peft_config`"),
]


def _load(folder: Path) -> Any:
    return diffusers.StableDiffusionPipeline.from_pretrained(folder)


def _as_loaded(module: nn.Module) -> nn.Module:
    """Where a pipeline draws, and in its memory format, so that pictures have the same bits."""
    return nn.Module.to(module, "cpu", memory_format=torch.contiguous_format)


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("device", DEVICES)
def test_diffusers_folder(device: str, tiny_model: Path, pictures: Path, tmp_path: Path) -> None:
    """By diffusers, by the package's own loader, and from the weights that the loop had."""
    made = trainer.session(
        "text-to-image",
        model=tiny_model,
        train_data_dir=pictures,
        train_text_encoder=True,
        output_dir=tmp_path,
        max_train_steps=2,
        learning_rate=1e-2,
        device=device,
    )
    TrainingLoop(made, trainer.Watch()).run()
    expected = _load(tiny_model)
    before = trainer.picture(expected)
    expected.unet = _as_loaded(made.model.unet)
    expected.text_encoder = _as_loaded(made.model.modules["text_encoder"])
    after = trainer.picture(expected)
    assert torch.equal(
        trainer.picture(diffusers.DiffusionPipeline.from_pretrained(tmp_path)), after
    )
    assert torch.equal(trainer.picture(sprites.load_from(tmp_path)), after)
    assert not torch.equal(before, after)
    kept = {
        "unet",
        "vae",
        "text_encoder",
        "tokenizer",
        "scheduler",
        "model_index.json",
        "metrics.jsonl",
    }
    assert {path.name for path in tmp_path.iterdir()} - {lock.NAME, attempts.NAME} == kept
    for name in ("vocab.json", "merges.txt", "tokenizer_config.json"):
        assert (tmp_path / "tokenizer" / name).read_bytes() == (
            tiny_model / "tokenizer" / name
        ).read_bytes()


def test_strop_generate_takes_it(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    trainer.train(
        "text-to-image",
        model=tiny_model,
        dataset_name="sprites",
        max_train_steps=2,
        output_dir="out",
    )
    words = [
        "generate",
        "a red ring",
        "--model",
        "out",
        "--size",
        "32x48",
        "--steps",
        "2",
        "--no-optimize",
        "--device",
        "cpu",
        "--threads",
        "1",
        "-o",
        "p.png",
    ]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    assert open_rgb(tmp_path / "p.png").size == (32, 48)


class Board:
    """Takes the place of TensorBoard's writer."""

    def __init__(self) -> None:
        self.scalars: list[tuple[str, float, int]] = []
        self.pictures: list[tuple[int, ...]] = []

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.scalars.append((name, value, step))

    def add_image(self, name: str, pixels: Any, step: int, dataformats: str) -> None:
        assert (name, dataformats) == ("validation", "HWC")
        self.pictures.append((step, *pixels.shape))

    def close(self) -> None:
        self.closed = True


def test_tensorboard_gets_what_the_journal_has(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    board = Board()
    monkeypatch.setattr("strop.train.metrics._tensorboard", lambda settings, step: board)
    monkeypatch.setattr("strop.train.metrics.check_available", lambda settings: None)
    trainer.train(
        "text-to-image",
        model=tiny_model,
        dataset_name="sprites",
        max_train_steps=2,
        output_dir=tmp_path,
        report_to="tensorboard",
        validation_prompt="a ring",
        num_validation_images=1,
        validation_inference_steps=1,
    )
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    kept = {
        (f"train/{name}", row[name], row["step"])
        for row in rows
        for name in row
        if name not in ("step", "epoch")
    }
    assert set(board.scalars) == kept
    assert len(kept) == 8
    assert board.pictures == [(0, 40, 40, 3), (2, 40, 40, 3)]
    assert board.closed


def test_tensorboard_reads_it(tiny_model: Path, tmp_path: Path) -> None:
    """Its own reader, also after a resume that goes back to an earlier step."""
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    values: dict[str, Any] = {
        "model": tiny_model,
        "dataset_name": "sprites",
        "output_dir": tmp_path,
        "report_to": "tensorboard",
        "validation_prompt": "a ring",
        "num_validation_images": 1,
        "validation_inference_steps": 1,
        "checkpointing_steps": 2,
    }
    trainer.train("text-to-image", **values, max_train_steps=4)
    shutil.rmtree(tmp_path / "checkpoint-4")
    trainer.train("text-to-image", **values, max_train_steps=5, resume_from_checkpoint="latest")
    board = EventAccumulator(str(tmp_path / "logs"), size_guidance={"scalars": 0, "images": 0})
    board.Reload()
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5]
    for name in ("loss", "lr", "grad_norm", "images_per_s"):
        found = [(event.step, event.value) for event in board.Scalars(f"train/{name}")]
        assert found == [(row["step"], pytest.approx(row[name], rel=1e-6)) for row in rows]
    pages = {event.step: event.encoded_image_string for event in board.Images("validation")}
    assert set(pages) >= {0, 5}
    with Image.open(io.BytesIO(pages[5])) as page:
        stored = open_rgb(tmp_path / "validation" / "step-000005.png")
        assert page.convert("RGB").tobytes() == stored.tobytes()


@pytest.mark.parametrize("device", DEVICES)
def test_the_averages_are_what_is_saved(
    device: str, tiny_model: Path, pictures: Path, tmp_path: Path
) -> None:
    made = trainer.session(
        "text-to-image",
        model=tiny_model,
        train_data_dir=pictures,
        use_ema=True,
        output_dir=tmp_path,
        max_train_steps=3,
        learning_rate=1e-2,
        save_precision="bf16",
        device=device,
    )
    TrainingLoop(made, trainer.Watch()).run()
    average = made.learner.steps.optimizer.ema
    assert average is not None
    saved = trainer.weights(tmp_path)
    for (name, live), mean in zip(made.learner.named.items(), average.shadow_params, strict=True):
        assert torch.equal(saved[name.removeprefix("unet.")], mean.bfloat16().cpu())
        assert live.dtype == torch.float32
    assert any(
        not torch.equal(p, a)
        for p, a in zip(made.learner.parameters, average.shadow_params, strict=True)
    )


def test_weights_that_do_not_fit_the_format(tiny_model: Path, tmp_path: Path) -> None:
    made = trainer.session(
        "text-to-image",
        model=tiny_model,
        dataset_name="sprites",
        output_dir=tmp_path,
        max_train_steps=1,
        save_precision="fp16",
    )
    with torch.no_grad():
        made.model.unet.conv_in.bias[0] = 1e6
    with pytest.raises(TrainingError, match=r"unet.conv_in.bias is not finite in torch.float16"):
        outputs.save(made.settings, made.model)
    assert not (tmp_path / "model_index.json").exists()


@pytest.fixture(scope="module", params=DEVICES)
def adapters(
    request: pytest.FixtureRequest,
    tiny_model: Path,
    pictures: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[Path, Tensor]:
    """A training of both parts whose alpha is not the rank, and the picture its model draws."""
    output = tmp_path_factory.mktemp("lora")
    made = trainer.session(
        "lora",
        model=tiny_model,
        train_data_dir=pictures,
        rank=3,
        lora_alpha=12,
        lora_dropout=0.3,
        train_text_encoder=True,
        output_dir=output,
        max_train_steps=3,
        learning_rate=3e-2,
        device=request.param,
    )
    TrainingLoop(made, trainer.Watch()).run()
    pipe = _load(tiny_model)
    made.learner.train(False)
    pipe.unet, pipe.text_encoder = map(
        _as_loaded, (made.model.unet, made.model.modules["text_encoder"])
    )
    return output, trainer.picture(pipe)


@pytest.mark.parametrize("file", [lora.DIFFUSERS_NAME, lora.KOHYA_NAME])
def test_lora_files_draw_the_same(
    file: str, adapters: tuple[Path, Tensor], tiny_model: Path
) -> None:
    output, expected = adapters
    pipe = _load(tiny_model)
    before = trainer.picture(pipe)
    pipe.load_lora_weights(output, weight_name=file)
    found = trainer.picture(pipe)
    assert torch.equal(found, expected)
    assert torch.equal(trainer.picture(pipe), found), "dropout belongs to the training"
    assert (found - before).abs().max() > 0.01
    pipe.unload_lora_weights()
    assert torch.equal(trainer.picture(pipe), before)


def test_lora_files_merged_by_hand(adapters: tuple[Path, Tensor], tiny_model: Path) -> None:
    """W + alpha / rank * up @ down, as ComfyUI computes it from kohya's names alone."""
    output, expected = adapters
    pipe = _load(tiny_model)
    parts = {"lora_unet_": (pipe.unet, ""), "lora_te_": (pipe.text_encoder, "text_model.")}
    paths = {
        prefix + (lost + name).replace(".", "_"): module
        for prefix, (part, lost) in parts.items()
        for name, module in part.named_modules()
    }
    tensors = load_file(output / lora.KOHYA_NAME)
    bases = {key.split(".")[0] for key in tensors}
    assert {sum(base.startswith(prefix) for base in bases) > 0 for prefix in parts} == {True}
    for base in bases:
        down, up = tensors[f"{base}.lora_down.weight"], tensors[f"{base}.lora_up.weight"]
        assert tensors[f"{base}.alpha"].item() == 12.0
        assert down.shape[0] == up.shape[1] == 3
        with torch.no_grad():
            paths[base].weight += 12.0 / 3 * up @ down
    torch.testing.assert_close(trainer.picture(pipe), expected, rtol=0, atol=2e-4)


def test_the_same_weights_give_the_same_bytes(tmp_path: Path) -> None:
    """Safetensors writes notes in an order that differs from file to file."""
    tensors = {name: torch.arange(n + 1.0) for n, name in enumerate("bac")}
    notes = {f"note_{n}": "größe" for n in range(8)}
    for number in range(8):
        files.write_tensors(tmp_path / f"{number}.safetensors", tensors, **notes)
    contents = {path.read_bytes() for path in tmp_path.iterdir()}
    assert len(contents) == 1
    length = int.from_bytes(next(iter(contents))[:8], "little")
    assert length % 8 == 0
    with safe_open(tmp_path / "0.safetensors", "pt") as file:
        assert file.metadata() == notes
        assert all(torch.equal(file.get_tensor(name), t) for name, t in tensors.items())


def test_lora_keys(adapters: tuple[Path, Tensor]) -> None:
    output, _ = adapters
    kohya = re.compile(
        r"lora_unet_(down_blocks|up_blocks|mid_block)_\w+_attn[12]_to_(q|k|v|out_0)"
        r"\.(lora_down\.weight|lora_up\.weight|alpha)"
        r"|lora_te_text_model_encoder_layers_\d+_self_attn_(q|k|v|out)_proj"
        r"\.(lora_down\.weight|lora_up\.weight|alpha)"
    )
    with safe_open(output / lora.KOHYA_NAME, "pt") as file:
        assert all(kohya.fullmatch(key) for key in file.keys())  # noqa: SIM118
        assert file.metadata()["ss_network_dim"] == "3"
        assert file.metadata()["ss_network_alpha"] == "12.0"
        assert file.metadata()["ss_base_model_version"] == "sd_v1_v"
        assert file.metadata()["ss_v2"] == "False"
    with safe_open(output / lora.DIFFUSERS_NAME, "pt") as file:
        notes = json.loads(file.metadata()["lora_adapter_metadata"])
    assert (notes["unet.r"], notes["unet.lora_alpha"]) == (3, 12.0)
    assert (notes["unet.lora_dropout"], notes["text_encoder.lora_dropout"]) == (0, 0)
    assert str(output.parent) not in json.dumps(notes)


@pytest.mark.parametrize(
    ("prediction", "version"), [("epsilon", "sd_v2"), ("v_prediction", "sd_v2_v")]
)
def test_adapters_of_stable_diffusion_2(
    prediction: str, version: str, pictures: Path, tmp_path: Path
) -> None:
    """Its text encoder is wider, by which kohya's scripts and others tell it from the first."""
    tiny = sprites.settings.TINY
    built = network.parts(replace(tiny, network=replace(tiny.network, text_width=1024)))
    network.pipeline(built, tiny.noise).save_pretrained(tmp_path / "model")
    vocabulary.write(tmp_path / "model" / "tokenizer")
    made = trainer.session(
        "lora",
        model=tmp_path / "model",
        train_data_dir=pictures,
        prediction_type=prediction,
        output_dir=tmp_path / "out",
    )
    outputs.save(made.settings, made.model)
    with safe_open(tmp_path / "out" / lora.KOHYA_NAME, "pt") as file:
        assert file.metadata()["ss_base_model_version"] == version
        assert file.metadata()["ss_v2"] == "True"


@pytest.mark.parametrize("device", DEVICES)
def test_validation_pictures(device: str, tiny_model: Path, pictures: Path, tmp_path: Path) -> None:
    """Drawn before, during and after; drawing does not change what is trained."""
    values: dict[str, Any] = {
        "model": tiny_model,
        "train_data_dir": pictures,
        "use_ema": True,
        "max_train_steps": 3,
        "device": device,
        "deterministic": True,
    }
    prompts = ["a red circle", "a blue ring"]
    shown = {
        "validation_prompts": prompts,
        "num_validation_images": 3,
        "validation_steps": 2,
        "validation_inference_steps": 2,
    }
    trainer.train("text-to-image", **values, **shown, output_dir=tmp_path / "shown")
    trainer.train("text-to-image", **values, output_dir=tmp_path / "plain")
    sheets = sorted((tmp_path / "shown" / "validation").iterdir())
    assert [path.name for path in sheets] == [f"step-{n:06d}.png" for n in (0, 2, 3)]
    pages = [open_rgb(path) for path in sheets]
    assert {page.size for page in pages} == {(3 * 36 + 4, 2 * 36 + 4)}
    assert pages[0].tobytes() != pages[2].tobytes()
    ours, theirs = trainer.weights(tmp_path / "shown"), trainer.weights(tmp_path / "plain")
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize("device", DEVICES)
def test_class_pictures_are_drawn_once(
    device: str, tiny_model: Path, pictures: Path, tmp_path: Path
) -> None:
    values: dict[str, Any] = {
        "device": device,
        "model": tiny_model,
        "instance_data_dir": pictures,
        "instance_prompt": "a sks",
        "with_prior_preservation": True,
        "class_data_dir": tmp_path / "class",
        "class_prompt": "a ring",
        "max_train_steps": 1,
        "validation_inference_steps": 2,
    }
    made = trainer.session("dreambooth", **values, num_class_images=3, output_dir=tmp_path / "1")
    batch = made.source.batch(0)
    assert (len(batch), len(batch.share)) == (4, 2)
    first = {path.name: path.read_bytes() for path in (tmp_path / "class").iterdir()}
    assert sorted(first) == [f"class-{n:05d}.png" for n in range(3)]
    trainer.session("dreambooth", **values, num_class_images=5, output_dir=tmp_path / "2")
    more = {path.name: path.read_bytes() for path in (tmp_path / "class").iterdir()}
    assert len(more) == 5
    assert first.items() <= more.items()


def test_class_pictures_that_were_removed_are_replaced(
    tiny_model: Path, pictures: Path, tmp_path: Path
) -> None:
    """By others, whose names are free; damaged ones are named as those of the subject are."""
    place, watch = tmp_path / "class", trainer.Watch()
    values: dict[str, Any] = {
        "model": tiny_model,
        "instance_data_dir": pictures,
        "instance_prompt": "a sks",
        "with_prior_preservation": True,
        "class_data_dir": place,
        "class_prompt": "a ring",
        "max_train_steps": 1,
        "validation_inference_steps": 2,
        "num_class_images": 3,
    }
    trainer.session("dreambooth", **values, output_dir=tmp_path / "1")
    removed = (place / "class-00000.png").read_bytes()
    (place / "class-00000.png").unlink()
    (place / "class-00002.png").write_bytes(removed[:60])
    made = trainer.session("dreambooth", watch, **values, output_dir=tmp_path / "2")
    names = {path.name: path.read_bytes() for path in place.iterdir()}
    assert sorted(names) == [f"class-{n:05d}.png" for n in (1, 2, 3, 4)]
    assert removed not in names.values()
    assert len(made.source.pictures) == len(list(pictures.glob("*.png"))) + 3  # type: ignore[attr-defined]
    assert [w for w in watch.warnings if "class-00002.png: is damaged" in w]
    with pytest.raises(OptionError, match=r"found 1 file without a whole picture.*class-00002.png"):
        trainer.session("dreambooth", **values, bad_files="refuse", output_dir=tmp_path / "3")
