"""Training of a ControlNet: the first step beside that of diffusers' script from the same draws,
whole trainings, and what they leave behind."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional
from typer.testing import CliRunner

import strop
from strop.cli import app
from strop.errors import OptionError, TrainingError, UnsupportedError
from strop.train.draws import generator
from strop.train.objective import Objective
from strop.train.session import Session
from tests.e2e.tiny import cache_dir
from tests.train import trainer
from tests.train.controls import awake, gradients
from tests.train.pair import Pair, train

diffusers = pytest.importorskip("diffusers")
# Importing and saving through transformers and diffusers warns about their own future.
pytestmark = pytest.mark.filterwarnings("ignore")

NUMBER, SIDE = 1, trainer.SIDE  # of the batch
WEIGHTS = "diffusion_pytorch_model.safetensors"


@pytest.fixture(scope="module")
def started(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A ControlNet that has been trained."""
    unet = diffusers.UNet2DConditionModel.from_pretrained(tiny_model / "unet")
    vae = diffusers.AutoencoderKL.from_pretrained(tiny_model / "vae")
    widths = (16, 32, 96, 256)[: len(vae.config.block_out_channels)]
    net = diffusers.ControlNetModel.from_unet(unet, conditioning_embedding_out_channels=widths)
    awake(net)
    folder = tmp_path_factory.mktemp("started") / "net"
    net.save_pretrained(folder)
    return folder


# ---- the first step ----------------------------------------------------------------------------


def script_condition(path: Path, interpolation: Any) -> Tensor:
    """``conditioning_image_transforms`` of the script: the shorter side becomes the resolution, and
    the middle is cut out."""
    picture = Image.open(path).convert("RGB")
    short = min(picture.size)
    size = tuple(int(SIDE * edge / short) for edge in picture.size)
    picture = picture.resize(size, interpolation)
    left, top = (round((edge - SIDE) / 2) for edge in size)
    picture = picture.crop((left, top, left + SIDE, top + SIDE))
    return torch.from_numpy(numpy.asarray(picture).copy()).permute(2, 0, 1) / 255


def script_loss(made: Session, conditions: Tensor) -> Tensor:
    """``train_controlnet.py`` and ``train_controlnet_sdxl.py``"""
    parts, batch = made.model.modules, made.source.batch(NUMBER)
    source = generator(made.settings.seed, "noise", NUMBER)
    scheduler = diffusers.DDPMScheduler.from_config(made.model.pipeline.scheduler.config)
    with torch.no_grad():
        latents = parts["vae"].encode(batch.pictures).latent_dist.sample(source)
    latents = latents * parts["vae"].config.scaling_factor
    noise = torch.randn(latents.shape, generator=source)
    times = torch.randint(0, 1000, (len(latents),), generator=source)
    noisy = scheduler.add_noise(latents, noise, times)
    given = _texts(parts, batch.text.tensors, batch.sizes)
    down, middle = parts["controlnet"](
        noisy, times, **given, controlnet_cond=conditions, return_dict=False
    )
    guess = parts["unet"](
        noisy,
        times,
        **given,
        down_block_additional_residuals=list(down),
        mid_block_additional_residual=middle,
        return_dict=False,
    )[0]
    is_noise = scheduler.config.prediction_type == "epsilon"
    target = noise if is_noise else scheduler.get_velocity(latents, noise, times)
    return functional.mse_loss(guess.float(), target.float(), reduction="mean")


def _texts(parts: Any, ids: dict[str, Tensor], sizes: Tensor) -> dict[str, Any]:
    if "text_encoder_2" not in parts:
        return {"encoder_hidden_states": parts["text_encoder"](ids["text_encoder"])[0]}
    names = ("text_encoder", "text_encoder_2")
    found = [parts[n](ids[n], output_hidden_states=True, return_dict=False) for n in names]
    states = torch.concat([one[-1][-2] for one in found], dim=-1)
    more = {"text_embeds": found[1][0], "time_ids": sizes}
    return {"encoder_hidden_states": states, "added_cond_kwargs": more}


def assert_near(ours: dict[str, Tensor], theirs: dict[str, Tensor], limit: float) -> None:
    assert ours.keys() == theirs.keys()
    whole = torch.stack([g.norm() for g in theirs.values()]).norm()
    apart = torch.stack([(ours[n] - g).norm() for n, g in theirs.items()]).norm()
    assert whole > 0
    assert apart < limit * whole


@pytest.mark.parametrize("name", ["sd", "sdxl"])
def test_first_step(
    name: str, tiny_model: Path, folders: dict[str, Path], controlled: Path, tmp_path: Path
) -> None:
    model = tiny_model if name == "sd" else folders[name]
    made = trainer.session(
        "controlnet",
        model=model,
        train_data_dir=controlled,
        output_dir=tmp_path,
        image_interpolation_mode="bilinear",
    )
    awake(made.model.modules["controlnet"])
    made.learner.train()
    batch = made.source.batch(NUMBER)
    paths = made.source.conditions  # type: ignore[attr-defined]
    places = made.source.batches(0)[NUMBER]  # type: ignore[attr-defined]
    conditions = torch.stack(
        [script_condition(paths[place], Image.Resampling.BILINEAR) for place in places]
    )
    assert batch.conditions is not None
    torch.testing.assert_close(batch.conditions, conditions, rtol=0, atol=1e-6)
    assert conditions.std() > 0.1
    loss = Objective(made.settings, made.model, made.unet)(batch, NUMBER)
    ours, theirs = gradients(made, loss), script_loss(made, conditions)
    assert loss.item() == pytest.approx(theirs.item(), rel=1e-5)
    assert_near(ours, gradients(made, theirs), 1e-4)
    assert all(grad.any() for grad in ours.values()), "each weight of the ControlNet learns"
    assert all(p.grad is None for p in made.model.unet.parameters())


def test_a_new_one_changes_nothing(tiny_model: Path, controlled: Path, tmp_path: Path) -> None:
    """Its loss is that of the UNet alone, and it has the UNet's weights."""
    given = {"model": tiny_model, "train_data_dir": controlled, "output_dir": tmp_path}
    made = trainer.session("controlnet", **given)
    loss = Objective(made.settings, made.model, made.unet)(made.source.batch(0), 0)
    batch = made.source.batch(0)
    plain = Objective(made.settings, made.model, made.model.unet)
    drawn = plain.drawn(batch, 0)
    object.__setattr__(drawn, "conditions", None)
    assert loss.item() == plain.loss(drawn).item()
    unet, net = (part.state_dict() for part in made.model.denoisers)
    shared = [n for n in net if n.startswith(("down_blocks", "mid_block", "time_embedding"))]
    assert len(shared) > 50
    assert all(torch.equal(net[name], unet[name]) for name in shared)
    again = trainer.session("controlnet", **given).model.denoisers[1].state_dict()
    assert all(torch.equal(value, again[name]) for name, value in net.items()), "by the seed"


# ---- whole trainings ---------------------------------------------------------------------------


def given_for(model: Path, data: Path, out: Path, **more: Any) -> dict[str, Any]:
    return {
        "model": str(model),
        "train_data_dir": str(data),
        "output_dir": str(out),
        "max_train_steps": 4,
        "checkpointing_steps": 2,
        "lr_warmup_steps": 0,
        "use_ema": True,
        "max_grad_norm": 0.05,
        "random_flip": True,
        "proportion_empty_prompts": 0.3,
        "threads": 1,
        **more,
    }


def test_a_training_is_resumed_to_the_bit(
    tiny_model: Path, controlled: Path, started: Path, tmp_path: Path
) -> None:
    """From a given ControlNet, with validation pictures; diffusers reads what comes out."""
    shown = {
        "controlnet_model_name_or_path": str(started),
        "validation_prompt": ["a ring", "a red circle"],
        "validation_image": [str(controlled / "greys" / "0.png")],
        "num_validation_images": 1,
        "validation_inference_steps": 1,
        "gradient_accumulation_steps": 2,
    }
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    given = partial(given_for, tiny_model, controlled, **shown)
    watch = trainer.Watch()
    made = trainer.holding("controlnet", watch, **given(whole))
    before = {n: t.clone() for n, t in made.model.unet.state_dict().items()}
    first = load_file(started / WEIGHTS)
    assert {n.removeprefix("controlnet."): p.shape for n, p in made.learner.named.items()} == {
        name: tensor.shape for name, tensor in first.items()
    }
    assert all(torch.equal(made.learner.named[f"controlnet.{n}"], t) for n, t in first.items())
    trainer.TrainingLoop(made, watch).run()
    cut.mkdir()
    shutil.copytree(whole / "checkpoint-2", cut / "checkpoint-2")
    trainer.train("controlnet", **given(cut, resume_from_checkpoint="latest"))
    last = "checkpoint-4"
    expected, actual = (trainer.checkpoint_sums(f / last) for f in (whole, cut))
    assert expected == actual
    assert all(torch.equal(t, before[n]) for n, t in made.model.unet.state_dict().items())
    assert Image.open(whole / "validation" / "step-000004.png").size == (SIDE + 8, 2 * SIDE + 12)
    net = diffusers.ControlNetModel.from_pretrained(whole)
    averages = trainer.checkpoint_tensors(whole / last)
    for name, weight in net.state_dict().items():
        assert torch.equal(weight, averages[f"optimizer/controlnet.{name}/ema"])
        assert not torch.equal(weight, first[name])


def test_the_command_generates_with_it(
    tiny_model: Path, controlled: Path, started: Path, tmp_path: Path
) -> None:
    """The picture is that of diffusers' pipeline, and follows the conditioning picture."""
    out, shown = tmp_path / "net", controlled / "greys" / "1.png"
    words = ["train", "controlnet", "--model", str(tiny_model), "--device", "cpu"]
    words += ["--train_data_dir", str(controlled), "--output_dir", str(out)]
    words += ["--controlnet_model_name_or_path", str(started), "--max_train_steps", "1"]
    words += ["--resolution", str(SIDE), "--train_batch_size", "2", "--threads", "1"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    pictures = []
    for scale in ("1", "0"):
        words = ["generate", "a ring", "--model", str(tiny_model), "--controlnet", str(out)]
        words += ["--control-image", f"{shown}:{scale}", "--size", f"{SIDE}x{SIDE}"]
        words += ["--steps", "2", "--no-optimize", "--device", "cpu", "--threads", "1"]
        words += ["-o", str(tmp_path / f"{scale}.png"), "--guidance", "4"]
        done = CliRunner().invoke(app, words)
        assert done.exit_code == 0, done.output
        pictures.append(numpy.asarray(Image.open(tmp_path / f"{scale}.png")).astype(int))
    assert abs(pictures[0] - pictures[1]).max() > 2


def test_ranks_have_the_conditions_of_their_rows(
    tiny_model: Path, controlled: Path, tmp_path: Path
) -> None:
    """Behind each other they are those of one rank with as many pictures."""
    values = {"model": tiny_model, "train_data_dir": controlled, "output_dir": tmp_path}
    made = trainer.session("controlnet", **values, train_batch_size=4, random_flip=True)
    source: Any = made.source
    settings = replace(made.settings, train_batch_size=2, num_processes=2)
    parts = [replace(source, settings=settings, rank=rank) for rank in range(2)]
    for number in range(3):
        whole, own = source.batch(number), [part.batch(number) for part in parts]
        rows = len(whole.share)
        for name in ("pictures", "conditions"):
            found = torch.cat([getattr(batch, name) for batch in own])[:rows]
            assert torch.equal(found, getattr(whole, name))


def _both(pair: Pair, **given: Any) -> None:
    for one in pair.run(partial(train, task="controlnet", given=given, change=None)):
        if isinstance(one, Exception):
            raise one


@pytest.mark.parametrize("more", [{}, {"shard_optimizer": True}], ids=["whole", "cut"])
def test_two_ranks_train_as_one(
    more: dict[str, Any],
    pair: Pair,
    tiny_model: Path,
    controlled: Path,
    started: Path,
    tmp_path: Path,
) -> None:
    """Conditioning pictures are those of a rank's own rows."""
    net = {"controlnet_model_name_or_path": str(started), "max_train_steps": 2}
    given = partial(given_for, tiny_model, controlled, **net)
    _both(pair, **given(tmp_path / "two", train_batch_size=2, **more))
    trainer.train("controlnet", **given(tmp_path / "one", train_batch_size=4))
    one, two = (trainer.checkpoint_tensors(tmp_path / n / "checkpoint-2") for n in ("one", "two"))
    assert one.keys() == two.keys()
    for key, tensor in one.items():
        assert (two[key] - tensor).norm() < 1e-3 * tensor.norm() + 1e-9, key


def test_caches_and_recomputed_activations_change_nothing(
    tiny_model: Path, controlled: Path, started: Path, tmp_path: Path
) -> None:
    values = {
        "model": tiny_model,
        "train_data_dir": controlled,
        "output_dir": tmp_path,
        "random_flip": True,
        "controlnet_model_name_or_path": started,
    }
    ways: Sequence[dict[str, Any]] = (
        {},
        {"cache_latents": True, "pre_compute_text_embeddings": True},
        {"gradient_checkpointing": True},
    )
    found = []
    for extra in ways:
        made = trainer.session("controlnet", **values, **extra)
        made.learner.train()
        objective = Objective(made.settings, made.model, made.unet)
        found.append(gradients(made, objective(made.source.batch(NUMBER), NUMBER)))
    for other in found[1:]:
        assert_near(other, found[0], 1e-5)


def test_mixed_precision(tiny_model: Path, controlled: Path, started: Path, tmp_path: Path) -> None:
    """The UNet is rounded, the ControlNet is not, and neither is what is written."""
    more = {"controlnet_model_name_or_path": str(started), "max_train_steps": 1}
    values = given_for(tiny_model, controlled, tmp_path / "out", **more)
    made = trainer.session("controlnet", **values, mixed_precision="bf16")
    assert [part.dtype for part in made.model.denoisers] == [torch.bfloat16, torch.float32]
    loss = Objective(made.settings, made.model, made.unet)(made.source.batch(0), 0)
    plain = trainer.session("controlnet", **values)
    exact = Objective(plain.settings, plain.model, plain.unet)(plain.source.batch(0), 0)
    assert loss.item() == pytest.approx(exact.item(), rel=0.05)
    trainer.train("controlnet", **values, save_precision="fp16", mixed_precision="bf16")
    written = load_file(tmp_path / "out" / WEIGHTS)
    assert {tensor.dtype for tensor in written.values()} == {torch.float16}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sd", "sdxl"])
def test_compiled_networks_learn_what_plain_ones_do(
    name: str,
    tiny_model: Path,
    folders: dict[str, Path],
    controlled: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A forward and a backward graph each, and no operator left to torch by a fallback."""
    monkeypatch.setenv("STROP_CACHE_DIR", cache_dir())
    model = tiny_model if name == "sd" else folders[name]
    found = []
    for compiled in (False, True):
        values = {"model": model, "train_data_dir": controlled, "output_dir": tmp_path}
        made = trainer.session("controlnet", **values, compile_unet=compiled)
        awake(made.model.modules["controlnet"])
        made.learner.train()
        objective = Objective(made.settings, made.model, made.unet)
        found.append(gradients(made, objective(made.source.batch(NUMBER), NUMBER)))
    for network in made.model.denoisers:
        report = strop.explain(network)
        assert sorted(graph.role for graph in report.graphs) == ["backward", "forward"]
        assert not report.fallbacks
        assert not network.forward.traced_by_torch
    assert_near(found[1], found[0], 1e-4)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("compiled", [False, True])
def test_on_a_gpu(
    compiled: bool, tiny_model: Path, controlled: Path, started: Path, tmp_path: Path
) -> None:
    """Two steps in bf16, with pictures between them; diffusers reads what comes out."""
    net = {"controlnet_model_name_or_path": str(started), "max_train_steps": 2}
    values = given_for(tiny_model, controlled, tmp_path / "out", **net)
    more = {
        "device": "cuda",
        "mixed_precision": "bf16",
        "compile_unet": compiled,
        "validation_prompt": "a ring",
        "validation_image": str(controlled / "greys" / "0.png"),
        "num_validation_images": 1,
        "validation_inference_steps": 1,
    }
    watch = trainer.Watch()
    trainer.train("controlnet", watch, **{**values, **more})
    assert watch.steps[-1].grad_norm > 0
    written = diffusers.ControlNetModel.from_pretrained(tmp_path / "out").state_dict()
    first = load_file(started / WEIGHTS)
    assert all(bool(tensor.isfinite().all()) for tensor in written.values())
    assert any(not torch.equal(tensor, first[name]) for name, tensor in written.items())


# ---- folders -----------------------------------------------------------------------------------


def test_layouts_of_folders(tiny_model: Path, controlled: Path, tmp_path: Path) -> None:
    """Metadata, metadata for Hugging Face's image folders, and a folder of files of the same names
    with captions beside the pictures: the same batches."""
    place = tmp_path / "data"
    shutil.copytree(controlled, place)
    rows = [json.loads(line) for line in (place / "metadata.jsonl").read_text().splitlines()]
    found = []
    for layout in ("metadata", "image folder", "folders"):
        given: dict[str, Any] = {"train_data_dir": place}
        if layout == "image folder":
            for row in rows:
                row["conditioning_image_file_name"] = row.pop("conditioning_image")
            (place / "metadata.jsonl").write_text("\n".join(map(json.dumps, rows)))
        if layout == "folders":
            (place / "metadata.jsonl").unlink()
            for row in rows:
                text = row["text"] if isinstance(row["text"], str) else row["text"][0]
                (place / row["file_name"]).with_suffix(".txt").write_text(text)
            given["conditioning_data_dir"] = place / "greys"
            given["train_data_dir"] = place / "pictures"
        watch = trainer.Watch()
        made = trainer.session(
            "controlnet", watch, model=tiny_model, output_dir=tmp_path / "out", **given
        )
        assert not watch.warnings
        found.append(made.source.batch(0))
    for other in found[1:]:
        assert torch.equal(other.pictures, found[0].pictures)
        assert torch.equal(other.conditions, found[0].conditions)


def test_a_condition_is_cut_and_mirrored_like_its_picture(
    tiny_model: Path, controlled: Path, tmp_path: Path
) -> None:
    """With the pictures themselves as conditions nothing but their range is another one."""
    shutil.copytree(controlled / "pictures", tmp_path / "same" / "pictures")
    made = trainer.session(
        "controlnet",
        model=tiny_model,
        train_data_dir=controlled,
        conditioning_data_dir=tmp_path / "same",
        output_dir=tmp_path / "out",
        random_flip=True,
        center_crop=False,
    )
    for number in range(4):
        batch = made.source.batch(number)
        assert batch.conditions is not None
        torch.testing.assert_close(batch.conditions * 2 - 1, batch.pictures, rtol=0, atol=1e-5)


def test_what_is_missing_is_named(
    tiny_model: Path, controlled: Path, started: Path, tmp_path: Path
) -> None:
    place = tmp_path / "data"
    shutil.copytree(controlled, place)
    out = {"model": tiny_model, "output_dir": tmp_path / "out"}

    def refused(message: str, **given: Any) -> None:
        with pytest.raises((OptionError, UnsupportedError), match=message):
            trainer.session("controlnet", **{**out, "train_data_dir": place, **given})

    refused(
        "no file under 'depth', only file_name, text, conditioning_image; --conditioning_im",
        conditioning_image_column="depth",
    )
    refused("has train_data_dir .* in it", conditioning_data_dir=place)
    refused(r"has no conditioning picture of pictures/0\.png", conditioning_data_dir=started)
    refused("sprites generator draws no conditioning pictures", model="sprites", train_data_dir="")
    refused("1 of validation_prompt and 0 of validation_image", validation_prompt="a ring")
    refused(
        r"validation_image .*gone\.png cannot be read",
        validation_prompt="a ring",
        validation_image=str(tmp_path / "gone.png"),
    )
    refused("there is no ControlNet in", controlnet_model_name_or_path=tmp_path / "none")
    refused(
        "holds a UNet2DConditionModel; training is built for a ControlNetModel of this model",
        controlnet_model_name_or_path=tiny_model / "unet",
    )
    refused("is the model to start from", controlnet_model_name_or_path=started, output_dir=started)
    Image.new("L", (20, 24)).save(place / "greys" / "3.png")
    refused(r"greys/3\.png has 20x24 pixels and its picture 48x40")
    (place / "greys" / "2.png").write_bytes(b"no picture")
    refused(r"greys/2\.png cannot be read")
    (place / "greys" / "1.png").unlink()
    refused(r"greys/1\.png cannot be read")
    (place / "metadata.jsonl").unlink()
    refused("has no metadata.jsonl that names conditioning pictures")


def test_other_models(
    folders: dict[str, Path], controlled: Path, started: Path, tmp_path: Path
) -> None:
    given = {"train_data_dir": controlled, "output_dir": tmp_path}
    with pytest.raises(OptionError, match="was made for another model: its"):
        trainer.session(
            "controlnet",
            model=folders["sdxl"],
            controlnet_model_name_or_path=started,
            **given,
        )


def test_a_changed_condition_ends_a_resume(
    tiny_model: Path, controlled: Path, tmp_path: Path
) -> None:
    place = tmp_path / "data"
    shutil.copytree(controlled, place)
    values = given_for(tiny_model, place, tmp_path / "out", max_train_steps=2)
    trainer.train("controlnet", **values)
    Image.new("L", (24, 20)).save(place / "greys" / "0.png")
    with pytest.raises(OptionError, match="other pictures or captions"):
        trainer.train(
            "controlnet", **{**values, "max_train_steps": 3}, resume_from_checkpoint="latest"
        )


def test_weights_that_are_not_finite_are_not_written(
    tiny_model: Path, controlled: Path, tmp_path: Path
) -> None:
    from strop.train import outputs

    made = trainer.session(
        "controlnet", model=tiny_model, train_data_dir=controlled, output_dir=tmp_path
    )
    with torch.no_grad():
        made.learner.parameters[3].flatten()[0] = float("nan")
    with pytest.raises(TrainingError, match=r"controlnet\..* is not finite"):
        outputs.save(made.settings, made.model)
    assert not (tmp_path / "config.json").exists()
