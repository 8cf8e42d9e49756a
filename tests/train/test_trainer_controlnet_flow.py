"""Training of ControlNets for Stable Diffusion 3 and Flux.1: the first step beside a plain loop of
diffusers in fp64, whole trainings, and what they leave behind."""

from __future__ import annotations

import copy
import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor

import strop
from strop.train import drawing
from strop.train.draws import generator
from strop.train.levels import Draws
from strop.train.objective import Objective
from strop.train.session import Session
from tests.e2e.tiny import cache_dir
from tests.train import trainer
from tests.train.controls import (
    FEWER,
    KINDS,
    NAMES,
    NUMBER,
    awake,
    by_diffusers,
    given_for,
    gradients,
    session,
)
from tests.train.pair import Pair, train

diffusers = pytest.importorskip("diffusers")
# Importing and saving through transformers and diffusers warns about their own future.
pytestmark = pytest.mark.filterwarnings("ignore")

SIDE = trainer.SIDE
WEIGHTS = "diffusion_pytorch_model.safetensors"
# ---- the first step ----------------------------------------------------------------------------


def texts_of(name: str, parts: Any, ids: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """What ``encode_prompt`` of the scripts gives: states, and the vector of the prompt."""
    if name == "flux":
        pooled = parts["text_encoder"](ids["text_encoder"]).pooler_output
        return parts["text_encoder_2"](ids["text_encoder_2"])[0], pooled
    clips = [
        parts[one](ids[one], output_hidden_states=True)
        for one in ("text_encoder", "text_encoder_2")
    ]
    states = torch.cat([one.hidden_states[-2] for one in clips], dim=-1)
    long = parts["text_encoder_3"](ids["text_encoder_3"])[0]
    states = torch.nn.functional.pad(states, (0, long.shape[-1] - states.shape[-1]))
    return torch.cat([states, long], dim=-2), torch.cat([one[0] for one in clips], dim=-1)


def guess_of(
    name: str, parts: Any, noisy: Tensor, times: Tensor, shown: Tensor, ids: Any
) -> Tensor:
    states, pooled = texts_of(name, parts, ids)
    net, transformer = parts["controlnet"], parts["transformer"]
    given = {"encoder_hidden_states": states, "pooled_projections": pooled, "return_dict": False}
    if name == "sd3":
        given |= {"hidden_states": noisy, "timestep": times}
        blind = dict(given)
        if net.config.force_zeros_for_pooled_projection:  # as the pipeline has it
            blind["pooled_projections"] = torch.zeros_like(pooled)
        added = net(controlnet_cond=shown, **blind)[0]
        return transformer(block_controlnet_hidden_states=added, **given)[0]
    pipe = diffusers.FluxPipeline
    rows, channels, height, width = noisy.shape
    given |= {
        "hidden_states": pipe._pack_latents(noisy, rows, channels, height, width),
        "timestep": times / 1000,
        "guidance": torch.tensor([3.5], dtype=noisy.dtype).expand(rows),
        "txt_ids": torch.zeros(states.shape[1], 3, dtype=noisy.dtype),
        "img_ids": pipe._prepare_latent_image_ids(
            rows, height // 2, width // 2, "cpu", noisy.dtype
        ),
    }
    packed = pipe._pack_latents(shown, rows, channels, height, width)
    double, single = net(controlnet_cond=packed, **given)
    guess = transformer(
        controlnet_block_samples=double, controlnet_single_block_samples=single, **given
    )[0]
    return pipe._unpack_latents(guess, height * 2, width * 2, 2)


def loss_in_fp64(name: str, made: Session, parts: Any) -> Tensor:
    """``train_controlnet_sd3.py`` and ``train_controlnet_flux.py``, but for the conditioning
    pictures of the first, which go from -1 to 1 as in the pipeline."""
    batch = made.source.batch(NUMBER)
    assert batch.conditions is not None
    source = generator(made.settings.seed, "noise", NUMBER)
    vae = parts["vae"]

    def encoded(pixels: Tensor, noise: Tensor, shift: float) -> Tensor:
        spread = vae.encode(pixels.double()).latent_dist
        return (spread.mean + spread.std * noise - shift) * vae.config.scaling_factor

    def drawn() -> Tensor:
        return torch.randn(shape, generator=source).double()

    size = SIDE // 2 ** (len(vae.config.block_out_channels) - 1)
    shape = (len(batch.pictures), vae.config.latent_channels, size, size)
    shift = vae.config.shift_factor
    first, noise = drawn(), drawn()
    scheduler = made.model.pipeline.scheduler
    u = torch.sigmoid(torch.randn(shape[0], generator=source))  # logit_normal
    places = (u * scheduler.config.num_train_timesteps).long()
    times, shares = scheduler.timesteps[places], scheduler.sigmas[places].double()
    shares = shares.view(-1, 1, 1, 1)
    is_blind = name == "sd3" and parts["controlnet"].config.force_zeros_for_pooled_projection
    with torch.no_grad():
        latents = encoded(batch.pictures, first, shift)
        shown = encoded(2 * batch.conditions - 1, drawn(), 0.0 if is_blind else shift)
    noisy = (1 - shares) * latents + shares * noise
    guess = guess_of(name, parts, noisy, times.double(), shown, batch.text.tensors)
    if name == "flux":
        return torch.nn.functional.mse_loss(guess, noise - latents)
    return ((guess * -shares + noisy - latents) ** 2).mean()  # preconditioned


@pytest.mark.parametrize("is_blind", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_first_step(
    name: str,
    is_blind: bool,
    deep: dict[str, Path],
    started: dict[str, Path],
    controlled: Path,
    tmp_path: Path,
) -> None:
    """From a new ControlNet, and from one that diffusers has saved (of Stable Diffusion 3 it reads
    no vector of the prompt)."""
    more = {"controlnet_model_name_or_path": started[name]} if is_blind else FEWER[name]
    made = session(deep[name], controlled, tmp_path, **more)
    awake(made.model.modules["controlnet"])
    made.learner.train()
    loss = Objective(made.settings, made.model, made.unet)(made.source.batch(NUMBER), NUMBER)
    ours = gradients(made, loss)
    parts = {part: copy.deepcopy(one).double() for part, one in made.model.modules.items()}
    exact = loss_in_fp64(name, made, parts)
    exact.backward()
    theirs = {
        f"controlnet.{path}": weight.grad
        for path, weight in parts["controlnet"].named_parameters()
        if weight.grad is not None
    }
    assert loss.item() == pytest.approx(exact.item(), rel=1e-6)
    assert ours.keys() == theirs.keys()
    whole = torch.stack([g.norm() for g in theirs.values()]).norm()
    apart = torch.stack([(ours[n] - g).norm() for n, g in theirs.items()]).norm()
    assert whole > 0
    assert apart < 1e-5 * whole
    still = {n for n, grad in theirs.items() if not grad.any()}  # queries of texts that end there
    assert all("add_q_proj" in n or (is_blind and "text_embedder" in n) for n in still), still
    silent = made.learner.named.keys() - ours.keys()
    assert all("context" in n or "add_" in n or "to_add_out" in n for n in silent), silent
    assert all(p.grad is None for p in made.model.unet.parameters())


@pytest.mark.parametrize("name", NAMES)
def test_a_new_one_changes_nothing(
    name: str, deep: dict[str, Path], controlled: Path, tmp_path: Path
) -> None:
    """It has the weights of diffusers' own start, and its loss is that of the transformer alone,
    whose settings stay what they were."""
    made = session(deep[name], controlled, tmp_path, **FEWER[name])
    net, batch = made.model.modules["controlnet"], made.source.batch(0)
    expected = by_diffusers(name, deep[name])
    assert type(net) is type(expected)
    changed = {"force_zeros_for_pooled_projection"}
    ours, theirs = (dict(one.config) for one in (net, expected))  # type: ignore[call-overload]
    same = {key for key in ours.keys() & theirs.keys() if not key.startswith("_")} - changed
    assert {key: ours[key] for key in same} == {key: theirs[key] for key in same}
    assert "num_layers" in same
    weights = expected.state_dict()
    assert net.state_dict().keys() == weights.keys()
    assert all(torch.equal(value, weights[key]) for key, value in net.state_dict().items())
    written = json.loads((deep[name] / "transformer" / "config.json").read_text())
    assert made.model.unet.config["num_layers"] == written["num_layers"]
    objective = Objective(made.settings, made.model, made.unet)
    plain = Objective(made.settings, made.model, made.model.unet)
    drawn = plain.drawn(batch, 0)
    object.__setattr__(drawn, "conditions", None)
    assert objective(batch, 0).item() == plain.loss(drawn).item()


def test_as_many_blocks_as_there_are(
    deep: dict[str, Path], controlled: Path, tmp_path: Path
) -> None:
    """Of Stable Diffusion 3 as many as the transformer reads, whose last block reads none."""
    for name, count in (
        ("sd3", {"num_layers": 1}),
        ("flux", {"num_layers": 2, "num_single_layers": 3}),
    ):
        made = session(deep[name], controlled, tmp_path / name)
        config = made.model.denoisers[1].config
        assert {key: config[key] for key in count} == count


# ---- whole trainings ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_a_training_is_resumed_to_the_bit(
    name: str, deep: dict[str, Path], started: dict[str, Path], controlled: Path, tmp_path: Path
) -> None:
    """From one of diffusers', with validation pictures; diffusers draws with what comes out, and
    what it draws follows the conditioning picture."""
    shown = controlled / "greys" / "0.png"
    more = {
        "controlnet_model_name_or_path": started[name],
        "validation_prompt": ["a ring"],
        "validation_image": [str(shown)],
        "num_validation_images": 2,
        "validation_inference_steps": 1,
        "gradient_accumulation_steps": 2,
    }
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    given = partial(given_for, deep[name], controlled, **more)
    made = trainer.holding("controlnet", **given(whole))
    before = {n: t.clone() for n, t in made.model.unet.state_dict().items()}
    first = load_file(started[name] / WEIGHTS)
    begun = made.model.denoisers[1].state_dict()
    assert all(torch.equal(begun[n], t) for n, t in first.items())
    trainer.TrainingLoop(made, trainer.Watch()).run()
    assert all(torch.equal(t, before[n]) for n, t in made.model.unet.state_dict().items())
    cut.mkdir()
    shutil.copytree(whole / "checkpoint-2", cut / "checkpoint-2")
    trainer.train("controlnet", **given(cut, resume_from_checkpoint="latest"))
    expected, actual = (trainer.checkpoint_sums(f / "checkpoint-4") for f in (whole, cut))
    assert expected == actual
    sheets = [(f / "validation" / "step-000004.png").read_bytes() for f in (whole, cut)]
    assert sheets[0] == sheets[1]
    net = getattr(diffusers, KINDS[name]).from_pretrained(whole)
    assert any(not torch.equal(t, first[n]) for n, t in net.state_dict().items())
    pipe = diffusers.DiffusionPipeline.from_pretrained(deep[name])
    drawer = getattr(diffusers, made.model.family.control.pipeline).from_pipe(pipe, controlnet=net)
    drawer.set_progress_bar_config(disable=True)
    seen = [
        drawer(
            "a ring",
            control_image=drawing.conditions_to_draw(made.settings, SIDE)[0],
            controlnet_conditioning_scale=scale,
            width=SIDE,
            height=SIDE,
            num_inference_steps=1,
            generator=torch.Generator().manual_seed(0),
            output_type="pt",
        ).images
        for scale in (1.0, 0.0)
    ]
    assert (seen[0] - seen[1]).abs().max() > 1e-4


@pytest.mark.parametrize("is_blind", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_diffusers_shows_what_training_shows(
    name: str,
    is_blind: bool,
    deep: dict[str, Path],
    started: dict[str, Path],
    controlled: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The pipeline hands a ControlNet the latents and the vector that it was trained with, with the
    means of latents in the place of drawn ones."""
    more = {"controlnet_model_name_or_path": started[name]} if is_blind else FEWER[name]
    made = session(deep[name], controlled, tmp_path, **more, train_batch_size=1)
    model, net = made.model, made.model.denoisers[1]
    batch = made.source.batch(0)
    assert batch.conditions is not None
    model.vae.register_to_config(shift_factor=0.25)
    kind = type(model.vae.encode(batch.pictures).latent_dist)
    monkeypatch.setattr(kind, "sample", lambda spread, generator=None: spread.mean)
    monkeypatch.setattr(Draws, "normal", lambda _, *shape: torch.zeros(1, *shape))
    recorded: list[dict[str, Any]] = []
    forward = net.forward

    def noted(**given: Any) -> Any:
        recorded.append(given)
        return forward(**given)

    monkeypatch.setattr(net, "forward", noted)
    Objective(made.settings, model, made.unet)(batch, 0)
    pixels = (batch.conditions[0].permute(1, 2, 0) * 255).round().byte().numpy()
    model.pipeline.set_progress_bar_config(disable=True)
    model.pipeline(
        "a ring",
        control_image=Image.fromarray(pixels),
        width=SIDE,
        height=SIDE,
        num_inference_steps=1,
        guidance_scale=1.0,
    )
    trained, drawn = recorded
    torch.testing.assert_close(trained["controlnet_cond"], drawn["controlnet_cond"])
    assert trained["controlnet_cond"].std() > 0.01
    vectors = [bool(one["pooled_projections"].any()) for one in (trained, drawn)]
    assert vectors == [not (is_blind and name == "sd3")] * 2
    assert trained.keys() - {"return_dict"} <= drawn.keys()
    assert ("guidance" in trained) == (name == "flux")


@pytest.mark.parametrize("name", NAMES)
def test_recomputed_activations_and_caches_change_nothing(
    name: str, deep: dict[str, Path], started: dict[str, Path], controlled: Path, tmp_path: Path
) -> None:
    found = []
    for extra in (
        {},
        {"gradient_checkpointing": True, "cache_latents": True},
        {"pre_compute_text_embeddings": True},
    ):
        made = session(
            deep[name],
            controlled,
            tmp_path,
            controlnet_model_name_or_path=started[name],
            **extra,
        )
        made.learner.train()
        objective = Objective(made.settings, made.model, made.unet)
        found.append(gradients(made, objective(made.source.batch(NUMBER), NUMBER)))
    whole = torch.stack([g.norm() for g in found[0].values()]).norm()
    for other in found[1:]:
        assert other.keys() == found[0].keys()
        apart = torch.stack([(other[n] - g).norm() for n, g in found[0].items()]).norm()
        assert apart < 1e-5 * whole


@pytest.mark.parametrize("name", NAMES)
def test_mixed_precision(
    name: str, deep: dict[str, Path], started: dict[str, Path], controlled: Path, tmp_path: Path
) -> None:
    """The transformer is rounded and the ControlNet is not; pictures are drawn under autocast."""
    more = {
        "controlnet_model_name_or_path": started[name],
        "max_train_steps": 1,
        "validation_prompt": ["a ring"],
        "validation_image": [str(controlled / "greys" / "0.png")],
        "num_validation_images": 1,
        "validation_inference_steps": 1,
    }
    values = given_for(deep[name], controlled, tmp_path / "out", **more)
    losses = []
    for precision in ("bf16", "no"):
        made = trainer.session("controlnet", **values, mixed_precision=precision)
        batch = made.source.batch(0)
        losses.append(Objective(made.settings, made.model, made.unet)(batch, 0).item())
        half = torch.bfloat16 if precision == "bf16" else torch.float32
        assert [part.dtype for part in made.model.denoisers] == [half, torch.float32]
    assert losses[0] == pytest.approx(losses[1], rel=0.05)
    assert losses[0] != losses[1]
    trainer.train("controlnet", **values, save_precision="fp16", mixed_precision="bf16")
    assert {t.dtype for t in load_file(tmp_path / "out" / WEIGHTS).values()} == {torch.float16}
    assert (tmp_path / "out" / "validation" / "step-000001.png").is_file()


@pytest.mark.parametrize("name", NAMES)
def test_two_ranks_train_as_one(
    name: str,
    pair: Pair,
    deep: dict[str, Path],
    started: dict[str, Path],
    controlled: Path,
    tmp_path: Path,
) -> None:
    """Some weights of Stable Diffusion 3's have no gradient."""
    net = {"controlnet_model_name_or_path": started[name], "max_train_steps": 2}
    given = partial(given_for, deep[name], controlled, **net)
    values = given(tmp_path / "two", train_batch_size=2)
    for one in pair.run(partial(train, task="controlnet", given=values, change=None)):
        if isinstance(one, Exception):
            raise one
    trainer.train("controlnet", **given(tmp_path / "one", train_batch_size=4))
    one, two = (trainer.checkpoint_tensors(tmp_path / n / "checkpoint-2") for n in ("one", "two"))
    assert one.keys() == two.keys()
    for key, tensor in one.items():
        assert (two[key] - tensor).norm() < 1e-3 * tensor.norm() + 1e-9, key


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_compiled_networks_learn_what_plain_ones_do(
    name: str,
    deep: dict[str, Path],
    started: dict[str, Path],
    controlled: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("STROP_CACHE_DIR", cache_dir())
    found = []
    for compiled in (False, True):
        made = session(
            deep[name],
            controlled,
            tmp_path,
            controlnet_model_name_or_path=started[name],
            compile_unet=compiled,
        )
        made.learner.train()
        objective = Objective(made.settings, made.model, made.unet)
        found.append(gradients(made, objective(made.source.batch(NUMBER), NUMBER)))
    for network in made.model.denoisers:
        report = strop.explain(network)
        assert sorted(graph.role for graph in report.graphs) == ["backward", "forward"]
        assert not report.fallbacks
        assert not network.forward.traced_by_torch
    plain, ours = found
    assert ours.keys() == plain.keys()
    whole = torch.stack([g.norm() for g in plain.values()]).norm()
    apart = torch.stack([(ours[n] - g).norm() for n, g in plain.items()]).norm()
    assert apart < 1e-4 * whole


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", NAMES)
def test_on_a_gpu(
    name: str, deep: dict[str, Path], started: dict[str, Path], controlled: Path, tmp_path: Path
) -> None:
    """Three steps in bf16, the last one from a graph; diffusers reads what comes out."""
    net = {"controlnet_model_name_or_path": started[name], "max_train_steps": 3}
    values = given_for(deep[name], controlled, tmp_path / "out", **net)
    watch = trainer.Watch()
    trainer.train("controlnet", watch, **{**values, "device": "cuda", "mixed_precision": "bf16"})
    assert watch.steps[-1].grad_norm > 0
    written = getattr(diffusers, KINDS[name]).from_pretrained(tmp_path / "out").state_dict()
    assert all(bool(tensor.isfinite().all()) for tensor in written.values())
