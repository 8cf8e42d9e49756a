"""Training of SDXL, Stable Diffusion 3 and Flux.1: the first step beside that of diffusers' scripts
from the same draws, whole trainings, and what they leave behind."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional

import strop
from strop.errors import OptionError, UnsupportedError
from strop.train import lora
from strop.train import model as models
from strop.train.crops import Crop, Placement
from strop.train.data import Batch, SpritesSource
from strop.train.draws import generator
from strop.train.objective import Objective
from strop.train.session import Session
from tests.e2e.tiny import cache_dir
from tests.train import trainer
from tests.train.pair import Pair, train

diffusers = pytest.importorskip("diffusers")
# Importing and saving through transformers and diffusers warns about their own future.
pytestmark = pytest.mark.filterwarnings("ignore")

NUMBER = 1  # of the batch
DENOISERS = {"sdxl": "unet", "sd3": "transformer", "flux": "transformer"}
PROMPT = "a red circle"


def given(folders: dict[str, Path], name: str, pictures: Path, out: Path) -> dict[str, Any]:
    return {"model": folders[name], "train_data_dir": pictures, "output_dir": out}


# ---- the first step ----------------------------------------------------------------------------


def clip_states(encoder: Any, ids: Tensor) -> tuple[Tensor, Tensor]:
    found = encoder(ids, output_hidden_states=True, return_dict=False)
    return found[0], found[-1][-2]


def sdxl_guess(made: Session, batch: Batch, noisy: Tensor, times: Tensor) -> Tensor:
    """``train_text_to_image_sdxl.py``"""
    parts, ids = made.model.modules, batch.text.tensors
    names = ("text_encoder", "text_encoder_2")
    found = [clip_states(parts[name], ids[name]) for name in names]
    states, pooled = torch.concat([states for _, states in found], dim=-1), found[-1][0]
    conditions = {"time_ids": batch.sizes, "text_embeds": pooled.view(len(pooled), -1)}
    guess: Tensor = parts["unet"](
        noisy, times, states, added_cond_kwargs=conditions, return_dict=False
    )[0]
    return guess


def sd3_guess(made: Session, batch: Batch, noisy: Tensor, times: Tensor) -> Tensor:
    """``train_dreambooth_lora_sd3.py``"""
    parts, ids = made.model.modules, batch.text.tensors
    names = ("text_encoder", "text_encoder_2")
    found = [clip_states(parts[name], ids[name]) for name in names]
    clips, pooled = (torch.cat([pair[i] for pair in found], dim=-1) for i in (1, 0))
    long = parts["text_encoder_3"](ids["text_encoder_3"])[0]
    clips = functional.pad(clips, (0, long.shape[-1] - clips.shape[-1]))
    guess: Tensor = parts["transformer"](
        hidden_states=noisy,
        timestep=times,
        encoder_hidden_states=torch.cat([clips, long], dim=-2),
        pooled_projections=pooled,
        return_dict=False,
    )[0]
    return guess


def flux_guess(made: Session, batch: Batch, noisy: Tensor, times: Tensor) -> Tensor:
    """``train_dreambooth_lora_flux.py``"""
    parts, ids, pipe = made.model.modules, batch.text.tensors, diffusers.FluxPipeline
    pooled = parts["text_encoder"](ids["text_encoder"], output_hidden_states=False).pooler_output
    states = parts["text_encoder_2"](ids["text_encoder_2"])[0]
    rows, channels, height, width = noisy.shape
    places = pipe._prepare_latent_image_ids(rows, height // 2, width // 2, "cpu", noisy.dtype)
    guess = parts["transformer"](
        hidden_states=pipe._pack_latents(noisy, rows, channels, height, width),
        timestep=times / 1000,
        guidance=torch.tensor([3.5]).expand(rows),
        pooled_projections=pooled,
        encoder_hidden_states=states,
        txt_ids=torch.zeros(states.shape[1], 3),
        img_ids=places,
        return_dict=False,
    )[0]
    unpacked: Tensor = pipe._unpack_latents(guess, height * 2, width * 2, 2)
    return unpacked


GUESSES = {"sdxl": sdxl_guess, "sd3": sd3_guess, "flux": flux_guess}


def drawn_latents(made: Session, batch: Batch, source: torch.Generator) -> Tensor:
    vae = made.model.vae
    with torch.no_grad():
        latents: Tensor = vae.encode(batch.pictures).latent_dist.sample(source)
    return (latents - (vae.config.shift_factor or 0.0)) * vae.config.scaling_factor


def ddpm_loss(made: Session, batch: Batch, guess_of: Any) -> Tensor:
    args, source = made.settings, generator(made.settings.seed, "noise", NUMBER)
    scheduler = diffusers.DDPMScheduler.from_config(made.model.pipeline.scheduler.config)
    latents = drawn_latents(made, batch, source)
    noise = torch.randn(latents.shape, generator=source)
    if args.noise_offset:
        shape = (latents.shape[0], latents.shape[1], 1, 1)
        noise += args.noise_offset * torch.randn(shape, generator=source)
    times = torch.randint(0, 1000, (len(latents),), generator=source)
    guess = guess_of(made, batch, scheduler.add_noise(latents, noise, times), times)
    is_noise = scheduler.config.prediction_type == "epsilon"
    target = noise if is_noise else scheduler.get_velocity(latents, noise, times)
    if args.snr_gamma is None:
        return functional.mse_loss(guess.float(), target.float(), reduction="mean")
    snr = diffusers.training_utils.compute_snr(scheduler, times)
    both = torch.stack([snr, args.snr_gamma * torch.ones_like(times)], dim=1)
    weights = both.min(dim=1)[0] / (snr if is_noise else snr + 1)
    loss = functional.mse_loss(guess.float(), target.float(), reduction="none")
    return (loss.mean(dim=[1, 2, 3]) * weights).mean()


def flow_loss(made: Session, batch: Batch, guess_of: Any, scheme: str, is_sd3: bool) -> Tensor:
    args, source = made.settings, generator(made.settings.seed, "noise", NUMBER)
    config = dict(made.model.pipeline.scheduler.config)
    if args.timestep_shift:
        config["shift"] = args.timestep_shift
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler.from_config(config)
    latents = drawn_latents(made, batch, source)
    noise = torch.randn(latents.shape, generator=source)
    u = diffusers.training_utils.compute_density_for_timestep_sampling(
        scheme, len(latents), args.logit_mean or 0.0, args.logit_std or 1.0, 1.29, "cpu", source
    )
    places = (u * scheduler.config.num_train_timesteps).long()
    times, sigmas = scheduler.timesteps[places], scheduler.sigmas[places].view(-1, 1, 1, 1)
    noisy = (1.0 - sigmas) * latents + sigmas * noise
    guess = guess_of(made, batch, noisy, times)
    preconditioned = is_sd3 if args.precondition_outputs is None else args.precondition_outputs
    if preconditioned:
        guess = guess * (-sigmas) + noisy
    weighting = diffusers.training_utils.compute_loss_weighting_for_sd3(scheme, sigmas=sigmas)
    target = latents if preconditioned else noise - latents
    errors = (weighting.float() * (guess.float() - target.float()) ** 2).reshape(len(target), -1)
    return errors.mean(1).mean()


CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "sdxl": ("sdxl", "text-to-image", {"random_flip": True}),
    "sdxl v min-SNR offset": (
        "sdxl",
        "text-to-image",
        {"prediction_type": "v_prediction", "snr_gamma": 5.0, "noise_offset": 0.1},
    ),
    "sdxl lora": ("sdxl", "lora", {"train_text_encoder": True}),
    "sdxl dora": ("sdxl", "lora", {"use_dora": True, "snr_gamma": 5.0}),
    "sd3": ("sd3", "text-to-image", {}),
    "sd3 cosmap": ("sd3", "text-to-image", {"weighting_scheme": "cosmap"}),
    "sd3 lora": ("sd3", "lora", {"precondition_outputs": 0, "train_text_encoder": True}),
    "flux": ("flux", "text-to-image", {"timestep_shift": 3.0}),
    "flux mode": ("flux", "text-to-image", {"weighting_scheme": "mode"}),
    "flux lora": (
        "flux",
        "lora",
        {"weighting_scheme": "logit_normal", "logit_mean": 0.3, "logit_std": 1.5},
    ),
    "flux sigma_sqrt": ("flux", "lora", {"weighting_scheme": "sigma_sqrt"}),
}


@pytest.mark.parametrize("case", CASES)
def test_first_step(case: str, folders: dict[str, Path], pictures: Path, tmp_path: Path) -> None:
    name, task, more = CASES[case]
    made = trainer.session(task, **given(folders, name, pictures, tmp_path / "out"), **more)
    made.learner.train()
    batch = made.source.batch(NUMBER)
    losses, gradients = [], []
    for is_ours in (True, False):
        if is_ours:
            loss = Objective(made.settings, made.model, made.unet)(batch, NUMBER)
        elif name == "sdxl":
            loss = ddpm_loss(made, batch, GUESSES[name])
        else:
            default = "logit_normal" if name == "sd3" else "none"
            scheme = made.settings.weighting_scheme or default
            loss = flow_loss(made, batch, GUESSES[name], scheme, name == "sd3")
        made.learner.forget_gradients()
        loss.backward()
        losses.append(loss.item())
        gradients.append(
            {n: p.grad.double() for n, p in made.learner.named.items() if p.grad is not None}
        )
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    ours, theirs = gradients
    assert ours.keys() == theirs.keys()
    whole = torch.stack([g.norm() for g in theirs.values()]).norm()
    apart = torch.stack([(ours[n] - g).norm() for n, g in theirs.items()]).norm()
    assert whole > 0
    assert apart < 1e-4 * whole


def test_sizes_are_those_of_the_script() -> None:
    """Of a picture of 48 x 40 in the file, shown as 32 x 32."""
    cut = Placement.of((48, 40), (32, 32), Crop(left=1.0, top=0.0))
    assert cut.resized == (38, 32)
    assert cut.sizes == (40, 48, 0, 6, 32, 32)
    mirror = Placement.of((48, 40), (32, 32), Crop(left=1.0, top=0.0, mirrored=True))
    assert mirror.sizes == (40, 48, 0, 0, 32, 32), "the script mirrors before it cuts"


# ---- whole trainings ---------------------------------------------------------------------------


def picture(pipe: Any) -> Tensor:
    return trainer.picture(pipe, PROMPT)


def loaded(folder: Path) -> Any:
    return diffusers.DiffusionPipeline.from_pretrained(folder)


@pytest.mark.parametrize("name", DENOISERS)
def test_a_subject_is_taught_and_resumed(
    name: str, folders: dict[str, Path], pictures: Path, tmp_path: Path
) -> None:
    """DreamBooth with class pictures, both caches and validation pictures, cut in two: the same
    bits, in a folder that diffusers loads."""
    subject = {
        "model": folders[name],
        "instance_data_dir": pictures,
        "instance_prompt": PROMPT,
        "with_prior_preservation": True,
        "class_data_dir": tmp_path / "class",
        "class_prompt": "a ring",
        "num_class_images": 2,
        "cache_latents": True,
        "center_crop": True,
        "pre_compute_text_embeddings": True,
        "validation_prompt": "a blue ring",
        "validation_inference_steps": 1,
        "num_validation_images": 1,
        "use_ema": True,
        "checkpointing_steps": 1,
        "lr_warmup_steps": 0,
        "threads": 1,
    }
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    trainer.train("dreambooth", **subject, output_dir=whole, max_train_steps=2)
    trainer.train("dreambooth", **subject, output_dir=cut, max_train_steps=1)
    trainer.train(
        "dreambooth",
        **subject,
        output_dir=cut,
        max_train_steps=2,
        resume_from_checkpoint="latest",
    )
    expected, actual = (trainer.checkpoint_sums(f / "checkpoint-2") for f in (whole, cut))
    assert expected
    assert expected == actual
    file = f"{DENOISERS[name]}/diffusion_pytorch_model.safetensors"
    before, after = load_file(folders[name] / file), load_file(whole / file)
    assert before.keys() == after.keys()
    assert any(not torch.equal(before[key], after[key]) for key in before)
    assert (whole / "validation" / "step-000002.png").is_file()
    assert bool(picture(loaded(whole)).isfinite().all())


@pytest.mark.parametrize("name", DENOISERS)
def test_caches_change_nothing(
    name: str, folders: dict[str, Path], pictures: Path, tmp_path: Path
) -> None:
    values = given(folders, name, pictures, tmp_path) | {"center_crop": True, "random_flip": True}
    losses = []
    for extra in ({}, {"cache_latents": True, "pre_compute_text_embeddings": True}):
        made = trainer.session("text-to-image", **values, **extra)
        objective = Objective(made.settings, made.model, made.unet)
        losses.append([objective(made.source.batch(n), n).item() for n in range(3)])
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


KINDS: dict[str, dict[str, Any]] = {
    "lora": {"lora_dropout": 0.2},
    "dora": {"use_dora": True},
    "loha": {"adapter": "loha"},
    "lokr": {"adapter": "lokr"},
}


def with_adapters(folder: Path, output: Path, parts: Sequence[str], kind: str) -> Any:
    pipe = loaded(folder)
    if kind in ("lora", "dora"):
        pipe.load_lora_weights(output, weight_name=lora.DIFFUSERS_NAME)
        return pipe
    from peft import PeftModel

    for part in parts:
        PeftModel.from_pretrained(getattr(pipe, part), output / f"{part}_{kind}")
    return pipe


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", DENOISERS)
def test_adapters_draw_the_same_in_diffusers(
    name: str, kind: str, folders: dict[str, Path], pictures: Path, tmp_path: Path
) -> None:
    """The picture of the files is that of the model that has just been trained."""
    out = tmp_path / "out"
    values = given(folders, name, pictures, out) | {
        "rank": 3,
        "lora_alpha": 12.0,
        "learning_rate": 0.05,
        "lr_warmup_steps": 0,
        "train_text_encoder": True,
        "max_train_steps": 3,
        **KINDS[kind],
    }
    watch = trainer.Watch()
    made = trainer.holding("lora", watch, **values)
    trainer.TrainingLoop(made, watch).run()
    expected = picture(made.model.pipeline)
    before = picture(loaded(folders[name]))
    assert (expected - before).abs().max() > 1e-3
    found = picture(with_adapters(folders[name], out, made.model.parts(made.settings), kind))
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-5)
    assert (out / lora.KOHYA_NAME).is_file()


def _product(kohya: dict[str, Tensor], base: str, scale: float) -> Tensor:
    """W' - W from kohya's names alone, as LyCORIS and ComfyUI compute it."""
    factor = {key.removeprefix(f"{base}."): t for key, t in kohya.items() if key.startswith(base)}
    if "hada_w1_a" in factor:
        one, two = (factor[f"hada_w{i}_a"] @ factor[f"hada_w{i}_b"] for i in (1, 2))
        return scale * one * two
    if any(key.startswith("lokr") for key in factor):
        parts = []
        for i in (1, 2):
            whole = factor.get(f"lokr_w{i}")
            product = whole is None
            parts.append(factor[f"lokr_w{i}_a"] @ factor[f"lokr_w{i}_b"] if product else whole)
        alone = "lokr_w1" in factor and "lokr_w2" in factor
        return torch.kron(parts[0], parts[1]) * (1.0 if alone else scale)
    return scale * factor["lora_up.weight"] @ factor["lora_down.weight"]


@pytest.mark.parametrize("kind", KINDS)
def test_kohyas_file_of_sdxl(
    kind: str, folders: dict[str, Path], pictures: Path, tmp_path: Path
) -> None:
    """Its names are those of the first release's blocks; merged by hand it gives the weights."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    out = tmp_path / "out"
    values = given(folders, "sdxl", pictures, out) | {"rank": 3, "lora_alpha": 12.0}
    values |= {"learning_rate": 0.05, "lr_warmup_steps": 0, "max_train_steps": 2, **KINDS[kind]}
    watch = trainer.Watch()
    made = trainer.holding("lora", watch, **values)
    trainer.TrainingLoop(made, watch).run()
    kohya = load_file(out / lora.KOHYA_NAME)
    bases = {key.split(".")[0] for key in kohya}
    places = ("input_blocks_3_1_", "output_blocks_0_1_", "output_blocks_1_1_", "middle_block_1_")
    assert all(base.startswith(tuple(f"lora_unet_{place}" for place in places)) for base in bases)
    layers = {
        path: layer
        for path, layer in made.model.unet.named_modules()
        if isinstance(layer, BaseTunerLayer)
    }
    assert len(layers) == len(bases)
    family = made.model.family
    for path, layer in layers.items():
        place = family.kohya_place(made.model.modules, "unet", path)
        base = f"lora_unet_{place.path.replace('.', '_')}"
        weight = layer.get_base_layer().weight.detach().clone()
        wanted = weight + _product(kohya, base, 12.0 / 3)
        if kind == "dora":
            scale = kohya[f"{base}.dora_scale"]
            wanted = scale * wanted / wanted.norm(dim=1, keepdim=True)
        layer.merge()
        torch.testing.assert_close(layer.get_base_layer().weight, wanted, rtol=1e-4, atol=1e-5)
    with safe_open(out / lora.KOHYA_NAME, "pt") as file:
        assert file.metadata()["ss_base_model_version"] == "sdxl_base_v1-0"


def test_diffusers_reads_kohyas_file_of_sdxl(
    folders: dict[str, Path], pictures: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    values = given(folders, "sdxl", pictures, out) | {"learning_rate": 0.05, "lr_warmup_steps": 0}
    trainer.train("lora", **values, max_train_steps=2, train_text_encoder=True)
    found = []
    for name in (lora.DIFFUSERS_NAME, lora.KOHYA_NAME):
        pipe = loaded(folders["sdxl"])
        pipe.load_lora_weights(out, weight_name=name)
        found.append(picture(pipe))
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=2e-5)
    assert (found[0] - picture(loaded(folders["sdxl"]))).abs().max() > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("name", DENOISERS)
def test_a_compiled_network_learns_what_a_plain_one_does(
    name: str,
    folders: dict[str, Path],
    pictures: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By ``compile_step`` around the objective, as in a loop of one's own."""
    monkeypatch.setenv("STROP_CACHE_DIR", cache_dir())
    found = []
    for compiled in (False, True):
        values = given(folders, name, pictures, tmp_path / str(compiled))
        made = trainer.session("text-to-image", **values, compile_unet=compiled)
        made.learner.train()
        objective = Objective(made.settings, made.model, made.unet)
        seen: dict[str, Tensor] = {}

        def note(names: Any = made.learner.named, kept: dict[str, Tensor] = seen) -> None:
            kept.update({n: p.grad.clone() for n, p in names.items() if p.grad is not None})

        optimizer = made.learner.steps.optimizer
        optimizer.register_step_pre_hook(lambda *_, note=note: note())
        step = strop.train.compile_step(objective, optimizer)
        step(made.source.batch(NUMBER), NUMBER)
        found.append(seen)
    assert not strop.explain(made.unet).fallbacks
    assert found[0].keys() == found[1].keys()
    for key, plain in found[0].items():
        # Of the sine of 3500, which embeds Flux's guidance, fp32 rounds the argument by 1e-4.
        assert (found[1][key] - plain).norm() < 1e-4 * plain.norm() + 1e-8, key


@pytest.mark.parametrize("name", ["sdxl", "flux"])
def test_two_ranks_train_as_one(
    name: str, folders: dict[str, Path], pictures: Path, tmp_path: Path, pair: Pair
) -> None:
    """Sizes, masks and timesteps are those of a rank's own rows."""
    size = {"max_train_steps": 2, "use_ema": True, "checkpointing_steps": 2, "random_flip": True}
    values = given(folders, name, pictures, tmp_path / "two") | size
    values = {key: str(v) if isinstance(v, Path) else v for key, v in values.items()}
    found = pair.run(
        partial(train, task="lora", given={**values, "train_batch_size": 2}, change=None)
    )
    for one in found:
        if isinstance(one, Exception):
            raise one
    alone = {**values, "output_dir": tmp_path / "one", "train_batch_size": 4}
    trainer.train("lora", **alone)
    one, two = (trainer.checkpoint_tensors(tmp_path / n / "checkpoint-2") for n in ("one", "two"))
    assert one.keys() == two.keys()
    for key, tensor in one.items():
        assert (two[key] - tensor).norm() < 1e-3 * tensor.norm() + 1e-9, key


def test_ranks_have_pictures_of_one_shape_in_each_step(tiny_model: Path, tmp_path: Path) -> None:
    """Sizes of the drawings change from batch to batch, and with the batch's number alone."""
    values = {"model": tiny_model, "dataset_name": "sprites", "output_dir": tmp_path}
    made = trainer.session("text-to-image", **values, max_train_steps=1)
    several = replace(made.settings, num_processes=3)
    tokenizers = {name: made.model.tokenizer(name) for name in made.model.encoders}
    sources = [SpritesSource(several, tokenizers, made.model.device, rank) for rank in range(3)]
    shapes = []
    for number in range(6):
        own = {tuple(source.batch(number).pictures.shape[1:]) for source in sources}
        assert len(own) == 1
        shapes += own
    assert len(set(shapes)) > 1


# ---- precision, refusals -----------------------------------------------------------------------


@pytest.mark.parametrize("name", DENOISERS)
def test_mixed_precision(
    name: str, folders: dict[str, Path], pictures: Path, tmp_path: Path
) -> None:
    """Autoencoders of SDXL and Stable Diffusion 3 stay in fp32, unless one says otherwise."""
    values = given(folders, name, pictures, tmp_path) | {"mixed_precision": "bf16"}
    made = trainer.session("lora", **values)
    assert made.model.vae.dtype == (torch.bfloat16 if name == "flux" else torch.float32)
    assert made.model.unet.dtype == torch.bfloat16
    loss = Objective(made.settings, made.model, made.unet)(made.source.batch(0), 0)
    plain = trainer.session("lora", **{**values, "mixed_precision": "no"})
    exact = Objective(plain.settings, plain.model, plain.unet)(plain.source.batch(0), 0)
    assert loss.item() == pytest.approx(exact.item(), rel=0.05)
    other = trainer.session("lora", **values, vae_precision="mixed")
    assert other.model.vae.dtype == torch.bfloat16


def test_an_autoencoder_of_another_folder(
    folders: dict[str, Path], pictures: Path, tmp_path: Path
) -> None:
    """It encodes, and is part of what is saved."""
    own = folders["sdxl"] / "vae"
    vae = diffusers.AutoencoderKL.from_pretrained(own)
    with torch.no_grad():
        vae.encoder.conv_in.bias += 1.0
    vae.save_pretrained(tmp_path / "vae")
    out = tmp_path / "out"
    values = given(folders, "sdxl", pictures, out) | {"max_train_steps": 1}
    values["pretrained_vae_model_name_or_path"] = tmp_path / "vae"
    trainer.train("text-to-image", **values)
    name = "diffusion_pytorch_model.safetensors"
    saved, wanted, before = (load_file(f / name) for f in (out / "vae", tmp_path / "vae", own))
    assert all(torch.equal(saved[key], wanted[key]) for key in wanted)
    assert not torch.equal(saved["encoder.conv_in.bias"], before["encoder.conv_in.bias"])
    values |= {"output_dir": tmp_path / "other", "pretrained_vae_model_name_or_path": "gone"}
    with pytest.raises(OptionError, match="no autoencoder in gone"):
        trainer.session("text-to-image", **values)


REFUSED: dict[str, tuple[str, str, dict[str, Any], str]] = {
    "flow": ("sdxl", "lora", {"timestep_shift": 3.0}, "timestep_shift is not for DDPM"),
    "guidance": (
        "sdxl",
        "lora",
        {"guidance_scale": 3.0},
        "guidance_scale is for models that read it",
    ),
    "t5": ("sdxl", "lora", {"max_sequence_length": 9}, "max_sequence_length is for models with"),
    "snr": ("sd3", "lora", {"snr_gamma": 5.0}, "snr_gamma is not for flow matching"),
    "mean": ("flux", "lora", {"logit_mean": 1.0}, "without --weighting_scheme logit_normal"),
    "layers": ("sdxl", "lora", {"lora_layers": "no_such"}, "no adapters of the unet"),
    "dropout": ("sd3", "lora", {"adapter": "loha", "lora_dropout": 0.1}, "lora_dropout is for"),
    "guided": ("sd3", "lora", {"guidance_scale": 3.0}, "guidance_scale is for models that read"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals(case: str, folders: dict[str, Path], pictures: Path, tmp_path: Path) -> None:
    name, task, more, message = REFUSED[case]
    with pytest.raises(OptionError, match=message):
        trainer.session(task, **given(folders, name, pictures, tmp_path / "out"), **more)


def test_other_models_name_the_nearest_family(
    folders: dict[str, Path], pictures: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "other"
    folder.mkdir()
    index = json.loads((folders["sdxl"] / "model_index.json").read_text())
    index["unet"] = ["diffusers", "UNetSpatioTemporalConditionModel"]
    (folder / "model_index.json").write_text(json.dumps(index))
    message = r"its unet is UNetSpatio\w+, and SDXL, the nearest family, has UNet2DConditionModel"
    with pytest.raises(UnsupportedError, match=message):
        trainer.session("lora", **given({"x": folder}, "x", pictures, tmp_path / "out"))


@pytest.mark.parametrize("name", DENOISERS)
def test_networks_that_read_more_are_refused(
    name: str, folders: dict[str, Path], pictures: Path, tmp_path: Path
) -> None:
    """Such as those for inpainting: their channels are named, not a size in a convolution."""
    folder = tmp_path / "other"
    shutil.copytree(folders[name], folder)
    place = folder / "vae"
    config = diffusers.AutoencoderKL.load_config(place)
    diffusers.AutoencoderKL.from_config({**config, "latent_channels": 2}).save_pretrained(place)
    with pytest.raises(UnsupportedError, match=r"reads 4 channels and latents have 2"):
        trainer.session("lora", **given({"x": folder}, "x", pictures, tmp_path / "out"))


@pytest.mark.parametrize("name", DENOISERS)
def test_recomputed_activations_change_nothing(
    name: str, folders: dict[str, Path], pictures: Path, tmp_path: Path
) -> None:
    """Of the network and of the text encoders that are trained."""
    values = given(folders, name, pictures, tmp_path) | {"train_text_encoder": True}
    found = []
    for recomputes in (False, True):
        made = trainer.session("text-to-image", **values, gradient_checkpointing=recomputes)
        made.learner.train()
        Objective(made.settings, made.model, made.unet)(made.source.batch(0), 0).backward()
        found.append({n: p.grad for n, p in made.learner.named.items()})
    parts = {key.split(".")[0] for key, grad in found[0].items() if grad is not None}
    assert parts == set(made.model.parts(made.settings))
    for key, plain in found[0].items():
        if plain is None:
            assert found[1][key] is None
        else:
            torch.testing.assert_close(found[1][key], plain, rtol=1e-4, atol=1e-6)


def test_a_stable_diffusion_3_without_its_t5(
    folders: dict[str, Path], pictures: Path, tmp_path: Path
) -> None:
    """Zeros stand in its place, as in the pipeline."""
    small = tmp_path / "small"
    pipe = diffusers.StableDiffusion3Pipeline.from_pretrained(
        folders["sd3"], text_encoder_3=None, tokenizer_3=None
    )
    pipe.save_pretrained(small)
    made = trainer.session("lora", **given({"x": small}, "x", pictures, tmp_path / "out"))
    ids = made.source.batch(0).text
    assert set(ids.tensors) == {"text_encoder", "text_encoder_2"}
    words = ["a ring", ""]
    found = models.embeddings_of(made.model, models.token_ids(made.model, words)).tensors
    wanted, _, pooled, _ = pipe.encode_prompt(words, words, words, max_sequence_length=77)
    torch.testing.assert_close(found["states"], wanted)
    torch.testing.assert_close(found["pooled"], pooled)
    assert torch.isfinite(Objective(made.settings, made.model, made.unet)(made.source.batch(0), 0))
